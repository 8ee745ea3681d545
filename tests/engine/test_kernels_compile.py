"""Every kernel goes through the compiler for the GPU that it is meant for, without one: the interpreter takes more than
the compiler does. Nothing runs; some 15 s of compiling, once: Triton keeps what it compiled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton's kernel language is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from photon_backend.kernels import attention, linear, norm, prefill, region, relay, sample

HOPPER = GPUTarget("cuda", 90, 32)
BF16, FP32, I64, I32 = "*bf16", "*fp32", "*i64", "*i32"


def compiled(kernel, constants: dict, warps: int, types: dict[str, str]) -> str:
    """The PTX of a kernel whose arguments have these types, int32 where not told, for aligned pointers and widths."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": warps}).asm["ptx"]


def typed(**names: str) -> dict[str, str]:
    """Type to names, turned around."""
    kinds = {"bf16": BF16, "fp32": FP32, "i64": I64, "i32": I32}
    return {name: kinds[kind] for kind, line in names.items() for name in line.split()}


@pytest.mark.parametrize(("spatial", "masked"), [(False, False), (False, True), (True, False)])
def test_survey(spatial: bool, masked: bool) -> None:
    types = typed(
        i64="rows row_tables table_states states traits positions seeds", fp32="logits temperatures scratch of_chunks",
        i32="legal host_masks tables ids_of_chunks",
    )  # fmt: skip
    constants = {"SPATIAL": spatial, "MASKED": masked, "W": sample.CHUNK // 32}
    assert "ld.global.v4" in compiled(
        sample.survey, constants, sample.CHUNK_WARPS, types
    )  # logits come 16 bytes at a time


@pytest.mark.parametrize("heads", [None, BF16, FP32])
def test_sample(heads: str | None) -> None:
    types = typed(
        i64="rows row_tables table_states states traits positions think_until top_ks next_tokens kinds out_ids",
        fp32="temperatures top_ps points extents point_values extent_values scratch of_chunks values out_values",
        i32="tables ids_of_chunks",
    )
    if heads is not None:
        types |= {"points": heads, "extents": heads}
    block, warps = sample.shape_for(51_200)
    constants = {"ANSWER": 3, "EOS": 0, "COORD": 5, "SIZE": 6, "TEXT_FIRST": 0, "SPATIAL": heads is not None}
    constants |= {"W": block // 32, "CHUNKS": 64, "POINT_BINS": 1024, "EXTENT_BINS": 1024}
    assert "ld.global.v2" in compiled(sample._sample, constants, warps, types)  # two ids a thread


def test_relay() -> None:
    types = typed(i64="rows next_tokens positions page_table step_positions step_pages", bf16="embeddings x")
    assert compiled(relay._relay, {"BLOCK": 2048, "PAGES": 128}, 4, types)


def test_encode_values() -> None:
    names = "frequencies weights bias"
    of_encoders = " ".join(f"{kind}_{name}" for kind in ("coord", "size") for name in names.split())
    types = typed(i64="rows kinds", fp32="values", bf16=f"{of_encoders} x")
    ptx = compiled(region._encode_values, {"COORD_HALF": 128, "SIZE_HALF": 256, "BLOCK": region.BLOCK}, 4, types)
    assert ".approx" not in ptx  # angles of some hundred radians need the range reduction


@pytest.mark.parametrize("splits", [0, 8])
def test_add_norm(splits: int) -> None:
    types = typed(bf16="x bias weight shift normed", fp32="parts")
    assert compiled(norm._add_norm, {"SPLITS": splits, "BLOCK": 2048, "EARLY": True}, 8, types)


@pytest.mark.parametrize(
    ("gelu", "rows", "wide", "asked"),
    [(False, 16, True, False), (True, 16, False, False), (False, 64, False, False), (True, 16, False, True)],
)
def test_linear(gelu: bool, rows: int, wide: bool, asked: bool) -> None:
    block_n, block_k, warps, _ = linear.shape_for(rows, wide)
    constants = {"BLOCK_M": rows, "BLOCK_N": block_n, "BLOCK_K": block_k, "BIAS": True, "GELU": gelu, "EVEN": True}
    constants |= {"ALL_LATE": not wide, "ASKED": asked, "EARLY": True}
    types = typed(bf16="x w bias out", i64="step_rows row_states", i32="asks")
    before_the_wait, _ = compiled(linear._linear, constants, warps, types).split("griddepcontrol.wait")
    assert "st.global" not in before_the_wait
    if not wide:  # no part of K is there already
        assert ("ld.global" in before_the_wait) == asked and "cp.async" not in before_the_wait


def test_the_number_of_rows_compiles_nothing_anew() -> None:
    """Heads are also sampled outside graphs, for any number of rows."""
    assert [p.name for p in linear._linear.params if p.do_not_specialize] == ["m_rows"]


@pytest.mark.parametrize(
    ("splits", "following", "ahead"),
    [(16, "registers", True), (16, "memory", True), (16, "memory", False), (1, "shared", True)],
)
def test_attention(splits: int, following: str, ahead: bool) -> None:
    parts = "part_out part_max part_sum"
    types = typed(bf16="qkv keys values out", i64="positions table", fp32=f"cos_table sin_table {parts}")
    shape = {"SPLITS": splits, "PAGE": 16, "E": 64, "HALF": 16, "BLOCK": 32}
    shape |= {"NEXT": following, "EARLY": True, "AHEAD": ahead}
    ptx = compiled(attention._attend, shape, 1, types | {"scale": "fp32"})
    before_the_wait = ptx[: ptx.index("griddepcontrol.wait")]
    assert ("ld.global" in before_the_wait) == ahead and "st.global" not in before_the_wait
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")
    assert ("cp.async.cg" in ptx) == (following == "shared") and "cp.async" not in before_the_wait
    assert compiled(attention._join, {"SPLITS": 16, "E": 64, "EARLY": True}, 1, typed(bf16="out", fp32=parts))


def test_prefill() -> None:
    types = typed(bf16="merged joined keys values", i64="rows positions blocks page_table", fp32="cos_table sin_table")
    types["scale"] = "fp32"
    sizes = {"PAGE": 16, "E": 64}
    heads = {"HALF": 16, "HEADS": 32, "KV_HEADS": 32, "BLOCK": 1024}
    assert "ld.global.v4" in compiled(prefill._spread, sizes | heads, 4, types)
    blocks = {"BLOCK_Q": prefill.BLOCK_Q, "BLOCK_K": prefill.SHAPE[0]}
    assert "wgmma" in compiled(prefill._attend, sizes | blocks, 4, types)


def test_the_number_of_tokens_compiles_nothing_anew() -> None:
    """Nor does whether a view of what went up in one copy is aligned."""
    free = {
        kernel: [p.name for p in kernel.params if p.do_not_specialize] for kernel in (prefill._spread, prefill._attend)
    }
    assert free == {prefill._spread: ["rows", "positions"], prefill._attend: ["blocks"]}
    assert [p.name for p in norm._add_norm.params if p.do_not_specialize] == ["rows"]
