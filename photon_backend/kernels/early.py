"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for it when it must.

A step is some 120 kernels of 2 to 100 us; started one after the other, each costs its launch and leaves the memory idle
while the last programs of the one before end. Measured at Moondream 2's shape: 7 % of a step at one row, 4 % at 16.

Every program of such a kernel releases the next one (`gdc_launch_dependents`), which then starts as soon as there is
room, and waits (`gdc_wait`) for the end of the whole kernel before, which waited for its own. After the wait it sees
all that came before it, as without early launch. Before the wait: no store, and no load but of weights. The
exceptions rest on attention, which releases the next kernel only after its own wait, so that whatever starts later sees
all that came before it: `linear_split` reads the MLP's hidden state, and the attention of the next layer the positions,
the page table, and keys and values of earlier steps. The region heads read the step's rows and their states, which are
written before the forward begins: its attention (that of a prefill is launched as ever) lies between.

A kernel without the wait (relay, values, sampling, those of a prefill alone, torch's own) is launched as ever, after
the end of the one before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

ENABLED = True  # for all launches; benchmarks and tests clear it


@functools.cache
def _supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)  # Hopper


def early_launch(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch: EARLY for the kernel, `launch_pdl` for the compiler."""
    return {"EARLY": True, "launch_pdl": True} if ENABLED and _supported(device) else {"EARLY": False}
