"""Two kernels from logits to the next input of each row: mask, draw and transition, without a host round trip.

The torch path beside them is `engine.sampler.sample_step`; tests compare the two, state by state.

Drawing needs neither a sort nor the threshold that top-p and top-k imply. A token is the argmax of logit / temperature
+ noise over the ids that they keep, and what they keep is everything from some weight upwards: an id stays when the
weights strictly above its own sum up to at most top_p and are fewer than top_k. So take the argmax over all ids; if it
stays, it is the answer, for no kept id is ahead of it. If not, nothing of its weight or less stays, and the argmax over
the ids above it is the next candidate. The mass at or above a candidate is uniform in what was left, so a draw needs
1 + ln(1 / top_p) candidates on average, 2.2 at top-p 0.3, each one pass over the row, where halving the bit pattern of
the threshold took up to 31. The likeliest id needs none.

The first kernel, `_survey`, cuts each row into chunks, so that the whole chip makes the noise: it masks, and leaves the
legal logits, the noisy ones and what is highest in each chunk. In the second one a program for each row goes on from
there. Moondream 2's vocabulary on an H200, flat logits, top-p 0.3, at 1, 4, 16 and 64 rows: 14, 26, 35 and 48 us, in
torch 279, 373, 489 and 921; one program for all of it took 44 at one row and 70 at 64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from photon_backend.grammar.spatial import State

if TYPE_CHECKING:
    from photon_backend.engine.rows import Rows
    from photon_backend.engine.slots import DecodeSlot

SHAPE: tuple[int, int] | None = None  # ids of a block, warps of a row's program; benchmarks set it
CHUNK = 1024  # ids of a program of the survey, with 4 warps


def shape_for(width: int) -> tuple[int, int]:
    """Ids of a block, warps."""
    block = min(2048, max(32, triton.next_power_of_2(width)))
    return SHAPE or (block, min(32, max(4, block // 64)))


@triton.jit
def _mix(x):
    """The 32-bit hash of `engine.sampler._mix`."""
    x = x + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _gumbel(key, ids):
    """`engine.sampler.gumbel` of some ids."""
    word = _mix(key ^ _mix(ids.to(tl.uint32)))
    uniform = tl.minimum(((word >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08, 0.99999994)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _first(best, best_id):
    """The lowest id of those with the highest value."""
    return tl.min(tl.where(best == tl.max(best), best_id, 2147483647))


@triton.jit
def _legal_logits(line, of_state, table, bound, host_mask, begin, width, words, MASKED: tl.constexpr, W: tl.constexpr):
    """Ids int32 [W, 32] of W mask words from `begin` on, and their logits float32 [W, 32]: minus infinity where an id
    is not legal. NaN is the highest, as in torch."""
    lane = tl.arange(0, 32)
    word = begin + tl.arange(0, W)
    ids = word[:, None] * 32 + lane[None, :]
    inside = ids < width
    value = tl.load(line + ids, inside, float("-inf"))
    bits = tl.load(of_state + word, word < words, 0) & tl.load(table + word, (word < words) & bound, -1)
    if MASKED:
        bits = bits & tl.load(host_mask + word, word < words, 0)
    legal = ((bits[:, None] >> lane[None, :]) & 1) != 0
    return ids, tl.where(legal, tl.where(value == value, value, float("inf")), float("-inf"))


@triton.jit
def _survey(
    rows, logits, legal, host_masks, tables, row_tables, table_states, states, traits, positions, temperatures, seeds,
    scratch, highest, highest_ids, width, words, chunks,
    SPATIAL: tl.constexpr, MASKED: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One chunk of one row. scratch [B, 2, V]: logits, minus infinity where not legal, and in a row that draws logit /
    temperature + noise; highest [B, 3, chunks]: the highest of each, and the sum of weights relative to the former."""
    b = tl.program_id(0)
    chunk = tl.program_id(1)
    row = tl.load(rows + b)
    state = tl.load(states + row)
    trait = traits + state * 5
    bound = tl.load(trait + 1) == 0
    table = tables + tl.load(row_tables + row * 3) + width + tl.load(table_states + row) * words
    line = logits + b.to(tl.int64) * width
    ids, value = _legal_logits(
        line, legal + state * words, table, bound, host_masks + b * words, chunk * W, width, words, MASKED, W
    )
    inside = ids < width
    place = scratch + b.to(tl.int64) * 2 * width + ids
    high = tl.max(value)
    of_chunk = b * 3 * chunks + chunk
    tl.store(highest + of_chunk, high)
    tl.store(highest_ids + of_chunk, _first(value, ids))
    temperature = tl.load(temperatures + row)
    if _draws(temperature, trait, SPATIAL):
        warm = tl.maximum(temperature, 1e-5)
        chance = value / warm + _gumbel(_key(tl.load(seeds + row), tl.load(positions + row)), ids)
        weight = tl.exp((value - tl.where(high == float("-inf"), 0.0, high)) / warm)
        tl.store(place, value, inside)
        tl.store(place + width, chance, inside)
        tl.store(highest + of_chunk + chunks, tl.max(chance))
        tl.store(highest_ids + of_chunk + chunks, _first(chance, ids))
        tl.store(highest + of_chunk + 2 * chunks, tl.sum(tl.where(inside, weight, 0.0)))


