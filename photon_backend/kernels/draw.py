"""A draw without a sort: noise for every id by the whole chip, then a few passes over a row by one program.

Drawing needs neither a sort nor the threshold that top-p and top-k imply. A token is the argmax of logit / temperature
+ noise over the ids that they keep, and what they keep is everything from some weight upwards: an id stays when the
weights strictly above its own sum up to at most top_p and are fewer than top_k. So take the argmax over all ids; if it
stays, it is the answer, for no kept id is ahead of it. If not, nothing of its weight or less stays, and the argmax over
the ids above it is the next candidate. The mass at or above a candidate is uniform in what was left, so a draw needs
1 + ln(1 / top_p) candidates on average, 2.2 at top-p 0.3, each one pass over the row, where halving the bit pattern of
the threshold took up to 31. A candidate as likely as the likeliest id stays without a pass.

`survey` cuts each row into chunks, so that the whole chip makes the noise: it masks, leaves what is highest in each
chunk and, of rows that draw, all legal logits and noisy ones. `draw` goes on from there, one program for each row.

Price: 400 KB written for each row that draws, and read again in each pass. Moondream 2's vocabulary on an H200, flat
logits, top-p 0.3, at 1, 4, 16 and 64 rows: 14, 26, 35 and 48 us with the rest of sampling, in torch 279, 373, 489 and
921; one program for all of a row took 44 at one row and 70 at 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK, CHUNK_WARPS = 1024, 4  # ids of a program of the survey; neither was swept
LOG2_E = tl.constexpr(1.4426950408889634)


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
def first(best, best_id):
    """The lowest id of those with the highest value."""
    return tl.min(tl.where(best == tl.max(best), best_id, 2147483647))


@triton.jit
def _legal_logits(line, legal, table, bound, host_mask, begin, width, words, MASKED: tl.constexpr, W: tl.constexpr):
    """Ids int32 [W, 32] of W mask words from `begin` on, and their logits float32 [W, 32]: minus infinity where an id
    is not legal. NaN is the highest, as in torch."""
    lane = tl.arange(0, 32)
    word = begin + tl.arange(0, W)
    ids = word[:, None] * 32 + lane[None, :]
    inside = ids < width
    value = tl.load(line + ids, inside, float("-inf"))
    bits = tl.load(legal + word, word < words, 0) & tl.load(table + word, (word < words) & bound, -1)
    if MASKED:
        bits = bits & tl.load(host_mask + word, word < words, 0)
    allowed = ((bits[:, None] >> lane[None, :]) & 1) != 0
    return ids, tl.where(allowed, tl.where(value == value, value, float("inf")), float("-inf"))


@triton.jit
def survey(
    rows, logits, legal, host_masks, tables, row_tables, table_states, states, traits, positions, temperatures, seeds,
    scratch, of_chunks, ids_of_chunks, width, words, chunks,
    SPATIAL: tl.constexpr, MASKED: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One chunk of one row.

    traits int64 [states, 5]: next state; whether it thinks, chooses an object, takes a coordinate, takes a size.
    of_chunks float32 [B, 3, chunks]: the highest legal logit; in a row that draws also the highest logit / temperature
    + noise, and the sum of the chunk's weights relative to the former. ids_of_chunks int32 [B, 3, chunks]: the ids of
    those two; the third line is not used. scratch float32 [B, 2, V] of a row that draws: logits, minus infinity where
    not legal, and logit / temperature + noise.
    """
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
    at = b * 3 * chunks + chunk
    tl.store(of_chunks + at, high)
    tl.store(ids_of_chunks + at, first(value, ids))
    temperature = tl.load(temperatures + row)
    if draws(temperature, trait, SPATIAL):
        warm = tl.maximum(temperature, 1e-5)
        chance = value / warm + _gumbel(_key(tl.load(seeds + row), tl.load(positions + row)), ids)
        # a chunk without a legal id has no highest one: infinity less infinity would be no number
        weight = tl.exp((value - tl.where(high == float("-inf"), 0.0, high)) / warm)
        tl.store(place, value, inside)
        tl.store(place + width, chance, inside)
        tl.store(of_chunks + at + chunks, tl.max(chance))
        tl.store(ids_of_chunks + at + chunks, first(chance, ids))
        tl.store(of_chunks + at + 2 * chunks, tl.sum(tl.where(inside, weight, 0.0)))


@triton.jit
def draws(temperature, trait, SPATIAL: tl.constexpr):
    """Whether the row's token is drawn: neither the likeliest one nor, with coordinates, decided by its state."""
    drawn = temperature > 0.0
    if SPATIAL:
        drawn = drawn & (tl.load(trait + 3) == 0) & (tl.load(trait + 4) == 0)
    return drawn


@triton.jit
def _key(seed, position):
    """Of the noise of a row's position, as in `engine.sampler.gumbel`."""
    return _mix(_mix(_mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)) ^ _mix(position.to(tl.uint32)))


@triton.jit
def draw(
    scratch, highs, chances, chance_ids, sums, width, words, high, temperature, top_p, top_k, W: tl.constexpr
):  # fmt: skip
    """The token that a row draws. scratch: its two lines; highs, chances, chance_ids and sums: what the survey says of
    each chunk; high: its highest legal logit. A weight is exp((logit - high) / temperature), 1 for the likeliest id.
    """
    lane = tl.arange(0, 32)
    warm = tl.maximum(temperature, 1e-5)
    total = tl.sum(sums * tl.exp((highs - high) / warm))
    token = first(chances, chance_ids)
    allowed = top_p * total
    scale = LOG2_E / warm  # weights as powers of two: no division for each id
    wide = (top_p >= 1.0) & (top_k == 0)
    narrow = (allowed < 1.0) | (top_k == 1)  # only ids of the likeliest one's weight, 1, stay: one pass finds them
    sound = total == total  # not so where a logit is NaN or infinite, or none is legal
    token = tl.where(sound, token, 0)
    weight = tl.exp2((tl.load(scratch + token) - high) * scale)
    searching = (weight < 1.0) & (wide == 0) & sound
    while searching:
        bar = tl.where(narrow, 0.99999994, weight)
        masses = tl.zeros((W, 32), tl.float32)
        counts = tl.zeros((W, 32), tl.int32)
        best = tl.full((W, 32), float("-inf"), tl.float32)
        best_id = tl.zeros((W, 32), tl.int32)
        for begin in range(0, words, W):
            ids = (begin + tl.arange(0, W))[:, None] * 32 + lane[None, :]
            weight_there = tl.exp2((tl.load(scratch + ids, ids < width, float("-inf")) - high) * scale)
            chance = tl.load(scratch + width + ids, ids < width, float("-inf"))
            above = weight_there > bar
            masses += tl.where(above, weight_there, 0.0)
            counts += above.to(tl.int32)
            chance = tl.where(above, chance, float("-inf"))
            best_id = tl.where(chance > best, ids, best_id)
            best = tl.maximum(best, chance)
        stays = (tl.sum(masses) <= allowed) & ((top_k == 0) | (tl.sum(counts) < top_k))
        token = tl.where(stays, token, first(best, best_id))
        before, weight = weight, tl.exp2((tl.load(scratch + token) - high) * scale)
        # the last keeps the loop from going on for ever, should this weight and the pass's of one logit ever differ
        searching = (weight < 1.0) & (stays == 0) & (weight > before)
    return token
