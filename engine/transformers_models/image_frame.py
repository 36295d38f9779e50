"""How an image becomes one of the size that a model takes: it is resized, and then cropped in the middle.

Shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from engine.errors import CheckpointError
from engine.files.json_file import shown

BILINEAR = 2
RESAMPLING = {0: "nearest-exact", 1: "bicubic", 2: "bilinear", 3: "bicubic"}
"""Mode of torch by Pillow's number of the filter. Torch has no Lanczos (1)."""
CROP_SHARE = 224 / 256
"""Share of the shorter side that a crop keeps where a checkpoint does not say: resized to 256, cropped to 224."""
LEAST_STRETCHED = 384
"""Size from which transformers' processors with `crop_pct` stretch an image instead of cropping it."""


@dataclass(frozen=True)
class Frame:
    """The size of a model's images, and how an image becomes one of that size."""

    size: tuple[int, int]
    """(height, width) of the result."""
    resized: int | tuple[int, int] | None = None
    """Length of the shorter side, or height and width, to which an image is resized before the crop in the middle.

    None where a checkpoint does not say: image files are then resized as is usual on ImageNet, and arrays are stretched.
    """
    resample: int = BILINEAR
    """Pillow's number of the filter."""

    @property
    def for_files(self) -> Frame:
        """Return the frame of image files, which keeps their aspect unless the checkpoint says otherwise."""
        return self if self.resized is not None else replace(self, resized=int(max(self.size) / CROP_SHARE))

    @property
    def stretched(self) -> Frame:
        """Return the frame that stretches an image to the size, for crops that were made already."""
        return replace(self, resized=self.size)

    def resized_to(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which an image of this size is resized."""
        if not isinstance(self.resized, int):
            return self.resized or self.size
        longer = int(self.resized * max(height, width) / min(height, width))
        return (self.resized, longer) if height <= width else (longer, self.resized)

    def corner(self, height: int, width: int) -> tuple[int, int]:
        """Return (top, left) of the crop of a resized image; they are negative where black margins are added."""
        return (height - self.size[0]) // 2, (width - self.size[1]) // 2

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """Return images of floating-point values from 0 to 255, resized and cropped."""
        mode, wanted = RESAMPLING[self.resample], self.resized_to(*images_BCHW.shape[2:])
        made = F.interpolate(images_BCHW, wanted, mode=mode, antialias=mode != "nearest-exact").clamp(0, 255)
        top, left = self.corner(*wanted)
        right, bottom = self.size[1] - wanted[1] + left, self.size[0] - wanted[0] + top
        return F.pad(made, (-left, right, -top, bottom))

    def described(self) -> dict[str, Any]:
        """Return these values in the format of preprocessor_config.json."""
        resample = {"do_resize": True, "resample": self.resample}
        if self.resized is None or self.resized == self.size:
            return resample | {"size": _sides(self.size)}
        size = {"shortest_edge": self.resized} if isinstance(self.resized, int) else _sides(self.resized)
        return resample | {"size": size, "do_center_crop": True, "crop_size": _sides(self.size)}


def _sides(size: tuple[int, int]) -> dict[str, int]:
    return {"height": size[0], "width": size[1]}


def image_frame(path: Path, said: Mapping[str, Any], size: Any) -> Frame | None:
    """Return the frame that a preprocessing file describes; None where no size is known.

    size: the model's own image size, for a file without one. The file's `size` is the length of the shorter side where it is
    called so, and where it is one number beside a crop. `crop_pct` is the share of the shorter side that the crop keeps.
    Raises CheckpointError for invalid values.
    """
    resample = said.get("resample", BILINEAR)
    if resample not in RESAMPLING:
        raise CheckpointError(f"{path}: resample is {shown(resample)}; it must be one of {', '.join(map(str, RESAMPLING))}")
    first, crop = said.get("size"), said.get("crop_size") if said.get("do_center_crop") is not False else None
    if first is None:
        only = crop if crop is not None else size
        return None if only is None else Frame(_size(path, only), None, resample)
    own = _size(path, first)
    is_shorter_side = isinstance(first, Mapping) and "shortest_edge" in first
    if crop is not None:
        keeps_aspect = is_shorter_side or isinstance(first, int)
        return Frame(_size(path, crop), own[0] if keeps_aspect else own, resample)
    if (share := said.get("crop_pct")) is not None:
        if not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise CheckpointError(f"{path}: crop_pct is {shown(share)}; it must be above 0 and at most 1")
        return Frame(own, int(own[0] / share) if own[0] < LEAST_STRETCHED else own, resample)
    return Frame(own, own[0] if is_shorter_side else own, resample)


def _size(path: Path, value: Any) -> tuple[int, int]:
    if isinstance(value, Mapping):
        edge = value.get("shortest_edge")
        value = [value.get("height", edge), value.get("width", edge)]
    height, width = value if isinstance(value, list | tuple) and len(value) == 2 else (value, value)
    if type(height) is not int or type(width) is not int or not 1 <= min(height, width) <= max(height, width) <= 8192:
        raise CheckpointError(
            f"{path.parent}: the image size is {shown(value)}; it must be a number of pixels, or two of them"
        )
    return height, width
