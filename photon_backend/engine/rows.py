"""What is kept of every row on the device, and the tables by which it advances by itself.

A decode step needs nothing from the host but which rows take part: token t reaches forward t+1 without leaving the
device (P6). Written by prefill, which starts a row, and by sampling, in torch or in `kernels.sample`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from photon_backend.engine.tables import AutomatonTables, RowAutomata
from photon_backend.grammar.constraint import ALL_LEGAL
from photon_backend.grammar.spatial import CHOOSES_OBJECT, DECODES_COORDINATE, NEXT, THINKING, State, suppressed_ids
from photon_backend.model.config import ModelConfig
from photon_backend.model.region import Region


class Asked(NamedTuple):
    """Which region heads the rows of a step ask for: what another head says of them means nothing."""

    rows: Tensor  # int64 [B], of the step
    states: Tensor  # int64 [R], of every row
    asks: Tensor  # int32 [heads, S], whether a row in a state asks for a head

    def of(self, head: int) -> Asked:
        return Asked(self.rows, self.states, self.asks[head : head + 1])


TOKEN, COORDINATE, SIZE = 0, 1, 2  # kinds of the next input: an embedding of the id, or of the value beside it


class Rows:
    """By row, R of them:

    next_token   int64   [R]     the id that the next step feeds
    kind         int64   [R]     what it stands for: TOKEN, COORDINATE or SIZE
    value        float32 [R, 2]  coordinate in [:, 0], or (width, height); means something beside its kind only
    state        int64   [R]     of the spatial automaton
    position     int64   [R]     of the token that the next step feeds
    page_table   int64   [R, P]
    think_until  int64   [R]     position at which answer_id is forced
    temperature, top_p float32 [R]; top_k, seed int64 [R]
    automata     the token automata

    By state of the spatial automaton, S of them: legal int32 [S, ceil(V / 32)], bits as in a grammar's mask; next_state
    int64 [S]; asks int32 [2, S], whether the next input may become a coordinate, or a size; the others bool [S].
    """

    def __init__(
        self, config: ModelConfig, region: Region, number: int, pages: int, grammar_mb: int, device: torch.device
    ) -> None:
        """`pages` of a row; `grammar_mb`: of tables."""

        def by_row(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(number, *shape, dtype=dtype, device=device)

        self.ids = config.tokenizer
        self.next_token = by_row(torch.int64)
        self.kind = by_row(torch.int64)
        self.value = by_row(torch.float32, 2)
        self.state = by_row(torch.int64)
        self.position = by_row(torch.int64)
        self.page_table = by_row(torch.int64, pages)
        self.think_until = by_row(torch.int64)
        self.temperature = by_row(torch.float32)
        self.top_p = by_row(torch.float32)
        self.top_k = by_row(torch.int64)
        self.seed = by_row(torch.int64)
        self.automata = RowAutomata(AutomatonTables(config.text.vocab_size, grammar_mb, device), number)
        self._make_tables(config, device)
        coordinates = torch.arange(config.region.coord_out_dim, device=device)
        sizes = torch.arange(config.region.size_bins, device=device)
        # float32 [bins] each: what a bin of a coordinate, or of a size, stands for
        self.bin_values = region.coordinate_value(coordinates), region.size_value(sizes)

    def _make_tables(self, config: ModelConfig, device: torch.device) -> None:
        states = list(State)
        legal = np.full((len(states), -(-config.text.vocab_size // 32)), ALL_LEGAL, np.int32)
        for state in states:
            for token in suppressed_ids(state, config):
                legal[state, token // 32] &= _all_but(token)

        def among(chosen: tuple[State, ...]) -> Tensor:
            return torch.tensor([state in chosen for state in states], device=device)

        self.legal = torch.from_numpy(legal).to(device)
        self.next_state = torch.tensor(NEXT, device=device)
        self.thinking = among(THINKING)
        self.chooses = among(CHOOSES_OBJECT)
        self.takes_coordinate = among(DECODES_COORDINATE)
        self.takes_size = among((State.BOX_SIZE,))
        self.asks = torch.stack([self.takes_coordinate | self.thinking, self.takes_size]).int()

    def asked(self, rows: Tensor) -> Asked:
        """rows int64 [B]: of a step."""
        return Asked(rows, self.state, self.asks)

    def forbid(self, token: int) -> None:
        """From now on no row samples it; for benchmarks and tests, whose rows must not end. Waits for the device: steps
        run on another stream than the caller."""
        self.legal[:, token // 32] &= _all_but(token)
        if self.legal.is_cuda:
            torch.cuda.synchronize(self.legal.device)


def _all_but(token: int) -> int:
    """The mask word of a token in which its bit alone is clear, as an int32."""
    return int(np.uint32(0xFFFFFFFF ^ (1 << token % 32)).astype(np.int32))
