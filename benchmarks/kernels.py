"""Time of each decode kernel at Moondream 2's shape, beside the bytes that it must read. Needs a GPU.

    python -m benchmarks.kernels [--batch 1,16,64] [--only NAME] [--sweep]

Every kernel runs over the weights or pages of all layers in one CUDA graph, so nothing it reads is still in L2. The
sampling kernel reads the same logits each time; they are still in L2 in a real step too. `--sweep` tries shapes and
prints the best; the last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np
import torch
import triton

from benchmarks import kernel_twins
from photon_backend.engine.fused import FusedText
from photon_backend.engine.fused_region import FusedRegion
from photon_backend.engine.kv_cache import KVCache
from photon_backend.engine.rows import COORDINATE, SIZE, Rows
from photon_backend.engine.runner import encode_in_torch, heads_in_torch, relay_in_torch
from photon_backend.engine.sampler import sample_step
from photon_backend.engine.slots import DecodeSlot
from photon_backend.engine.tables import AutomatonTables
from photon_backend.grammar.constraint import ALL_LEGAL, TokenAutomaton
from photon_backend.grammar.spatial import State
from photon_backend.kernels import attention as attention_module
from photon_backend.kernels import early as early_module
from photon_backend.kernels import linear as linear_module
from photon_backend.kernels import norm as norm_module
from photon_backend.kernels import prefill as prefill_module
from photon_backend.kernels import sample as sample_module
from photon_backend.kernels.attention import DecodeAttention
from photon_backend.kernels.linear import linear, linear_split
from photon_backend.kernels.norm import add_norm, add_norm_reference
from photon_backend.kernels.prefill import attend, pack, spread, unpack
from photon_backend.kernels.relay import relay
from photon_backend.kernels.sample import SampleKernel
from photon_backend.model.config import ModelConfig, TextConfig
from photon_backend.model.region import Region
from photon_backend.model.text import rope_tables
from photon_backend.model.weights import random_model

GB_PER_S = 4200.0
LAUNCHES = 24  # of a kernel in a graph, and the layers of Moondream 2
Work = tuple[Callable[[], None], int, ModuleType | None]  # so many launches, bytes of one, whose SHAPE a sweep sets


def graph_us(work: Callable[[], None], launches: int, repeat: int = 20) -> float:
    """Median microseconds of one launch, of `launches` in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / launches)
    return sorted(times)[repeat // 2]


def linears(model: ModelConfig, batch: int) -> dict[str, Work]:
    config = model.text
    width, hidden = config.dim, config.ff_dim
    outputs = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim + hidden

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02

    w_in = [normal(outputs, width) for _ in range(config.n_layers)]
    w_out = [normal(width, width + hidden) for _ in range(config.n_layers)]
    bias, x, joined = normal(outputs), normal(batch, width), normal(batch, width + hidden)
    out = normal(batch, outputs)

    def first() -> None:
        for w in w_in:
            linear(x, w, bias, out, gelu_from=outputs - hidden)

    def second(splits: int) -> Callable[[], None]:
        sums = torch.empty(splits, batch, width, device="cuda")

        def work() -> None:
            for w in w_out:
                linear_split(joined, w, sums, late=width)

        return work

    def library(x: torch.Tensor, weights: list[torch.Tensor], bias: torch.Tensor | None) -> None:
        for w in weights:
            torch.nn.functional.linear(x, w, bias)

    size = 2 * w_in[0].numel()
    works: dict[str, Work] = {
        "in": (first, size, linear_module),
        "in, cuBLAS": (partial(library, x, w_in, bias), size, None),
    }
    works["out, cuBLAS"] = (partial(library, joined, w_out, None), 2 * w_out[0].numel(), None)
    for splits in (4, 8, 16):
        works[f"out, {splits} splits"] = (second(splits), 2 * w_out[0].numel(), linear_module)
    return works


def attentions(config: ModelConfig, batch: int) -> dict[str, Work]:
    context = 800
    kv = 4 * config.text.n_kv_heads * config.text.head_dim * context * batch
    ours, in_torch = attention(config.text, batch, context)
    return {"attention": (ours, kv, attention_module), "attention, torch": (in_torch, kv, None)}


def attention(config: TextConfig, batch: int, context: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Decode attention over the pages of all layers, ours and torch's; ours builds its launcher anew for each shape of
    a sweep."""
    pages = batch * (context // 16 + 1)
    cache = KVCache(config, pages, 16, torch.device("cuda"), torch.bfloat16)
    cache.k.normal_()
    cache.v.normal_()
    table = torch.randperm(pages, device="cuda").reshape(batch, -1)
    position = torch.full((batch,), context, device="cuda")
    width = config.n_heads * config.head_dim
    qkv = torch.randn(batch, 3 * width, device="cuda", dtype=torch.bfloat16)
    cos, sin = rope_tables(torch.arange(config.max_context, device="cuda"), config)
    rope, out = (cos[:, 0].contiguous(), sin[:, 0].contiguous()), qkv.new_empty(batch, width)

    def work() -> None:
        launch = DecodeAttention(batch, config.n_heads, config.n_kv_heads, config.head_dim, 16, cache.k.device)
        for layer in range(config.n_layers):
            launch(qkv, *cache.flat(layer), position, table, rope, out, ahead=layer > 0)

    return work, kernel_twins.decode_attention(config, cache, table, position, qkv)


def others(config: ModelConfig, batch: int) -> dict[str, Work]:
    width, splits, pages = config.text.dim, 8, config.text.max_context // 16
    x, normed = (torch.randn(batch, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    parts, bias = torch.randn(splits, batch, width, device="cuda"), x[0].clone()
    embeddings = torch.randn(1000, width, device="cuda", dtype=torch.bfloat16)
    row, table = torch.arange(batch, device="cuda"), torch.zeros(batch, pages, dtype=torch.int64, device="cuda")
    position = torch.zeros_like(row)

    def start(run: Callable) -> Callable[[], None]:
        return lambda: run(row, row, position, table, embeddings, batch, x)

    return {
        "add_norm": (many(lambda: add_norm(x, parts, bias, bias, bias, normed)), parts.numel() * 4, norm_module),
        "add_norm, torch": (many(lambda: add_norm_reference(x, parts, bias, bias, bias)), parts.numel() * 4, None),
        "relay": (many(start(relay)), x.numel() * 4, None),
        "relay, torch": (many(start(relay_in_torch)), x.numel() * 4, None),
    }


def many(launch: Callable[[], object]) -> Callable[[], None]:
    def work() -> None:
        for _ in range(LAUNCHES):
            launch()

    return work


def regions(config: ModelConfig, batch: int) -> dict[str, Work]:
    """What rows with coordinates or sizes need beside the layers. The encoders' weights, 3 MB, stay in L2 here."""
    with torch.device("cuda"):
        region = Region(config.region).requires_grad_(False).bfloat16()
    for frequencies in (region.coord_features, region.size_features):
        frequencies.normal_()
    fused, hidden = FusedRegion(region), torch.randn(batch, config.text.dim, device="cuda", dtype=torch.bfloat16)
    row, value = torch.arange(batch, device="cuda"), torch.rand(batch, 2, device="cuda")
    boxes = torch.tensor([COORDINATE, COORDINATE, SIZE], device="cuda")[row % 3]
    of_heads = sum(2 * p.numel() for part in (region.coord_decoder, region.size_decoder) for p in part.parameters())
    return {
        "values": (many(lambda: fused.encode(row, boxes, value, hidden)), hidden.numel() * 2, None),
        "values, torch": (many(lambda: encode_in_torch(region, row, boxes, value, hidden)), hidden.numel() * 2, None),
        "heads": (many(lambda: fused.heads(hidden)), of_heads, None),
        "heads, torch": (many(lambda: heads_in_torch(region, hidden)), of_heads, None),
    }


def forwards(config: ModelConfig, batch: int) -> dict[str, Work]:
    """The whole forward of a decode step by layer, and with each kernel launched only when the one before has ended."""
    text, context = random_model(config, "cuda", torch.bfloat16, seed=0).requires_grad_(False).text, 800
    pages = context // 16 + 1
    cache = KVCache(config.text, batch * pages, 16, torch.device("cuda"), torch.bfloat16)
    cache.k.normal_()
    cache.v.normal_()
    fused, start = FusedText(text, cache), torch.randn(batch, config.text.dim, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(batch * pages, device="cuda").reshape(batch, pages)
    x, position = start.clone(), torch.full((batch,), context, device="cuda")
    logits = torch.empty(batch, config.text.vocab_size, device="cuda")

    def forward(early: bool) -> None:
        x.copy_(start)
        early_module.ENABLED = early
        fused.forward(x, position, table, logits)
        early_module.ENABLED = True

    weights = sum(p.numel() for name, p in text.named_parameters() if name != "wte")
    kv = 2 * config.text.n_kv_heads * config.text.head_dim * context * batch
    size = 2 * (weights // config.text.n_layers + kv)
    return {
        "forward": (partial(forward, True), size, None),
        "forward, one by one": (partial(forward, False), size, None),
    }


SAMPLERS: dict[str, dict] = {  # flat logits are the worst case; a model that is sure is far cheaper
    "flat": {},
    "flat, top-p 0.9": {"top_p": 0.9},
    "flat, all ids": {"top_p": 1.0},
    "flat, top-k 5": {"top_p": 1.0, "top_k": 5},
    "sure": {"sure": True},
    "greedy": {"temperature": 0.0},
    "automaton": {"automaton": True},
    "masked": {"masked": True},
    "boxes": {"state": State.BOX_X},
}


def prefills(config: ModelConfig, batch: int) -> dict[str, Work]:
    """The two kernels of a prefill of pictures, four at most, with 12 tokens of question each."""
    text, pictures, prefix = config.text, min(batch, 4), config.prefix_len
    length, heads, width = prefix + 12, text.n_heads, text.n_heads * text.head_dim
    pages = -(-length // 16)
    cache = KVCache(text, pictures * pages, 16, torch.device("cuda"), torch.bfloat16)
    table = torch.randperm(pictures * pages, device="cuda").reshape(pictures, pages)
    numbers = torch.from_numpy(pack([(row, 0, prefix, length) for row in range(pictures)])).cuda()
    packed = unpack(numbers, pictures * length, pictures)
    merged = torch.randn(pictures * length, 3 * width + text.ff_dim, device="cuda", dtype=torch.bfloat16)
    joined = merged[:, : width + text.ff_dim].contiguous()
    cos, sin = rope_tables(torch.arange(text.max_context, device="cuda"), text)
    rope = cos[:, 0].contiguous(), sin[:, 0].contiguous()

    def spreads() -> None:
        for layer in range(text.n_layers):
            spread(merged, joined, *cache.flat(layer), packed, table, rope, heads, 16)

    def attends() -> None:
        for layer in range(text.n_layers):
            attend(joined, *cache.flat(layer), packed, table, heads, 16)

    qkv = merged[:, : 3 * width].contiguous()
    in_torch = kernel_twins.prefill_attention(text, cache, table, prefix, length, qkv)
    return {
        "prefill, spread": (spreads, 2 * (merged.numel() + joined.numel() + 2 * width * len(merged)), None),
        "prefill, attention": (attends, 8 * width * len(merged), prefill_module),
        "prefill, both in torch": (in_torch, 2 * merged.numel(), None),
    }


def samplers(config: ModelConfig, batch: int) -> dict[str, Work]:
    """Mask, draw and transition of a step in two launches, and the same in torch operations."""
    works: dict[str, Work] = {}
    for name, changes in SAMPLERS.items():
        for way in ("sample", "torch"):
            work, size = sampler(config, batch, way == "torch", **changes)
            works[f"{way}, {name}"] = (work, size, sample_module if way == "sample" else None)
    return works


def sampler(
    config: ModelConfig, batch: int, in_torch: bool, temperature: float = 0.5, top_p: float = 0.3, top_k: int = 0,
    sure: bool = False, automaton: bool = False, masked: bool = False, state: State = State.TEXT,
) -> tuple[Callable[[], None], int]:  # fmt: skip
    device = torch.device("cuda")
    with torch.device("meta"):
        region = Region(config.region)  # for the values of its bins, not for its weights
    rows = Rows(config, region, batch, 1, 8, device)
    slot = DecodeSlot(config, batch, device, torch.bfloat16)
    slot.load_rows(list(range(batch)))
    slot.logits.normal_(std=2.0)
    slot.mask.fill_(ALL_LEGAL)
    if sure:
        slot.logits[:, 77] += 40.0
    for column, value in ((rows.temperature, temperature), (rows.top_p, top_p), (rows.top_k, top_k)):
        column.fill_(value)
    rows.seed.copy_(torch.arange(batch))
    rows.state.fill_(int(state))
    if automaton:
        rows.automata.start(slot.rows, torch.tensor([place_any(rows.automata.tables)] * batch, device=device))
    bins = config.region.coord_out_dim
    heads = torch.randn(batch, bins, device=device), torch.randn(batch, 2, bins, device=device)
    region_heads = None if state == State.TEXT else heads
    run = partial(sample_step, rows) if in_torch else SampleKernel(rows)
    return many(lambda: run(slot, batch, region_heads, masked, automaton)), slot.logits.numel() * 4


def place_any(tables: AutomatonTables) -> tuple[int, int, int]:
    """Tables of 40 states in which every token is legal and leads anywhere; their row_values."""
    chance, size = np.random.RandomState(0), tables.free_row[1] - tables.mask_words
    classes = chance.randint(0, 30, size).astype(np.int32)
    follow = chance.randint(0, 40, (40, 30)).astype(np.int32)
    placed = tables.place(TokenAutomaton(np.full((40, tables.mask_words), ALL_LEGAL, np.int32), classes, follow))
    assert placed is not None
    tables.write(placed[0].base, tables.host_words(placed[0].automaton))
    return placed[0].row_values


SWEEPS: dict[ModuleType, list[tuple]] = {
    linear_module: list(itertools.product((32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 5))),
    attention_module: list(
        itertools.product((1, 2, 4, 8, 16, 32), (16, 32, 64), (1, 2), ("registers", "shared", "memory"))
    ),
    norm_module: [(4,), (8,), (16,), (32,)],
    prefill_module: list(itertools.product((32, 64, 128), (4, 8), (2, 3, 4))),
    sample_module: [(b, w) for b in (1024, 2048, 4096, 8192, 16384) for w in (4, 8, 16, 32) if 4 <= b // w // 32 <= 32],
}


def sweep(module: ModuleType, work: Callable[[], None]) -> None:
    """Prints the four best shapes of a module's kernel."""
    tried, before = [], module.SHAPE  # type: ignore[attr-defined]
    for shape in SWEEPS[module]:
        module.SHAPE = shape  # type: ignore[attr-defined]
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            tried.append((graph_us(work, LAUNCHES, repeat=8), shape))
    module.SHAPE = before  # type: ignore[attr-defined]
    for us, shape in sorted(tried)[:4]:
        print(f"  {shape}: {us:6.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--sweep", action="store_true", help="shapes of all kernels that have one")
    parser.add_argument("--only", default="", help="kernels whose name begins with this")
    options = parser.parse_args()
    config, results = ModelConfig(), []
    for batch in map(int, options.batch.split(",")):
        works = [
            work
            for make in (linears, attentions, others, regions, forwards, prefills, samplers)
            for work in make(config, batch).items()
        ]
        for name, (work, size, module) in works:
            if not name.startswith(options.only):
                continue
            us = graph_us(work, LAUNCHES)
            print(f"batch {batch:>3} {name:<24} {us:7.2f} us {size / us / 1e3:6.0f} GB/s of {GB_PER_S:.0f}", flush=True)
            results.append({"batch": batch, "kernel": name, "us": us, "gb_per_s": size / us / 1e3})
            if options.sweep and module is not None:
                sweep(module, work)
    print(json.dumps({"benchmark": "kernels", "results": results}))


if __name__ == "__main__":
    main()
