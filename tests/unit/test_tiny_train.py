"""A training that pauses and goes on is the training that does not pause, to the last bit (on a CPU, one thread)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from photon_backend.config import TINY_CHECKPOINT
from photon_backend.model.config import load_config
from photon_backend.tiny.state import PART_BYTES, State, load_state, save_state
from photon_backend.tiny.train import STAGES, Run, Stage, rate, train_all
from photon_backend.tiny.vocabulary import CONFIG

TWO_STAGES = (Stage(3, 1, 1e-3), Stage(2, 2, 1e-3))
SMALL = msgspec.structs.replace(
    CONFIG,
    text=msgspec.structs.replace(CONFIG.text, dim=32, ff_dim=32, n_layers=1, n_heads=1, n_kv_heads=1),
    vision=msgspec.structs.replace(
        CONFIG.vision, enc_dim=32, enc_n_layers=1, enc_ff_dim=32, enc_n_heads=1, proj_out_dim=32, proj_inner_dim=32
    ),
    region=msgspec.structs.replace(CONFIG.region, dim=32, inner_dim=32, coord_feat_dim=8, size_feat_dim=8),
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], Path]:
    """A directory with configuration and vocabulary, as the command makes it."""

    def make(name: str) -> Path:
        out = tmp_path / name
        out.mkdir()
        (out / "config.json").write_bytes(msgspec.json.encode(SMALL))
        shutil.copy(TINY_CHECKPOINT / "tokenizer.json", out)
        return out

    return make


def call(out: Path, minutes: float | None = None, seed: int = 5) -> bool:
    """One call of the command, saving its state after every step."""
    return train_all(Run(out, seed, minutes=minutes, save_every=1), load_state(out, seed), "cpu", TWO_STAGES)


def test_paused_and_resumed_equals_uninterrupted(start: Callable[[str], Path]) -> None:
    whole, pieces = start("whole"), start("pieces")
    assert call(whole)
    places = []
    while not call(pieces, minutes=0):
        (state,) = pieces.glob("state-*")
        places.append(state.name)
    assert places == ["state-0-1", "state-0-2", "state-1-0", "state-1-1"], "a pause after every step"
    assert sorted(path.name for path in pieces.iterdir()) == sorted(path.name for path in whole.iterdir())
    expected, got = load_file(whole / "model.safetensors"), load_file(pieces / "model.safetensors")
    assert set(got) == set(expected)
    assert [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)] == []
    assert load_config(whole) == SMALL


def test_a_state_travels_in_small_pieces(tmp_path: Path) -> None:
    tensors = {f"weight.{i}": torch.full((1 << 20,), float(i)) for i in range(9)}  # 36 MiB
    save_state(State(0, 1, 250, tensors), tmp_path)
    save_state(State(0, 1, 500, tensors), tmp_path)
    (directory,) = tmp_path.iterdir()
    sizes = [path.stat().st_size for path in directory.iterdir()]
    assert len(sizes) == 3 and max(sizes) < PART_BYTES + (64 << 10)
    state = load_state(tmp_path, 0)
    assert (state.stage, state.step) == (1, 500)
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(ValueError, match="seed 0, not 1"):
        load_state(tmp_path, 1)


def test_a_kill_while_saving_leaves_the_state_before(tmp_path: Path) -> None:
    save_state(State(0, 0, 250, {"weight.0": torch.ones(2)}), tmp_path)
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "part-0.safetensors").write_bytes(b"half of a fi")
    assert load_state(tmp_path, 0).step == 250
    save_state(State(0, 0, 500, {"weight.0": torch.zeros(2)}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["state-0-500"]


def test_rate_depends_on_the_step_alone() -> None:
    peak, steps = STAGES[0].rate, STAGES[0].steps
    rates = [rate(step, step / steps, peak) for step in range(steps)]
    assert max(rates) <= peak and rates[0] < rates[100] < rates[399] and rates[-1] < 0.02 * peak
