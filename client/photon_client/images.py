"""Pictures in the forms that callers have them, turned into the encoded bytes that the server takes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from photon_client.errors import InvalidArgument

ImageLike = str | Path | bytes | Image.Image | np.ndarray

# Above this a PNG is replaced by a JPEG: the server refuses large files (20 MiB by default), and the model looks at far
# fewer pixels than such a picture has.
MAX_PNG_BYTES = 16 * 1024 * 1024
_PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}


def encode_image(image: ImageLike) -> bytes:
    """Encoded bytes of a picture.

    A path (str or Path) is read and bytes are taken as they are, both undecoded. A PIL picture is turned upright as its
    EXIF data says. An array is uint8 [h, w], [h, w, 1], [h, w, 3] (RGB) or [h, w, 4] (RGBA). These two are sent as PNG,
    or as JPEG of quality 95 when the PNG would be larger than 16 MiB.

    Raises InvalidArgument for anything else, OSError for a file that cannot be read.
    """
    if isinstance(image, str | Path):
        return Path(image).read_bytes()
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, np.ndarray):
        return _encode(_from_array(image))
    if isinstance(image, Image.Image):
        return _encode(ImageOps.exif_transpose(image))
    raise InvalidArgument(f"image: expected a path, bytes, a PIL image or a numpy array, got {type(image).__name__}")


def displayed_image(image: ImageLike) -> Image.Image:
    """The picture as a viewer shows it, in RGB: upright by its EXIF data, transparency over white.

    Boxes and points of the server refer to this picture. Raises InvalidArgument when the bytes are no picture.
    """
    if isinstance(image, np.ndarray):
        return _to_rgb(_from_array(image))
    if isinstance(image, Image.Image):
        return _to_rgb(ImageOps.exif_transpose(image))
    try:
        opened = Image.open(io.BytesIO(encode_image(image)))
        return _to_rgb(ImageOps.exif_transpose(opened))
    except (Image.UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as error:
        raise InvalidArgument(f"image: not a picture that can be read: {error}") from error


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or 0 in array.shape:
        raise InvalidArgument(f"image: expected a uint8 array with pixels in it, got {array.dtype} {list(array.shape)}")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4)):
        return Image.fromarray(np.ascontiguousarray(array))
    raise InvalidArgument(f"image: expected [h, w], [h, w, 1], [h, w, 3] or [h, w, 4], got {list(array.shape)}")


def _encode(image: Image.Image) -> bytes:
    if image.mode not in _PNG_MODES:
        image = _to_rgb(image)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    if buffer.tell() > MAX_PNG_BYTES:
        buffer = io.BytesIO()
        _to_rgb(image).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    if image.mode == "F" or image.mode.startswith("I"):  # wider than 8 bits, where Pillow's own conversion cuts at 255
        pixels = np.asarray(image).astype(np.float64)
        brightest = 65535 if image.mode != "F" else 255 if pixels.max() > 1 else 1
        return Image.fromarray(np.clip(pixels * (255 / brightest), 0, 255).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")
