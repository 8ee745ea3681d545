"""No step compiles a kernel: what starts with an engine on a GPU has launched all that its steps ever launch.

Without a GPU and without running anything: kernels are replaced by what notes the kind of their arguments, as Triton
tells kernels apart by them. It compiles one for each type, for pointers that are multiples of 16 bytes or not, for
integers that are 1, multiples of 16 or neither, and for the constants.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton", reason="Triton's kernel language is not installed")

from photon_backend.engine import capture, fused, graphs
from photon_backend.engine.graphs import DecodeGraphs, buckets_for
from photon_backend.engine.kv_cache import KVCache
from photon_backend.engine.runner import PrefillRow, Runner
from photon_backend.engine.slots import DecodeSlot
from photon_backend.kernels import attention, linear, norm, prefill, region, relay, sample
from photon_backend.kernels.norm import MANY
from photon_backend.model.config import ModelConfig, TextConfig
from photon_backend.model.weights import random_model
from tests.model.tiny_checkpoint import CONFIG

KERNELS = [
    (attention, "_attend"), (attention, "_join"), (linear, "_linear"), (norm, "_add_norm"), (prefill, "_attend"),
    (prefill, "_spread"), (region, "_encode_values"), (relay, "_relay"), (sample, "_sample"),
    (sample, "survey"),
]  # fmt: skip
ROWS, PAGE = 20, 16
# wide enough for the shapes of a launch to differ by the number of rows; a vocabulary that is no multiple of 16
TEXT = TextConfig(dim=320, ff_dim=112, n_layers=2, n_heads=5, n_kv_heads=5, vocab_size=301, max_context=2 * MANY)
CPU, DTYPE = torch.device("cpu"), torch.bfloat16


class Noted:
    """Stands for a kernel; `seen` grows by one for each that Triton would compile."""

    def __init__(self, kernel: Any, seen: set[tuple]) -> None:
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **named: Any) -> None:
        params = self._kernel.params
        given = dict(zip((p.name for p in params), args, strict=False)) | named
        kinds = [self._kind(p, given.pop(p.name)) for p in params]
        self._seen.add((self._kernel.__name__, self._kernel.__module__, *kinds, *sorted(given.items())))

    @staticmethod
    def _kind(param: Any, value: Any) -> object:
        if param.is_constexpr:
            return value
        if isinstance(value, torch.Tensor):
            return value.dtype, param.do_not_specialize or value.data_ptr() % 16 == 0
        if isinstance(value, int):
            return abs(value) < 2**31, param.do_not_specialize or (value == 1, value % 16 == 0)
        return type(value)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[tuple]:
    seen: set[tuple] = set()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Noted(getattr(module, name), seen))
    monkeypatch.setattr(fused.FusedText, "supports", staticmethod(lambda text: True))
    device = SimpleNamespace(
        graph_pool_handle=lambda: None, Stream=lambda device: SimpleNamespace(device=device), CUDAGraph=object,
        stream=lambda stream: nullcontext(), synchronize=lambda device=None: None,
        graph=lambda *args, **named: nullcontext(),
    )  # fmt: skip
    for module in (graphs, capture):
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=device))
    return seen


@torch.inference_mode()
def test_no_step_launches_what_the_start_did_not(seen: set[tuple]) -> None:
    model = ModelConfig(TEXT, CONFIG.vision, replace(CONFIG.region, dim=TEXT.dim))
    cache = KVCache(TEXT, ROWS * TEXT.max_context // PAGE, PAGE, CPU, DTYPE)
    runner = Runner(random_model(model, "cpu", DTYPE, seed=0).requires_grad_(False), cache, ROWS, debug=False)
    runner.use_kernels()
    buckets = buckets_for(ROWS)
    slots = [DecodeSlot(model, buckets[-1], CPU, DTYPE) for _ in range(2)]
    DecodeGraphs(runner, slots, buckets)
    assert {kernel for kernel, *_ in seen} == {name for _, name in KERNELS}
    at_start = set(seen)
    chance = Random(0)
    for number in [*range(1, ROWS + 1), *(chance.randint(1, 3) for _ in range(20))]:
        slot = chance.choice(slots)
        runner.prefill(slot, some_rows(number, chance))
        for spatial in (False, True):
            for masked in (False, True):  # masks: of decode steps too, which are sampled outside their graphs then
                runner.sample(slot, number, spatial, masked, automata=True)
    assert seen - at_start == set()


def some_rows(number: int, chance: Random) -> list[PrefillRow]:
    """Short and long prompts, some of them behind a cached prefix."""
    rows = []
    for row in chance.sample(range(ROWS), number):
        prefix, prompt = chance.choice([0, 1, 40]), chance.choice([1, 2, 12, MANY])
        first, pages = row * TEXT.max_context // PAGE, -(-(prefix + prompt) // PAGE)
        rows.append(PrefillRow(
            row=row, pages=list(range(first, first + pages)), cached_len=prefix, prefix_len=prefix,
            prompt_ids=[7] * prompt, coords=[], sizes=[], pixels=None, tiling=(1, 1), load_tail=None, save_tail=None,
            state=0, think_until=0, temperature=0.5, top_p=0.3, top_k=0, seed=0, automaton=(0, 0, 1),
        ))  # fmt: skip
    return rows
