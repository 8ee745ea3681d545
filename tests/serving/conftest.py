"""A real Triton server with a seeded random model of the bundled model's shape.

Random weights are what these tests want: greedy answers differ from picture to picture and hardly ever end by
themselves, so a mixed-up answer shows and a request stays open as long as a test needs it.
"""

from __future__ import annotations

import colorsys
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from photon_backend.config import TINY_CHECKPOINT
from photon_backend.serve import Server, start_server


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from photon_backend.model.config import load_config
    from photon_backend.model.weights import random_model, save_checkpoint

    directory = tmp_path_factory.mktemp("checkpoint")
    config = load_config(TINY_CHECKPOINT)
    save_checkpoint(random_model(config, torch.device("cpu"), torch.float32, seed=0), directory)
    shutil.copy(TINY_CHECKPOINT / "tokenizer.json", directory)
    return directory


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Shared by all tests that leave it as they found it."""
    yield from logged_server(checkpoint, tmp_path_factory.mktemp("log") / "server.log")


def logged_server(checkpoint: Path, log: Path) -> Iterator[Server]:
    """The log is printed at the end; pytest shows it beside a failure."""
    try:
        with start_server(checkpoint, log=log) as server:
            yield server
    finally:
        print(log.read_text() if log.exists() else "no log")


@pytest.fixture(scope="session")
def pictures() -> list[bytes]:
    """Sixteen small PNGs of different sizes, colours and content."""
    return [draw(number) for number in range(16)]


def draw(number: int) -> bytes:
    color = tuple(round(255 * part) for part in colorsys.hsv_to_rgb(number / 16, 1, 1))
    image = Image.new("RGB", (60 + 11 * number, 150 - 6 * number), (15 * number, 255 - 15 * number, 128))
    ImageDraw.Draw(image).ellipse([5 + 3 * number, 10 + number, 45 + 5 * number, 50 + 2 * number], fill=color)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
