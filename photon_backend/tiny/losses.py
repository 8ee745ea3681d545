"""What the bundled model is trained to say: the losses of one batch, and the heads that exist for training only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from photon_backend.model.attention import dense_attend
from photon_backend.model.moondream import Moondream
from photon_backend.model.vision import Vision
from photon_backend.tiny.batches import LETTERS, MAX_LETTERS, tilings_of
from photon_backend.tiny.scenes import COLORS, KINDS, SIZES
from photon_backend.tiny.spelling import NONE

BIN_SPREAD = 1.0  # standard deviation, in bins, of the target around the true value
COORD_WEIGHT, SIZE_WEIGHT, CELL_WEIGHT = 0.5, 0.3, 0.5


class CellHeads(nn.Module):
    """What each picture embedding must tell by itself, for training only: this is how sight is learned quickly."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.counts = {"kind": len(KINDS) + 2, "color": len(COLORS), "size": len(SIZES)}
        width = sum(self.counts.values()) + 4 + MAX_LETTERS * (len(LETTERS) + 1)
        self.linear = nn.Linear(dim, width)

    def forward(self, embeddings: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """embeddings: [B, N, D]. Returns the sum of the losses."""
        out = self.linear(embeddings).flatten(0, 1).float()
        *parts, box, letters = out.split([*self.counts.values(), 4, MAX_LETTERS * (len(LETTERS) + 1)], dim=-1)
        loss = out.new_zeros(())
        for name, logits in zip(self.counts, parts, strict=True):
            loss = loss + self._mean(logits, batch[f"cell_{name}"])
        taken = (batch["cell_kind"].flatten() > 0)[:, None]
        difference = (box - batch["cell_box"].flatten(0, 1)).abs() * taken
        loss = loss + 10 * difference.sum() / (4 * taken.sum()).clamp(min=1)
        return loss + self._mean(letters.unflatten(-1, (MAX_LETTERS, -1)).flatten(0, 1), batch["cell_letters"])

    @staticmethod
    def _mean(logits: Tensor, wanted: Tensor) -> Tensor:
        """Over the cells that have a target; 0 when none has."""
        wanted = wanted.flatten()
        summed = F.cross_entropy(logits, wanted, ignore_index=NONE, reduction="sum")
        return summed / (wanted != NONE).sum().clamp(min=1)


def stitching(vision: Vision) -> Tensor:
    """What `Vision.merge` does to each tile, as matrices: float32 [tiles of all tilings, N, N].

    Stitching and pooling are linear, so the pooled map of a picture is the sum of one matrix product per tile; that
    treats all tiles of a batch at once, where `Vision.encode` goes picture by picture.
    """
    num_patches = vision.config.num_patches
    matrices = []
    for rows, columns in tilings_of(vision.config.max_crops):
        count = rows * columns
        basis = torch.eye(count * num_patches).unflatten(0, (count, num_patches))
        features = torch.cat([torch.zeros_like(basis[:1]), basis])
        pooled = vision.merge(features, (rows, columns))[:, count * num_patches :]
        matrices.append(pooled.unflatten(1, (count, num_patches)).transpose(0, 1))
    return torch.cat(matrices)


def encode_pictures(vision: Vision, matrices: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The same as `Vision.encode`, for a batch of `make_batch`. Returns [B, N, D]."""
    pictures = batch["globals"].shape[0]
    features = vision.encode_crops(torch.cat([batch["globals"], batch["tiles"]]))
    placed = torch.bmm(matrices[batch["tile_kind"]].to(features.dtype), features[pictures:])
    pooled = torch.zeros_like(features[:pictures]).index_add(0, batch["tile_picture"], placed.to(features.dtype))
    return vision.proj_mlp(torch.cat([features[:pictures], pooled], dim=-1))


def packed_mask(segments: Tensor, sees_picture: Tensor, prefix_len: int) -> Tensor:
    """segments: [B, Q]; sees_picture: bool [B, Q]. Returns bool [B, T, T], T = prefix_len + Q (see `batches`)."""
    batch, length = segments.shape
    mask = torch.zeros(batch, prefix_len + length, prefix_len + length, dtype=torch.bool, device=segments.device)
    mask[:, :, :prefix_len] = F.pad(sees_picture, (prefix_len, 0), value=True)[:, :, None]
    same = segments[:, :, None] == segments[:, None, :]
    mask[:, prefix_len:, prefix_len:] = same.tril()
    return mask


def losses(model: Moondream, heads: CellHeads, matrices: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean loss per kind of target."""
    text, region, special = model.text, model.region, model.config.tokenizer
    picture = encode_pictures(model.vision, matrices, batch)
    ids, values = batch["ids"], batch["values"]
    x = text.embed(ids)
    x = torch.where((ids == special.coord_id)[..., None], region.encode_coordinate(values[..., :1]), x)
    x = torch.where((ids == special.size_id)[..., None], region.encode_size(values), x)
    bos = text.embed(torch.full_like(ids[:, :1], special.bos_id))
    x = torch.cat([bos, picture, x], dim=1)
    prefix_len = model.config.prefix_len
    before = torch.arange(prefix_len, device=ids.device).expand(ids.shape[0], -1)
    mask = packed_mask(batch["segments"], batch["sees_picture"], prefix_len)
    hidden = text(x, torch.cat([before, batch["positions"]], dim=1), dense_attend(mask))
    hidden = hidden[:, prefix_len:].flatten(0, 1)
    logits = text.logits(hidden[batch["token_place"]]).float()
    coords = region.decode_coordinate(hidden[batch["coord_place"]]).float()
    sizes = region.decode_size(hidden[batch["size_place"]]).float()
    return {
        "token": weighted_loss(logits, batch["token"], batch["token_weight"]),
        "coord": bin_loss(coords, batch["coord"]),
        "size": bin_loss(sizes, batch["size"]),
        "cell": heads(picture, batch),
    }


def weighted_loss(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    return (F.cross_entropy(logits, wanted, reduction="none") * weights).sum() / weights.sum()


def bin_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy with a bell around the true value. logits: [..., bins]; wanted: [...], in bins, not rounded."""
    bins = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.float32)
    target = torch.softmax(-0.5 * ((bins - wanted[..., None]) / BIN_SPREAD) ** 2, dim=-1)
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


def total(parts: dict[str, Tensor], progress: float) -> Tensor:
    """The loss that is minimised; the cell losses fade out over the first 80 % of the training."""
    cell_weight = CELL_WEIGHT * max(0.0, 1.0 - progress / 0.8)
    return parts["token"] + COORD_WEIGHT * parts["coord"] + SIZE_WEIGHT * parts["size"] + cell_weight * parts["cell"]
