"""Rows of published data sets: their fields, and the prompt and responses that they hold.

`FORMS` lists the known layouts. A row is a JSON object, and a file of rows is

- a .jsonl file with one row per line;
- a .json file with a list of rows, one row, or one row per line;
- a folder in which all files are .json files (the data set MATH has one for each problem).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.errors import DataError

TEXT_FIELD = "text"
"""A row with this field is plain text, whatever other fields it has."""
Section = tuple[str, str]
"""Title and content of a part of a prompt."""
ASSISTANT = "Assistant"
SHAREGPT_ROLES = (("human", "User"), ("gpt", ASSISTANT))
"""Roles and their titles."""


@dataclass(frozen=True)
class Row:
    """A prompt with its responses; either may be blank."""

    sections: tuple[Section, ...]
    """The parts of the prompt."""
    title: str
    """Title of the section of the response."""
    responses: tuple[str, ...]
    """Alternative responses. Models are trained on the first; ROUGE-L compares with all of them."""
    rest: tuple[Section, ...] = ()
    """Sections after the response, which belong to the text alone."""
    is_laid_out: bool = False
    """Whether the prompt is one section, which already contains the whole layout."""

    @property
    def response(self) -> str:
        """Return the first response; an empty text where there is none."""
        return self.responses[0] if self.responses else ""

    @property
    def question(self) -> str:
        """Return the sections and the title as JSON: the part of a row that decides its split."""
        return json.dumps([*self.sections, (self.title, "")])

    @property
    def contents(self) -> str:
        """Return the contents of the prompt, one below the other."""
        return "\n".join(content for _, content in self.sections)

    @property
    def prompt(self) -> str:
        """Return the prompt up to the response.

        Each section is a line `### Title:`, followed by its content, with an empty line between sections.
        """
        return self.contents if self.is_laid_out else _layout((*self.sections, (self.title, "")))

    @property
    def text(self) -> str:
        """Return the prompt, its first response, and the rest."""
        return "\n\n".join([self.prompt + self.response, *([_layout(self.rest)] if self.rest else [])])

    @property
    def missing(self) -> str | None:
        """Return the name of the part that is blank, or None."""
        if not self.contents.strip():
            return "prompt"
        return None if self.response.strip() else "response"


def _layout(sections: tuple[Section, ...]) -> str:
    return "\n\n".join(f"### {title}:\n{content}" for title, content in sections)


# The known forms


class Form(Protocol):
    """A layout of rows."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the fields by which the form is recognized."""

    def read(self, row: dict[str, Any], where: str) -> Row:
        """Return the prompt and responses of a row. `where` is its place, for errors."""


@dataclass(frozen=True)
class Fields:
    """One field for the instruction and one for the response, perhaps with a third one for the input."""

    instruction: str
    response: str
    context: str | None = None
    """Optional field of the input, without which the prompt has one section."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the fields by which the form is recognized."""
        return self.instruction, self.response

    def read(self, row: dict[str, Any], where: str) -> Row:
        """Return sections Instruction and Input (left out where it is empty), and the responses."""
        sections = [("Instruction", string(row, self.instruction, where))]
        if self.context is not None and row.get(self.context):
            sections.append(("Input", string(row, self.context, where)))
        return Row(tuple(sections), "Response", _strings(row, self.response, where))


@dataclass(frozen=True)
class LaidOut:
    """A prompt that contains its whole layout, so that none is added."""

    prompt: str
    response: str

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the fields by which the form is recognized."""
        return self.prompt, self.response

    def read(self, row: dict[str, Any], where: str) -> Row:
        """Return the prompt as it is, and the responses. MiniLLM's loader also reads `<n>` as a line end."""
        sections = (("", string(row, self.prompt, where).replace("<n>", "\n")),)
        return Row(sections, "", _strings(row, self.response, where), is_laid_out=True)


@dataclass(frozen=True)
class Conversation:
    """A list of messages, each with a role and its content."""

    messages: str
    role: str
    content: str
    titles: tuple[tuple[str, str], ...] = ()
    """Roles with titles of their own; every other role is capitalized."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the fields by which the form is recognized."""
        return (self.messages,)

    def read(self, row: dict[str, Any], where: str) -> Row:
        """Return the last message of the assistant, or the last message if it has none, as the response."""
        messages = row[self.messages]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise DataError(f"{where}: `{self.messages}` must be a list of objects with `{self.role}` and `{self.content}`")
        roles, contents = ([string(m, key, where) for m in messages] for key in (self.role, self.content))
        titles = dict(self.titles)
        sections = [(titles.get(role, role.capitalize()), own) for role, own in zip(roles, contents, strict=True)]
        answers = [place for place, (title, _) in enumerate(sections) if title == ASSISTANT]
        at = answers[-1] if answers else len(sections) - 1
        if at < 0:
            return Row((), ASSISTANT, ())
        title, response = sections[at]
        return Row(tuple(sections[:at]), title, (response,), tuple(sections[at + 1 :]))


