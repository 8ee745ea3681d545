"""Drawing for the scenes: antialiased masks of shapes and text, backgrounds, colours. Needs Pillow and numpy."""

from __future__ import annotations

import io
import math
import random
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SUPERSAMPLING = 4

# Several anchors a name, so that the pure colours of other drawing programs are known too.
ANCHORS = {
    "red": ((220, 40, 40), (255, 0, 0), (190, 25, 30)),
    "orange": ((245, 140, 30), (255, 165, 0), (240, 120, 20)),
    "yellow": ((240, 215, 50), (255, 255, 0), (250, 230, 90)),
    "green": ((50, 165, 75), (0, 128, 0), (0, 220, 60)),
    "blue": ((45, 95, 215), (0, 0, 255), (30, 120, 230)),
    "purple": ((135, 60, 175), (128, 0, 128), (110, 50, 200)),
    "pink": ((245, 140, 190), (255, 192, 203), (255, 105, 180)),
}
TONE_RANGES = {"white": (232, 255), "gray": (105, 165), "black": (0, 32)}


@lru_cache(maxsize=4096)
def shape_mask(kind: str, width: int) -> np.ndarray:
    """Coverage of a shape that is `width` pixels wide: uint8 [rows, columns], cropped to its ink."""
    side = width * SUPERSAMPLING
    image = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(image)
    if kind == "circle":
        draw.ellipse((0, 0, side - 1, side - 1), fill=255)
    elif kind == "heart":
        _draw_heart(draw, side)
    else:
        draw.polygon([(x * (side - 1), y * (side - 1)) for x, y in _polygon(kind)], fill=255)
    mask = np.asarray(image.reduce(SUPERSAMPLING))
    return _ink(mask)


def _polygon(kind: str) -> list[tuple[float, float]]:
    """Corners in the unit square."""
    if kind == "square":
        return [(0.05, 0.05), (0.95, 0.05), (0.95, 0.95), (0.05, 0.95)]
    if kind == "triangle":
        return [(0.5, 0.0), (1.0, 0.9), (0.0, 0.9)]
    if kind == "diamond":
        return [(0.5, 0.0), (0.95, 0.5), (0.5, 1.0), (0.05, 0.5)]
    if kind == "cross":
        near, far = 0.33, 0.67
        return [
            *[(near, 0.0), (far, 0.0), (far, near), (1.0, near), (1.0, far), (far, far)],
            *[(far, 1.0), (near, 1.0), (near, far), (0.0, far), (0.0, near), (near, near)],
        ]
    if kind == "star":
        radii = (0.525, 0.22)
        turns = [(radii[i % 2], math.pi * (i / 5 - 0.5)) for i in range(10)]
        return [(0.5 + r * math.cos(a), 0.525 + r * math.sin(a)) for r, a in turns]
    raise ValueError(f"no such shape: {kind}")


def _draw_heart(draw: ImageDraw.ImageDraw, side: int) -> None:
    angles = [2 * math.pi * i / 80 for i in range(80)]
    xs = [16 * math.sin(a) ** 3 for a in angles]
    ys = [-(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) for a in angles]
    scale = (side - 1) / 32
    draw.polygon([((x + 16) * scale, (y + 12.5) * scale) for x, y in zip(xs, ys, strict=True)], fill=255)


@lru_cache(maxsize=256)
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)  # type: ignore[return-value]


def text_mask(text: str, font_size: int) -> np.ndarray:
    """Coverage of a printed text: uint8 [rows, columns], cropped to its ink."""
    font = _font(font_size)
    left, top, right, bottom = font.getbbox(text)
    image = Image.new("L", (int(right - left) + 4, int(bottom - top) + 4), 0)
    ImageDraw.Draw(image).text((2 - left, 2 - top), text, font=font, fill=255)
    return _ink(np.asarray(image))


