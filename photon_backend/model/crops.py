"""From a picture to the crops that the vision encoder reads. numpy and Pillow only.

The first crop is the whole picture squeezed into one square (global). The others are tiles of a larger copy, laid out
row by row; neighbours overlap by twice `overlap_margin` patches, so nothing is seen only at a crop's edge. The result
must equal the public reference byte for byte (with its Pillow path): a model has learned these very pixels.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from photon_backend.model.config import VisionConfig

PREPROCESSING_VERSION = "lanczos-1"  # part of a picture's digest: change it whenever a crop's pixels change


def make_crops(image: np.ndarray, config: VisionConfig) -> tuple[np.ndarray, tuple[int, int]]:
    """Cuts a picture into one global crop and a grid of overlapping tiles.

    image: uint8 [h, w, 3], RGB, h and w >= 1.
    Returns crops uint8 [C, crop_size, crop_size, 3], the global crop first, then the tiles row by row,
    C = 1 + rows * columns; and (rows, columns).
    """
    side, margin = config.crop_size, _margin_pixels(config)
    stride = side - 2 * margin
    rows, columns = select_tiling(image.shape[0], image.shape[1], config)
    picture = Image.fromarray(image)
    crops = np.empty((1 + rows * columns, side, side, 3), dtype=np.uint8)
    crops[0] = _resize(picture, side, side)
    if (rows, columns) == (1, 1):  # the only tile is the whole picture at the same size
        crops[1] = crops[0]
        return crops, (1, 1)
    canvas = _resize(picture, rows * stride + 2 * margin, columns * stride + 2 * margin)
    for row in range(rows):
        for column in range(columns):
            top, left = row * stride, column * stride
            crops[1 + row * columns + column] = canvas[top : top + side, left : left + side]
    return crops, (rows, columns)


def select_tiling(height: int, width: int, config: VisionConfig) -> tuple[int, int]:
    """(rows, columns) of the tiles of a picture of that many pixels; rows * columns <= max_crops, each >= 1.

    As the reference decides it, with one difference: a very elongated picture (2 x 100 tiles, say) gets max_crops
    tiles at most there too, where the reference would make more and spend unbounded memory.
    """
    margins = 2 * _margin_pixels(config)
    stride = config.crop_size - margins
    height, width = height - margins, width - margins
    if height <= stride or width <= stride:  # also when the margins alone are larger than the picture
        return 1, 1
    least_rows, least_columns = math.ceil(height / stride), math.ceil(width / stride)
    if least_rows * least_columns > config.max_crops:
        ratio = math.sqrt(config.max_crops / (least_rows * least_columns))
        rows = max(1, math.floor(least_rows * ratio))
        columns = max(1, math.floor(least_columns * ratio))
        # Their product fits unless one side was raised to 1: a long strip, cut here.
        return min(rows, config.max_crops), min(columns, config.max_crops)
    rows = max(math.floor(math.sqrt(config.max_crops * height / width)), least_rows)
    columns = max(math.floor(math.sqrt(config.max_crops * width / height)), least_columns)
    if rows * columns > config.max_crops:
        if columns > rows:
            columns = config.max_crops // rows
        else:
            rows = config.max_crops // columns
    return max(1, rows), max(1, columns)


def _margin_pixels(config: VisionConfig) -> int:
    return config.overlap_margin * config.enc_patch_size


def _resize(picture: Image.Image, height: int, width: int) -> np.ndarray:
    return np.asarray(picture.resize((width, height), resample=Image.Resampling.LANCZOS))
