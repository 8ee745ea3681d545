from __future__ import annotations

from pathlib import Path

import pytest
from harness import Bench
from tiny_checkpoint import write_checkpoint


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