def _ink(mask: np.ndarray) -> np.ndarray:
    rows, columns = np.nonzero(mask.max(1) > 63)[0], np.nonzero(mask.max(0) > 63)[0]
    return mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def blend(canvas: np.ndarray, mask: np.ndarray, x: int, y: int, color: tuple[int, int, int]) -> None:
    """Paints `color` through `mask` onto `canvas` uint8 [h, w, 3], in place, with the mask's corner at (x, y)."""
    window = canvas[y : y + mask.shape[0], x : x + mask.shape[1]]
    weight = mask[:, :, None].astype(np.uint16)
    mixed = window * (255 - weight) + np.array(color, np.uint16) * weight
    window[:] = (mixed + 127) // 255


def paint_color(rng: random.Random, name: str) -> tuple[int, int, int]:
    anchor = rng.choice(ANCHORS[name])
    red, green, blue = (min(255, max(0, value + rng.randint(-12, 12))) for value in anchor)
    return red, green, blue


def ink(rng: random.Random, tone: str) -> tuple[int, int, int]:
    """A colour for printed text that can be read on a background of that tone."""
    dark = tone == "white" or (tone == "gray" and rng.random() < 0.5)
    value = rng.randint(0, 30) if dark else rng.randint(235, 255)
    return value, value, value


def background(rng: random.Random, width: int, height: int, tone: str, style: str) -> np.ndarray:
    """uint8 [height, width, 3]."""
    low, high = TONE_RANGES[tone]
    base = rng.randint(low, high)
    tint = [rng.randint(-5, 5) for _ in range(3)]
    canvas = np.empty((height, width, 3), np.uint8)
    if style == "plain":
        canvas[:] = [min(255, max(0, base + shade)) for shade in tint]
        return canvas
    shades = _noise(rng, width, height, base) if style == "noisy" else _wave(rng, width, height, base, tone, style)
    for channel in range(3):
        np.clip(shades + np.int16(tint[channel]), 0, 255, out=canvas[:, :, channel], casting="unsafe")
    return canvas


def _noise(rng: random.Random, width: int, height: int, base: int) -> np.ndarray:
    """int16 [height, width]. Grains about two pixels wide, visible after resizing."""
    grain = max(2, min(width, height) // 64)
    numbers = np.random.default_rng(rng.getrandbits(63))
    shape = (height // grain + 1, width // grain + 1)
    swing = rng.randint(22, 40)
    noise = numbers.integers(base - swing, base + swing + 1, shape, np.int16)
    return noise.repeat(grain, 0).repeat(grain, 1)[:height, :width]


def _wave(rng: random.Random, width: int, height: int, base: int, tone: str, style: str) -> np.ndarray:
    """int16 [height, width]. A gradient from side to side, or stripes of two shades, at one of four angles."""
    step_x, step_y = rng.choice(((1, 0), (0, 1), (1, 1), (1, -1)))
    along = np.arange(width)[None, :] * step_x + np.arange(height)[:, None] * step_y
    along -= min(0, (height - 1) * step_y)  # starts at 0
    length = (width - 1) * step_x + (height - 1) * abs(step_y)
    swing = rng.randint(35, 60) * (-1 if tone == "white" else 1)
    if style == "striped":
        period = max(8, int(rng.uniform(0.09, 0.2) * min(width, height)))
        shades = [base + (0 if step // (period // 2) % 2 == 0 else int(swing * 0.7)) for step in range(length + 1)]
    else:
        shades = [base + swing * step // length for step in range(length + 1)]
        shades = shades if rng.random() < 0.5 else shades[::-1]
    return np.array(shades, np.int16)[along]


def finish(rng: random.Random, canvas: np.ndarray) -> np.ndarray:
    """Some pictures pass through JPEG, as users' pictures have."""
    if rng.random() > 0.15:
        return canvas
    encoded = io.BytesIO()
    Image.fromarray(canvas).save(encoded, "JPEG", quality=rng.randint(60, 95))
    return np.array(Image.open(encoded))