@triton.jit
def _draws(temperature, trait, SPATIAL: tl.constexpr):
    """Whether the row's token is drawn: neither the likeliest one nor, with coordinates, decided by its state."""
    draws = temperature > 0.0
    if SPATIAL:
        draws = draws & (tl.load(trait + 3) == 0) & (tl.load(trait + 4) == 0)
    return draws


@triton.jit
def _key(seed, position):
    return _mix(_mix(_mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)) ^ _mix(position.to(tl.uint32)))


@triton.jit
def _draw(
    values, highs, chances, chance_ids, sums, width, words, high, temperature, top_p, top_k, W: tl.constexpr
):  # fmt: skip
    """The token that a row draws. `high` is its highest legal logit; values: its lines of scratch; highs, chances,
    their ids and sums: what the survey says of each chunk."""
    lane = tl.arange(0, 32)
    warm = tl.maximum(temperature, 1e-5)
    total = tl.sum(sums * tl.exp((highs - high) / warm))
    token = _first(chances, chance_ids)
    allowed = top_p * total
    scale = 1.4426950408889634 / warm  # weights are powers of two: no division for each id
    wide = (top_p >= 1.0) & (top_k == 0)
    narrow = (allowed < 1.0) | (top_k == 1)  # only ids of the likeliest one's weight, 1, stay: one pass finds them
    sound = total == total  # not so where a logit is NaN or infinite, or none is legal
    token = tl.where(sound, token, 0)
    weight = tl.exp2((tl.load(values + token) - high) * scale)
    searching = (weight < 1.0) & (wide == 0) & sound
    while searching:
        bar = tl.where(narrow, 0.99999994, weight)
        masses = tl.zeros((W, 32), tl.float32)
        counts = tl.zeros((W, 32), tl.int32)
        best = tl.full((W, 32), float("-inf"), tl.float32)
        best_id = tl.zeros((W, 32), tl.int32)
        for begin in range(0, words, W):
            ids = (begin + tl.arange(0, W))[:, None] * 32 + lane[None, :]
            weight_there = tl.exp2((tl.load(values + ids, ids < width, float("-inf")) - high) * scale)
            chance = tl.load(values + width + ids, ids < width, float("-inf"))
            above = weight_there > bar
            masses += tl.where(above, weight_there, 0.0)
            counts += above.to(tl.int32)
            chance = tl.where(above, chance, float("-inf"))
            best_id = tl.where(chance > best, ids, best_id)
            best = tl.maximum(best, chance)
        stays = (tl.sum(masses) <= allowed) & ((top_k == 0) | (tl.sum(counts) < top_k))
        token = tl.where(stays, token, _first(best, best_id))
        before, weight = weight, tl.exp2((tl.load(values + token) - high) * scale)
        # the last: no id twice, even should a compiler make two exponentials of one logit that differ
        searching = (weight < 1.0) & (stays == 0) & (weight > before)
    return token


@triton.jit
def _first_bin(line, bins, BINS: tl.constexpr):
    """The lowest of the most likely bins."""
    i = tl.arange(0, BINS)
    value = tl.load(line + i, i < bins, float("-inf"))
    return tl.min(tl.where(value == tl.max(value), i, 2147483647))


@triton.jit
def _put_value(values, out_values, row, b, first, second):
    """A coordinate, twice, or width and height: for the next step's input, and for the host."""
    tl.store(values + row * 2, first)
    tl.store(values + row * 2 + 1, second)
    tl.store(out_values + b * 2, first)
    tl.store(out_values + b * 2 + 1, second)


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
    scratch, highest, highest_ids, points, extents, point_line, extent_line, point_values, extent_values,
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
    highs = tl.load(highest + place, there, float("-inf"))
    token = _first(highs, tl.load(highest_ids + place, there, 2147483647))
    if SPATIAL:
        ends = (tl.load(trait + 2) != 0) & (token == EOS)
    temperature = tl.load(temperatures + row)
    if _draws(temperature, trait, SPATIAL):
        chances = tl.load(highest + place + chunks, there, float("-inf"))
        chance_ids = tl.load(highest_ids + place + chunks, there, 2147483647)
        sums = tl.load(highest + place + 2 * chunks, there, 0.0)
        token = _draw(
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
        device, chunks = slot.logits.device, triton.cdiv(width, CHUNK)
        scratch = torch.empty(number, 2, width, dtype=torch.float32, device=device)
        highest = torch.empty(number, 3, chunks, dtype=torch.float32, device=device)
        highest_ids = torch.empty(number, 3, chunks, dtype=torch.int32, device=device)
        _survey[(number, chunks)](
            slot.rows,
            slot.logits,
            rows.legal,
            slot.mask,
            rows.automata.tables.buffer,
            rows.automata.row_values,
            rows.automata.state,
            rows.state,
            self._traits,
            rows.position,
            rows.temperature,
            rows.seed,
            scratch,
            highest,
            highest_ids,
            width,
            words,
            chunks,
            SPATIAL=region is not None,
            MASKED=masked,
            W=CHUNK // 32,
            num_warps=4,
        )
        block, warps = shape_for(width)
        _sample[(number,)](
            slot.rows,
            rows.automata.tables.buffer,
            rows.automata.row_values,
            rows.automata.state,
            rows.state,
            self._traits,
            rows.position,
            rows.think_until,
            rows.temperature,
            rows.top_p,
            rows.top_k,
            scratch,
            highest,
            highest_ids,
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
