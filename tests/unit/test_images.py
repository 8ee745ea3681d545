from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, features

from photon_backend.config import Settings
from photon_backend.frontend.images import FORMATS, decode_image, read_image
from photon_backend.protocol import PhotonError
from tests.unit.front_end_parts import file_bytes, fuzz, halves

SETTINGS = Settings()
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def read(payload: bytes, **settings: Any) -> np.ndarray:
    return decode_image(read_image(payload, msgspec.structs.replace(SETTINGS, **settings)).data)


def refusal(payload: bytes, **settings: Any) -> str:
    with pytest.raises(PhotonError) as caught:
        read(payload, **settings)
    assert caught.value.code == "INVALID_ARG"
    assert caught.value.message.startswith("image ")
    return caught.value.message


def assert_halves(pixels: np.ndarray, left: Any = RED, right: Any = BLUE, tolerance: int = 0) -> None:
    assert pixels.dtype == np.uint8 and pixels.shape[2] == 3
    quarter = pixels.shape[1] // 4
    for columns, colour in ((pixels[:, :quarter], left), (pixels[:, -quarter:], right)):
        assert np.abs(columns.astype(int) - np.asarray(colour)).max() <= tolerance


# ---- formats and pixel types


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_of_the_list_is_decoded(format: str) -> None:
    if format == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    assert_halves(read(file_bytes(halves(), format)), tolerance=12)


@pytest.mark.parametrize("format", ["EPS", "ICO", "PCX", "SGI", "TGA", "DDS", "PDF", "ICNS", "QOI"])
def test_other_formats_are_refused(format: str) -> None:
    assert "is no picture that can be read: expected AVIF" in refusal(file_bytes(halves((64, 64)), format))


@pytest.mark.parametrize(
    ("mode", "format"),
    [
        ("RGB", "PNG"),
        ("RGBA", "PNG"),
        ("P", "PNG"),
        ("P", "GIF"),
        ("CMYK", "TIFF"),
        ("CMYK", "JPEG"),
        ("YCbCr", "JPEG"),
    ],
)
def test_colour_modes(mode: str, format: str) -> None:
    assert_halves(read(file_bytes(halves(mode=mode), format)), tolerance=2)


@pytest.mark.parametrize("mode", ["1", "L", "LA"])
def test_grey_modes(mode: str) -> None:
    assert_halves(read(file_bytes(halves(left="black", right="white", mode=mode))), (0, 0, 0), WHITE)


def wide_grey(values: tuple[float, float], dtype: str) -> Image.Image:
    return Image.fromarray(np.repeat(np.asarray([values], dtype=dtype), 30, axis=1).repeat(40, axis=0))


@pytest.mark.parametrize(
    ("values", "dtype", "format", "levels"),
    [
        ((257 * 10, 65535), "<u2", "PNG", (10, 255)),
        ((257 * 10, 65535), "<u2", "TIFF", (10, 255)),
        ((200, 100), "<u2", "PNG", (1, 0)),  # 16 bits are scaled by their range, not by what is in the picture
        ((257 * 10, 65535), "<i4", "TIFF", (10, 255)),
        ((-5, 10 * 65535), "<i4", "TIFF", (0, 255)),
        ((0.2, 1.0), "<f4", "TIFF", (51, 255)),
        ((51.0, 255.0), "<f4", "TIFF", (51, 255)),
        ((200.0, 1000.0), "<f4", "TIFF", (51, 255)),
        ((float("nan"), 1.0), "<f4", "TIFF", (0, 255)),
    ],
)
def test_wide_grey_is_scaled_to_eight_bits(values: Any, dtype: str, format: str, levels: tuple[int, int]) -> None:
    left, right = levels
    assert_halves(read(file_bytes(wide_grey(values, dtype), format)), (left,) * 3, (right,) * 3)


def test_big_endian_sixteen_bits() -> None:
    image = Image.frombytes("I;16B", (4, 1), struct.pack(">4H", 2570, 2570, 65535, 65535))
    assert_halves(read(file_bytes(image, "TIFF")), (10,) * 3, WHITE)


def test_sixteen_bit_pgm() -> None:
    pixels = read(b"P5 4 1 65535\n" + struct.pack(">4H", 2570, 2570, 65535, 65535))
    assert_halves(pixels, (10,) * 3, WHITE)


