"""No torch operation of a step would wait for a GPU: seen without one, by looking at what the steps ask torch for.

A GPU that is waited for in the tick stands idle afterwards, and nothing but time tells. `tests/gpu` has torch raise at
such a call (`torch.cuda.set_sync_debug_mode`); here the operations themselves give away most of what does. Not seen: an
upload whose memory should be pinned and is not, since on a CPU nothing is copied; and what runs only on a GPU.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import Bench
from test_constrained import drain, mixed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from photon_backend.engine.runner import Runner

STEPS = ("prefill", "decode", "sample")
VALUES = {"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"}  # a number that the host reads
SIZES = {  # the result is as large as the values say
    *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
WRITES = {"index_put", "index_put_", "_index_put_impl_"}


def why_it_waits(func: torch._ops.OpOverload, args: tuple) -> str:
    """Why a GPU would be waited for in this operation, whatever its tensors hold; empty: it would not."""
    name = func.overloadpacket.__name__
    if name in VALUES:
        return "reads a value"
    if name == "resolve_conj":
        return "tolist or numpy"  # which ask for it first
    if name in SIZES or (name == "where" and len(args) == 1):
        return "its result's size depends on values"
    if name == "repeat_interleave" and any(isinstance(arg, Tensor) for arg in args[1:]):
        return "its result's size depends on values"
    masks = [i for i in args[1] if i is not None and i.dtype is torch.bool] if name in {"index", *WRITES} else []
    return "looks for what a mask selects" if masks else ""


class Watch(TorchDispatchMode):
    """Notes each operation that would wait, with the line that asked for it, and counts all of them."""

    def __init__(self, host: list[Tensor] | None = None) -> None:
        """`host`: buffers of the host even where there is a GPU."""
        super().__init__()
        self.number = 0
        self.waits: list[str] = []
        self._host = [tensor.untyped_storage().data_ptr() for tensor in host or []]
        self._literals: list[
            Tensor
        ] = []  # made from Python's numbers, in ordinary memory; kept, so none takes its place

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        name = func.overloadpacket.__name__
        why = why_it_waits(func, args) or self._copies_up(name, args)
        if why:
            ours = [f for f in traceback.extract_stack() if "photon_backend" in f.filename]
            where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}: {ours[-1].line}" if ours else ""
            self.waits.append(f"{func} {why}: {where}")
        result = func(*args, **(kwargs or {}))
        if name == "lift_fresh":
            self._literals.append(result)
        return result

    def uploaded(self, tensor: Tensor) -> None:
        """On a GPU it would be there now, from pinned memory."""
        at = tensor.untyped_storage().data_ptr()
        self._literals = [t for t in self._literals if t.untyped_storage().data_ptr() != at]

    def _copies_up(self, name: str, args: tuple) -> str:
        """Whether a literal meets what is on the device. One number may, but where it is copied as it is."""
        if name in ("lift_fresh", "detach_", "detach", "fill_"):
            return ""
        literal = [t for t in tree_leaves(args) if isinstance(t, Tensor) and self._is_literal(t)]
        number_is_copied = name in WRITES or name == "copy_"
        if not any(t.dim() > 0 or number_is_copied for t in literal):
            return ""
        to_host = name == "copy_" and args[0].untyped_storage().data_ptr() in self._host
        return "" if to_host else "copies from ordinary memory"

    def _is_literal(self, tensor: Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()
        return any(at == literal.untyped_storage().data_ptr() for literal in self._literals)


LINES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a value for chosen lines": lambda x, at: x.__setitem__(at, 0),
    "a value for chosen columns": lambda x, at: x.__setitem__((slice(None), at), 1.0),
    "a value for one element": lambda x, at: x.__setitem__((0, 1), 2.0),
    "a value for masked lines": lambda x, at: x.__setitem__(x[:, 0] > 0, 1.0),
    "lines under a mask": lambda x, at: x[x[:, 0] > 0],
    "a choice by a mask": lambda x, at: x.masked_select(x > 0),
    "where something is": lambda x, at: torch.where(x > 0),
    "nonzero": lambda x, at: x.nonzero(),
    "a condition": lambda x, at: bool((x > 0).all()),
    "a number": lambda x, at: float(x[0, 0]),
    "an index that is a tensor": lambda x, at: x[at[0]],
    "a slice up to a tensor": lambda x, at: x[: at[0]],
    "a list": lambda x, at: at.tolist(),
    "an array": lambda x, at: at.numpy(),
    "unique values": lambda x, at: at.unique(),
    "repeats by a tensor": lambda x, at: torch.repeat_interleave(x[:2], at, 0),
    "literal indices": lambda x, at: x[torch.tensor([1, 2])],
    "literal values": lambda x, at: x.__setitem__(at, torch.tensor([1.0, 2.0, 3.0])),
    "a comparison": lambda x, at: torch.equal(x, x),
}
FREE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a value for chosen lines": lambda x, at: x.index_fill_(0, at, 0),
    "a value for a slice": lambda x, at: x.__setitem__(slice(1, 2), 0.0),
    "lines for chosen lines": lambda x, at: x.__setitem__(at, torch.ones(2, 3)),
    "one line for one": lambda x, at: x[:, 0].__setitem__(at[:1], torch.ones(1)),
    "a number beside values": lambda x, at: x + torch.tensor(1.0),
    "chosen lines": lambda x, at: x[at],
    "a choice in place": lambda x, at: torch.where(x > 0, x, 0),
    "a mask in place": lambda x, at: x.masked_fill_(x > 0, 1.0),
}


@pytest.mark.parametrize(("lines", "waits"), [(LINES, True), (FREE, False)], ids=["waits", "free"])
def test_what_waits_is_known(lines, waits):
    """In inference mode, as the streams run: outside of it torch takes some operations apart."""
    for name, line in lines.items():
        with torch.inference_mode():
            x, at = torch.zeros(4, 3), torch.tensor([1, 2])
            with Watch() as watch:
                line(x, at)
        assert bool(watch.waits) == waits, (name, watch.waits)


@pytest.mark.parametrize("overlap", [True, False])
def test_no_step_waits_for_the_device(checkpoint, monkeypatch, overlap):
    """Pictures new and cached, places and sizes, reasoning, automata and host grammars, on the stream's own thread.

    Without debug, which reads values on purpose.
    """
    bench = Bench(checkpoint, debug=False, overlap=overlap)
    pinned = [slot.host_rows for slot in bench.engine.stepper.slots]
    watches = {name: Watch(pinned) for name in STEPS}
    calls: Counter[str] = Counter()

    upload = bench.engine.stepper.runner._upload

    def uploading(*args) -> Tensor:
        tensor = upload(*args)
        watches["prefill"].uploaded(tensor)
        return tensor

    monkeypatch.setattr(bench.engine.stepper.runner, "_upload", uploading)

    def watched(name: str) -> Callable[..., None]:
        step = getattr(Runner, name)

        def run(*args) -> None:
            calls[name] += 1
            with watches[name]:
                step(*args)

        return run

    for name in STEPS:
        monkeypatch.setattr(Runner, name, watched(name))
    batch = mixed(checkpoint, 24)
    for submit, name in batch:
        bench.submit(submit, name)
        bench.tick()
    answers = drain(bench)
    bench.close()
    assert {answer.reason for answer in answers.values()} <= {"stop", "length"} and len(answers) == len(batch)
    assert bench.engine.constraints.num_device and bench.engine.constraints.num_host and bench.engine.cache.hits
    for name, watch in watches.items():
        assert not watch.waits, (name, Counter(watch.waits).most_common())
        assert watch.number > 10 * calls[name] > 0
