"""What the modules promise beside the golden numbers: bfloat16, gradients, masks, rope, values of bins."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from photon_backend.model.attention import dense_attend, prefix_mask
from photon_backend.model.crops import make_crops
from photon_backend.model.generate import generate
from photon_backend.model.moondream import Moondream
from photon_backend.model.weights import random_model
from tests.model.tiny_checkpoint import CONFIG, picture

PREFIX = CONFIG.prefix_len


def random_crops(name: str = "tiles") -> tuple[torch.Tensor, tuple[int, int]]:
    crops, tiling = make_crops(picture(name), CONFIG.vision)
    return torch.from_numpy(crops), tiling


def forward(model: Moondream, x: torch.Tensor, prefix_len: int) -> torch.Tensor:
    """x: [B, T, D] -> hidden [B, T, D]."""
    mask = prefix_mask(x.shape[1], prefix_len, x.device)
    return model.text(x, torch.arange(x.shape[1], device=x.device), dense_attend(mask))


@pytest.mark.parametrize("task", ["query", "caption", "detect", "point"])
def test_bfloat16_runs_every_task(task: str) -> None:
    model = random_model(CONFIG, "cpu", torch.bfloat16, seed=0)
    crops, tiling = random_crops()
    prompt = [8, 20, CONFIG.tokenizer.coord_id, CONFIG.tokenizer.coord_id, CONFIG.tokenizer.size_id, 3]
    ids, values, _ = generate(model, crops, tiling, prompt, [0.1, 0.9], [(0.2, 0.3)], task, False, 5, 2)
    assert 0 < len(ids) <= 6 and np.isfinite(values).all()
    assert all(0 <= value <= 1 for value in values)


def test_bfloat16_stays_close_to_float32() -> None:
    model = random_model(CONFIG, "cpu", torch.float32, seed=0)
    crops, tiling = random_crops()
    exact = model.vision.encode(crops, [tiling])
    rough = model.to(torch.bfloat16).vision.encode(crops, [tiling])
    assert rough.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(exact, rough.float(), dim=-1).min() > 0.999


def test_values_come_from_the_bin_in_float32() -> None:
    region = random_model(CONFIG, "cpu", torch.bfloat16, seed=0).region
    coords = region.coordinate_value(torch.tensor([0, 1, 511]))
    assert coords.dtype == torch.float32 and coords.tolist() == [0.0, 1 / 512, 511 / 512]
    sizes = region.size_value(torch.tensor([[0, 1023], [512, 1]]))
    assert sizes.dtype == torch.float32
    expected = [[2**-10, 1.0], [2 ** (512 / 1023 * 10 - 10), 2 ** (1 / 1023 * 10 - 10)]]
    assert sizes.tolist() == [pytest.approx(row, rel=1e-5) for row in expected]


def test_neighbouring_values_differ_in_bfloat16() -> None:
    region = random_model(CONFIG, "cpu", torch.bfloat16, seed=0).region
    embedded = region.encode_coordinate(torch.tensor([[511 / 512], [510 / 512]]))
    assert not torch.equal(embedded[0], embedded[1])


def test_gradients_reach_every_parameter() -> None:
    model = random_model(CONFIG, "cpu", torch.float32, seed=0)
    crops, tiling = random_crops()
    image = model.vision.encode(torch.cat([crops, crops]), [tiling, tiling])
    text = model.text.embed(torch.randint(0, 300, (2, 7), generator=torch.Generator().manual_seed(0)))
    coord = model.region.encode_coordinate(torch.rand(2, 2, 1))
    size = model.region.encode_size(torch.rand(2, 1, 2))
    hidden = forward(model, torch.cat([text[:, :1], image, text[:, 1:], coord, size], dim=1), PREFIX)
    loss = model.text.logits(hidden).square().mean()
    loss = loss + model.region.decode_coordinate(hidden[:, -2]).square().mean()
    loss = loss + model.region.decode_size(hidden[:, -1]).square().mean()
    loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


def test_prefix_mask() -> None:
    mask = prefix_mask(5, 3, "cpu").int().tolist()
    assert mask == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_prefix_sees_itself_and_text_sees_no_future() -> None:
    model = random_model(CONFIG, "cpu", torch.float32, seed=0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 12, CONFIG.text.dim, generator=generator)
    other = x.clone()
    other[0, 4] *= -1  # the last of the prefix
    before, after = forward(model, x, 5), forward(model, other, 5)
    assert (before[0] - after[0]).abs().amax(dim=-1).min() > 1e-3  # every position, the first one too
    other = x.clone()
    other[0, 8] *= -1
    after = forward(model, other, 5)
    torch.testing.assert_close(before[0, :8], after[0, :8])
    assert (before[0, 8:] - after[0, 8:]).abs().amax(dim=-1).min() > 1e-3


def test_one_mask_per_row_equals_the_rows_alone() -> None:
    model = random_model(CONFIG, "cpu", torch.float32, seed=0)
    x = torch.randn(2, 9, CONFIG.text.dim, generator=torch.Generator().manual_seed(0))
    masks = torch.stack([prefix_mask(9, 0, "cpu"), prefix_mask(9, 6, "cpu")])
    together = model.text(x, torch.arange(9), dense_attend(masks))
    for row, prefix_len in enumerate((0, 6)):
        torch.testing.assert_close(together[row], forward(model, x[row : row + 1], prefix_len)[0], atol=1e-5, rtol=1e-5)


def test_rope_depends_on_distance_only() -> None:
    """Scores of a causal text are the same wherever it starts: all positions may be moved together."""
    model = random_model(CONFIG, "cpu", torch.float32, seed=0)
    x = torch.randn(1, 9, CONFIG.text.dim, generator=torch.Generator().manual_seed(0))
    attend = dense_attend(prefix_mask(9, 0, "cpu"))
    here, there = (model.text(x, torch.arange(9) + start, attend) for start in (0, 1500))
    torch.testing.assert_close(here, there, atol=1e-3, rtol=1e-3)
    stretched = model.text(x, torch.arange(9) * 2, attend)
    assert not torch.allclose(here, stretched, atol=1e-2)


def test_wrong_number_of_crops_is_refused() -> None:
    model = random_model(CONFIG, "cpu", torch.float32, seed=0)
    crops, tiling = random_crops()
    with pytest.raises(ValueError, match="crops for tilings"):
        model.vision.encode(crops[:-1], [tiling])


def test_generation_ends_at_the_context_limit() -> None:
    """Prompt and ids together fill the context and no more; an object is never cut in the middle."""
    model = random_model(CONFIG, "cpu", torch.float32, seed=0)
    model.text.lm_head.bias.data[CONFIG.tokenizer.eos_id] = -1e9
    text = msgspec.structs.replace(CONFIG.text, max_context=12)
    model.config = msgspec.structs.replace(CONFIG, text=text)
    prompt = [CONFIG.tokenizer.bos_id, 20, 21, 22, 3]
    for task, expected in (("query", 7), ("point", 6), ("detect", 6)):
        ids, _, reason = generate(model, None, (0, 0), prompt, [], [], task, False, 100, 100)
        assert (len(ids), reason) == (expected, "length")
