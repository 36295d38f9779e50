"""Images in messages: parts with data URLs in, and the model's inputs of a prompt's images from process to process.

The process that reads bodies (`reading_process.py`) decodes images: it has no model and no keys, and is limited in time and
memory. Only the content of a request is read, never a network or a file.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any

from engine.files.image_file import MOST_IMAGES
from engine.server.errors import ApiError

PARAM = "messages"
MOST_SENT_BYTES = 5_000_000
"""Limit on the file of one image, decoded from base64."""
_DATA = re.compile(r"data:image/(png|jpeg|jpg|webp|gif);base64,", re.IGNORECASE)
ONLY_DATA = (
    "an image's url must be data:image/png;base64,… (or jpeg, webp, gif): this server fetches nothing and opens no files; "
    "send the image itself"
)


def image_files(urls: Iterable[str]) -> list[tuple[str, bytes]]:
    """Return the file in each data URL, with a name for messages. Raises ApiError for other URLs, and beyond the limits."""
    files: list[tuple[str, bytes]] = []
    for url in urls:
        if len(files) == MOST_IMAGES:
            raise ApiError(400, f"messages have more than {MOST_IMAGES} images, the limit; send fewer", param=PARAM)
        files.append((f"image {len(files) + 1} of messages", _content(url)))
    return files


def _content(url: str) -> bytes:
    found = _DATA.match(url)
    if found is None:
        raise ApiError(400, ONLY_DATA, param=PARAM)
    size = (len(url) - found.end()) // 4 * 3 - url[-2:].count("=")
    if size > MOST_SENT_BYTES:
        raise ApiError(400, f"an image is larger than {MOST_SENT_BYTES} bytes, the limit; send a smaller one", param=PARAM)
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, "an image's url is not valid base64; encode the whole file", param=PARAM) from error


def packed(inputs: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """Return the names, dtypes and shapes of tensors, and the memory of each. Pixels are large, and are not copied."""
    arrays = {name: tensor.contiguous().numpy() for name, tensor in inputs.items()}
    rows = [{"name": name, "dtype": str(array.dtype), "shape": list(array.shape)} for name, array in arrays.items()]
    return rows, [memoryview(array.reshape(-1).view("u1")) for array in arrays.values()]


def unpacked(rows: Iterable[Mapping[str, Any]], data: memoryview) -> dict[str, Any]:
    """Return the tensors that `packed` described; their values follow each other in the data, and are not copied."""
    import numpy as np
    import torch

    found, start = {}, 0
    for row in rows:
        dtype, shape = np.dtype(row["dtype"]), tuple(row["shape"])
        count = int(np.prod(shape))
        array = np.frombuffer(data, dtype, count, start).reshape(shape)
        found[row["name"]] = torch.from_numpy(array if array.flags.aligned and array.flags.writeable else array.copy())
        start += count * dtype.itemsize
    return found