# ---- as a viewer shows it


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied(orientation: int, format: str) -> None:
    stored = Image.new("RGB", (40, 60), "blue")
    stored.paste("red", (0, 0, 20, 30))  # upper left as stored
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = read(file_bytes(stored, format, exif=exif))
    assert pixels.shape[:2] == ((60, 40) if orientation <= 4 else (40, 60))
    height, width = pixels.shape[0], pixels.shape[1]
    red = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0)}[orientation]
    for bottom in (0, 1):
        for right in (0, 1):
            y, x = height // 4 + bottom * height // 2, width // 4 + right * width // 2
            is_red = int(pixels[y, x, 0]) > 128
            assert is_red == ((bottom, right) == red)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_broken_exif_block_is_ignored() -> None:
    assert_halves(read(file_bytes(halves(), exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12broken")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparent_parts_are_white(mode: str) -> None:
    image = halves(left="black").convert("RGBA")
    image.putalpha(halves(left="white", right="black", mode="L"))  # the right half is transparent
    format = "TIFF" if mode == "PA" else "PNG"
    assert_halves(read(file_bytes(image.convert(mode), format)), (0, 0, 0), WHITE)


def test_half_transparent_red_is_pink() -> None:
    image = Image.new("RGBA", (20, 20), (255, 0, 0, 128))
    assert_halves(read(file_bytes(image)), (255, 127, 127), (255, 127, 127), tolerance=1)


@pytest.mark.parametrize("transparency", [1, bytes([255, 0])])
def test_palette_transparency(transparency: int | bytes) -> None:
    image = Image.new("P", (60, 40), 1)
    image.putpalette([*RED, *BLUE])
    image.paste(0, (0, 0, 30, 40))
    assert_halves(read(file_bytes(image, transparency=transparency)), RED, WHITE)


def test_transparent_colour_of_rgb_and_grey() -> None:
    assert_halves(read(file_bytes(halves(), transparency=BLUE)), RED, WHITE)
    assert_halves(read(file_bytes(halves(left="black", right="#808080", mode="L"), transparency=128)), (0, 0, 0), WHITE)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_shows_its_first_frame(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    data = file_bytes(halves(), format, save_all=True, append_images=[Image.new("RGB", (60, 40), "green")], **options)
    assert_halves(read(data))


# ---- the ways to send it


def payloads() -> dict[str, bytes]:
    noise = np.random.RandomState(3).randint(0, 256, (31, 30, 3)).astype(np.uint8)
    data = file_bytes(Image.fromarray(noise)) + b"\0"  # noise: all base64 digits occur; one byte more: padding does
    plain, safe = base64.b64encode(data), base64.urlsafe_b64encode(data)
    return {
        "file": data,
        "base64": plain,
        "URL-safe": safe,
        "unpadded": plain.rstrip(b"="),
        "URL-safe unpadded": safe.rstrip(b"="),
        "lines": base64.encodebytes(data),
        "Windows lines": base64.encodebytes(data).replace(b"\n", b"\r\n"),
        "blanks around": b" \n" + plain + b"\n ",
        "data URL": b"data:image/png;base64," + plain,
        "data URL, other case": b"DATA:image/PNG;name=a.png;BASE64," + safe,
        "data URL, percent": b"data:image/png;base64," + plain.replace(b"+", b"%2B").replace(b"=", b"%3D"),
        "data URL, lines": b"data:;base64," + base64.encodebytes(data),
    }


@pytest.mark.parametrize("name", payloads())
def test_every_way_gives_the_same_file_and_digest(name: str) -> None:
    data = payloads()["file"]
    assert len(data) % 3 and b"+" in payloads()["base64"] and b"_" in payloads()["URL-safe"]
    expected = read_image(data, SETTINGS)
    assert read_image(payloads()[name], SETTINGS) == expected
    assert expected.data == data and len(expected.digest) == 16


def test_a_text_file_of_pixels_is_not_taken_for_base64() -> None:
    assert_halves(read(b"P3 4 1 255 255 0 0 255 0 0 0 0 255 0 0 255\n"))


@pytest.mark.parametrize(
    ("payload", "part"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"http://127.0.0.1/a.png", "URLs are not fetched"),
        (b"HTTPS://example.org/a.png", "URLs are not fetched"),
        (b"file:///etc/hostname", "URLs are not fetched"),
        (b"/etc/hostname", "is no picture"),
        (b"picture.png", "is no picture"),
        (b"not base64!", "is no picture"),
        (b"AAAA", "is no picture"),
        (b"AAAAA", "is no picture"),
        (b"====", "is no picture"),
        (b"iVBORw0KGgo=iVBORw0KGgo=", "is no picture"),
        (b"\x00\x01\x02\x03" * 100, "is no picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no picture"),
        (b"%PDF-1.7\n", "is no picture"),
        (b"data:image/png;base64,", "data is not valid base64"),
        (b"data:image/png;base64,AAAAA", "data is not valid base64"),
        (b"data:image/png;base64,!!", "data is not valid base64"),
        (b"data:image/png;base64", "without base64 data"),
        (b"data:image/svg+xml,%3Csvg/%3E", "without base64 data"),
    ],
)
def test_what_is_no_picture_is_refused(payload: bytes, part: str) -> None:
    assert part in refusal(payload)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_cut_off_is_refused(format: str) -> None:
    noise = Image.fromarray(np.random.RandomState(3).randint(0, 256, (64, 64, 3)).astype(np.uint8))
    data = file_bytes(noise, format)
    message = refusal(data[: len(data) // 2])
    assert "is damaged or cut off" in message or "is no picture" in message


@fuzz
@given(st.sampled_from(FORMATS), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_files_are_decoded_or_refused(format: str, changes: list[tuple[float, int]]) -> None:
    data = bytearray(file_bytes(halves((16, 16)), format))
    for place, value in changes:
        data[min(int(place * len(data)), len(data) - 1)] = value
    try:
        assert read(bytes(data), max_image_pixels=10_000).shape[2] == 3
    except PhotonError as error:
        assert error.code == "INVALID_ARG" and error.message.startswith("image ")


# ---- limits


def png_header(width: int, height: int) -> bytes:
    """A PNG file that claims a size and has no pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_the_header_size_is_checked_before_decoding() -> None:
    assert read(file_bytes(halves()), max_image_pixels=60 * 40).shape == (40, 60, 3)
    assert "has 60 x 40 pixels; at most 2399" in refusal(file_bytes(halves()), max_image_pixels=60 * 40 - 1)
    assert "9000 x 9000 pixels; at most 50000000" in refusal(png_header(9000, 9000))
    assert "too many pixels; at most 50000000" in refusal(png_header(2**31 - 1, 2**31 - 1))


def test_the_number_of_bytes_is_checked() -> None:
    data = file_bytes(halves())
    size = len(data)
    assert f"has {size} bytes; at most {size - 1}" in refusal(data, max_image_bytes=size - 1)
    assert f"has {size} bytes; at most {size - 1}" in refusal(base64.b64encode(data), max_image_bytes=size - 1)
    assert read(base64.encodebytes(data), max_image_bytes=size).shape == (40, 60, 3)
    assert "at most 10 are accepted" in refusal(b"A" * 5000, max_image_bytes=10)


@pytest.mark.parametrize("size", [(1, 1), (200, 1), (13, 21)])
def test_small_and_narrow_pictures_are_accepted(size: tuple[int, int]) -> None:
    assert read(file_bytes(Image.new("RGB", size))).shape == (size[1], size[0], 3)


def test_a_thread_of_pixels_is_refused() -> None:
    assert "201 x 1 pixels is too narrow" in refusal(file_bytes(Image.new("RGB", (201, 1))))


def test_no_pixels_are_refused() -> None:
    refusal(png_header(0, 5))
    refusal(b"P6 0 5 255\n")


# ---- digests


def test_nearly_identical_pictures_have_different_digests() -> None:
    base = halves(mode="P")
    other_pixel, other_palette = base.copy(), base.copy()
    other_pixel.putpixel((0, 0), 7)
    palette = base.getpalette() or []
    other_palette.putpalette([*palette[:3], palette[3] ^ 1, *palette[4:]])
    turned = Image.new("RGB", (40, 60), "red")
    pictures = [
        *map(file_bytes, (base, other_pixel, other_palette, turned, turned.transpose(Image.Transpose.ROTATE_90))),
        file_bytes(base) + b"\0",
        file_bytes(base, compress_level=1),
    ]
    assert len({read_image(data, SETTINGS).digest for data in pictures}) == len(pictures)


def test_the_digest_depends_on_the_preprocessing_version(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_bytes(halves())
    before = read_image(data, SETTINGS).digest
    monkeypatch.setattr("photon_backend.frontend.images.PREPROCESSING_VERSION", "other")
    assert read_image(data, SETTINGS).digest != before
