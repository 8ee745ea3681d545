from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Bench
from tiny_checkpoint import write_checkpoint

torch.set_num_threads(1)  # a test machine runs more than this


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory)
    return directory


@pytest.fixture
def make_bench(checkpoint: Path):
    benches: list[Bench] = []

    def make(**settings) -> Bench:
        benches.append(Bench(checkpoint, **settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()
