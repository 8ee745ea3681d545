"""Training batches: scenes rendered, questions drawn, everything packed into arrays. Runs in worker processes.

A picture is costly, a question cheap. So one row holds the picture's prefix and then many questions about it, packed
one after another; each sees the prefix and itself, and counts its positions from the end of the prefix, as if it were
alone. A question without a picture starts with BOS, counts from 0 and does not see the prefix.

    Q  packed question positions of a row       B  pictures of a batch
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from photon_backend.model.config import ModelConfig, load_config
from photon_backend.model.crops import make_crops
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.tiny.questions import draw_question
from photon_backend.tiny.scenes import COLORS, KINDS, SIZES, TEXT_OWNER, Scene, make_scene
from photon_backend.tiny.spelling import NONE, Encoder, Spelling

SEED_STRIDE = 1 << 40  # scenes of training seed s are s * SEED_STRIDE + 0, 1, 2, ...
PADDING_SEGMENT = 255
MAX_LETTERS = 5  # letters of the longest printed text
ALIGNMENT = 64  # bytes; of each array in a packed batch
Layout = dict[str, tuple[str, tuple[int, ...], int]]  # name: dtype, shape, first byte
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class Batches(Dataset):
    """Batch i is a function of (seed, i) alone, so the number of workers changes nothing. See `make_batch`."""

    def __init__(self, checkpoint: Path, seed: int, pictures: int, question_len: int, num_batches: int) -> None:
        self.checkpoint, self.seed, self.pictures = checkpoint, seed, pictures
        self.question_len, self.num_batches = question_len, num_batches
        self.encoder: Encoder | None = None  # made in the worker

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> tuple[Tensor, Layout]:
        if index >= self.num_batches:
            raise IndexError(index)
        if self.encoder is None:
            self.encoder = Encoder(load_config(self.checkpoint), TextTokenizer(self.checkpoint / "tokenizer.json"))
        first = self.seed * SEED_STRIDE + index * self.pictures
        return pack(make_batch(self.encoder, range(first, first + self.pictures), self.question_len))


def pack(batch: dict[str, np.ndarray]) -> tuple[Tensor, Layout]:
    """All arrays in one buffer, uint8 [bytes]: every tensor that crosses from a worker costs the trainer half a
    millisecond, whatever its size."""
    layout: Layout = {}
    used = 0
    for name, array in batch.items():
        layout[name] = (str(array.dtype), array.shape, used)
        used += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = np.zeros(used, np.uint8)
    for name, array in batch.items():
        start = layout[name][2]
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(buffer), layout


def unpack(buffer: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The arrays as views of the buffer, on its device."""
    batch = {}
    for name, (dtype_name, shape, start) in layout.items():
        dtype = getattr(torch, dtype_name)
        num_bytes = math.prod(shape) * dtype.itemsize
        batch[name] = buffer[start : start + num_bytes].view(dtype).view(shape)
    return batch


