"""The names by which the models of one server are asked for, and the models of a directory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoint.hub import is_hub_id, last_name
from engine.checkpoint.model_directory import DEMO, resolve
from engine.errors import OptionError
from engine.files.gguf_file import SUFFIX

_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
"""Names of the parts of a split GGUF file, except the first one, which stands for all."""


def model_names(models: Sequence[str], directory: Path | None) -> dict[str, str]:
    """Return the given models and then those of a directory, in order, by name: the last part of a path or hub id.

    Raises OptionError if two given models have one name, and if there is no model; a model of the directory whose name
    is taken is left out. Files are not read.
    """
    named: dict[str, str] = {}
    for model in models:
        name = last_name(model) or Path(model).resolve().name
        if name in named:
            raise OptionError(
                f"two models have the name {name}: {named[name]} and {model}; give one by a path with another last part"
            )
        named[name] = model
    if directory is not None:
        for path in models_in(directory):
            named.setdefault(path.name, str(path))
    if not named:
        raise OptionError(f"{directory} has no directory with a config.json and no GGUF file; give another --models-dir")
    return named


def models_in(directory: Path) -> list[Path]:
    """Return the models directly in a directory, sorted: directories with a config.json, and GGUF files.

    Raises OptionError if it cannot be read.
    """
    try:
        found = sorted(directory.iterdir())
    except OSError as error:
        raise OptionError(f"models-dir {directory} cannot be read: {error.strerror or error}; give a directory") from error
    return [path for path in found if not path.name.startswith(".") and _is_model(path)]


def _is_model(path: Path) -> bool:
    if path.name.endswith(SUFFIX):
        return path.is_file() and not _LATER_PART.fullmatch(path.name)
    return (path / "config.json").is_file()


def check_local(models: Sequence[str]) -> None:
    """Raise CheckpointError for a model that is neither on this machine nor a hub id. Nothing is downloaded."""
    for model in models:
        if model != DEMO and (Path(model).exists() or not is_hub_id(model)):
            resolve(model)
