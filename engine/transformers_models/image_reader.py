"""The processor of an image-and-text model: images and a text become token ids and the model's further inputs.

It is the checkpoint's own, made by transformers from the files of the directory alone. Parts of a processor that read video
or sound are left out, because they need packages that images do not.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.chat_template import DEFAULT_TEMPLATE, render
from engine.checkpoint.tokenizer import load_tokenizer_of
from engine.errors import CheckpointError, CompressError, OptionError, UnsupportedError
from engine.files.json_file import load_json, shown
from engine.transformers_models.transformers_model import quiet_transformers

_IMAGE_KIND = 1
"""Kind of an image's tokens, where a processor says the kinds; text has 0, and video and sound have others."""
PREPROCESSOR, PROCESSOR, TOKENIZER = "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"
VISION = "vision_config"
"""Key of the vision part in config.json, the same in all families of transformers."""
Part = Mapping[str, Any]


class ImagePrompt(NamedTuple):
    """A prompt with images."""

    token_ids: list[int]
    """With as many image tokens for each image as the model has features of it."""
    inputs: dict[str, Tensor]
    """Inputs of the model's forward beside the token ids, by name: pixels, and what says where they belong."""


def has_vision(raw: Part) -> bool:
    """Return whether config.json describes a part that reads images."""
    parts = (raw, *(value for value in raw.values() if isinstance(value, dict)))
    return any(isinstance(part.get(VISION), dict) for part in parts)


def check_vision(directory: Path) -> None:
    """Raise UnsupportedError for a model without a part that reads images."""
    raw = load_json(directory / "config.json", "model config") if directory.is_dir() else {}
    if not has_vision(raw):
        family = f"a model of the family {shown(raw.get('model_type'))}" if raw else "a GGUF file"
        raise UnsupportedError(
            f"{directory}: {family} without a vision part ({VISION} in config.json) reads text only; leave out the images, "
            "or take an image-and-text model"
        )


