"""Images in PNG, JPEG, WebP and GIF files, decoded by Pillow within limits.

The size that a header claims is checked before any pixel is decoded, because a few bytes may claim billions of pixels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

from engine.errors import OptionError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Pillow's names of the formats that are read. Only the first frame of an animated image is read."""
MOST_IMAGES = 16
"""Limit on the images of one prompt."""
MOST_FILE_BYTES = 50_000_000
MOST_PIXELS = 16_000_000
"""Limit on the pixels of all images of one prompt together. They are held as 3 bytes each."""
EXTRA = "images need Pillow; install it with `pip install 'moe-compress[images]'`"


def pictures_of(images: Iterable[Any]) -> list[Any]:
    """Return images of Pillow: those among the given ones as they are, and those in the files at given paths.

    Raises OptionError for the first file that holds none, and beyond the limits.
    """
    given = list(images)
    paths = [each for each in given if isinstance(each, str | Path)]
    decoded = iter(decoded_images((str(path), _content(Path(path))) for path in paths))
    return [next(decoded) if isinstance(each, str | Path) else each for each in given]


def decoded_images(named: Iterable[tuple[str, bytes]]) -> list[Any]:
    """Return images of Pillow in RGB, upright, from the contents of files. Each has a name for error messages.

    Raises OptionError for content that is no image of FORMATS, is damaged, or is beyond the limits.
    """
    images: list[Any] = []
    left = MOST_PIXELS
    for name, data in named:
        if len(images) == MOST_IMAGES:
            raise OptionError(f"there are more than {MOST_IMAGES} images, which is the limit for one prompt; give fewer")
        images.append(_decoded(name, data, left))
        left -= images[-1].width * images[-1].height
    return images


def _content(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise OptionError(f"{path}: is not a file; give an image file")
        if path.stat().st_size > MOST_FILE_BYTES:
            raise OptionError(f"{path}: is larger than {MOST_FILE_BYTES} bytes, the limit for an image; give a smaller one")
        return path.read_bytes()
    except OSError as error:
        raise OptionError(f"{path}: cannot be read ({error.strerror}); give an image file") from error


def _decoded(name: str, data: bytes, most_pixels: int) -> Any:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise OptionError(EXTRA) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                _check_size(name, image.width, image.height, most_pixels)
                return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise OptionError(f"{name}: is no image in PNG, JPEG, WebP or GIF format; give one") from error
    except Image.DecompressionBombError as error:
        raise OptionError(
            f"{name}: has more pixels than the {most_pixels} that are left for it; give a smaller one"
        ) from error
    except (MemoryError, OptionError):
        raise
    except Exception as error:  # decoders of Pillow raise many kinds for damaged files
        reason = " ".join(str(error).split())[:200]
        raise OptionError(f"{name}: the image cannot be decoded ({reason}); give a whole one") from error


def _check_size(name: str, width: int, height: int, most_pixels: int) -> None:
    if width * height > most_pixels:
        raise OptionError(
            f"{name}: has {width} × {height} pixels, and the images of one prompt have at most {MOST_PIXELS} together; "
            "give a smaller one"
        )