FORMS: dict[str, Form] = {
    "MiniLLM": LaidOut("prompt", "output"),
    "Alpaca": Fields("instruction", "output", context="input"),
    "Dolly": Fields("instruction", "response", context="context"),
    "GSM8K": Fields("question", "answer"),
    "MATH": Fields("problem", "solution"),
    "pairs": Fields("source", "target", context="input"),
    "chat": Conversation("messages", "role", "content"),
    "ShareGPT": Conversation("conversations", "from", "value", SHAREGPT_ROLES),
}
"""Published layouts by name. The first one whose needed fields a row has is that of the row."""


def form_of(row: dict[str, Any]) -> Form | None:
    """Return the form of a row, or None for an unknown one."""
    return next((form for form in FORMS.values() if all(field in row for field in form.needed)), None)


def read_row(row: object, where: str) -> Row:
    """Return the prompt and responses of a row. Raises DataError for an unknown form, with the fields of the row."""
    row = _object(row, where)
    form = form_of(row)
    if form is None:
        known = ", ".join(f"{_quoted(each.needed)} ({name})" for name, each in FORMS.items())
        raise DataError(
            f"{where}: a row needs `{TEXT_FIELD}` for text, or for a prompt with its response {known}; this one has "
            f"{', '.join(f'`{key}`' for key in list(row)[:8]) or 'nothing'}"
        )
    return form.read(row, where)


def row_text(row: object, where: str) -> str:
    """Return the text of a row: its field `text` unchanged, or prompt and response."""
    row = _object(row, where)
    return string(row, TEXT_FIELD, where) if TEXT_FIELD in row else read_row(row, where).text


def _object(row: object, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object, and this is a {type(row).__name__}")
    return row


def _quoted(fields: tuple[str, ...]) -> str:
    return " and ".join(f"`{field}`" for field in fields)


def string(row: dict[str, Any], key: str, where: str) -> str:
    """Return a field that must be a string. Raises DataError for any other value, and for half of a surrogate pair."""
    return _checked(row.get(key), f"{where}: `{key}`", "a string")


def _strings(row: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Return the text of a field, or the texts of a list that are not blank."""
    value = row[key]
    if isinstance(value, list):
        texts = [_checked(each, f"{where}: an item of `{key}`", "a string") for each in value]
        return tuple(text for text in texts if text.strip())
    return (_checked(value, f"{where}: `{key}`", "a string or a list of strings"),)


def _checked(value: object, name: str, wanted: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} must be {wanted}, and is {type(value).__name__}")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{name} has half of a surrogate pair, which is not a character; write it as UTF-8")
    return value


# Files of rows


def read_objects(path: Path) -> Iterator[tuple[object, str]]:
    """Yield the rows of a file or folder as they are, each with its place. Raises DataError for an unreadable file."""
    for file in visible_files(path) if path.is_dir() else [path]:
        text = _read(file)
        whole = None if file.suffix == ".jsonl" else _whole(text, file)
        if whole is None:
            yield from _lines(text, file)
        elif isinstance(whole, list):
            yield from ((row, f"{file}, row {number}") for number, row in enumerate(whole, start=1))
        else:
            yield whole, str(file)


def visible_files(folder: Path) -> list[Path]:
    """Return all files below a folder in a fixed order, without hidden ones."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def has_rows(path: Path) -> bool:
    """Whether a path is a .jsonl or .json file, or a folder in which all files are .json files."""
    if path.is_dir():
        return bool(found := visible_files(path)) and all(file.suffix == ".json" for file in found)
    return path.is_file() and path.suffix in (".json", ".jsonl")


def first_object(path: Path) -> object:
    """Return the first row of a file or folder for which `has_rows` holds; None where it cannot be read."""
    if path.suffix == ".jsonl":  # the file may be long, so only its first line is read
        return _first_line(path)
    try:
        return next(read_objects(path), (None, ""))[0]
    except DataError:
        return None


def text_rows(path: Path, is_named: bool) -> list[tuple[object, str]] | None:
    """Return the rows of a .json file with their places, or None for a file that is read as plain text.

    Rows are objects with `text` or of a known form. A list of other objects is plain text too, unless the user has named
    the file, and then expects that its rows are read.
    """
    try:
        rows = list(read_objects(path))
    except DataError:
        return None
    first = rows[0][0] if rows else None
    if not isinstance(first, dict):
        return None
    is_known = TEXT_FIELD in first or form_of(first) is not None
    return rows if is_known or (is_named and len(rows) > 1) else None


def _first_line(path: Path) -> object:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            return json.loads(next((line for line in file if line.strip()), ""))
    except (OSError, ValueError, RecursionError):
        return None


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from error


def _whole(text: str, path: Path) -> Any:
    """Return the value of a .json file; None where it has one value on each of several lines."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        raise DataError(f"{path}: not JSON ({error}); give a list of rows, or one row per line") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); give a list of rows, or one row per line") from error


def _lines(text: str, path: Path) -> Iterator[tuple[object, str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield parse_line(line, where), where


def parse_line(line: str, where: str) -> object:
    """Return the value of one line of JSON. Raises DataError for any other line."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a line of JSON ({error}); each line must be one JSON object") from error
