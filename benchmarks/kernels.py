"""Time of each decode kernel at Moondream 2's shape, beside the bytes that it must read. Needs a GPU.

    python -m benchmarks.kernels [--batch 1,16,64] [--sweep | --sweep-attention]

Every kernel runs over the weights or pages of all layers in one CUDA graph, so nothing it reads is still in L2.
`--sweep` tries tile shapes and prints the best; the last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable
from types import ModuleType

import torch
import triton

from photon_backend.engine.kv_cache import KVCache
from photon_backend.kernels import attention as attention_module
from photon_backend.kernels import linear as linear_module
from photon_backend.kernels.attention import DecodeAttention
from photon_backend.kernels.linear import linear, linear_split
from photon_backend.kernels.norm import add_norm
from photon_backend.kernels.sample import draw
from photon_backend.model.config import TextConfig
from photon_backend.model.text import rope_tables

GB_PER_S = 4200.0
LINEAR_SWEEP = list(itertools.product((32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 5)))


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


def linears(config: TextConfig, batch: int) -> dict[str, tuple[Callable[[], None], int]]:
    """name -> (work over all layers, bytes of one layer's weights)"""
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
                linear_split(joined, w, sums)

        return work

    def library() -> None:
        for w in w_in:
            torch.nn.functional.linear(x, w, bias)

    works = {"in": (first, 2 * w_in[0].numel()), "in, cuBLAS": (library, 2 * w_in[0].numel())}
    for splits in (4, 8, 16):
        works[f"out, {splits} splits"] = (second(splits), 2 * w_out[0].numel())
    return works


ATTENTION_SWEEP = list(itertools.product((1, 2, 4, 8, 16), (32, 64), (2, 4)))


def attention(config: TextConfig, batch: int, context: int = 800) -> Callable[[], None]:
    """Decode attention over the pages of all layers; builds its launcher anew for each shape of a sweep."""
    pages = batch * (context // 16 + 1)
    cache = KVCache(config, pages, 16, torch.device("cuda"), torch.bfloat16)
    cache.k.normal_()
    cache.v.normal_()
    table = torch.randperm(pages, device="cuda").reshape(batch, -1)
    rows, position = torch.arange(batch, device="cuda"), torch.full((batch,), context, device="cuda")
    width = config.n_heads * config.head_dim
    qkv = torch.randn(batch, 3 * width, device="cuda", dtype=torch.bfloat16)
    cos, sin = rope_tables(torch.arange(config.max_context, device="cuda"), config)
    rope, out = (cos[:, 0].contiguous(), sin[:, 0].contiguous()), qkv.new_empty(batch, width)

    def work() -> None:
        launch = DecodeAttention(batch, config.n_heads, config.n_kv_heads, config.head_dim, 16, cache.k.device)
        for layer in range(config.n_layers):
            launch(qkv, *cache.flat(layer), rows, position, table, rope, out)

    return work


def others(config: TextConfig, batch: int) -> dict[str, tuple[Callable[[], None], int]]:
    """name -> (24 launches, bytes of one)"""
    width, splits = config.dim, 8
    x, normed = (torch.randn(batch, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    parts, bias = torch.randn(splits, batch, width, device="cuda"), x[0].clone()
    logits = torch.randn(batch, config.vocab_size, device="cuda") * 2
    ones = torch.ones(batch, device="cuda")
    cold = (ones * 0.5, ones * 0.3, ones.long() * 0, ones.long(), ones.long())
    greedy = (ones * 0.0, *cold[1:])

    def norms() -> None:
        for _ in range(24):
            add_norm(x, parts, bias, bias, bias, normed)

    def draws(options: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        def work() -> None:
            for _ in range(24):
                draw(logits, *options)

        return work

    return {
        "add_norm": (norms, parts.numel() * 4),
        "draw, flat logits": (draws(cold), logits.numel() * 4),
        "draw, greedy": (draws(greedy), logits.numel() * 4),
    }


def sweep(module: ModuleType, shapes: list[tuple[int, ...]], work: Callable[[], None]) -> None:
    """Prints the four best shapes of a module's kernel."""
    tried = []
    for shape in shapes:
        module.SHAPE = shape  # type: ignore[attr-defined]
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            tried.append((graph_us(work, 24, repeat=8), shape))
    module.SHAPE = None  # type: ignore[attr-defined]
    for us, shape in sorted(tried)[:4]:
        print(f"  {shape}: {us:6.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--sweep", action="store_true", help="shapes of all kernels that have one")
    parser.add_argument("--sweep-attention", action="store_true", help="shapes of attention only")
    options = parser.parse_args()
    config, results = TextConfig(), []
    for batch in map(int, options.batch.split(",")):
        kv = 4 * config.n_kv_heads * config.head_dim * 800 * batch
        works = linears(config, batch) | {"attention": (attention(config, batch), kv)} | others(config, batch)
        for name, (work, size) in works.items():
            us = graph_us(work, 24)
            print(f"batch {batch:>3} {name:<18} {us:7.2f} us {size / us / 1e3:6.0f} GB/s of {GB_PER_S:.0f}", flush=True)
            results.append({"batch": batch, "kernel": name, "us": us, "gb_per_s": size / us / 1e3})
            if (options.sweep or options.sweep_attention) and name == "attention":
                sweep(attention_module, ATTENTION_SWEEP, work)
            elif options.sweep and name.startswith(("in", "out")) and "cuBLAS" not in name:
                sweep(linear_module, LINEAR_SWEEP, work)
    print(json.dumps({"benchmark": "kernels", "results": results}))


if __name__ == "__main__":
    main()
