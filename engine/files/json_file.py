"""Strict JSON files: content is checked before it is used, and written content reads back unchanged."""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import CheckpointError, OutputError

MAX_JSON_BYTES = 100_000_000

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 160


class _Refused(ValueError):
    """Well-formed JSON whose meaning is ambiguous, such as an object with a duplicate key."""


def shown(value: object) -> str:
    """Return `value` quoted for an error message: on one line, and bounded in length and depth."""
    return _SHORT.repr(value)


@contextmanager
def reading(path: Path, what: str) -> Iterator[BufferedReader]:
    """Open a regular file for reading bytes; an OSError on opening or in the body becomes a CheckpointError.

    Anything but a regular file is refused before it is opened, because opening a pipe could block forever.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: {what} is not a regular file; replace it by the file itself")
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: {what} is missing; give a directory with a complete checkpoint") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CheckpointError(f"{path}: {what} cannot be read ({reason}); check the disk and permissions") from error


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError in the body, which writes `what` to `path`, into an OutputError that names both."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise OutputError(
            f"{path}: cannot write {what} ({reason}); make space there or give another output directory"
        ) from error


@contextmanager
def replacing(path: Path, what: str, suffix: str = "") -> Iterator[Path]:
    """Yield a temporary sibling of `path` to write to, and rename it to `path` when the body ends.

    `suffix`: the end of the sibling's name, for what reads it before it is renamed. Raises OutputError as `writing` does.
    The temporary file is removed if the body raises.
    """
    partial = path.with_name(f".{path.name}.partial{suffix}")
    try:
        with writing(path, what):
            yield partial
            partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of `pairs`. A duplicate key is refused, because JSON readers differ on which value wins."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _Refused(f"the key {shown(key)} occurs twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {shown(text)} is too large")
    return value


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in UTF-8 `data`.

    Raises CheckpointError, with a message that begins with `where`, for anything else: also for duplicate keys, NaN,
    infinities, and nesting beyond the interpreter's depth.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}"
    except (json.JSONDecodeError, _Refused) as error:
        reason = str(error)
    except RecursionError:
        reason = "nested too deeply"
    except ValueError:
        # The only ValueError left is the interpreter's limit on the digits of an integer.
        reason = "a number has too many digits"
    else:
        if isinstance(value, dict):
            return value
        reason = "its top level is not an object"
    raise CheckpointError(f"{where} is not valid JSON ({reason}); fetch or write the file again")


def load_json(path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in the file at `path`.

    `what` names the file in messages, such as "model configuration". Raises CheckpointError for anything that is not a
    JSON object of at most `MAX_JSON_BYTES` bytes.
    """
    with reading(path, what) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {what} is longer than {MAX_JSON_BYTES} bytes; fetch or write the file again")
    return parse_object(data, f"{path}: {what}")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as an indented JSON object with its keys in order: completely and synced to disk, or not at all.

    Raises OutputError if the file cannot be written, and ValueError (a caller's bug) for NaN or infinity.
    """
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    with replacing(path, "JSON") as partial, partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
