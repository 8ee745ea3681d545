from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from tiny_checkpoint import write_checkpoint

from photon_backend.engine.capture import can_capture


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory)
    return directory


# run on a CPU too, under TRITON_INTERPRET=1
INTERPRETED = (
    "test_kernels.py",
    "test_prefill_kernel.py",
    "test_region_kernel.py",
    "test_sample_kernel.py",
    "test_vision_kernels.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            runs = os.environ.get("TRITON_INTERPRET") == "1" and item.path.name in INTERPRETED
            if not torch.cuda.is_available() and not runs:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def captures() -> None:
    """Of a test that captures a CUDA graph by itself; an engine does without under an allocator that cannot."""
    if not can_capture():
        pytest.skip("this allocator cannot capture")
