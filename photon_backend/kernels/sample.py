"""Two kernels from logits to the next input of each row: mask, draw and transition, without a host round trip.

The torch path beside them is `engine.sampler.sample_step`; tests compare the two, state by state.

The first, and how a row draws, is in draw.py. The second has a program for each row: the token, the value of a
coordinate or a size, the state of the row's automata, and what it feeds next.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from photon_backend.grammar.spatial import State
from photon_backend.kernels.draw import CHUNK, CHUNK_WARPS, draw, draws, first, survey

if TYPE_CHECKING:
    from photon_backend.engine.rows import Rows
    from photon_backend.engine.slots import DecodeSlot

SHAPE: tuple[int, int] | None = None  # ids of a block, warps of a row's program; benchmarks and tests set it


def shape_for(width: int) -> tuple[int, int]:
    """Ids of a block, warps."""
    block = min(2048, max(32, triton.next_power_of_2(width)))
    return SHAPE or (block, max(4, block // 64))


@triton.jit
def _first_bin(line, bins, BINS: tl.constexpr):
    """The lowest of the most likely bins."""
    i = tl.arange(0, BINS)
    value = tl.load(line + i, i < bins, float("-inf"))
    return first(value, i)


@triton.jit
def _put_value(values, out_values, row, b, one, other):
    """A coordinate, twice, or width and height: for the next step's input, and for the host."""
    tl.store(values + row * 2, one)
    tl.store(values + row * 2 + 1, other)
    tl.store(out_values + b * 2, one)
    tl.store(out_values + b * 2 + 1, other)


@triton.jit
def _take_values(
    points, extents, point_line, extent_line, point_values, extent_values, point_bins, extent_bins, values, out_values,
    row, b, coordinate, size, POINT_BINS: tl.constexpr, EXTENT_BINS: tl.constexpr,
):  # fmt: skip
    """What the region heads say of a row whose next input is a coordinate, or a size. The logits of two rows lie
    point_line and extent_line elements apart."""
    if coordinate:
        value = tl.load(point_values + _first_bin(points + b * point_line, point_bins, POINT_BINS))
        _put_value(values, out_values, row, b, value, value)
    if size:
        line_of_bins = extents + b * extent_line
        across = tl.load(extent_values + _first_bin(line_of_bins, extent_bins, EXTENT_BINS))
        down = tl.load(extent_values + _first_bin(line_of_bins + extent_bins, extent_bins, EXTENT_BINS))
        _put_value(values, out_values, row, b, across, down)


@triton.jit
def _move_on(tables, base, row_tables, row, table_states, table_state, bound, token):
    """The row's token automaton takes the token, unless it does not hold yet."""
    kind_of_token = tl.load(tables + base + token, bound, 0)
    line_of_state = tl.load(row_tables + row * 3 + 1) + table_state * tl.load(row_tables + row * 3 + 2)
    tl.store(table_states + row, tl.load(tables + line_of_state + kind_of_token, bound, 0).to(tl.int64), bound)


