"""The model on a GPU against the same golden numbers of the public reference (float32), and in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from photon_backend.model.crops import make_crops
from photon_backend.model.generate import generate
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.model.weights import load_model
from tests.model.cases import MAX_TOKENS, cases, prompt
from tests.model.tiny_checkpoint import CONFIG, GOLDEN, PICTURES, TOKENIZER, picture, write_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_features_and_greedy_tokens_in_float32(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    model = load_model(tmp_path, "cuda", torch.float32)
    golden, tokenizer = json.loads((GOLDEN / "golden.json").read_text()), TextTokenizer(TOKENIZER)
    cut = {name: make_crops(picture(name), CONFIG.vision) for name in PICTURES}
    with np.load(GOLDEN / "golden.npz") as arrays:
        for name, (crops, tiling) in cut.items():
            features = model.vision.encode(torch.from_numpy(crops).cuda(), [tiling])[0]
            torch.testing.assert_close(features.cpu(), torch.from_numpy(arrays[f"vision/{name}"]), atol=1e-3, rtol=1e-3)
    for case in cases():
        crops, tiling = cut[case.picture] if case.picture else (None, (0, 0))
        pixels = None if crops is None else torch.from_numpy(crops).cuda()
        request = prompt(case, CONFIG, tokenizer)
        ids, values, _ = generate(
            model, pixels, tiling, *request, case.task, case.reasoning, MAX_TOKENS, case.max_objects
        )
        expected = golden["cases"][case.name]
        if "objects" in expected:
            assert len(values) == len(expected["objects"]) * (4 if case.task == "detect" else 2), case.name
        else:
            thoughts = [*expected["reasoning_ids"], CONFIG.tokenizer.answer_id] if case.reasoning else []
            assert ids == [*thoughts, *expected["ids"]], case.name


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    exact, rough = (load_model(tmp_path, "cuda", dtype) for dtype in (torch.float32, torch.bfloat16))
    crops, tiling = make_crops(picture("tiles"), CONFIG.vision)
    pixels = torch.from_numpy(crops).cuda()
    one, other = (model.vision.encode(pixels, [tiling]).float() for model in (exact, rough))
    assert torch.nn.functional.cosine_similarity(one, other, dim=-1).min() > 0.99
