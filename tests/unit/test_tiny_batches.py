"""What the bundled model is trained on equals what it meets in service."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from photon_backend.config import TINY_CHECKPOINT
from photon_backend.frontend.options import Request
from photon_backend.frontend.prompts import build_prompt
from photon_backend.model.attention import dense_attend, prefix_mask
from photon_backend.model.config import load_config
from photon_backend.model.crops import make_crops
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.model.weights import random_model
from photon_backend.protocol import Sampling
from photon_backend.tiny.batches import PADDING_SEGMENT, make_batch, pack, unpack
from photon_backend.tiny.losses import CellHeads, encode_pictures, losses, packed_mask, stitching
from photon_backend.tiny.question import Question
from photon_backend.tiny.questions import draw_question
from photon_backend.tiny.scenes import make_scene
from photon_backend.tiny.spelling import NONE, Encoder
from photon_backend.tiny.vocabulary import CONFIG

QUESTION_LEN = 255
SEEDS = range(300, 304)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(TINY_CHECKPOINT / "tokenizer.json")


@pytest.fixture(scope="module")
def encoder(tokenizer: TextTokenizer) -> Encoder:
    return Encoder(load_config(TINY_CHECKPOINT), tokenizer)


@pytest.fixture(scope="module")
def batch(encoder: Encoder) -> dict[str, np.ndarray]:
    return make_batch(encoder, SEEDS, QUESTION_LEN)


@pytest.fixture(scope="module")
def tensors(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def test_committed_config_is_that_of_the_vocabulary_module() -> None:
    assert load_config(TINY_CHECKPOINT) == CONFIG


def test_prompts_are_those_of_the_front_end(encoder: Encoder, tokenizer: TextTokenizer) -> None:
    kinds = set()
    for seed in range(400, 430):
        scene, rng = make_scene(seed), random.Random(seed)
        for _ in range(10):
            question = draw_question(rng, scene)
            spelling = encoder.prompt(question)
            prompt = build_prompt(_request(question), encoder.config, tokenizer)
            assert prompt.ids == spelling.ids
            values = [spelling.values[place] for place in sorted(spelling.values)]
            size_id = encoder.config.tokenizer.size_id
            sizes = [spelling.values[p] for p in sorted(spelling.values) if spelling.ids[p] == size_id]
            assert prompt.sizes == sizes
            assert prompt.coords == [value[0] for value in values if value not in sizes]
            kinds.add((question.task, question.reasoning, question.picture, bool(question.refs)))
    assert len(kinds) >= 7


def _request(question: Question) -> Request:
    is_caption = question.task == "caption"
    return Request(
        task=question.task,  # type: ignore[arg-type]
        text="" if is_caption else question.text,
        image=b"some" if question.picture else None,
        stream=False,
        sampling=Sampling(),
        length=question.text if is_caption else "normal",  # type: ignore[arg-type]
        reasoning=question.reasoning,
        spatial_refs=[list(ref) for ref in question.refs],
    )


def test_targets_of_a_detect_example(encoder: Encoder) -> None:
    """The choice of another object or the end at the places before x; x, y and size each one place ahead."""
    special = encoder.config.tokenizer
    box = (0.25, 0.5, 0.5, 1.0)
    spelling = encoder.example(Question("detect", "detect", "circle", boxes=(box, box)), random.Random(0))
    last_of_prompt = spelling.ids.index(special.coord_id) - 1
    assert spelling.ids[last_of_prompt + 1 :] == [special.coord_id, special.coord_id, special.size_id] * 2
    wanted = {place: token for place, token in enumerate(spelling.tokens) if token != NONE}
    assert wanted == {last_of_prompt: 5, last_of_prompt + 3: 5, last_of_prompt + 6: special.eos_id}
    bins = encoder.config.region.coord_out_dim
    assert spelling.coords[last_of_prompt] == pytest.approx(0.375 * bins)
    assert spelling.coords[last_of_prompt + 1] == pytest.approx(0.75 * bins)
    top = encoder.config.region.size_bins - 1
    assert spelling.sizes[last_of_prompt + 2] == pytest.approx((0.8 * top, 0.9 * top))


def test_answer_targets_shift_by_one_and_end(encoder: Encoder, tokenizer: TextTokenizer) -> None:
    spelling = encoder.example(Question("query", "text", "What is written?", "AB 7"), random.Random(0))
    answer = tokenizer.encode("AB 7")
    assert spelling.ids[-len(answer) :] == answer
    assert spelling.tokens[-len(answer) - 1 :] == [*answer, encoder.config.tokenizer.eos_id]
    assert set(spelling.tokens[: -len(answer) - 1]) == {NONE}


def test_batch_depends_on_its_seeds_only(encoder: Encoder, batch: dict[str, np.ndarray]) -> None:
    again = make_batch(encoder, SEEDS, QUESTION_LEN)
    assert all(np.array_equal(again[name], batch[name]) for name in batch)


def test_pack_and_unpack(batch: dict[str, np.ndarray]) -> None:
    unpacked = unpack(*pack(batch))
    assert list(unpacked) == list(batch)
    for name, array in batch.items():
        assert np.array_equal(unpacked[name].numpy(), array)
        assert unpacked[name].numpy().dtype == array.dtype


def test_stitching_matrices_equal_the_vision_encoder(tensors: dict[str, torch.Tensor]) -> None:
    model = random_model(CONFIG, "cpu", torch.float32, 0).requires_grad_(False)
    crops, tilings = zip(*(make_crops(make_scene(seed).pixels, CONFIG.vision) for seed in SEEDS), strict=True)
    assert len(set(tilings)) > 1
    expected = model.vision.encode(torch.from_numpy(np.concatenate(crops)), tilings)
    got = encode_pictures(model.vision, stitching(model.vision), tensors)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_a_packed_question_sees_what_it_would_see_alone(tensors: dict[str, torch.Tensor]) -> None:
    model = random_model(CONFIG, "cpu", torch.float32, 0).requires_grad_(False)
    prefix_len, row = CONFIG.prefix_len, 0
    x = torch.randn(1, prefix_len + QUESTION_LEN, CONFIG.text.dim)
    segments, sees = tensors["segments"][row : row + 1], tensors["sees_picture"][row : row + 1]
    positions = torch.cat([torch.arange(prefix_len), tensors["positions"][row]])[None]
    packed = model.text(x, positions, dense_attend(packed_mask(segments, sees, prefix_len)))
    last = int(segments[segments != PADDING_SEGMENT].max())
    for segment in (1, 2, last):
        places = prefix_len + torch.nonzero(segments[0] == segment).flatten()
        start = prefix_len if bool(sees[0, places[0] - prefix_len]) else 0
        alone = torch.cat([x[:, :start], x[:, places]], dim=1)
        mask = prefix_mask(alone.shape[1], start, "cpu")
        expected = model.text(alone, torch.arange(alone.shape[1])[None], dense_attend(mask))
        torch.testing.assert_close(packed[:, places], expected[:, start:], atol=1e-4, rtol=1e-4)


def test_loss_reaches_every_trained_weight(tensors: dict[str, torch.Tensor]) -> None:
    model = random_model(CONFIG, "cpu", torch.float32, 0)
    heads = CellHeads(CONFIG.text.dim)
    parts = losses(model, heads, stitching(model.vision), tensors)
    assert set(parts) == {"token", "coord", "size", "cell"}
    sum(parts.values()).backward()  # type: ignore[union-attr]
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []
