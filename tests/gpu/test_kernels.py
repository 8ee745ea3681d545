"""Each kernel against torch. They run on a GPU, or, slowly, under TRITON_INTERPRET=1 on a CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")

from photon_backend.engine.kv_cache import KVCache, PagedDecode  # noqa: E402
from photon_backend.engine.runner import relay_in_torch  # noqa: E402
from photon_backend.kernels.attention import DecodeAttention  # noqa: E402
from photon_backend.kernels.linear import linear, linear_reference, linear_split  # noqa: E402
from photon_backend.kernels.norm import add_norm, add_norm_reference  # noqa: E402
from photon_backend.kernels.relay import relay  # noqa: E402
from photon_backend.model.config import TextConfig  # noqa: E402
from photon_backend.model.text import rope_tables, rotate  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 of numpy
INTERPRETED = DEVICE == "cpu"
# the widths of Moondream 2's layers and odd ones; slow where kernels are interpreted
LINEARS = [(256, 448, 192), (320, 200, None), (128, 64, 0)]
ATTENTIONS = [(1, 2, 2, 64), (3, 2, 1, 32)]
RELAYS = [(9, 192, 5)]
if not INTERPRETED:
    RELAYS += [(1, 2048, 128), (64, 2048, 128)]
    LINEARS += [(2048, 14336, 6144), (2048, 51_200, None)]
    ATTENTIONS += [(40, 2, 2, 32), (40, 2, 2, 64), (1, 32, 32, 64), (64, 32, 32, 64)]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, DTYPE)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize("rows", [1, 16, 70] if INTERPRETED else [1, 3, 16, 64, 70])
@pytest.mark.parametrize(("width", "outputs", "gelu_from"), LINEARS)
def test_linear(rows, width, outputs, gelu_from):
    x, weight, bias = normal(rows, width), normal(outputs, width, seed=1, scale=width**-0.5), normal(outputs, seed=2)
    out = torch.full((rows, outputs), float("nan"), dtype=DTYPE, device=DEVICE)
    linear(x, weight, bias, out, gelu_from)
    assert distance(out, linear_reference(x.float(), weight.float(), bias.float(), gelu_from)) < 5e-3


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("late", [0, 200, None])
def test_linear_split(rows, splits, late):
    """Into some of the columns of a buffer, the others stay."""
    storage, bias = normal(rows, 1000), None if late == 0 else normal(192, seed=2)
    x, weight = storage[:, :960], normal(192, 960, seed=1, scale=960**-0.5)
    buffer = torch.full((splits, rows, 300), float("nan"), dtype=torch.float32, device=DEVICE)
    out = buffer[..., 100:292]
    linear_split(x, weight, out, late, bias)
    expected = x.float() @ weight.float().T
    assert distance(out.sum(0), expected if bias is None else expected + bias.float()) < 1e-3
    assert buffer[..., :100].isnan().all() and buffer[..., 292:].isnan().all()


@pytest.mark.parametrize("splits", [None, 1, 8])
@pytest.mark.parametrize("width", [192, 2048])
def test_add_norm(splits, width):
    x, bias, weight, shift = normal(5, width), normal(width, seed=1), normal(width, seed=2), normal(width, seed=3)
    parts = None if splits is None else torch.randn(splits, 5, width).to(DEVICE)
    if splits is None:
        x *= 1e-3  # where what keeps a norm from dividing by zero counts
    expected_x = x.clone()
    expected = add_norm_reference(expected_x, parts, bias, weight, shift)
    normed = torch.full_like(x, float("nan"))
    add_norm(x, parts, bias, weight, shift, normed)
    assert distance(x, expected_x) < 1e-3 and distance(normed, expected) < 5e-3


@pytest.mark.parametrize("shape", [None, *itertools.product((1, 4), (16, 32), (1,), ("registers", "shared", "memory"))])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "head_dim"), ATTENTIONS)
def test_decode_attention(batch, heads, kv_heads, head_dim, shape, monkeypatch):
    """Rows of all lengths, shuffled pages, rows not in batch order; what is written to the pages counts as well."""
    monkeypatch.setattr("photon_backend.kernels.attention.SHAPE", shape)
    config = TextConfig(dim=heads * head_dim, n_heads=heads, n_kv_heads=kv_heads, n_layers=1, max_context=512)
    generator = torch.Generator().manual_seed(batch)
    num_rows, per_row, size = batch + 2, 32, 16
    cache = KVCache(config, num_rows * per_row, size, torch.device(DEVICE), DTYPE)
    cache.k.copy_(normal(*cache.k.shape, seed=5))
    cache.v.copy_(normal(*cache.v.shape, seed=6))
    table = torch.randperm(num_rows * per_row, generator=generator).reshape(num_rows, per_row).to(DEVICE)
    lengths = [200, 0, 63, 1, 15, 16, 64, 511]  # of the first row, which may be the only one: several blocks
    rows = torch.randperm(num_rows, generator=generator)[:batch].to(DEVICE)
    positions = torch.full((num_rows,), 7, device=DEVICE)
    positions[rows] = torch.tensor([lengths[i % len(lengths)] for i in range(batch)], device=DEVICE)
    qkv = normal(batch, (heads + 2 * kv_heads) * head_dim, seed=7)
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], 1)
    cos, sin = rope_tables(positions[rows], config)
    expected_cache = KVCache(config, num_rows * per_row, size, torch.device(DEVICE), DTYPE)
    expected_cache.k.copy_(cache.k)
    expected_cache.v.copy_(cache.v)
    attend = PagedDecode(expected_cache, table[rows], positions[rows])
    expected = attend(0, rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(1)

    out = torch.full_like(expected, float("nan"))
    cos, sin = rope_tables(torch.arange(config.max_context, device=DEVICE), config)
    keys, values = cache.flat(0)
    launch = DecodeAttention(batch, heads, kv_heads, head_dim, size, torch.device(DEVICE))
    launch(qkv, keys, values, positions[rows], table[rows], (cos[:, 0].contiguous(), sin[:, 0].contiguous()), out)
    assert distance(out, expected) < 5e-3
    assert distance(cache.k, expected_cache.k) < 1e-3 and torch.equal(cache.v, expected_cache.v)


@pytest.mark.parametrize(("batch", "width", "pages"), RELAYS)
def test_relay(batch, width, pages):
    """A third of the batch is the scratch row, as in a graph that is filled up."""
    scratch = batch + 1
    generator = torch.Generator().manual_seed(batch)
    rows = torch.randperm(batch + 1, generator=generator)[:batch]
    rows[batch - batch // 3 :] = scratch
    token = torch.randint(0, 300, (batch + 2,), generator=generator)
    position = torch.randint(0, 2000, (batch + 2,), generator=generator)
    position[scratch] = 0
    table = torch.randint(0, 2**40, (batch + 2, pages), generator=generator)
    embeddings, told = normal(300, width), []
    for run in (relay, relay_in_torch):
        moved, x = position.clone().to(DEVICE), torch.full((batch, width), float("nan"), dtype=DTYPE, device=DEVICE)
        positions, lines = run(rows.to(DEVICE), token.to(DEVICE), moved, table.to(DEVICE), embeddings, scratch, x)
        told.append([t.tolist() for t in (x, moved, positions, lines)])
    assert told[0] == told[1]
    assert told[0][1][scratch] == 0