@triton.jit
def _sample(
    rows, tables, row_tables, table_states, states, traits, positions, think_until, temperatures, top_ps, top_ks,
    scratch, of_chunks, ids_of_chunks, points, extents, point_line, extent_line, point_values, extent_values,
    next_tokens, kinds, values, out_ids, out_values, width, words, chunks, point_bins, extent_bins,
    ANSWER: tl.constexpr, EOS: tl.constexpr, COORD: tl.constexpr, SIZE: tl.constexpr, TEXT_FIRST: tl.constexpr,
    SPATIAL: tl.constexpr, W: tl.constexpr, CHUNKS: tl.constexpr,
    POINT_BINS: tl.constexpr, EXTENT_BINS: tl.constexpr,
):  # fmt: skip
    """The rest of one row: the token, its value, its automaton's state and what the row feeds next."""
    b = tl.program_id(0)
    row = tl.load(rows + b)
    state = tl.load(states + row)
    position = tl.load(positions + row)
    trait = traits + state * 5
    following = tl.load(trait)
    thinks = tl.load(trait + 1) != 0
    coordinate = tl.load(trait + 3) != 0
    size = tl.load(trait + 4) != 0
    bound = thinks == 0  # the token automaton holds
    base = tl.load(row_tables + row * 3)
    table_state = tl.load(table_states + row)

    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    place = b * 3 * chunks + chunk
    highs = tl.load(of_chunks + place, there, float("-inf"))
    token = first(highs, tl.load(ids_of_chunks + place, there, 2147483647))
    if SPATIAL:
        ends = (tl.load(trait + 2) != 0) & (token == EOS)
    temperature = tl.load(temperatures + row)
    if draws(temperature, trait, SPATIAL):
        chances = tl.load(of_chunks + place + chunks, there, float("-inf"))
        chance_ids = tl.load(ids_of_chunks + place + chunks, there, 2147483647)
        sums = tl.load(of_chunks + place + 2 * chunks, there, 0.0)
        token = draw(
            scratch + b.to(tl.int64) * 2 * width, highs, chances, chance_ids, sums, width, words, tl.max(highs),
            temperature, tl.load(top_ps + row), tl.load(top_ks + row), W,
        )  # fmt: skip

    if SPATIAL:
        forced = thinks & (position >= tl.load(think_until + row))
        token = tl.where(forced, ANSWER, token)
        token = tl.where(coordinate, COORD, token)
        token = tl.where(size, SIZE, token)
        token = tl.where(ends, EOS, token)
        coordinate = (coordinate & (ends == 0)) | (thinks & (token == COORD))
        _take_values(
            points, extents, point_line, extent_line, point_values, extent_values, point_bins, extent_bins,
            values, out_values, row, b, coordinate, size, POINT_BINS, EXTENT_BINS,
        )  # fmt: skip
        tl.store(kinds + row, tl.where(size, 2, tl.where(coordinate, 1, 0)).to(tl.int64))
    else:
        tl.store(kinds + row, tl.zeros((), tl.int64))

    answers = thinks & (token == ANSWER)
    tl.store(states + row, tl.where(answers, TEXT_FIRST, following))
    _move_on(tables, base, row_tables, row, table_states, table_state, bound, token)
    tl.store(next_tokens + row, token.to(tl.int64))
    tl.store(out_ids + b, token.to(tl.int64))


class SampleKernel:
    """Launches the kernels for the rows of a step; knows where their state lies."""

    def __init__(self, rows: Rows) -> None:
        """All tensors of `rows` must stay where they are."""
        self._rows = rows
        flags = (rows.thinking, rows.chooses, rows.takes_coordinate, rows.takes_size)
        self._traits = torch.stack([rows.next_state, *(flag.long() for flag in flags)], 1)

    def __call__(
        self, slot: DecodeSlot, number: int, region: tuple[Tensor, Tensor] | None, masked: bool, automata: bool
    ) -> None:
        """As `engine.sampler.sample_step`. `automata` changes nothing: a row without one has tables of its own."""
        rows, ids = self._rows, self._rows.ids
        width, words = slot.logits.shape[1], slot.mask.shape[1]
        points, extents = region or (slot.logits, slot.logits)
        bins = points.shape[-1], extents.shape[-1]
        chunks, empty = triton.cdiv(width, CHUNK), partial(torch.empty, device=slot.logits.device)
        scratch = empty(number, 2, width, dtype=torch.float32)
        found = scratch, empty(number, 3, chunks, dtype=torch.float32), empty(number, 3, chunks, dtype=torch.int32)
        tables = rows.automata.tables.buffer, rows.automata.row_values, rows.automata.state
        states = rows.state, self._traits, rows.position
        survey[(number, chunks)](
            slot.rows,
            slot.logits,
            rows.legal,
            slot.mask,
            *tables,
            *states,
            rows.temperature,
            rows.seed,
            *found,
            width,
            words,
            chunks,
            SPATIAL=region is not None,
            MASKED=masked,
            W=CHUNK // 32,
            num_warps=CHUNK_WARPS,
        )
        block, warps = shape_for(width)
        _sample[(number,)](
            slot.rows,
            *tables,
            *states,
            rows.think_until,
            rows.temperature,
            rows.top_p,
            rows.top_k,
            *found,
            points,
            extents,
            points.stride(0),
            extents.stride(0),
            *rows.bin_values,
            rows.next_token,
            rows.kind,
            rows.value,
            slot.ids,
            slot.values,
            width,
            words,
            chunks,
            *bins,
            ANSWER=ids.answer_id,
            EOS=ids.eos_id,
            COORD=ids.coord_id,
            SIZE=ids.size_id,
            TEXT_FIRST=int(State.TEXT_FIRST),
            SPATIAL=region is not None,
            W=block // 32,
            CHUNKS=triton.next_power_of_2(chunks),
            POINT_BINS=triton.next_power_of_2(bins[0]) if region is not None else 1,
            EXTENT_BINS=triton.next_power_of_2(bins[1]) if region is not None else 1,
            num_warps=warps,
        )
