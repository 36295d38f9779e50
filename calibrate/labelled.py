"""Labeled examples: the data on which classifiers are distilled and evaluated.

A source is
- a folder of images with one subfolder per class, or such folders named `train` and `val`, `validation` or `test`;
- an .npz file of `images` (uint8 [N, H, W] or [N, H, W, channels]) and `labels` (integers), or of `x_train`, `y_train`,
  `x_test` and `y_test`;
- a .jsonl file of `text` and `label`, where a label is a name or a number;
- `digits`: the handwritten digits of scikit-learn, 1,797 gray images of 8×8 pixels, enlarged to 32×32.

Each example belongs to one split, which never changes. The split is given by the source itself, or else by a hash of
the example's content (for an image in a folder, of its path there).

Shape suffixes: N examples, B batch, C channels, H height, W width.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import DataError, OptionError
from engine.transformers_models.classifier_inputs import Examples
from engine.transformers_models.image_frame import Frame

DIGITS = "digits"
DIGIT_SIZE = 32
HELD_OUT_ONE_IN = 5
FOLDER_SIZE = (224, 224)
"""Height and width of images from a folder, where the model does not give a size."""
_HELD_OUT_NAMES = ("val", "validation", "test")
_GENERIC = "LABEL_"
"""Prefix of the names that transformers gives to unnamed classes."""
PARTS: dict[str, tuple[bool, ...]] = {"calibration": (False,), "held-out": (True,), "all": (False, True)}
"""By split, whether its examples are held out."""


@dataclass(frozen=True)
class Labelled:
    """Examples, which are read on demand, and their classes."""

    name: str
    what: str
    """The kind of the examples: "images" or "texts", for messages."""
    labels: Sequence[int | str]
    read: Callable[[Sequence[int]], Examples]
    """Reads the examples of the given rows: uint8 [B, C, H, W], or texts."""
    keys: Sequence[bytes]
    """The bytes whose hash decides the split of each example."""
    frame: Frame | None = None
    """How `read` makes the files of a folder images of one size; None for other sources."""
    whole: Callable[[Sequence[int]], list[Tensor]] | None = None
    """Reads images of the given rows as they are stored, uint8 [C, H, W], each of its own size; None for texts."""
    held_out: Sequence[bool] | None = None
    """Whether each example is held out, where the source gives the splits itself."""

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, split: str) -> Labelled:
        """Return the examples of one split of PARTS. Raises OptionError for another, and DataError where there are none."""
        if split not in PARTS:
            raise OptionError(f"split {split!r} is for text; examples have {', '.join(PARTS)}")
        own = self.held_out or [int.from_bytes(hashlib.sha256(key).digest()[:8]) % HELD_OUT_ONE_IN == 0 for key in self.keys]
        rows = [row for row, held in enumerate(own) if held in PARTS[split]]
        if not rows:
            raise DataError(f"{self.name}: none of its {len(self)} examples is in the {split} part; give more")
        return self.only(rows)

    def only(self, rows: Sequence[int]) -> Labelled:
        """Return the examples of these rows, in this order."""
        whole = self.whole
        return replace(
            self,
            labels=[self.labels[row] for row in rows],
            read=lambda own: self.read([rows[row] for row in own]),
            keys=[self.keys[row] for row in rows],
            whole=None if whole is None else lambda own: whole([rows[row] for row in own]),
            held_out=None if self.held_out is None else [self.held_out[row] for row in rows],
        )

    def numbers(self, class_names: Sequence[str]) -> Tensor:
        """Return the class index of each example in the model's numbering, int64 [N].

        Integer labels are the model's own class indices. Names are the model's names or, where the model has none, in
        alphabetical order. Raises DataError for classes that the model does not have.
        """
        by_name = {name: number for number, name in enumerate(class_names)}
        names = sorted({label for label in self.labels if isinstance(label, str)})
        if names and is_nameless(class_names):
            by_name = {name: number for number, name in enumerate(names)}
        found = [by_name.get(label, -1) if isinstance(label, str) else label for label in self.labels]
        wrong = [label for label, number in zip(self.labels, found, strict=True) if not 0 <= number < len(class_names)]
        if wrong:
            raise DataError(
                f"{self.name}: has class {wrong[0]!r:.80}, and the model knows {len(class_names)} classes, "
                f"{', '.join(class_names[:3])} and so on; give data of the model's classes"
            )
        return torch.tensor(found, dtype=torch.long)

    def fingerprint(self) -> str:
        """Return the SHA-256 digest over keys and labels, which identifies the examples."""
        digest = hashlib.sha256()
        for key, label in zip(self.keys, self.labels, strict=True):
            digest.update(hashlib.sha256(key).digest() + repr(label).encode())
        return digest.hexdigest()


def is_nameless(class_names: Sequence[str]) -> bool:
    """Whether the class names are only numbers."""
    return all(name == f"{_GENERIC}{number}" for number, name in enumerate(class_names))


def labelled(source: str, frame: Frame | None = None) -> Labelled:
    """Return the examples of a source. Raises DataError for a source that cannot be read.

    frame: how images from a folder become images of one size.
    """
    path = Path(source).expanduser()
    if source == DIGITS:
        return _digits()
    if path.is_dir():
        return _folder(path, (frame or Frame(FOLDER_SIZE)).for_files)
    if path.suffix == ".npz" and path.is_file():
        return _arrays(path)
    if path.suffix == ".jsonl" and path.is_file():
        return _texts(path)
    raise DataError(
        f"{source}: no examples with classes; give a folder of images, an .npz, a .jsonl of text and label, or '{DIGITS}'"
    )


def _digits() -> Labelled:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise OptionError("the digits need scikit-learn; install it with `pip install moe-compress[classifiers]`") from error
    found = load_digits()
    small_N1HW = torch.from_numpy(found.images).float()[:, None] * (255 / 16)
    images_N1HW = F.interpolate(small_N1HW, (DIGIT_SIZE, DIGIT_SIZE), mode="bilinear").round().to(torch.uint8)
    return _of_images(DIGITS, images_N1HW, found.target.tolist())


def _of_images(name: str, images_NCHW: Tensor, labels: Sequence[int], held_out: Sequence[bool] | None = None) -> Labelled:
    keys = [image.numpy().tobytes() for image in images_NCHW]
    return Labelled(
        name,
        "images",
        labels,
        lambda rows: images_NCHW[list(rows)],
        keys,
        whole=lambda rows: list(images_NCHW[list(rows)]),
        held_out=held_out,
    )


def _arrays(path: Path) -> Labelled:
    pairs = (("images", "labels"), ("x_train", "y_train"), ("x_test", "y_test"))
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for pair in pairs for name in pair if name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); give an .npz of arrays") from error
    own = [pair for pair in pairs if set(pair) <= set(found)]
    if own not in ([pairs[0]], list(pairs[1:])):
        raise DataError(f"{path}: needs arrays `images` and `labels`, or x_train, y_train, x_test and y_test")
    images, labels, held_out = [], [], []
    for images_name, labels_name in own:
        images.append(_image_array(path, images_name, found[images_name]))
        labels += _label_array(path, labels_name, found[labels_name], len(images[-1]))
        held_out += [images_name == "x_test"] * len(images[-1])
    if len({tuple(each.shape[1:]) for each in images}) > 1:
        raise DataError(f"{path}: x_train and x_test have images of different shapes; give both one shape")
    return _of_images(str(path), torch.cat(images), labels, held_out if len(own) > 1 else None)


def _image_array(path: Path, name: str, images: Any) -> Tensor:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise DataError(f"{path}: {name} is {images.dtype} {list(images.shape)}; give uint8 [N, H, W] or [N, H, W, 1 or 3]")
    if 0 in images.shape:
        raise DataError(f"{path}: {name} is empty; give images")
    tensor = torch.from_numpy(images)
    return tensor[:, None] if tensor.dim() == 3 else tensor.permute(0, 3, 1, 2).contiguous()


def _label_array(path: Path, name: str, labels: Any, count: int) -> list[int]:
    if not np.issubdtype(labels.dtype, np.integer) or labels.size != count:
        raise DataError(
            f"{path}: {name} is {labels.dtype} {list(labels.shape)}; give one integer for each of {count} images"
        )
    return [int(label) for label in labels.reshape(-1)]


def _texts(path: Path) -> Labelled:
    texts: list[str] = []
    labels: list[int | str] = []
    try:
        # not splitlines: JSON strings may contain other line separators
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); give a .jsonl in UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        text, label = _row(line, f"{path}:{number}")
        texts.append(text)
        labels.append(label)
    if not texts:
        raise DataError(f"{path}: is empty; give rows of `text` and `label`")
    keys = [text.encode() for text in texts]
    return Labelled(str(path), "texts", labels, lambda rows: [texts[row] for row in rows], keys)


def _row(line: str, where: str) -> tuple[str, int | str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON; give rows of `text` and `label`") from error
    text, label = (row.get("text"), row.get("label")) if isinstance(row, dict) else (None, None)
    if not isinstance(text, str) or isinstance(label, bool) or not isinstance(label, int | str):
        raise DataError(f"{where} needs `text`, a string, and `label`, a name or a number")
    return text, label


def _folder(path: Path, frame: Frame) -> Labelled:
    held = [path / name for name in _HELD_OUT_NAMES if (path / name).is_dir()]
    parts = [(path / "train", False), (held[0], True)] if held and (path / "train").is_dir() else [(path, False)]
    files: list[Path] = []
    labels: list[str] = []
    held_out: list[bool] = []
    for part, is_held in parts:
        for folder in sorted(each for each in part.iterdir() if each.is_dir() and not _is_hidden(each)):
            own = sorted(file for file in folder.rglob("*") if file.is_file() and not _is_hidden(file))
            files += own
            labels += [folder.name] * len(own)
            held_out += [is_held] * len(own)
    if not files:
        raise DataError(f"{path}: has no subfolders with images; give a folder of images for each class")
    keys = [file.relative_to(path).as_posix().encode() for file in files]

    def read(rows: Sequence[int]) -> Tensor:
        return torch.stack([_image(files[row], frame) for row in rows])

    def whole(rows: Sequence[int]) -> list[Tensor]:
        return [_image(files[row]) for row in rows]

    return Labelled(str(path), "images", labels, read, keys, frame, whole, held_out if len(parts) > 1 else None)


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _image(path: Path, frame: Frame | None = None) -> Tensor:
    """Read an image as uint8 [3, H, W]; in its own size without a frame."""
    try:
        from PIL import Image
    except ImportError as error:
        raise OptionError("image files need Pillow; install it with `pip install moe-compress[classifiers]`") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                pixels = image.convert("RGB")
                if frame is not None:
                    height, width = frame.resized_to(pixels.height, pixels.width)
                    pixels = pixels.resize((width, height), Image.Resampling(frame.resample))
                    top, left = frame.corner(height, width)
                    pixels = pixels.crop((left, top, left + frame.size[1], top + frame.size[0]))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as an image ({' '.join(str(error).split())[:200]}); remove it") from error
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous()
