"""This model against numbers of the public reference, made by make_golden.py on the seeded tiny checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from photon_backend.model.config import VisionConfig
from photon_backend.model.crops import make_crops
from photon_backend.model.generate import GreedyRun, generate
from photon_backend.model.moondream import Moondream
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.model.weights import load_model
from tests.model.cases import MAX_TOKENS, Case, cases, prompt
from tests.model.tiny_checkpoint import CONFIG, GOLDEN, PICTURES, TOKENIZER, noise, picture, write_checkpoint

DOCUMENT: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
REAL_SIZES = [name for name in DOCUMENT["crops"] if name not in PICTURES]
COORD_BIN = 1 / CONFIG.region.coord_out_dim
SIZE_BIN = 2 ** (10 / (CONFIG.region.size_bins - 1)) - 1  # relative: sizes are on a logarithmic scale


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "golden.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Moondream:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory)
    return load_model(directory, "cpu", torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(TOKENIZER)


@pytest.mark.parametrize("name", [*PICTURES, *REAL_SIZES])
def test_crops_are_exact(name: str) -> None:
    """The tiny pictures at the tiny geometry; the others at that of Moondream 2."""
    golden = DOCUMENT["crops"][name]
    if name in PICTURES:
        crops, tiling = make_crops(picture(name), CONFIG.vision)
    else:
        height, width = map(int, name.split("x"))
        crops, tiling = make_crops(noise(height, width), VisionConfig())
    assert list(tiling) == golden["tiling"]
    assert crops[:, 40, 50, :].tolist() == golden["samples"]
    assert hashlib.sha256(crops.tobytes()).hexdigest() == golden["sha256"]


@pytest.mark.parametrize("name", PICTURES)
def test_vision_features(name: str, model: Moondream, arrays: dict[str, np.ndarray]) -> None:
    crops, tiling = make_crops(picture(name), CONFIG.vision)
    features = model.vision.encode(torch.from_numpy(crops), [tiling])[0]
    torch.testing.assert_close(features, torch.from_numpy(arrays[f"vision/{name}"]), atol=1e-4, rtol=1e-4)


def test_vision_features_of_all_pictures_in_one_call(model: Moondream, arrays: dict[str, np.ndarray]) -> None:
    cut = [make_crops(picture(name), CONFIG.vision) for name in PICTURES]
    crops = torch.from_numpy(np.concatenate([crops for crops, _ in cut]))
    features = model.vision.encode(crops, [tiling for _, tiling in cut])
    expected = torch.from_numpy(np.stack([arrays[f"vision/{name}"] for name in PICTURES]))
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_prompt_ids(case: Case, tokenizer: TextTokenizer) -> None:
    assert prompt(case, CONFIG, tokenizer)[0] == DOCUMENT["cases"][case.name]["prompt"]


def test_query_suffix_comes_twice_and_thinking_once() -> None:
    """The reference's quirk: [3, 3] opens an answer, [3, 4] opens reasoning."""
    ids = CONFIG.tokenizer
    assert DOCUMENT["cases"]["wide/query"]["prompt"][-2:] == [ids.answer_id, ids.answer_id]
    assert DOCUMENT["cases"]["wide/query/reasoning"]["prompt"][-2:] == [ids.answer_id, ids.thinking_id]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_first_logits(case: Case, model: Moondream, tokenizer: TextTokenizer, arrays: dict[str, np.ndarray]) -> None:
    run = GreedyRun(model)
    run.feed_prompt(*_crops(case), *prompt(case, CONFIG, tokenizer))
    logits = model.text.logits(run.hidden())
    torch.testing.assert_close(logits, torch.from_numpy(arrays[f"logits/{case.name}"]), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_greedy_generation(case: Case, model: Moondream, tokenizer: TextTokenizer) -> None:
    golden = DOCUMENT["cases"][case.name]
    request = prompt(case, CONFIG, tokenizer)
    ids, values, reason = generate(
        model, *_crops(case), *request, case.task, case.reasoning, MAX_TOKENS, case.max_objects
    )
    if case.task in ("detect", "point"):
        _check_objects(case, golden["objects"], ids, values)
        assert reason == ("length" if len(golden["objects"]) == case.max_objects else "stop")
        return
    thoughts = [*golden["reasoning_ids"], CONFIG.tokenizer.answer_id] if case.reasoning else []
    assert ids == [*thoughts, *golden["ids"]]
    assert reason == ("length" if len(golden["ids"]) == MAX_TOKENS else "stop")
    _check_grounding(golden, ids[: len(thoughts)], values)


def _crops(case: Case) -> tuple[torch.Tensor | None, tuple[int, int]]:
    if case.picture is None:
        return None, (0, 0)
    crops, tiling = make_crops(picture(case.picture), CONFIG.vision)
    return torch.from_numpy(crops), tiling


def _check_objects(case: Case, golden: list[dict[str, float]], ids: list[int], values: list[float]) -> None:
    special = CONFIG.tokenizer
    one = [special.coord_id, special.coord_id] + [special.size_id] * (case.task == "detect")
    assert ids == one * len(golden)
    width = 4 if case.task == "detect" else 2
    found = np.array(values).reshape(-1, width)
    if width == 2:
        expected = np.array([[o["x"], o["y"]] for o in golden]).reshape(-1, 2)
        assert np.abs(found - expected).max(initial=0) <= COORD_BIN
        return
    corners = np.array([[o["x_min"], o["y_min"], o["x_max"], o["y_max"]] for o in golden]).reshape(-1, 4)
    centres, sizes = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
    assert np.abs(found[:, :2] - centres).max(initial=0) <= COORD_BIN
    assert np.abs(found[:, 2:] / sizes - 1).max(initial=0) <= SIZE_BIN * 1.001


def _check_grounding(golden: dict[str, Any], thoughts: list[int], values: list[float]) -> None:
    """Every coord id of the reasoning has one value; the reference lists them in pairs, chunk by chunk."""
    assert len(values) == thoughts.count(CONFIG.tokenizer.coord_id)
    pairs = [point for chunk in golden.get("grounding", []) for point in chunk["points"]]
    found = _paired(thoughts, values)
    assert np.abs(np.array(found).reshape(-1, 2) - np.array(pairs).reshape(-1, 2)).max(initial=0) <= COORD_BIN


def _paired(thoughts: list[int], values: list[float]) -> list[tuple[float, float]]:
    """Values in pairs; a start or end of a ground drops a half pair."""
    special, rest = CONFIG.tokenizer, iter(values)
    pairs: list[tuple[float, float]] = []
    open_value: float | None = None
    for token in thoughts:
        if token in (special.start_ground_points_id, special.end_ground_id):
            open_value = None
        elif token == special.coord_id and open_value is None:
            open_value = next(rest)
        elif token == special.coord_id:
            pairs.append((open_value, next(rest)))  # type: ignore[arg-type]
            open_value = None
    return pairs


def test_golden_cases_are_not_degenerate() -> None:
    """What the comparison above is worth: texts, objects and reasoning that differ, end, and reach their limits."""
    entries = {case.name: (case, DOCUMENT["cases"][case.name]) for case in cases()}
    texts = [entry["ids"] for case, entry in entries.values() if case.task in ("query", "caption")]
    counts = [(len(e["objects"]), case.max_objects) for case, e in entries.values() if case.task in ("detect", "point")]
    thoughts = [entry for case, entry in entries.values() if case.reasoning]
    assert len({tuple(text) for text in texts}) >= 15
    assert any(len(text) == MAX_TOKENS for text in texts) and any(0 < len(text) < MAX_TOKENS for text in texts)
    assert any(n == 0 for n, _ in counts) and any(0 < n < most for n, most in counts)
    assert any(n == most for n, most in counts)
    assert any(len(entry["reasoning_ids"]) == MAX_TOKENS for entry in thoughts)
    assert any(len(entry["reasoning_ids"]) < MAX_TOKENS for entry in thoughts)
    assert sum(len(chunk["points"]) for entry in thoughts for chunk in entry["grounding"]) >= 3
    assert min(entry["margin"] for _, entry in entries.values()) > 2e-3  # no choice so close that rounding decides


def test_golden_files_stay_small() -> None:
    assert sum(path.stat().st_size for path in Path(GOLDEN).iterdir()) < 500_000
