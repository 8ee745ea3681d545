"""What a state asks for is what a step uses: a region head that no row asks for may say anything."""

from __future__ import annotations

import pytest
import torch

from photon_backend.engine.rows import COORDINATE, SIZE, Rows
from photon_backend.engine.sampler import sample_step
from photon_backend.engine.slots import DecodeSlot
from photon_backend.grammar.spatial import State
from photon_backend.model.region import Region
from tests.model.tiny_checkpoint import CONFIG

CPU = torch.device("cpu")


def kinds_after(state: State) -> set[int]:
    """What the next input of a row in this state may be, over all the tokens that its logits may favour."""
    number = CONFIG.text.vocab_size
    rows, slot = Rows(CONFIG, Region(CONFIG.region), number, 4, 1, CPU), DecodeSlot(CONFIG, number, CPU, torch.float32)
    slot.load_rows(list(range(number)))
    slot.logits.copy_(torch.eye(number))
    rows.state.fill_(int(state))
    rows.think_until.fill_(10**6)
    heads = torch.zeros(number, CONFIG.region.coord_out_dim), torch.zeros(number, 2, CONFIG.region.size_bins)
    sample_step(rows, slot, number, heads, masked=False, automata=False)
    return set(rows.kind.tolist())


@pytest.mark.parametrize("state", State)
def test_a_state_asks_for_the_heads_that_its_step_may_use(state):
    asks = Rows(CONFIG, Region(CONFIG.region), 1, 4, 1, CPU).asks[:, state].tolist()
    kinds = kinds_after(state)
    assert asks == [COORDINATE in kinds, SIZE in kinds]
