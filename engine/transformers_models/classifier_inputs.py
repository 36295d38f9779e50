"""Preprocessing of images and texts for classifiers.

Shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError, DataError
from engine.files.json_file import load_json, shown
from engine.transformers_models.image_frame import Frame, image_frame

PREPROCESSOR = "preprocessor_config.json"
MIDDLE = (0.5,)
"""Default mean and standard deviation of pixels for a checkpoint without PREPROCESSOR."""
SMALL_SIZE = (32, 32)
"""Default image size for a model that accepts any size, if there are no images yet."""
Examples = Tensor | Sequence[str]
"""uint8 images [B, C, H, W], or texts."""


@dataclass(frozen=True)
class ImageInputs:
    """Preprocessing of images to normalized pixels of one size."""

    channels: int
    frame: Frame | None
    """Size of the model's images, and how an image becomes one of that size; None for the size of the given images."""
    mean: tuple[float, ...] = MIDDLE
    deviation: tuple[float, ...] = MIDDLE

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width); None for the size of the given images."""
        return None if self.frame is None else self.frame.size

    @property
    def of_crops(self) -> ImageInputs:
        """Return the preprocessing of random crops, which are not cropped again."""
        return self if self.frame is None else replace(self, frame=self.frame.stretched)

    def __call__(self, images: Examples) -> dict[str, Tensor]:
        """Return `pixel_values`, float32 [B, channels, H, W]. Other numbers of channels are averaged and repeated."""
        if not isinstance(images, Tensor):
            raise DataError("these are texts, and the model classifies images; give other --data")
        pixels_BCHW = images.float()
        if pixels_BCHW.shape[1] != self.channels:
            pixels_BCHW = pixels_BCHW.mean(dim=1, keepdim=True).expand(-1, self.channels, -1, -1)
        if self.frame is not None and tuple(pixels_BCHW.shape[2:]) != self.size:
            pixels_BCHW = self.frame(pixels_BCHW)
        mean, deviation = (
            torch.tensor(values, device=images.device).view(1, -1, 1, 1) for values in (self.mean, self.deviation)
        )
        return {"pixel_values": (pixels_BCHW / 255 - mean) / deviation}

    def described(self, frame: Frame) -> dict[str, Any]:
        """Return these values in the format of PREPROCESSOR, with the frame by which images were read."""
        return {
            **frame.described(),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean) * (self.channels // len(self.mean)),
            "image_std": list(self.deviation) * (self.channels // len(self.deviation)),
        }


@dataclass(frozen=True)
class TextInputs:
    """Tokenization of texts, padded on the right to the longest text of the batch."""

    tokenizer: Any
    length: int
    """Maximum number of tokens; longer texts are truncated."""
    pad: int

    def __call__(self, texts: Examples) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask`, int64 [B, tokens]."""
        if isinstance(texts, Tensor):
            raise DataError("these are images, and the model classifies texts; give other --data")
        try:
            rows = self.tokenizer(list(texts), truncation=True, max_length=self.length, verbose=False)["input_ids"]
        except Exception as error:  # tokenizers raises plain Exception for incomplete files
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"the model's tokenizer cannot read these texts: {reason}; take another model") from error
        longest = max(1, *map(len, rows))
        ids = torch.tensor([row + [self.pad] * (longest - len(row)) for row in rows])
        real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": real}


def image_inputs(directory: Path, config: Any) -> ImageInputs:
    """Return the preprocessing in PREPROCESSOR, with the image size of config.json where that has none.

    Raises CheckpointError for invalid values.
    """
    channels, path = int(getattr(config, "num_channels", 3)), directory / PREPROCESSOR
    said = load_json(path, "image preprocessing") if path.is_file() else {}
    frame = image_frame(path, said, getattr(config, "image_size", None))
    if said.get("do_normalize") is False:
        return ImageInputs(channels, frame, (0.0,), (1.0,))
    mean, deviation = (_numbers(path, said, key, channels) for key in ("image_mean", "image_std"))
    if not all(value > 0 for value in deviation):
        raise CheckpointError(f"{path}: image_std is {shown(said['image_std'])}; its numbers must be above 0")
    return ImageInputs(channels, frame, mean, deviation)


def _numbers(path: Path, said: Mapping[str, Any], key: str, channels: int) -> tuple[float, ...]:
    value = said.get(key, MIDDLE)
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) and abs(each) < 1e9 for each in values)
    if not numbers or len(values) not in (1, channels):
        raise CheckpointError(
            f"{path}: {key} is {shown(value)}; it must be a number, or one for each of {channels} channels"
        )
    return values