class ImageReader:
    """A checkpoint's own processor, with its chat template."""

    def __init__(self, directory: Path, vocabulary: int) -> None:
        """Raises CheckpointError for files that are missing or damaged, UnsupportedError and OptionError for a processor
        that cannot be made here."""
        check_vision(directory)
        self.directory = directory
        tokenizer = load_tokenizer_of(directory, vocabulary)
        self._processor = _processor(directory, tokenizer)
        self.image_token: str | None = getattr(self._processor, "image_token", None)
        """The text in which a prompt has an image's place; None if the processor does not say."""
        if self.image_token is not None and not (isinstance(self.image_token, str) and self.image_token):
            raise CheckpointError(f"{directory}: image_token is {shown(self.image_token)}; it must be the text of a token")
        self.template = _template(directory) or _plain(tokenizer.chat_template)
        """The chat template; None for a model without one."""
        named = tokenizer.special_tokens_map.items()
        self._special_tokens = {name: value for name, value in named if isinstance(value, str)}

    def prepare(self) -> None:
        """Read a small image, so that the first one does not wait for what reading imports."""
        from PIL import Image

        with suppress(CompressError):  # some processors take no image as small as this
            self.prompt("", [Image.new("RGB", (64, 64))])

    def prompt(self, text: str, images: Sequence[Any]) -> ImagePrompt:
        """Return a user's question about images, ready for the answer; a model without a chat template continues the text.

        A text that has image tokens itself is taken as it is. images: of Pillow. Must run in the main thread of its process.
        Raises OptionError for a text that does not fit the images.
        """
        if self.image_token is not None and self.image_token in text:
            return self.read(text, images, add_special_tokens=True)
        if self.template is None:
            return self.read(f"{self._token}\n" * len(images) + text, images, add_special_tokens=True)
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        return self.conversation(self.conversation_text([{"role": "user", "content": parts}]), images)

    def conversation_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of messages, ready for the answer. Contents are texts, or lists of parts of type text and image.

        tools, variables: as for `chat_template.render`. Must run in the main thread. Raises OptionError for messages that
        the template refuses.
        """
        if self.template is None:
            messages = [{**message, "content": self._flat(message.get("content"))} for message in messages]
        return render(self.template or DEFAULT_TEMPLATE, messages, self._special_tokens, tools, variables)

    def conversation(self, text: str, images: Sequence[Any]) -> ImagePrompt:
        """Return the prompt of a text from `conversation_text`. images: of Pillow, in the order of their parts.

        Raises OptionError as `read` does.
        """
        return self.read(text, images, add_special_tokens=self.template is None)

    def read(self, text: str, images: Sequence[Any], *, add_special_tokens: bool) -> ImagePrompt:
        """Return the token ids of a text with an image token for each image, and the inputs of the images.

        Raises OptionError unless there are as many image tokens as images, and for an image that the processor refuses.
        """
        if self.image_token is not None and (found := text.count(self.image_token)) != len(images):
            raise OptionError(
                f"image tokens in the prompt: {found} ({self.image_token}), for images: {len(images)}; leave that token out "
                "of the text, or give as many images"
            )
        with quiet_transformers():
            try:
                made = self._processor(
                    text=[text], images=list(images), add_special_tokens=add_special_tokens, return_tensors="pt"
                )
                inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
                ids = [int(token) for token in inputs.pop("input_ids")[0]]
            except Exception as error:  # processors raise many kinds for images that they cannot take
                raise OptionError(
                    f"the model's image processor cannot take these images: {_reason(error)}; give others"
                ) from error
        kinds_1L = inputs.get("mm_token_type_ids")
        if kinds_1L is not None and bool((kinds_1L > _IMAGE_KIND).any()):
            raise OptionError("the text has tokens of video or of sound, which are not read; leave them out")
        if _runs(kinds_1L) < len(images):
            raise OptionError(
                "images follow each other with no text between them, and the model cannot tell them apart; add some"
            )
        return ImagePrompt(ids, inputs)

    @property
    def _token(self) -> str:
        if self.image_token is None:
            raise OptionError(
                f"{self.directory}: the model has no chat template, and its processor does not say which token an image "
                "has; give a chat_template.jinja"
            )
        return self.image_token

    def _flat(self, content: Any) -> Any:
        """Return the text of parts, with image tokens."""
        if not isinstance(content, list):
            return content
        return "".join(f"{self._token}\n" if part["type"] == "image" else part["text"] for part in content)


def _processor(directory: Path, tokenizer: Any) -> Any:
    """Return the processor of a directory, without parts for video and sound."""
    said = {name: _read(directory / name) for name in (PROCESSOR, PREPROCESSOR, TOKENIZER)}
    if not said[PREPROCESSOR] and not isinstance(said[PROCESSOR].get("image_processor"), dict):
        raise CheckpointError(
            f"{directory}: has no {PREPROCESSOR}, which says how images are read; copy it from the model's own directory"
        )
    family = load_json(directory / "config.json", "model config")
    with quiet_transformers():
        try:
            whole = _processor_class(directory, family, said)
            parts = {"tokenizer": tokenizer, "image_processor": _image_processor(directory)}
            return _without_others(whole)(**_arguments(whole, parts, said[PROCESSOR]))
        except CompressError:
            raise
        except Exception as error:  # any exception of transformers for files that it cannot use
            if find_spec("torchvision") is None and "torchvision" in str(error).lower():
                raise OptionError(
                    f"{directory}: the image processor of this family needs the package torchvision, which is not "
                    "installed: pip install torchvision"
                ) from error
            raise CheckpointError(
                f"{directory}: transformers cannot make the processor of images ({_reason(error)}); copy the files of the "
                "model's own directory"
            ) from error


def _read(path: Path) -> Part:
    return load_json(path, "image preprocessing") if path.is_file() else {}


def _image_processor(directory: Path) -> Any:
    if find_spec("PIL") is None:
        from engine.files.image_file import EXTRA

        raise OptionError(EXTRA)
    from transformers import AutoImageProcessor

    loader: Any = AutoImageProcessor
    return loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _processor_class(directory: Path, config: Part, said: Mapping[str, Part]) -> Any:
    """Return transformers' class for the family. said: the files that describe processors, by name.

    Raises UnsupportedError for a family without one, and for files that name a class of another family, before anything is
    made: constructors of some classes download what a file tells them to.
    """
    from transformers.models.auto import image_processing_auto, processing_auto

    auto: Any = processing_auto
    images: Any = image_processing_auto
    family = config.get("model_type")
    name = auto.PROCESSOR_MAPPING_NAMES.get(family)
    found = None if name is None else auto.processor_class_from_name(name)
    if not (isinstance(found, type) and hasattr(found, "get_attributes")):
        raise UnsupportedError(
            f"{directory}: transformers has no processor of images for the family {shown(family)}, and code of a directory "
            "is never run; leave out the images"
        )
    alike = [other for other, whole in auto.PROCESSOR_MAPPING_NAMES.items() if whole == name]
    own = {one for other in alike for one in images.IMAGE_PROCESSOR_MAPPING_NAMES.get(other, {}).values() if one}
    allowed = {name, *(_plain_name(one) for one in own)}
    for file, key, value in _named_classes(config, said):
        if _plain_name(value) not in allowed:
            raise UnsupportedError(
                f"{directory}: {file} names {key} {shown(value)}, which is not of the family {shown(family)}; copy the file "
                "of the model's own directory"
            )
    return found


def _named_classes(config: Part, said: Mapping[str, Part]) -> Iterator[tuple[str, str, Any]]:
    """Yield the file, the key and the value of every entry that transformers would take a class from."""
    nested = said[PROCESSOR].get("image_processor")
    parts = [*said.items(), (PROCESSOR, nested if isinstance(nested, dict) else {}), ("config.json", config)]
    for file, part in parts:
        for key in ("processor_class", "image_processor_type", "feature_extractor_type"):
            if part.get(key) is not None:
                yield file, key, part[key]


def _plain_name(name: Any) -> str:
    """Return the name of a class of image processors without its backend."""
    plain = str(name).replace("FeatureExtractor", "ImageProcessor")
    return plain.removesuffix("Fast").removesuffix("Pil")


def _arguments(whole: Any, parts: Part, said: Part) -> dict[str, Any]:
    """Return the arguments of a processor: its parts, None for those that are left out, and the settings in its file."""
    accepted = inspect.signature(whole.__init__).parameters
    own = whole.get_attributes()
    settings = {key: said[key] for key in said if key in accepted and key not in (*own, "chat_template", "audio_tokenizer")}
    return settings | {name: parts.get(name) for name in own}


def _without_others(whole: Any) -> Any:
    """Return a subclass of a processor's class whose parts may be None."""
    check: Callable[..., Any] = whole.check_argument_for_proper_class

    def checked(self: Any, name: str, part: Any) -> Any:
        return None if part is None else check(self, name, part)

    return type(whole.__name__, (whole,), {"check_argument_for_proper_class": checked})


def _template(directory: Path) -> str | None:
    """Return the chat template beside the processor, from the first file that has one."""
    own = directory / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    files = (directory / "chat_template.json", directory / PROCESSOR)
    return next((found for path in files if (found := _plain(_read(path).get("chat_template")))), None)


def _plain(template: Any) -> str | None:
    template = template.get("default") if isinstance(template, dict) else template
    return template if isinstance(template, str) and template else None


def _runs(kinds_1L: Tensor | None) -> float:
    """Return how many runs of tokens of images there are; without kinds of tokens, any number."""
    if kinds_1L is None:
        return math.inf
    is_image_L = (kinds_1L[0] != 0).int()
    return int(is_image_L[:1].sum() + (is_image_L.diff() == 1).sum())


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def in_dtype(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the inputs of a model that computes in a dtype; only real numbers are converted."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
