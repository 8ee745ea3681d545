"""Blocks of the device's table buffer: shared, counted, evicted by use; and rows that walk through them."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import torch

from photon_backend.engine.tables import AutomatonTables, RowAutomata
from photon_backend.grammar.constraint import ALL_LEGAL, TokenAutomaton

VOCABULARY = 100
WORDS = 4


def automaton(states: int, seed: int = 0, kinds: int = 5) -> TokenAutomaton:
    chance = np.random.RandomState(seed)
    return TokenAutomaton(
        masks=chance.randint(-(2**31), 2**31 - 1, (states, WORDS)).astype(np.int32),
        classes=chance.randint(0, kinds, VOCABULARY).astype(np.int32),
        next_state=chance.randint(0, states, (states, kinds)).astype(np.int32),
    )


def make_tables() -> AutomatonTables:
    tables = AutomatonTables(VOCABULARY, 0, torch.device("cpu"))
    room = 4 * automaton(10).num_words
    tables.num_words = tables._first + room
    tables.buffer = torch.cat([tables.buffer, torch.full((room,), -7, dtype=torch.int32)])
    return tables


def write(tables: AutomatonTables, block) -> None:
    tables.write(block.base, tables.host_words(block.automaton))


def test_one_grammar_has_one_block() -> None:
    tables, a = make_tables(), automaton(10)
    (first, new), (second, again) = tables.place(a), tables.place(a)
    assert first is second and new and not again and first.users == 2


def test_room_in_use_is_never_given_away() -> None:
    tables = make_tables()
    blocks = [tables.place(automaton(10, seed))[0] for seed in range(4)]
    assert tables.place(automaton(10, 9)) is None and len(tables._blocks) == 4
    tables.release(blocks[2])
    block, new = tables.place(automaton(10, 9))
    assert new and block.base == blocks[2].base


def test_the_longest_unused_goes_first() -> None:
    tables = make_tables()
    automata = [automaton(10, seed) for seed in range(4)]
    for a in automata:
        tables.release(tables.place(a)[0])
    tables.release(tables.place(automata[0])[0])  # used again: 1 is the oldest now
    tables.place(automaton(10, 9))
    assert [tables.place(a)[1] for a in (automata[0], automata[2], automata[3])] == [False] * 3
    assert tables.place(automata[1]) is None


def test_blocks_never_overlap_whatever_happens() -> None:
    chance, tables = random.Random(3), make_tables()
    automata = [automaton(chance.randint(1, 30), seed) for seed in range(20)]
    held = []
    for _ in range(2000):
        if held and chance.random() < 0.5:
            tables.release(held.pop(chance.randrange(len(held))))
        else:
            placed = tables.place(chance.choice(automata))
            if placed is not None:
                held.append(placed[0])
        spans = sorted((b.base, b.base + b.automaton.num_words) for b in tables._blocks.values())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert not spans or (spans[0][0] >= tables._first and spans[-1][1] <= tables.num_words)
        assert all(id(block.automaton) in tables._blocks for block in held)
    assert tables.num_used == sum(b.automaton.num_words for b in {id(b): b for b in held}.values())


def test_rows_walk_through_their_own_tables() -> None:
    tables = make_tables()
    automata = {1: automaton(10, 1), 4: automaton(7, 2), 5: automaton(10, 1, 3)}
    rows = RowAutomata(tables, 8)
    states = dict.fromkeys(automata, 0)
    for row, a in automata.items():
        block, _ = tables.place(a)
        write(tables, block)
        rows.start(torch.tensor([row]), torch.tensor([block.row_values]))
    chance = np.random.RandomState(0)
    for _ in range(200):
        row = torch.from_numpy(chance.permutation(8)[:5])
        bound = torch.from_numpy(chance.rand(5) < 0.8)
        ids = torch.from_numpy(chance.randint(0, VOCABULARY, 5))
        masks = rows.masks(row, bound, VOCABULARY)
        rows.advance(row, bound, ids)
        for i, (r, is_bound, token) in enumerate(zip(row.tolist(), bound.tolist(), ids.tolist(), strict=True)):
            if r in automata and is_bound:
                assert (masks[i].numpy() == automata[r].masks[states[r]]).all()
                states[r] = int(automata[r].next_state[states[r], automata[r].classes[token]])
            else:
                assert (masks[i] == ALL_LEGAL).all()
    assert {row: int(rows.state[row]) for row in automata} == states


def test_a_row_that_starts_anew_forgets_its_automaton() -> None:
    tables = make_tables()
    rows = RowAutomata(tables, 2)
    block, _ = tables.place(automaton(10))
    write(tables, block)
    row, bound = torch.tensor([1]), torch.tensor([True])
    rows.start(row, torch.tensor([block.row_values]))
    rows.advance(row, bound, torch.tensor([5]))
    rows.start(row, torch.tensor([tables.free_row]))
    assert (rows.masks(row, bound, VOCABULARY) == ALL_LEGAL).all()
    rows.advance(row, bound, torch.tensor([VOCABULARY - 1]))
    assert (rows.masks(row, bound, VOCABULARY) == ALL_LEGAL).all()


def test_words_are_the_tables_in_their_order() -> None:
    tables, a = make_tables(), automaton(10)
    assert not tables.holds(a)
    block, _ = tables.place(a)
    assert tables.holds(a) and not tables.holds(automaton(10))
    words = tables.host_words(a).numpy()
    assert (words[:VOCABULARY] == a.classes).all()
    assert (words[VOCABULARY : block.next_base - block.base] == a.masks.ravel()).all()
    assert (words[block.next_base - block.base :] == a.next_state.ravel()).all()
