"""What the client sends for each form of picture, and what it draws on."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from photon_client import InvalidArgument, images
from photon_client.images import displayed_image, encode_image
from PIL import Image

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)  # [h, w, 3]


def decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def rotated_jpeg() -> bytes:
    """A picture 30 x 20 as stored, red on its left half, that is to be shown turned: 20 x 30, red on top."""
    image = Image.new("RGB", (30, 20), "white")
    image.paste("red", (0, 0, 15, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    file = io.BytesIO()
    image.save(file, "JPEG", quality=100, subsampling=0, exif=exif)
    return file.getvalue()


def test_files_and_bytes_are_sent_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "any.bin"
    path.write_bytes(b"not even a picture")
    assert encode_image(path) == encode_image(str(path)) == encode_image(b"not even a picture") == b"not even a picture"


@pytest.mark.parametrize(
    "array", [PIXELS, PIXELS[:, ::-1], PIXELS[:, :, 0], PIXELS[:, :, :1], np.dstack([PIXELS, PIXELS[:, :, 0]])]
)
def test_arrays_keep_every_pixel(array: np.ndarray) -> None:
    image = decoded(encode_image(array))
    assert image.format == "PNG"
    assert np.array_equal(np.asarray(image), array.squeeze(2) if array.shape[2:] == (1,) else array)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_png_modes_keep_every_pixel(mode: str) -> None:
    image = Image.new(mode, (4, 3))
    image.putpixel((1, 2), {"LA": (9, 8), "RGB": (1, 2, 3), "RGBA": (1, 2, 3, 4)}.get(mode, 1))
    sent = decoded(encode_image(image))
    assert sent.mode == mode
    assert sent.tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "LAB", "F", "I", "RGBX", "RGBa", "PA"])
def test_other_modes_become_rgb(mode: str) -> None:
    assert decoded(encode_image(Image.new(mode, (4, 3)))).mode == "RGB"


def test_pil_pictures_are_sent_upright() -> None:
    sent = decoded(encode_image(decoded(rotated_jpeg())))
    assert sent.size == (20, 30)
    assert not sent.getexif()


def test_a_png_that_is_too_large_becomes_a_jpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PNG_BYTES", 50)
    sent = decoded(encode_image(np.dstack([PIXELS, PIXELS[:, :, 0]])))
    assert (sent.format, sent.mode, sent.size) == ("JPEG", "RGB", (5, 7))


@pytest.mark.parametrize(
    "image",
    [None, 3, ["a.png"], np.zeros((4, 4), np.float32), np.zeros((0, 4, 3), np.uint8), np.zeros((4, 4, 2), np.uint8)],
)
def test_anything_else_is_refused_by_name(image: object) -> None:
    with pytest.raises(InvalidArgument, match="image: expected"):
        encode_image(image)  # type: ignore[arg-type]


def test_a_missing_file_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        encode_image(tmp_path / "none.png")


def test_displayed_picture_is_upright() -> None:
    shown = displayed_image(rotated_jpeg())
    assert shown.size == (20, 30)
    red, white = shown.getpixel((10, 2)), shown.getpixel((10, 28))
    assert red[1] < 60 and white[1] > 200  # type: ignore[index]


def test_displayed_picture_puts_transparency_on_white() -> None:
    assert displayed_image(Image.new("RGBA", (2, 2), (255, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)
    assert displayed_image(Image.new("LA", (2, 2), (0, 255))).getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize(("mode", "grey", "expected"), [("I;16", 32896, 128), ("I", 65535, 255), ("F", 0.5, 127)])
def test_displayed_picture_scales_wide_greys(mode: str, grey: float, expected: int) -> None:
    assert displayed_image(Image.new(mode, (2, 2), grey)).getpixel((0, 0)) == (expected,) * 3


def test_bytes_that_are_no_picture() -> None:
    with pytest.raises(InvalidArgument, match="not a picture"):
        displayed_image(b"nothing")
