"""The tables of token automata on the device: one buffer for all grammars, so graphs and kernels know one address.

A grammar takes one block of the int32 buffer:

    classes [V] | masks [states, ceil(V / 32)] | next_state [states, classes]

The block at 0 is for rows without an automaton: one state, in which every token is legal.

Blocks are shared by the requests of one grammar and counted. One that nobody uses stays until its room is needed, the
longest unused first. A block is written only when no step in flight can read it: a request keeps its block until none
of its steps is uncommitted. The host side (`place`, `release`) belongs to the engine thread, `write` to a stream;
`host_words`, which may take milliseconds, to a compiling thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from photon_backend.engine.streams import Event
from photon_backend.grammar.constraint import ALL_LEGAL, TokenAutomaton


@dataclass(eq=False)
class Block:
    automaton: TokenAutomaton
    base: int  # where it begins in the buffer
    users: int = 0
    last_used: int = 0
    ready: Event | None = None  # event after which it may be read; None when that is known to have passed
    next_base: int = field(init=False)  # where next_state begins

    def __post_init__(self) -> None:
        self.next_base = self.base + self.automaton.classes.size + self.automaton.masks.size

    @property
    def row_values(self) -> tuple[int, int, int]:
        """(base, next_base, number of classes): what a row must know."""
        return self.base, self.next_base, self.automaton.next_state.shape[1]


class AutomatonTables:
    def __init__(self, vocabulary: int, megabytes: int, device: torch.device) -> None:
        self.mask_words = -(-vocabulary // 32)
        self._first = vocabulary + self.mask_words + 1  # words of the block for rows without an automaton
        self.num_words = max(megabytes << 18, self._first)
        self.buffer = torch.empty(self.num_words, dtype=torch.int32, device=device)
        self.buffer[: self._first] = 0
        self.buffer[vocabulary : vocabulary + self.mask_words] = ALL_LEGAL
        self.free_row = (0, vocabulary + self.mask_words, 1)  # row_values of a row without an automaton
        self.max_words = (self.num_words - self._first) // 2  # of one grammar, so that two have room at least
        self._blocks: dict[int, Block] = {}  # by the identity of the automaton, which the block keeps alive
        self._clock = count(1)

    @property
    def num_used(self) -> int:
        """Words of blocks that a request uses."""
        return sum(block.automaton.num_words for block in self._blocks.values() if block.users)

    def place(self, automaton: TokenAutomaton) -> tuple[Block, bool] | None:
        """A block for one more user, and whether it must be written first; None when there is no room."""
        block = self._blocks.get(id(automaton))
        new = block is None
        if block is None:
            base = self._room(automaton.num_words)
            if base is None:
                return None
            block = self._blocks[id(automaton)] = Block(automaton, base)
        block.users += 1
        block.last_used = next(self._clock)
        return block, new

    def release(self, block: Block) -> None:
        assert block.users > 0
        block.users -= 1

    def write(self, base: int, words: Tensor) -> None:
        """Copies the tables of a block up; runs on the copy stream."""
        self.buffer[base : base + len(words)].copy_(words, non_blocking=True)

    def holds(self, automaton: TokenAutomaton) -> bool:
        """Whether it has a block; on any thread, but only on the engine thread it stays true."""
        return id(automaton) in self._blocks

    def host_words(self, automaton: TokenAutomaton) -> Tensor:
        """Its tables as one host tensor int32, pinned for a GPU; on any thread."""
        a = automaton
        words = torch.cat([torch.from_numpy(part.ravel()) for part in (a.classes, a.masks, a.next_state)])
        return words.pin_memory() if self.buffer.is_cuda else words

    def _room(self, words: int) -> int | None:
        """Where `words` fit, after evicting unused blocks as needed; None evicts nothing."""
        unused = sorted((b for b in self._blocks.values() if not b.users), key=lambda b: b.last_used)
        for number in range(len(unused) + 1):
            evicted = {id(b) for b in unused[:number]}
            base = self._gap(words, [b for b in self._blocks.values() if id(b) not in evicted])
            if base is not None:
                for block in unused[:number]:
                    del self._blocks[id(block.automaton)]
                return base
        return None

    def _gap(self, words: int, blocks: list[Block]) -> int | None:
        start = self._first
        for block in sorted(blocks, key=lambda b: b.base):
            if block.base - start >= words:
                return start
            start = block.base + block.automaton.num_words
        return start if self.num_words - start >= words else None


class RowAutomata:
    """The automata of all rows, on the device: where each row's tables are and its state. Torch; runs on the stream.

    `bound` bool [B] says in which rows the automaton holds now: not while a row reasons.
    """

    def __init__(self, tables: AutomatonTables, rows: int) -> None:
        device = tables.buffer.device
        self.tables = tables
        self.row_values = torch.zeros(rows, 3, dtype=torch.int64, device=device)  # of each row's block
        self.state = torch.zeros(rows, dtype=torch.int64, device=device)
        self.row_values[:] = torch.tensor(tables.free_row, device=device)
        self._word = torch.arange(tables.mask_words, device=device)

    def start(self, row: Tensor, row_values: Tensor) -> None:
        """Rows int64 [B] begin anew with row_values int64 [B, 3]."""
        self.row_values[row] = row_values
        self.state.index_fill_(0, row, 0)  # `[row] = 0` waits for the device: it copies a 0 from pageable memory

    def masks(self, row: Tensor, bound: Tensor, vocabulary: int) -> Tensor:
        """Legal ids of rows int64 [B]: int32 [B, ceil(V / 32)]."""
        first = self.row_values[row, 0] + vocabulary + self.state[row] * self.tables.mask_words
        masks = self.tables.buffer[first[:, None] + self._word]
        return torch.where(bound[:, None], masks, ALL_LEGAL)

    def advance(self, row: Tensor, bound: Tensor, ids: Tensor) -> None:
        """Moves the automata of rows int64 [B] by their sampled ids int64 [B]."""
        base, next_base, num_classes = self.row_values[row].unbind(1)
        state = self.state[row]
        token_class = self.tables.buffer[base + ids].long()
        following = self.tables.buffer[next_base + state * num_classes + token_class].long()
        self.state[row] = torch.where(bound, following, state)
