"""The sampling kernel against `engine.sampler.sample_step`: every state and every kind of mask, mixed in one batch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from harness import Bench, request

pytest.importorskip("triton")

from photon_backend.engine.rows import TOKEN, Rows
from photon_backend.engine.sampler import sample_step
from photon_backend.engine.slots import DecodeSlot
from photon_backend.grammar.constraint import TokenAutomaton
from photon_backend.grammar.spatial import State
from photon_backend.kernels import sample as kernel
from photon_backend.kernels.sample import SampleKernel
from photon_backend.model.config import ModelConfig, RegionConfig, TextConfig
from photon_backend.model.region import Region

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SIZES = [(51_200, 1), (51_200, 16), (51_200, 64), (50_000, 27)] if ON_GPU else [(300, 9), (64, 4)]
BINS = 1024 if ON_GPU else 50
STEPS = 4 if ON_GPU else 2
OPTIONS = [(t, p, k) for t in (0.0, 0.5, 1.3) for p in (0.3, 0.9, 0.999, 1.0) for k in (0, 1, 5)]
SEEDS = [5, 2**33 + 1, 2**62 + 2**40, -1]


@pytest.fixture(params=["one block", "many"])
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own shapes, and others, of which more go into a row and do not divide it."""
    if request.param == "many":
        monkeypatch.setattr(kernel, "SHAPE", (1024, 8) if ON_GPU else (64, 4))
        monkeypatch.setattr(kernel, "CHUNK", 512 if ON_GPU else 64)


