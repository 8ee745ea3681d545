"""One kernel from logits to the next input of each row: mask, draw and transition, without a host round trip.

The torch path beside it is `engine.sampler.sample_step`; tests compare the two, state by state.

Drawing needs neither a sort nor the threshold that top-p and top-k imply. A token is the argmax of logit / temperature
+ noise over the ids that they keep, and what they keep is everything from some weight upwards: an id stays when the
weights strictly above its own sum up to at most top_p and are fewer than top_k. So take the argmax over all ids; if it
stays, it is the answer, for no kept id is ahead of it. If not, nothing of its weight or less stays, and the argmax over
the ids above it is the next candidate. The mass at or above a candidate is uniform in what was left, so a draw needs
1 + ln(1 / top_p) candidates on average, 2.2 at top-p 0.3, each one pass over the row, where halving the bit pattern of
the threshold took up to 31.

One program per row. A row of 51,200 does not fit in its registers (64 a thread at 1,024 threads), so weights and noisy
logits go to a scratch buffer that stays in L2.

At Moondream 2's vocabulary on an H200, flat logits, top-p 0.3: 44 us at one row and 70 at 64, where torch takes 279 and
919; greedy 9 and 9, where torch takes 280 and 857.
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

SHAPE: tuple[int, int] | None = None  # ids of a block, warps for all launches; benchmarks set it


def shape_for(width: int) -> tuple[int, int]:
    """Ids of a block, warps."""
    block = min(4096, max(32, triton.next_power_of_2(width)))
    return SHAPE or (block, min(32, max(4, block // 256)))


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
def _likeliest(line, of_state, table, bound, host_mask, width, words, MASKED: tl.constexpr, W: tl.constexpr):
    """The legal id with the highest logit, the lowest such, and that logit."""
    best = tl.full((W, 32), float("-inf"), tl.float32)
    best_id = tl.zeros((W, 32), tl.int32)
    for begin in range(0, words, W):
        ids, value = _legal_logits(line, of_state, table, bound, host_mask, begin, width, words, MASKED, W)
        best_id = tl.where(value > best, ids, best_id)
        best = tl.maximum(best, value)
    return _first(best, best_id), tl.max(best)


@triton.jit
def _draw(
    line, of_state, table, bound, host_mask, width, words, high, temperature, top_p, top_k, key, weights, noisy,
    MASKED: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The token that a row draws. `high` is its highest legal logit; weights and noisy: its lines of scratch."""
    lane = tl.arange(0, 32)
    warm = tl.maximum(temperature, 1e-5)
    sums = tl.zeros((W, 32), tl.float32)
    best = tl.full((W, 32), float("-inf"), tl.float32)
    best_id = tl.zeros((W, 32), tl.int32)
    for begin in range(0, words, W):
        ids, value = _legal_logits(line, of_state, table, bound, host_mask, begin, width, words, MASKED, W)
        weight = tl.exp((value - high) / warm)
        chance = value / warm + _gumbel(key, ids)
        tl.store(weights + ids, weight, ids < width)
        tl.store(noisy + ids, chance, ids < width)
        sums += tl.where(ids < width, weight, 0.0)
        best_id = tl.where(chance > best, ids, best_id)
        best = tl.maximum(best, chance)
    total = tl.sum(sums)
    token = _first(best, best_id)
    tl.debug_barrier()  # what follows reads what other threads of this program stored
    weight = tl.load(weights + token)
    allowed = top_p * total
    wide = (top_p >= 1.0) & (top_k == 0)
    narrow = (allowed < 1.0) | (top_k == 1)  # the likeliest alone passes: only ids of its weight, 1, stay
    sound = total == total  # not so where a logit is NaN or infinite, or none is legal
    searching = (weight < 1.0) & (wide == 0) & sound
    while searching:
        bar = tl.where(narrow, 0.99999994, weight)
        masses = tl.zeros((W, 32), tl.float32)
        counts = tl.zeros((W, 32), tl.int32)
        best = tl.full((W, 32), float("-inf"), tl.float32)
        best_id = tl.zeros((W, 32), tl.int32)
        for begin in range(0, words, W):
            ids = (begin + tl.arange(0, W))[:, None] * 32 + lane[None, :]
            weight_there = tl.load(weights + ids, ids < width, 0.0)
            chance = tl.load(noisy + ids, ids < width, float("-inf"))
            above = weight_there > bar
            masses += tl.where(above, weight_there, 0.0)
            counts += above.to(tl.int32)
            chance = tl.where(above, chance, float("-inf"))
            best_id = tl.where(chance > best, ids, best_id)
            best = tl.maximum(best, chance)
        stays = (tl.sum(masses) <= allowed) & ((top_k == 0) | (tl.sum(counts) < top_k))
        token = tl.where(stays, token, _first(best, best_id))
        weight = tl.load(weights + token)
        searching = (weight < 1.0) & (stays == 0)
    return tl.where(sound, token, 0)


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
    rows, logits, legal, host_masks, tables, row_tables, table_states, states, traits, positions, think_until,
    temperatures, top_ps, top_ks, seeds, points, extents, point_line, extent_line, point_values, extent_values, scratch,
    next_tokens, kinds, values, out_ids, out_values, width, words, point_bins, extent_bins,
    ANSWER: tl.constexpr, EOS: tl.constexpr, COORD: tl.constexpr, SIZE: tl.constexpr, TEXT_FIRST: tl.constexpr,
    SPATIAL: tl.constexpr, MASKED: tl.constexpr, W: tl.constexpr,
    POINT_BINS: tl.constexpr, EXTENT_BINS: tl.constexpr,
):  # fmt: skip
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
    table = tables + base + width + table_state * words
    line = logits + b.to(tl.int64) * width
    of_state = legal + state * words
    host_mask = host_masks + b * words

    token, high = _likeliest(line, of_state, table, bound, host_mask, width, words, MASKED, W)
    temperature = tl.load(temperatures + row)
    draws = temperature > 0.0
    if SPATIAL:  # such a row's token is decided by its state
        ends = (tl.load(trait + 2) != 0) & (token == EOS)
        draws = draws & (coordinate == 0) & (size == 0)
    if draws:
        seed = tl.load(seeds + row)
        key = _mix(_mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)) ^ _mix(position.to(tl.uint32))
        weights = scratch + b.to(tl.int64) * 2 * width
        token = _draw(
            line, of_state, table, bound, host_mask, width, words, high, temperature, tl.load(top_ps + row),
            tl.load(top_ks + row), _mix(key), weights, weights + width, MASKED, W,
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
    """Launches the kernel for the rows of a step; knows where their state lies."""

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
        scratch = torch.empty(number, 2, width, dtype=torch.float32, device=slot.logits.device)
        block, warps = shape_for(width)
        _sample[(number,)](
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
            rows.think_until,
            rows.temperature,
            rows.top_p,
            rows.top_k,
            rows.seed,
            points,
            extents,
            points.stride(0),
            extents.stride(0),
            *rows.bin_values,
            scratch,
            rows.next_token,
            rows.kind,
            rows.value,
            slot.ids,
            slot.values,
            width,
            words,
            *bins,
            ANSWER=ids.answer_id,
            EOS=ids.eos_id,
            COORD=ids.coord_id,
            SIZE=ids.size_id,
            TEXT_FIRST=int(State.TEXT_FIRST),
            SPATIAL=region is not None,
            MASKED=masked,
            W=block // 32,
            POINT_BINS=triton.next_power_of_2(bins[0]) if region is not None else 1,
            EXTENT_BINS=triton.next_power_of_2(bins[1]) if region is not None else 1,
            num_warps=warps,
        )
