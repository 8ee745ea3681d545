"""The state of an unfinished training on disk: what the next command needs to go on as if there had been no pause.

    OUT/state-STAGE-STEP/part-0.safetensors, part-1.safetensors, ...

The directory appears by one rename when it is complete, and the one before goes then, so whenever a training is killed
one whole state is there. The pieces are at most 15 MiB each, so that they pass where larger files do not.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

PART_BYTES = 15 << 20


@dataclass
class State:
    """Where a training stands: before `step` of `stage`. `seed` is that of the whole training."""

    seed: int
    stage: int = 0
    step: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)


def save_state(state: State, out: Path) -> None:
    target = out / f"state-{state.stage}-{state.step}"
    unfinished = out / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for number, part in enumerate(_parts(state.tensors)):
        save_file(part, unfinished / f"part-{number}.safetensors", metadata={"seed": str(state.seed)})
    before = _directories(out)
    os.replace(unfinished, target)
    for directory in before:
        shutil.rmtree(directory)


def load_state(out: Path, seed: int) -> State:
    """The furthest state in `out`, its tensors on the CPU; the very beginning when there is none.

    Raises ValueError when it belongs to a training with another seed.
    """
    directories = _directories(out)
    if not directories:
        return State(seed)
    stage, step = _place(directories[-1])
    state = State(seed, stage, step)
    for path in sorted(directories[-1].glob("part-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if file.metadata()["seed"] != str(seed):
                raise ValueError(f"{path} is of a training with seed {file.metadata()['seed']}, not {seed}")
            state.tensors.update({name: file.get_tensor(name).clone() for name in file.keys()})  # noqa: SIM118
    return state


def remove_states(out: Path) -> None:
    for directory in _directories(out):
        shutil.rmtree(directory)


def _directories(out: Path) -> list[Path]:
    """From the least to the furthest."""
    return sorted((path for path in out.glob("state-*") if re.fullmatch(r"state-\d+-\d+", path.name)), key=_place)


def _place(directory: Path) -> tuple[int, int]:
    _, stage, step = directory.name.split("-")
    return int(stage), int(step)


def _parts(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if used + tensor.nbytes > PART_BYTES and parts[-1]:
            parts.append({})
            used = 0
        parts[-1][name] = tensor.contiguous().cpu()
        used += tensor.nbytes
    return parts
