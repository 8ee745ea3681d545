"""The kernels without a GPU: their tests at small shapes, in a process where Triton-language code is interpreted.

A process of its own, because the variable that switches the interpreter on counts when the kernels are imported, and
no server that another test starts should inherit it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton's kernel language is not installed")
GPU_TESTS = Path(__file__).parents[1] / "gpu"


@pytest.mark.timeout(1500)  # half a minute of work, on a machine that may be busy with other things
@pytest.mark.parametrize("module", ["kernels", "prefill_kernel", "region_kernel", "sample_kernel", "vision_kernels"])
def test_kernels_equal_torch(module: str) -> None:
    path = str(GPU_TESTS / f"test_{module}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", path]
    ran = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout and " skipped" not in ran.stdout