class Batch:
    """Rows, a slot that holds some of them in another order, and grammars; a function of its arguments alone."""

    def __init__(self, vocabulary: int, batch: int, states: list[int], seed: int = 0) -> None:
        text = TextConfig(vocab_size=vocabulary, dim=16, n_heads=1, n_kv_heads=1, n_layers=1, max_context=64)
        region = RegionConfig(
            dim=16, coord_feat_dim=8, size_feat_dim=8, inner_dim=16, coord_out_dim=BINS, size_out_dim=BINS
        )
        self.config = ModelConfig(text=text, region=region)
        self.chance = np.random.RandomState(seed)
        self.batch, self.vocabulary = batch, vocabulary
        self.rows = Rows(self.config, Region(region), batch + 3, 4, 1, DEVICE)
        self.slot = DecodeSlot(self.config, batch, DEVICE, torch.float32)
        self.slot.load_rows(self.chance.permutation(batch + 2)[:batch].tolist())
        number = batch + 3
        self._set(state=np.resize(states, number), position=self.chance.randint(5, 40, number))
        turn = np.where(np.arange(number) % 2, 30, -1)  # every other row that reasons has used its allowance
        self._set(think_until=self.rows.position.cpu().numpy() + turn, seed=np.resize(SEEDS, number))
        options = [OPTIONS[i] for i in np.resize(self.chance.permutation(len(OPTIONS)), number)]
        temperature, top_p, top_k = (np.array(column) for column in zip(*options, strict=True))
        self._set(temperature=temperature, top_p=top_p, top_k=top_k)
        self._start_automata()

    def _set(self, **columns: np.ndarray) -> None:
        for name, values in columns.items():
            getattr(self.rows, name).copy_(torch.from_numpy(values))

    def _start_automata(self) -> None:
        """Two rows of three have one of two grammars, in some state of it, thinking ones among them."""
        tables, words = self.rows.automata.tables, self.slot.mask.shape[1]
        for i, kinds in enumerate((3, 7)):
            masks = self._bits(4, words)
            classes = self.chance.randint(0, kinds, self.vocabulary).astype(np.int32)
            follow = self.chance.randint(0, 4, (4, kinds)).astype(np.int32)
            placed = tables.place(TokenAutomaton(masks, classes, follow))
            assert placed is not None
            tables.write(placed[0].base, tables.host_words(placed[0].automaton))
            row = torch.arange(i, self.batch, 3, device=DEVICE)
            if not len(row):
                continue
            self.rows.automata.start(row, torch.tensor([placed[0].row_values] * len(row), device=DEVICE))
            self.rows.automata.state[row] = torch.from_numpy(self.chance.randint(0, 4, len(row))).to(DEVICE)

    def _bits(self, lines: int, words: int) -> np.ndarray:
        """Half of the ids legal; one id is legal in all of them, so that two masks have it in common."""
        bits = self.chance.randint(-(2**31), 2**31 - 1, (lines, words)).astype(np.int32)
        bits[:, 1] |= 1 << 9
        return bits

    def fill(self) -> tuple[torch.Tensor, torch.Tensor]:
        """New logits and masks in the slot; logits of the region heads. Special ids often win."""
        logits = self.chance.randn(self.batch, self.vocabulary).astype(np.float32) * 3
        for i in range(self.batch):
            logits[i, self.chance.choice([0, 3, 5, 6, 50])] += self.chance.choice([0.0, 12.0])
        self.slot.logits.copy_(torch.from_numpy(logits))
        self.slot.mask.copy_(torch.from_numpy(self._bits(self.batch, self.slot.mask.shape[1])))
        points, extents = self.chance.randn(self.batch, BINS), self.chance.randn(self.batch, 2, BINS // 2).round(1)
        return torch.from_numpy(points).to(DEVICE).bfloat16().float(), torch.from_numpy(extents).to(DEVICE).float()

    def told(self) -> dict[str, list]:
        """What a step leaves behind. A value means something where the next input is one."""
        rows, row = self.rows, self.slot.rows
        carries = rows.kind[row] != TOKEN
        return {
            "ids": self.slot.ids.tolist(),
            "values": self.slot.values[carries].tolist(),
            "own values": rows.value[row][carries].tolist(),
            "next token": rows.next_token.tolist(),
            "kind": rows.kind.tolist(),
            "state": rows.state.tolist(),
            "automaton state": rows.automata.state.tolist(),
        }


def both(vocabulary: int, batch: int, states: list[int], seed: int = 0) -> tuple[Batch, Batch]:
    return Batch(vocabulary, batch, states, seed), Batch(vocabulary, batch, states, seed)


def check_text_step(here: Batch, there: Batch) -> None:
    """One step without region heads and host masks: the kernel leaves what torch leaves."""
    sample_step(here.rows, here.slot, here.batch, None, False, True)
    SampleKernel(there.rows)(there.slot, there.batch, None, False, True)
    assert there.told() == here.told()


@pytest.mark.usefixtures("shape")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("vocabulary", "batch"), SIZES)
def test_every_state_in_one_batch(vocabulary: int, batch: int, masked: bool) -> None:
    here, there = both(vocabulary, batch, list(State), seed=masked)
    launch = SampleKernel(there.rows)
    for _ in range(STEPS):
        sample_step(here.rows, here.slot, batch, here.fill(), masked, True)
        launch(there.slot, batch, there.fill(), masked, True)
        assert there.told() == here.told()
        for rows in (here.rows, there.rows):
            rows.position += 7


@pytest.mark.usefixtures("shape")
@pytest.mark.parametrize(("vocabulary", "batch"), SIZES)
@pytest.mark.parametrize("automata", [False, True])
def test_rows_of_text(vocabulary: int, batch: int, automata: bool) -> None:
    """Without region heads, as a batch of free or constrained text has them."""
    here, there = both(vocabulary, batch, [State.TEXT_FIRST, State.TEXT], seed=3)
    if not automata:
        for rows in (here.rows, there.rows):
            rows.automata.row_values[:] = torch.tensor(rows.automata.tables.free_row, device=DEVICE)
            rows.automata.state.zero_()
    launch = SampleKernel(there.rows)
    for _ in range(STEPS):
        here.fill(), there.fill()
        sample_step(here.rows, here.slot, batch, None, False, automata)
        launch(there.slot, batch, None, False, automata)
        assert there.told() == here.told()


