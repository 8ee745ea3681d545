"""The encoder with sums and norms in a kernel, against torch. On a GPU, or under TRITON_INTERPRET=1 on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton")

from photon_backend.engine.fused_vision import encode_crops
from photon_backend.model.config import ModelConfig, TextConfig, VisionConfig
from photon_backend.model.vision import Vision
from photon_backend.model.weights import random_model

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter has no bfloat16 of numpy
SMALL = VisionConfig(
    crop_size=42, enc_patch_size=14, enc_dim=48, enc_n_heads=2, enc_ff_dim=80, enc_n_layers=3, proj_inner_dim=32,
    proj_out_dim=32,
)  # fmt: skip
CONFIGS = [SMALL] + ([VisionConfig(enc_n_layers=2)] if ON_GPU else [])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def vision_of(config: VisionConfig) -> Vision:
    """Weights that are not all as small as a fresh model's, so that no residual hides a block."""
    text = TextConfig(dim=32, ff_dim=32, n_layers=1, n_heads=1, n_kv_heads=1, vocab_size=64)
    model = random_model(ModelConfig(text, config), DEVICE, DTYPE, seed=0).requires_grad_(False)
    chance = torch.Generator().manual_seed(1)
    for name, parameter in model.vision.named_parameters():
        if name.endswith("bias") or ".ln" in name:
            parameter.add_(torch.randn(parameter.shape, generator=chance).to(DEVICE, DTYPE) * 0.3)
    return model.vision


@pytest.mark.parametrize("config", CONFIGS)
@torch.inference_mode()
def test_features(config):
    """As far from float32 as torch's own roundings."""
    vision = vision_of(config)
    side = config.crop_size
    chance = torch.Generator().manual_seed(0)
    crops = torch.randint(0, 256, (3, side, side, 3), generator=chance, dtype=torch.uint8).to(DEVICE)
    exact, plain = copy.deepcopy(vision).float().encode_crops(crops), vision.encode_crops(crops)
    told = encode_crops(vision, crops)
    assert told.shape == exact.shape
    assert distance(told, exact) < 1.5 * distance(plain, exact) + 1e-3
