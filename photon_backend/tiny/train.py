"""Trains the bundled model: `python -m photon_backend.tiny.train --seed 0`.

Everything is learned from scenes drawn on the fly; no picture is seen twice. The checkpoint written is the model in
float16 (half the bytes of float32, and more digits than bfloat16; the weights are small enough for its range).

A training that is killed or paused (`--minutes`) goes on when the same command is given again: scene and questions of
a step depend on seed and step alone, and so does the learning rate. See state.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from photon_backend.model.config import load_config
from photon_backend.model.moondream import Moondream
from photon_backend.model.region import Region
from photon_backend.model.weights import random_model, save_checkpoint
from photon_backend.tiny.batches import Batches, unpack
from photon_backend.tiny.losses import CellHeads, losses, stitching, total
from photon_backend.tiny.state import State, load_state, remove_states, save_state
from photon_backend.tiny.vocabulary import write as write_vocabulary


@dataclass(frozen=True)
class Stage:
    """One schedule: warm-up, then a cosine down to almost nothing. The next stage starts afresh from its weights."""

    steps: int
    pictures: int  # of a batch
    rate: float  # peak learning rate


STAGES = (Stage(5800, 128, 2e-3), Stage(4400, 256, 2e-3))
STAGE_SEEDS = 1000  # between the seeds of two stages
QUESTION_LEN = 255  # with the prefix of 145 a multiple of 16
WARMUP, WEIGHT_DECAY, MAX_NORM = 400, 0.05, 1.0
MOMENTS = ("exp_avg", "exp_avg_sq")


def rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up, then half a cosine to 1 % of the peak."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


class Optimizer:
    """AdamW on float32 copies of the bfloat16 weights that forward and backward use."""

    def __init__(self, modules: list[nn.Module], peak: float) -> None:
        self.parameters: list[Tensor] = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.masters = [p.detach().clone() for p in self.parameters]
        for module in modules:
            module.bfloat16()
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        matrices = [master for master in self.masters if master.dim() >= 2]
        vectors = [master for master in self.masters if master.dim() < 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        torch._foreach_copy_(self.gradients, [p.grad for p in self.parameters if p.grad is not None])
        for parameter in self.parameters:
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        torch._foreach_copy_(self.parameters, self.masters)

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Weights in float32 and moments in bfloat16: 45 MB. The moments that go on are rounded too, so a training that
        pauses here and one that does not are the same."""
        tensors = {}
        for number, master in enumerate(self.masters):
            tensors[f"weight.{number}"] = master.detach()
            for name in MOMENTS:
                moment = self.adam.state[master][name]
                moment.copy_(moment.bfloat16())
                tensors[f"{name}.{number}"] = moment.bfloat16()
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], step: int) -> None:
        for number, (master, parameter) in enumerate(zip(self.masters, self.parameters, strict=True)):
            master.copy_(tensors[f"weight.{number}"])
            parameter.copy_(master)
            moments = {name: tensors[f"{name}.{number}"].to(master) for name in MOMENTS}
            self.adam.state[master] = {"step": torch.tensor(float(step), device=master.device), **moments}

    def restore(self) -> None:
        """Gives the modules their float32 weights."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.data = master


def fix_frequencies(region: Region) -> None:
    """The Fourier frequencies stay as drawn, rounded to bfloat16, so that they are the same numbers in every dtype."""
    for frequencies in (region.coord_features, region.size_features):
        frequencies.requires_grad_(False)
        frequencies.copy_(frequencies.bfloat16())


def train(model: Moondream, stage: Stage, number: int, run: Run, state: State) -> bool:
    """One stage, from where `state` stands. The model is float32 before and after. False when it paused."""
    seed = run.seed + STAGE_SEEDS * number  # of its scenes and of the heads
    torch.manual_seed(seed)
    device = model.text.wte.device
    fix_frequencies(model.region)
    heads = CellHeads(model.config.text.dim).to(device)
    matrices = stitching(model.vision).to(device)
    optimizer = Optimizer([model, heads], stage.rate)
    first = state.step
    if first:
        optimizer.load(state.tensors, first)
    feed = Feed(Batches(run.out, seed, stage.pictures, QUESTION_LEN, stage.steps), first, run.workers, device)
    for step in range(first, stage.steps):
        parts = losses(model, heads, matrices, feed.next())
        total(parts, step / stage.steps).backward()
        optimizer.step(rate(step, step / stage.steps, stage.rate))
        if step % run.log_every == 0 or step == stage.steps - 1:
            run.report(number, step, parts, feed.waited_s)
        if (step + 1) % run.save_every == 0 and step + 1 < stage.steps:
            save_state(State(run.seed, number, step + 1, optimizer.state() | untrained(model)), run.out)
            if run.is_time_up():
                return False
    optimizer.restore()
    return True


def untrained(model: Moondream) -> dict[str, Tensor]:
    return {name: p.detach().float() for name, p in model.named_parameters() if not p.requires_grad}


class Feed:
    """The batches of a stage from step `first` on, and for how long the trainer has waited for them."""

    def __init__(self, batches: Batches, first: int, workers: int, device: torch.device) -> None:
        order = range(first, len(batches))
        loader = DataLoader(
            batches, batch_size=None, sampler=order, num_workers=workers, pin_memory=device.type == "cuda"
        )
        self.batches, self.device, self.waited_s = iter(loader), device, 0.0

    def next(self) -> dict[str, Tensor]:
        start = time.perf_counter()
        buffer, layout = next(self.batches)
        self.waited_s += time.perf_counter() - start
        return unpack(buffer.to(self.device, non_blocking=True), layout)


@dataclass
class Run:
    """One call of the command."""

    out: Path
    seed: int
    workers: int = 0
    minutes: float | None = None  # after which it pauses, at the first state that it saves
    log_every: int = 200
    save_every: int = 250
    started: float = field(default_factory=time.perf_counter)
    saved_at: float = field(default_factory=time.perf_counter)

    def is_time_up(self) -> bool:
        """Asked after each save. True when another stretch as long as the last one would end too late."""
        now = time.perf_counter()
        longest, self.saved_at = now - self.saved_at, now
        return self.minutes is not None and now + longest - self.started > 60 * self.minutes

    def report(self, stage: int, step: int, parts: dict[str, Tensor], waited_s: float) -> None:
        """One line on the screen and in OUT/train.log. waited: seconds for data in this stage, in this call."""
        losses = {name: round(value.item(), 4) for name, value in parts.items()}
        self.say({"stage": stage, "step": step, **losses, "waited": round(waited_s, 1)})

    def say(self, document: dict[str, object]) -> None:
        line = json.dumps({"seconds": round(time.perf_counter() - self.started, 1), **document})
        print(line, flush=True)
        with (self.out / "train.log").open("a") as log:
            log.write(line + "\n")


def train_all(run: Run, state: State, device: str, stages: Sequence[Stage] = STAGES) -> bool:
    """Every stage that is still to do, from `state` on. True when the checkpoint is complete, False when it paused.

    Between two stages the weights pass through float16, as in the checkpoint.
    """
    if not (run.out / "tokenizer.json").exists():
        write_vocabulary(run.out)
    model = random_model(load_config(run.out), device, torch.float32, run.seed)
    model.load_state_dict({name: t for name, t in state.tensors.items() if name in model.state_dict()}, strict=False)
    for number in range(state.stage, len(stages)):
        run.say({"stage": number, "step": state.step, "steps": stages[number].steps, "workers": run.workers})
        if not train(model, stages[number], number, run, state):
            return False
        model.half()
        state = State(run.seed, number + 1, 0, dict(model.state_dict()))
        if number + 1 < len(stages):
            save_state(state, run.out)
            if run.is_time_up():
                return False
        model.float()
    save_checkpoint(model.half(), run.out)
    remove_states(run.out)
    return True


def main() -> int:
    """Exit status 0: the checkpoint is complete; 3: paused, the same command goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/tiny"), help="directory of the checkpoint and the state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="pause before so much time has passed; default: never")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="draw and ask")
    parser.add_argument("--log-every", type=int, default=200)
    args = parser.parse_args()
    if (args.out / "model.safetensors").exists():
        parser.error(f"{args.out} holds a finished training; choose another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        state = load_state(args.out, args.seed)
    except ValueError as error:
        parser.error(str(error))
    run = Run(args.out, args.seed, args.workers, args.minutes, args.log_every)
    is_complete = train_all(run, state, args.device)
    run.say({"complete": is_complete})
    return 0 if is_complete else 3


if __name__ == "__main__":
    sys.exit(main())
