"""Image files: which formats are read, in which orientation, and what is refused before its pixels are decoded."""

from __future__ import annotations

import re
import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_images import encoded, picture

from engine.errors import OptionError
from engine.files import image_file
from engine.files.image_file import decoded_images, pictures_of


def _of_size(width: int, height: int) -> bytes:
    """Return a PNG whose header claims a size, with hardly any pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(10)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 95})])
def test_formats(kind: str, options: dict[str, object]) -> None:
    image = picture()
    (found,) = decoded_images([("it", encoded(image, kind, **options))])
    assert (found.mode, found.size) == ("RGB", image.size)
    if kind != "JPEG":
        assert np.array_equal(np.array(found), np.array(image))


def test_only_the_first_frame_of_an_animation_is_read() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    (found,) = decoded_images([("it", encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))])
    assert found.getpixel((0, 0)) == (255, 0, 0)


def test_images_are_upright_and_have_three_channels(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    path = tmp_path / "turned.jpg"
    path.write_bytes(encoded(picture(width=40, height=20), "JPEG", exif=turned))
    gray, clear = Image.new("L", (4, 4), 7), Image.new("RGBA", (4, 4))
    (tmp_path / "gray.png").write_bytes(encoded(gray))
    (tmp_path / "clear.png").write_bytes(encoded(clear))
    own = picture()
    found = pictures_of([str(path), own, tmp_path / "gray.png", tmp_path / "clear.png"])
    assert found[1] is own
    assert [each.size for each in found] == [(20, 40), own.size, (4, 4), (4, 4)]
    assert {each.mode for each in found} == {"RGB"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it: is no image in PNG, JPEG, WebP or GIF format; give one"),
        (b"text", "it: is no image in PNG"),
        (encoded(picture(), "TIFF"), "it: is no image in PNG"),
        (encoded(picture())[:2000], "it: the image cannot be decoded (image file is truncated"),
        (encoded(picture(), "JPEG")[:1500], "it: the image cannot be decoded"),
        (_of_size(60_000, 60_000), "it: has "),
        (_of_size(8_000, 8_000), "it: has 8000 × 8000 pixels, and the images of one prompt have at most 16000000"),
    ],
)
def test_what_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)) as error:
        decoded_images([("it", data)])
    assert "\n" not in str(error.value)


def test_all_images_of_a_prompt_share_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_file, "MOST_PIXELS", 150)
    small = encoded(Image.new("RGB", (10, 10)))
    assert len(decoded_images([("one", small)])) == 1
    with pytest.raises(OptionError, match=r"two: has 10 × 10 pixels"):
        decoded_images([("one", small), ("two", small)])
    monkeypatch.setattr(image_file, "MOST_IMAGES", 0)
    with pytest.raises(OptionError, match="more than 0 images"):
        decoded_images([("one", small)])


def test_files_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"missing.png: is not a file"):
        pictures_of([tmp_path / "missing.png"])
    with pytest.raises(OptionError, match="is not a file"):
        pictures_of([tmp_path])
    path = tmp_path / "large.png"
    path.write_bytes(encoded(picture()))
    monkeypatch.setattr(image_file, "MOST_FILE_BYTES", 100)
    with pytest.raises(OptionError, match=r"large.png: is larger than 100 bytes"):
        pictures_of([path])


def test_the_size_in_a_header_is_checked_before_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("pixels are decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with Image.open(BytesIO(_of_size(8_000, 8_000))) as image:
        assert image.size == (8_000, 8_000)
    with pytest.raises(OptionError, match="has 8000 × 8000 pixels"):
        decoded_images([("it", _of_size(8_000, 8_000))])
