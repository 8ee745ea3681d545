"""From what a client calls an image to pixels as a viewer would show them. numpy and Pillow only.

Two stages, because a cached picture needs only the first: `read_image` finds the file's bytes, checks its header and
makes the digest; `decode_image` decodes. The payload is untrusted: it is never taken for a path or fetched as a URL,
only formats with a clear signature are opened, and the header's size is checked before any pixel is decoded.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import string
import warnings
from urllib.parse import unquote_to_bytes

import msgspec
import numpy as np
from PIL import Image, ImageOps

from photon_backend.config import Settings
from photon_backend.frontend.options import invalid
from photon_backend.model.crops import PREPROCESSING_VERSION

# Left out on purpose: EPS and WMF run other programs, ICO holds pictures of another size than its header says, TGA and
# others have no signature, so that any bytes could pass for them.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
MAX_ASPECT = 200  # longer side to shorter side

_KNOWN = "AVIF, BMP, GIF, JPEG, JPEG 2000, PNG, PPM, TIFF or WebP"
_WHITESPACE = string.whitespace.encode()
_BASE64 = (string.ascii_letters + string.digits + "+/-_=").encode() + _WHITESPACE
_URL = re.compile(rb"[a-z][a-z0-9+.-]{1,15}://", re.IGNORECASE)

# What Pillow warns of is either refused here or shown as it is; a client's files are not to fill the server's log.
warnings.filterwarnings("ignore", module=r"PIL\.")


class EncodedImage(msgspec.Struct, frozen=True):
    data: bytes  # of the picture file
    digest: bytes  # 16 bytes, of the preprocessing version and all of `data`


def read_image(payload: bytes, settings: Settings) -> EncodedImage:
    """payload: bytes of a picture file, or the same as base64 (standard or URL-safe, padded or not) or as a data URL.

    Raises PhotonError INVALID_ARG.
    """
    limit = settings.max_image_bytes
    if len(payload) > 2 * limit + 1024:  # base64 with line breaks and all is shorter
        raise invalid(f"image has {len(payload)} bytes; at most {limit} are accepted")
    data = _file_bytes(payload)
    if len(data) > limit:
        raise invalid(f"image has {len(data)} bytes; at most {limit} are accepted")
    _check_size(data, settings.max_image_pixels)
    digest = hashlib.blake2b(PREPROCESSING_VERSION.encode() + b"\0" + data, digest_size=16).digest()
    return EncodedImage(data, digest)


def decode_image(data: bytes) -> np.ndarray:
    """uint8 [h, w, 3], RGB: orientation applied, transparency on white, the first frame of an animation.

    Raises PhotonError INVALID_ARG when the bytes are damaged, cut off or of a pixel type that has no colours.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.load()
            return np.asarray(_to_rgb(_upright(image)))
    except Exception:  # decoders of foreign bytes raise anything: OSError, SyntaxError, struct.error, ...
        raise invalid("image is damaged or cut off, or has a pixel type that cannot be shown") from None


def _file_bytes(payload: bytes) -> bytes:
    start = payload[:64].lstrip()
    if not start:
        raise invalid("image is empty")
    if start[:5].lower() == b"data:":
        return _from_data_url(payload.strip())
    if _URL.match(start):
        raise invalid("image is a URL, and URLs are not fetched: send the bytes of the file, base64 or a data URL")
    if start.translate(None, _BASE64) or payload.translate(None, _BASE64):
        return payload
    data = _from_base64(payload)
    # digits and spaces alone may also be a text file of pixels (PPM)
    return payload if data is None or (_opened(data) is None and _opened(payload) is not None) else data


def _from_data_url(payload: bytes) -> bytes:
    head, comma, body = payload.partition(b",")
    if not comma or not head.lower().endswith(b";base64"):
        raise invalid("image is a data URL without base64 data; expected data:image/...;base64,...")
    data = _from_base64(unquote_to_bytes(body))
    if not data:
        raise invalid("image is a data URL whose data is not valid base64")
    return data


def _from_base64(text: bytes) -> bytes | None:
    """None when it is not base64."""
    digits = text.translate(bytes.maketrans(b"-_", b"+/"), _WHITESPACE)
    body = digits.rstrip(b"=")
    if b"=" in body or len(digits) - len(body) > 2 or len(body) % 4 == 1 or body.translate(None, _BASE64):
        return None
    return base64.b64decode(body + b"=" * (-len(body) % 4))


def _opened(data: bytes) -> Image.Image | None:
    """A picture with its header read, None when it is of no known format."""
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise
    except Exception:  # as in decode_image; here it means: not this format
        return None


def _check_size(data: bytes, max_pixels: int) -> None:
    try:
        image = _opened(data)
    except Image.DecompressionBombError:
        raise invalid(f"image has too many pixels; at most {max_pixels} are accepted") from None
    if image is None:
        raise invalid(f"image is no picture that can be read: expected {_KNOWN}, as file bytes, base64 or data URL")
    with image:
        width, height = image.size
    if width < 1 or height < 1:
        raise invalid(f"image has no pixels: its size is {width} x {height}")
    if width * height > max_pixels:
        raise invalid(f"image has {width} x {height} pixels; at most {max_pixels} in all are accepted")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise invalid(f"image of {width} x {height} pixels is too narrow; at most 1 to {MAX_ASPECT} is accepted")


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a viewer shows a picture whose EXIF block is broken as it lies, and so do we
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _grey(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def _grey(image: Image.Image) -> Image.Image:
    """Wide grey values to 8 bits. White is 65535 for integers and 1 for floats; when a value exceeds that, 255 for
    floats, and the highest value when even that is exceeded."""
    values = np.nan_to_num(np.asarray(image).astype(np.float32))
    usual_whites = (1.0, 255.0) if image.mode == "F" else (65535.0,)
    highest = float(values.max())
    white = next((white for white in usual_whites if highest <= white), highest)
    return Image.fromarray(np.rint(np.clip(values / white, 0.0, 1.0) * 255.0).astype(np.uint8))