def tilings_of(max_crops: int) -> list[tuple[int, int]]:
    """Every (rows, columns) that a picture can be cut into."""
    return [(r, c) for r in range(1, max_crops + 1) for c in range(1, max_crops // r + 1)]


def make_batch(encoder: Encoder, scene_seeds: Sequence[int], question_len: int) -> dict[str, np.ndarray]:
    """One batch; variable-length lists of targets are flat, with their places in the [B, Q] arrays.

    globals uint8 [B, side, side, 3], tiles uint8 [tiles, side, side, 3], tile_picture and tile_kind int64 [tiles] (the
    second counts the tiles of all tilings of `tilings_of` through); ids, positions int64 and segments uint8 [B, Q],
    sees_picture bool [B, Q], values float32 [B, Q, 2]; token_place and token int64, token_weight float32, coord_place
    int64 and coord float32, size_place int64 and size float32 [n, 2], coord and size in bins; and what `_cells` gives.
    """
    rows, crops, tilings, cells = [], [], [], []
    for seed in scene_seeds:
        scene = make_scene(seed)
        picture, tiling = make_crops(scene.pixels, encoder.config.vision)
        rows.append(_row(encoder, scene, question_len))
        crops.append(picture)
        tilings.append(tiling)
        cells.append(_cells(scene, encoder.config.vision.grid))
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    batch = _with_places(arrays)
    batch |= {f"cell_{name}": np.stack([cell[name] for cell in cells]) for name in cells[0]}
    batch |= _tiles(encoder.config, crops, tilings)
    return batch


def _row(encoder: Encoder, scene: Scene, question_len: int) -> dict[str, np.ndarray]:
    """Questions until the row is full. One that does not fit is dropped; the third ends the row."""
    rng = random.Random(scene.seed ^ 0x5EED)
    spellings: list[tuple[Spelling, bool]] = []
    used, misses = 0, 0
    while misses < 3:
        question = draw_question(rng, scene)
        spelling = encoder.example(question, rng)
        if used + len(spelling.ids) > question_len:
            misses += 1
            continue
        used += len(spelling.ids)
        spellings.append((spelling, question.picture))
    return _written(spellings, used, question_len, encoder.config.prefix_len)


def _written(
    spellings: Sequence[tuple[Spelling, bool]], used: int, question_len: int, prefix_len: int
) -> dict[str, np.ndarray]:
    """One row from the spellings of its questions and whether each sees the picture; lists first, arrays at the end."""
    row = _empty_row(question_len)
    ids: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    sees: list[bool] = []
    weights: list[float] = []
    for segment, (spelling, sees_picture) in enumerate(spellings, 1):
        start, length = len(ids), len(spelling.ids)
        first = prefix_len if sees_picture else 0
        ids += spelling.ids
        tokens += spelling.tokens
        positions += range(first, first + length)
        segments += [segment] * length
        sees += [sees_picture] * length
        num_wanted = length - spelling.tokens.count(NONE)
        weights += [num_wanted**-0.5] * length  # so that captions do not drown the short answers
        for name, wanted in (("values", spelling.values), ("coord", spelling.coords), ("size", spelling.sizes)):
            for place, value in wanted.items():
                row[name][start + place] = value
    lists = {"ids": ids, "token": tokens, "positions": positions, "segments": segments}
    for name, values in (lists | {"sees_picture": sees, "token_weight": weights}).items():
        row[name][:used] = values
    return row


def _empty_row(question_len: int) -> dict[str, np.ndarray]:
    return {
        "ids": np.zeros(question_len, np.int64),
        "positions": np.zeros(question_len, np.int64),
        "segments": np.full(question_len, PADDING_SEGMENT, np.uint8),
        "sees_picture": np.zeros(question_len, bool),
        "values": np.zeros((question_len, 2), np.float32),
        "token": np.full(question_len, NONE, np.int64),
        "token_weight": np.zeros(question_len, np.float32),
        "coord": np.full(question_len, NONE, np.float32),
        "size": np.full((question_len, 2), NONE, np.float32),
    }


def _with_places(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replaces the dense targets by lists of targets and their flat places, so that the GPU need not search them."""
    batch = {name: array for name, array in arrays.items() if name not in ("token", "token_weight", "coord", "size")}
    for name in ("token", "coord", "size"):
        flat = arrays[name].reshape(-1, *arrays[name].shape[2:])
        wanted = flat != NONE if flat.ndim == 1 else flat[:, 0] != NONE
        batch[f"{name}_place"] = np.nonzero(wanted)[0]
        batch[name] = flat[wanted]
    batch["token_weight"] = arrays["token_weight"].ravel()[batch["token_place"]]
    return batch


def _tiles(config: ModelConfig, crops: list[np.ndarray], tilings: list[tuple[int, int]]) -> dict[str, np.ndarray]:
    first_of, count = {}, 0
    for tiling in tilings_of(config.vision.max_crops):
        first_of[tiling] = count
        count += tiling[0] * tiling[1]
    kinds = [first_of[tiling] + tile for tiling in tilings for tile in range(tiling[0] * tiling[1])]
    pictures = [index for index, tiling in enumerate(tilings) for _ in range(tiling[0] * tiling[1])]
    return {
        "globals": np.stack([picture[0] for picture in crops]),
        "tiles": np.concatenate([picture[1:] for picture in crops]),
        "tile_kind": np.array(kinds, np.int64),
        "tile_picture": np.array(pictures, np.int64),
    }


def _cells(scene: Scene, grid: int) -> dict[str, np.ndarray]:
    """What the picture shows at the middle of each of its G x G cells: targets of the auxiliary losses.

    kind int64 [N]: 0 background, then KINDS, then text; color and size int64 [N], NONE where there is no item;
    box float32 [N, 4] (centre and extent, 0..1); letters int64 [N, MAX_LETTERS], NONE where there is no text, 0 past
    its end.
    """
    height, width = scene.owner.shape
    rows = ((np.arange(grid) + 0.5) / grid * height).astype(int)
    columns = ((np.arange(grid) + 0.5) / grid * width).astype(int)
    owner = scene.owner[rows[:, None], columns[None, :]].ravel()
    things = {TEXT_OWNER: scene.printed, **{i + 1: item for i, item in enumerate(scene.items)}}
    kind, color = np.zeros(128, np.int64), np.full(128, NONE, np.int64)
    size, box = np.full(128, NONE, np.int64), np.zeros((128, 4), np.float32)
    for number, thing in things.items():
        if thing is None:
            continue
        x_min, y_min, x_max, y_max = thing.box
        box[number] = (*thing.center, x_max - x_min, y_max - y_min)
        kind[number] = len(KINDS) + 1
        if number != TEXT_OWNER:
            item = scene.items[number - 1]
            kind[number], color[number] = KINDS.index(item.kind) + 1, COLORS.index(item.color)
            size[number] = SIZES.index(item.size)
    letters = np.full((128, MAX_LETTERS), NONE, np.int64)
    if scene.printed:
        spelled = [LETTERS.index(letter) + 1 for letter in scene.printed.text]
        letters[TEXT_OWNER] = (spelled + [0] * MAX_LETTERS)[:MAX_LETTERS]
    return {
        "kind": kind[owner],
        "color": color[owner],
        "size": size[owner],
        "box": box[owner],
        "letters": letters[owner],
    }
