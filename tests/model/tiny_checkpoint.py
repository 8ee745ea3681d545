"""The seeded tiny checkpoint of the golden tests: weights, tokenizer text and pictures that every machine makes alike.

Only `numpy.random.RandomState` is used: its streams are frozen for ever, so nothing of this is committed but seeds.
The shape obeys what the public reference hard-codes (head width 64, 1024 size bins, context 2048) and is otherwise
unlike the real model where it can be: grouped query heads, another grid, another margin, other special ids.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from photon_backend.model.config import (
    CaptionTemplate,
    ModelConfig,
    RegionConfig,
    SpanTemplate,
    Templates,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
)
from photon_backend.model.moondream import Moondream

GOLDEN = Path(__file__).parent / "golden"
TOKENIZER = GOLDEN / "tokenizer.json"
SEED = 395

CONFIG = ModelConfig(
    text=TextConfig(dim=128, ff_dim=192, n_layers=3, vocab_size=384, max_context=2048, n_heads=2, n_kv_heads=1),
    vision=VisionConfig(
        enc_dim=48,
        enc_patch_size=14,
        enc_n_layers=6,  # the reference takes this for the grid side
        enc_ff_dim=80,
        enc_n_heads=2,
        proj_out_dim=128,
        crop_size=84,
        max_crops=7,
        overlap_margin=1,
        proj_inner_dim=96,
    ),
    region=RegionConfig(
        dim=128, coord_feat_dim=32, coord_out_dim=512, size_feat_dim=48, size_out_dim=2048, inner_dim=96
    ),
    tokenizer=TokenizerConfig(
        bos_id=2,
        eos_id=6,
        answer_id=3,
        thinking_id=4,
        coord_id=5,
        size_id=1,
        start_ground_points_id=7,
        end_ground_id=9,
        templates=Templates(
            caption=CaptionTemplate([8, 270, 10, 291, 3], [8, 270, 10, 299, 3], [8, 270, 10, 307, 3]),
            query=SpanTemplate([8, 281, 10], [3]),
            detect=SpanTemplate([8, 275, 283, 10], [3]),
            point=SpanTemplate([8, 287, 10], [3]),
        ),
    ),
)

PICTURES = {  # height, width
    "wide": (90, 410),
    "tall": (300, 100),
    "tiny": (21, 13),
    "one_crop": (84, 84),
    "tiles": (190, 230),
}


def picture(name: str) -> np.ndarray:
    """uint8 [h, w, 3]: coarse random colours with fine noise on them, so that every resize step matters."""
    height, width = PICTURES[name]
    random = np.random.RandomState(1000 + sorted(PICTURES).index(name))
    coarse = random.randint(0, 200, (-(-height // 16), -(-width // 16), 3))
    smooth = coarse.repeat(16, axis=0).repeat(16, axis=1)[:height, :width]
    return (smooth + random.randint(0, 56, (height, width, 3))).astype(np.uint8)


def noise(height: int, width: int) -> np.ndarray:
    """uint8 [h, w, 3] in coarse blocks, for the geometry of the real model."""
    coarse = np.random.RandomState(height * 10007 + width).randint(0, 256, (-(-height // 8), -(-width // 8), 3))
    return coarse.repeat(8, axis=0).repeat(8, axis=1)[:height, :width].astype(np.uint8)


def write_checkpoint(directory: Path) -> None:
    """config.json, model.safetensors (names with `model.`) and tokenizer.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    (directory / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    save_file({f"model.{name}": tensor for name, tensor in weights().items()}, directory / "model.safetensors")


def weights() -> dict[str, torch.Tensor]:
    """Float32 tensors under the names of `Moondream.state_dict()`."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in Moondream(CONFIG).state_dict().items()}
    random = np.random.RandomState(SEED)
    tensors = {name: _weight(name, shapes[name], random) for name in sorted(shapes)}
    _lean(tensors["text.lm_head.bias"])
    return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}


def _weight(name: str, shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    """Scales, found by trial, that let picture, text and values decide the output rather than the biases."""
    values = random.standard_normal(shape)
    if name.endswith("bias"):
        values *= 0.1
    elif name.endswith(("ln.weight", "ln1.weight", "ln2.weight")):
        values = 1.0 + 0.2 * values
    else:
        values *= _scale(name, shape)
    return values.astype(np.float32)


def _scale(name: str, shape: tuple[int, ...]) -> float:
    if name.endswith("_features"):
        return 4.0
    if name.endswith(("wte", "pos_emb")):
        return 1.5 if name.endswith("wte") else 0.7
    if name.startswith("text.blocks") and "attn" in name:
        return 2.5 * shape[-1] ** -0.5
    if name.endswith(("coord_encoder.weight", "size_encoder.weight")):
        return 3.0 * shape[-1] ** -0.5
    return 2.0 * shape[-1] ** -0.5


def _lean(bias: np.ndarray) -> None:
    """Makes texts end, reasoning end and ground, and objects be found sometimes, by raising those ids."""
    special = CONFIG.tokenizer
    lifts = {special.eos_id: 4.6, special.answer_id: 4.3, special.coord_id: 3.4, special.size_id: 3.0}
    for token, lift in {**lifts, special.start_ground_points_id: 2.9, special.end_ground_id: 2.9}.items():
        bias[token] += lift


def config_for_reference() -> dict:
    """The configuration as the reference's `from_dict` takes it: it does not know rope_theta."""
    config = json.loads(msgspec.json.encode(CONFIG))
    del config["text"]["rope_theta"]
    return config
