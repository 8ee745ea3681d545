"""Boxes, points and labels are where the server said."""

from __future__ import annotations

import io

import numpy as np
import pytest
from photon_client import annotate
from photon_client.draw import COLOURS, MIN_SIDE
from PIL import Image, ImageChops

BOX = {"x_min": 0.25, "y_min": 0.5, "x_max": 0.75, "y_max": 0.9}


def changed(before: Image.Image, after: Image.Image) -> tuple[int, int, int, int]:
    """left, top, right, bottom of what differs."""
    box = ImageChops.difference(before, after).getbbox()
    assert box is not None
    return box


def test_box_outline_is_at_its_corners() -> None:
    picture = Image.new("RGB", (800, 600), "grey")
    left, top, right, bottom = changed(picture, annotate(picture, [BOX]))
    assert (left, top, right, bottom) == pytest.approx((200, 300, 600, 540), abs=2)
    assert annotate(picture, [BOX]).getpixel((400, 420)) == (128, 128, 128), "the inside stays visible"


def test_point_is_centred() -> None:
    picture = Image.new("RGB", (800, 600), "grey")
    left, top, right, bottom = changed(picture, annotate(picture, points=[{"x": 0.5, "y": 0.25}]))
    assert ((left + right) / 2, (top + bottom) / 2) == pytest.approx((400, 150), abs=2)


def test_nothing_found_leaves_the_picture_alone() -> None:
    picture = Image.new("RGB", (800, 600), "grey")
    assert annotate(picture, label="cat").tobytes() == picture.tobytes()


def test_the_callers_picture_is_not_drawn_on() -> None:
    picture = Image.new("RGB", (800, 600), "grey")
    annotate(picture, [BOX], label="cat")
    assert picture.getcolors() == [(800 * 600, (128, 128, 128))]


def test_small_pictures_are_enlarged_by_a_whole_factor() -> None:
    assert annotate(np.zeros((40, 64, 3), np.uint8), [BOX]).size == (64 * 8, 40 * 8)
    assert annotate(np.zeros((40, MIN_SIDE, 3), np.uint8), [BOX]).size == (MIN_SIDE, 40)


def test_a_turned_picture_is_drawn_on_as_it_is_shown() -> None:
    exif = Image.Exif()
    exif[0x0112] = 8  # to be turned by 270 degrees clockwise
    file = io.BytesIO()
    Image.new("RGB", (600, 800), "grey").save(file, "PNG", exif=exif)
    drawn = annotate(file.getvalue(), [BOX])
    assert drawn.size == (800, 600)
    assert changed(Image.new("RGB", (800, 600), "grey"), drawn) == pytest.approx((200, 300, 600, 540), abs=2)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
def test_pictures_of_every_mode(mode: str) -> None:
    drawn = annotate(Image.new(mode, (500, 400)), [BOX], label="cat")
    assert drawn.mode == "RGB" and len(drawn.getcolors() or []) > 1


@pytest.mark.parametrize("corner", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_labels_stay_inside(corner: tuple[float, float]) -> None:
    """As many label pixels at every border as in the middle of the picture."""
    picture = Image.new("RGB", (640, 480), "grey")

    def label_pixels(x: float, y: float) -> int:
        point = [{"x": x, "y": y}]
        bare, labelled = annotate(picture, points=point), annotate(picture, points=point, label="a green star")
        return int((np.asarray(bare) != np.asarray(labelled)).any(axis=2).sum())

    assert label_pixels(*corner) == pytest.approx(label_pixels(0.5, 0.5), rel=0.1)


def test_labels_do_not_cover_each_other() -> None:
    picture = Image.new("RGB", (640, 480), "grey")
    drawn = np.asarray(annotate(picture, points=[{"x": 0.5, "y": 0.5}] * 3, label="a green star"))
    areas = []
    for colour in COLOURS[:3]:
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        areas.append(int((drawn == rgb).all(axis=2).sum()))
    assert min(areas) > 0.7 * max(areas)


@pytest.mark.parametrize("label", ["", "  \n ", "two\nlines", "日本語 🙂", "x" * 500])
def test_any_label(label: str) -> None:
    annotate(np.zeros((21, 13, 3), np.uint8), [BOX, BOX], [{"x": 0.0, "y": 1.0}], label=label)
