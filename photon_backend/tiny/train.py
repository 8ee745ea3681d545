"""Trains the bundled model: `python -m photon_backend.tiny.train --seed 0 --out DIR`.

Everything is learned from scenes drawn on the fly; no picture is seen twice. The checkpoint written is the model in
float16 (half the bytes of float32, and more digits than bfloat16; the weights are small enough for its range).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from photon_backend.config import TINY_CHECKPOINT
from photon_backend.model.attention import dense_attend
from photon_backend.model.config import load_config
from photon_backend.model.moondream import Moondream
from photon_backend.model.region import Region
from photon_backend.model.vision import Vision
from photon_backend.model.weights import load_model, random_model, save_checkpoint
from photon_backend.tiny.batches import LETTERS, MAX_LETTERS, Batches, tilings_of, unpack
from photon_backend.tiny.scenes import COLORS, KINDS, SIZES
from photon_backend.tiny.spelling import NONE


@dataclass(frozen=True)
class Stage:
    """One schedule: warm-up, then a cosine down to almost nothing. The next stage starts afresh from its weights."""

    steps: int
    pictures: int  # of a batch
    rate: float  # peak learning rate


STAGES = (Stage(5800, 128, 2e-3), Stage(3870, 256, 2e-3))
STAGE_SEEDS = 1000  # between the seeds of two stages
QUESTION_LEN = 255  # with the prefix of 145 a multiple of 16
WARMUP, WEIGHT_DECAY, MAX_NORM = 400, 0.05, 1.0
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


def rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up, then half a cosine to 1 % of the peak."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


class Optimizer:
    """AdamW on float32 copies of the bfloat16 weights that forward and backward use."""

    def __init__(self, modules: list[nn.Module], peak: float) -> None:
        self.parameters: list[Tensor] = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.masters = [p.detach().clone() for p in self.parameters]
        for module in modules:
            module.bfloat16()
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        matrices = [master for master in self.masters if master.dim() >= 2]
        vectors = [master for master in self.masters if master.dim() < 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        torch._foreach_copy_(self.gradients, [p.grad for p in self.parameters if p.grad is not None])
        for parameter in self.parameters:
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        torch._foreach_copy_(self.parameters, self.masters)

    def restore(self) -> None:
        """Gives the modules their float32 weights."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.data = master


def fix_frequencies(region: Region) -> None:
    """The Fourier frequencies stay as drawn, rounded to bfloat16, so that they are the same numbers in every dtype."""
    for frequencies in (region.coord_features, region.size_features):
        frequencies.requires_grad_(False)
        frequencies.copy_(frequencies.bfloat16())


def train(model: Moondream, stage: Stage, seed: int, args: argparse.Namespace) -> Moondream:
    """One stage. `seed` numbers its scenes. The model is float32 before and after."""
    torch.manual_seed(seed)
    device = model.text.wte.device
    fix_frequencies(model.region)
    heads = CellHeads(model.config.text.dim).to(device)
    matrices = stitching(model.vision).to(device)
    optimizer = Optimizer([model, heads], stage.rate)
    batches = Batches(args.checkpoint, seed, stage.pictures, QUESTION_LEN, stage.steps)
    loader = DataLoader(batches, batch_size=None, num_workers=args.workers, pin_memory=device.type == "cuda")
    started = time.perf_counter()
    for step, (buffer, layout) in enumerate(loader):
        progress = step / stage.steps
        if args.minutes:
            progress = max(progress, (time.perf_counter() - started) / (60 * args.minutes))
        if progress >= 1:
            break
        parts = losses(model, heads, matrices, unpack(buffer.to(device, non_blocking=True), layout))
        total(parts, progress).backward()
        optimizer.step(rate(step, progress, stage.rate))
        if step % args.log_every == 0 or step == stage.steps - 1:
            report(step, progress, parts, time.perf_counter() - started)
    optimizer.restore()
    return model


def report(step: int, progress: float, parts: dict[str, Tensor], seconds: float) -> None:
    line = {name: round(value.item(), 4) for name, value in parts.items()}
    print(json.dumps({"step": step, "progress": round(progress, 4), "seconds": round(seconds, 1), **line}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=TINY_CHECKPOINT, help="has config.json and tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="directory for the trained checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-stage", type=int, default=0, help="above 0: starts from the weights in --checkpoint")
    parser.add_argument("--minutes", type=float, default=0.0, help="of a stage; cuts its schedule short, 0: never")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=15, help="processes that render and ask")
    parser.add_argument("--log-every", type=int, default=200)
    args = parser.parse_args()
    if args.first_stage:
        model = load_model(args.checkpoint, args.device, torch.float32).train().requires_grad_(True)
    else:
        model = random_model(load_config(args.checkpoint), args.device, torch.float32, args.seed)
    for number in range(args.first_stage, len(STAGES)):
        model = train(model, STAGES[number], args.seed + STAGE_SEEDS * number, args)
        save_checkpoint(model.half(), args.out)
        model.float()
    (args.out / "tokenizer.json").write_bytes((args.checkpoint / "tokenizer.json").read_bytes())


if __name__ == "__main__":
    main()
