"""Random changes to training images: crops of a padded image (CIFAR-100) or resized crops (ImageNet), and mirror images.

Shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.labelled import Labelled
from compress.classifiers.recipes import Augmentation
from engine.transformers_models.classifier_inputs import Examples

PADDING = 4
"""Pixels of padding around an image before a random crop (MoE-KD §5.1)."""
AREAS, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)
"""Limits of a resized crop: its share of the image's area, and its width over its height ("standard PyTorch practice")."""
ATTEMPTS = 10
"""Maximum number of crops that are drawn to find one that lies within the image."""


def training_examples(
    examples: Labelled,
    rows: Sequence[int],
    how: Augmentation,
    size: tuple[int, int] | None,
    generator: torch.Generator,
) -> Examples:
    """Return the examples of these rows, changed at random where they are images.

    size: (height, width) of resized crops; None for the size of the image that `examples.read` returns.
    """
    if not how.resizes or examples.whole is None:
        read = examples.read(rows)
        return augmented(read, how, generator) if isinstance(read, Tensor) else read
    if size is None:
        first = examples.whole(rows[:1])[0]
        size = examples.frame.size if examples.frame is not None else (first.shape[1], first.shape[2])
    return torch.stack([resized_crop(image, size, how.flips, generator) for image in examples.whole(rows)])


def augmented(images_BCHW: Tensor, how: Augmentation, generator: torch.Generator) -> Tensor:
    """Return each image padded, cropped to its size at random and, if allowed, mirrored with probability 1/2 (§5.1)."""
    if not how.crops:
        return images_BCHW
    count, _, height, width = images_BCHW.shape
    padded = F.pad(images_BCHW, (PADDING,) * 4)
    tops, lefts = (torch.randint(2 * PADDING + 1, (count,), generator=generator).tolist() for _ in range(2))
    mirrored = torch.rand(count, generator=generator).lt(0.5).tolist() if how.flips else [False] * count
    made = []
    for image, top, left, flips in zip(padded, tops, lefts, mirrored, strict=True):
        cut = image[:, top : top + height, left : left + width]
        made.append(cut.flip(-1) if flips else cut)
    return torch.stack(made)


def resized_crop(image_CHW: Tensor, size: tuple[int, int], flips: bool, generator: torch.Generator) -> Tensor:
    """Return a random part of an image, resized, uint8 [C, *size], and mirrored with probability 1/2 if allowed."""
    top, left, height, width = crop_box(image_CHW.shape[1], image_CHW.shape[2], generator)
    part = image_CHW[None, :, top : top + height, left : left + width].float()
    made = F.interpolate(part, size, mode="bilinear", antialias=True)[0].round().to(torch.uint8)
    return made.flip(-1) if flips and float(torch.rand((), generator=generator)) < 0.5 else made


def crop_box(height: int, width: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of a random crop.

    Its area is uniform within AREAS, and its ratio log-uniform within RATIOS. Where no drawn crop lies within the image, it
    is the largest one in the middle whose ratio is within the limits.
    """
    for _ in range(ATTEMPTS):
        share, slope, down, across = torch.rand(4, generator=generator).tolist()
        area = height * width * (AREAS[0] + share * (AREAS[1] - AREAS[0]))
        ratio = math.exp(math.log(RATIOS[0]) + slope * math.log(RATIOS[1] / RATIOS[0]))
        own_height, own_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < own_height <= height and 0 < own_width <= width:
            return int(down * (height - own_height + 1)), int(across * (width - own_width + 1)), own_height, own_width
    own_width = min(width, max(1, round(height * RATIOS[1])))
    own_height = min(height, max(1, round(width / RATIOS[0])))
    return (height - own_height) // 2, (width - own_width) // 2, own_height, own_width
