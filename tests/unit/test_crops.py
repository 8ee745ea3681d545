"""Crops beside the golden ones: limits, degenerate pictures, what a tile shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_backend.model.config import VisionConfig
from photon_backend.model.crops import make_crops, select_tiling
from tests.unit.front_end_parts import fuzz

REAL = VisionConfig()
SMALL = VisionConfig(crop_size=84, max_crops=6, overlap_margin=1)


@pytest.mark.parametrize("config", [REAL, SMALL], ids=["real", "small"])
@settings(fuzz, max_examples=300)
@given(height=st.integers(1, 40_000), width=st.integers(1, 40_000))
def test_never_more_tiles_than_allowed(config: VisionConfig, height: int, width: int) -> None:
    rows, columns = select_tiling(height, width, config)
    assert rows >= 1 and columns >= 1
    assert rows * columns <= config.max_crops


def test_long_strips_are_cut_to_the_limit() -> None:
    """The reference would make 24 and 1 x 24 tiles of these."""
    assert select_tiling(2 * 266 + 112, 100 * 266 + 112, REAL) == (1, 12)
    assert select_tiling(100 * 266 + 112, 2 * 266 + 112, REAL) == (12, 1)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (1, 1, (1, 1)),
        (21, 13, (1, 1)),
        (378, 4000, (1, 1)),  # one side within one tile: no grid at all
        (379, 379, (3, 3)),
        (600, 850, (2, 4)),
        (4000, 4000, (3, 3)),
    ],
)
def test_tilings_of_the_real_geometry(height: int, width: int, expected: tuple[int, int]) -> None:
    assert select_tiling(height, width, REAL) == expected


@pytest.mark.parametrize(("height", "width"), [(1, 1), (21, 13), (1, 3000), (3000, 1), (84, 84), (200, 333)])
def test_shapes(height: int, width: int) -> None:
    image = np.full((height, width, 3), 77, dtype=np.uint8)
    crops, (rows, columns) = make_crops(image, SMALL)
    assert crops.shape == (1 + rows * columns, 84, 84, 3) and crops.dtype == np.uint8
    assert (crops == 77).all()


def test_neighbouring_tiles_overlap_by_two_margins() -> None:
    image = np.random.RandomState(0).randint(0, 256, (200, 300, 3)).astype(np.uint8)
    crops, (rows, columns) = make_crops(image, SMALL)
    overlap = 2 * SMALL.overlap_margin * SMALL.enc_patch_size
    tiles = crops[1:].reshape(rows, columns, 84, 84, 3)
    assert rows > 1 and columns > 1
    assert (tiles[:, :-1, :, -overlap:] == tiles[:, 1:, :, :overlap]).all()
    assert (tiles[:-1, :, -overlap:] == tiles[1:, :, :overlap]).all()


def test_a_picture_of_crop_size_is_its_own_crop() -> None:
    image = np.random.RandomState(0).randint(0, 256, (84, 84, 3)).astype(np.uint8)
    crops, tiling = make_crops(image, SMALL)
    assert tiling == (1, 1) and (crops == image).all()