@pytest.mark.usefixtures("shape")
def test_every_mix_of_options() -> None:
    vocabulary, batch = (51_200, 72) if ON_GPU else (80, 36)
    here, there = both(vocabulary, batch, [State.TEXT], seed=1)
    mixes = zip(here.rows.temperature.tolist(), here.rows.top_p.tolist(), here.rows.top_k.tolist(), strict=True)
    assert len(set(mixes)) == len(OPTIONS)
    for _ in range(STEPS):
        here.fill(), there.fill()
        check_text_step(here, there)


def test_flat_logits_and_ties() -> None:
    """Equal logits stay or go together: the first of them is the greedy one, the noise chooses among the rest."""
    vocabulary, batch = SIZES[0]
    here, there = both(vocabulary, batch, [State.TEXT])
    values = torch.from_numpy(here.chance.randint(0, 3, (batch, vocabulary))).float()
    for scale in (0.0, 1.0, 8.0):
        for b in (here, there):
            b.slot.logits.copy_(values * scale)
        check_text_step(here, there)


def test_logits_that_are_no_numbers() -> None:
    """The model is to blame; the step still ends, with the id that torch gives."""
    vocabulary, batch = SIZES[0]
    here, there = both(vocabulary, batch, [State.TEXT])
    for bad in (float("nan"), float("inf")):
        for b in (here, there):
            b.chance = np.random.RandomState(8)
            b.fill()
            b.slot.logits[0::4, 40:45] = bad
            b.slot.logits[1::4, :] = bad
            b.slot.logits[2::4, :] = float("-inf")
        check_text_step(here, there)


def test_rows_that_fill_a_graph_up() -> None:
    """The scratch row comes several times; the others do not notice."""
    vocabulary, batch = SIZES[0] if not ON_GPU else SIZES[1]
    here, there = both(vocabulary, batch, list(State))
    for b in (here, there):
        b.slot.load_rows([*b.slot.loaded[: batch - 3], *[batch + 2] * 3])
    sample_step(here.rows, here.slot, batch, here.fill(), False, True)
    SampleKernel(there.rows)(there.slot, batch, there.fill(), False, True)
    kept = slice(0, batch - 3)
    assert torch.equal(there.slot.ids[kept], here.slot.ids[kept])
    for name in ("next_token", "kind", "state"):
        assert getattr(there.rows, name)[: batch + 2].tolist() == getattr(here.rows, name)[: batch + 2].tolist()
    assert 0 <= int(there.rows.next_token[batch + 2]) < vocabulary


def test_an_id_whose_noise_would_be_infinite_does_not_win() -> None:
    """Seed 23641, position 0: the hash of id 58 is the largest there is, and its uniform number would round to 1."""
    here, there = both(96, 2, [State.TEXT])
    for b in (here, there):
        b.rows.seed.fill_(23641), b.rows.position.zero_(), b.rows.temperature.fill_(1.0), b.rows.top_p.fill_(1.0)
        b.slot.logits.zero_()[:, 58] = -20.0
    sample_step(here.rows, here.slot, 2, None, False, False)
    SampleKernel(there.rows)(there.slot, 2, None, False, False)
    assert there.slot.ids.tolist() == here.slot.ids.tolist() != [58, 58]


@pytest.mark.parametrize("overlap", [True, False] if ON_GPU else [True])
def test_an_engine_whose_steps_go_through_the_kernels(checkpoint, overlap: bool) -> None:
    told = []
    for kernels in (False, True):
        bench = Bench(checkpoint, device=DEVICE.type, overlap=overlap, kernels=False, graphs=False)
        if kernels:
            bench.engine.stepper.runner.use_kernels()
        for i in range(6):
            bench.submit(*request(f"r{i}", checkpoint, i, max_tokens=4, max_objects=2))
        told.append({key: copy.copy(answer.told) for key, answer in bench.drain().items()})
        bench.assert_baseline()
        bench.close()
    assert told[0] == told[1]
