"""Sampling: masks, token ids, transitions. In plain torch, the path that stays; `kernels.sample` needs two launches.

A sample depends on its logits, its options, its seed and its position, and on nothing else: not on the batch, the row
or the overlap. So the random number is a hash of (seed, position, id), not the state of a generator, and a token is
drawn by the Gumbel trick: argmax of logit / temperature + noise(id) over the ids that top-p and top-k keep. That needs
no sorted order, only the set that is kept, so a kernel that never sorts gives the same token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from photon_backend.engine.rows import COORDINATE, SIZE, TOKEN, Rows
from photon_backend.engine.slots import DecodeSlot
from photon_backend.grammar.spatial import State

WORD = 0xFFFFFFFF  # int64 arithmetic on 32-bit words


def sample_step(
    rows: Rows, slot: DecodeSlot, number: int, region: tuple[Tensor, Tensor] | None, masked: bool, automata: bool
) -> None:
    """Samples the first `number` rows of a slot and advances them: ids and values into the slot, the rest into `rows`.

    `region`: logits of the region heads, [B, bins] of a coordinate and [B, 2, bins] of a size; None when no row of the
    step may take one. `masked`: apply the slot's mask. `automata`: some row may have a token automaton.
    """
    row, logits = slot.rows[:number], slot.logits[:number]
    state, position = rows.state[row], rows.position[row]
    thinks = rows.thinking[state]
    mask = rows.legal[state]
    if masked:
        mask &= slot.mask[:number]
    if automata:
        mask &= rows.automata.masks(row, ~thinks, logits.shape[1])
    legal = apply_bitmask(logits, mask)
    ids = draw(legal, rows.temperature[row], rows.top_p[row], rows.top_k[row], rows.seed[row], position)
    kind = torch.zeros_like(ids)
    if region is not None:
        ids, kind = _spatial(rows, slot, region, legal, ids)
    if automata:
        rows.automata.advance(row, ~thinks, ids)
    answers = thinks & (ids == rows.ids.answer_id)
    rows.state[row] = torch.where(answers, int(State.TEXT_FIRST), rows.next_state[state])
    rows.next_token[row] = ids
    rows.kind[row] = kind
    slot.ids[:number] = ids


def _spatial(
    rows: Rows, slot: DecodeSlot, region: tuple[Tensor, Tensor], legal: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids and kinds of rows whose state decides more than the sample does; fills slot.values and rows.value."""
    number, special = len(ids), rows.ids
    row = slot.rows[:number]
    state, position = rows.state[row], rows.position[row]
    thinks, coordinate, size = rows.thinking[state], rows.takes_coordinate[state], rows.takes_size[state]
    ends = rows.chooses[state] & (legal.argmax(-1) == special.eos_id)
    forced = thinks & (position >= rows.think_until[row])
    ids = torch.where(forced, special.answer_id, ids)
    ids = torch.where(coordinate, special.coord_id, ids)
    ids = torch.where(size, special.size_id, ids)
    ids = torch.where(ends, special.eos_id, ids)
    coordinate = (coordinate & ~ends) | (thinks & (ids == special.coord_id))
    point, extent = (values[logits.argmax(-1)] for values, logits in zip(rows.bin_values, region, strict=True))
    value = torch.where(size[:, None], extent, point[:, None])
    rows.value[row] = value
    slot.values[:number] = value
    kind = torch.where(size, SIZE, torch.where(coordinate, COORDINATE, TOKEN))
    return ids, kind


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """One id per row.

    logits float32 [B, V]; temperature, top_p float32 [B]; top_k (0: all), seed, position int64 [B] -> int64 [B].
    Temperature 0 is argmax. A row without a legal token (all minus infinity) is the caller's fault.
    """
    scaled = logits / temperature.clamp(min=1e-5)[:, None]
    kept = kept_ids(torch.softmax(scaled, -1), top_p, top_k)
    noisy = (scaled + gumbel(seed, position, logits.shape[-1])).masked_fill(~kept, float("-inf"))
    return torch.where(temperature == 0, logits.argmax(-1), noisy.argmax(-1))


def kept_ids(probabilities: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """bool [B, V]: as the reference, an id stays while the probability of those before it is at most top_p.

    Ids of one probability stay or go together, which is all that differs from a sort.
    """
    ranked = probabilities.sort(dim=-1, descending=True).values
    before = ranked.cumsum(-1) - ranked
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    stays = (before <= top_p[:, None]) & ((rank < top_k[:, None]) | (top_k[:, None] == 0))
    last = (stays.sum(-1, keepdim=True) - 1).clamp(min=0)  # none stays where a probability is no number
    least = ranked.gather(-1, last)
    return probabilities >= least


def gumbel(seed: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """float32 [B, V] of standard Gumbel noise: -log(-log(u)) with 24-bit u from a hash of (seed, position, id).

    The largest of the 2^24 values rounds to u = 1, where the noise would be infinite: it would win over any logit.
    """
    key = _mix(_mix(seed & WORD) ^ (seed >> 32 & WORD)) ^ _mix(position & WORD)
    ids = torch.arange(vocabulary, device=seed.device)
    word = _mix(_mix(key)[:, None] ^ _mix(ids))
    uniform = (((word >> 8).float() + 0.5) * 2.0**-24).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 (Appleby, public domain) on 32-bit words, after a step that moves 0."""
    x = (x + 0x9E3779B9) & WORD
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & WORD
    return x ^ (x >> 16)


def apply_bitmask(logits: Tensor, mask: Tensor) -> Tensor:
    """logits [B, V], minus infinity where a bit of int32 [B, ceil(V / 32)] is clear: bit i of word w is id 32 w + i."""
    bits = (mask[:, :, None] >> torch.arange(32, device=mask.device, dtype=torch.int32)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))
