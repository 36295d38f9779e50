"""The words of the project: no phrase of the list below, and American spelling, in documents, docstrings and messages.

`SOURCES` names what is read besides the Markdown files: folders and files with Python code. From these the test reads
docstrings and comments, and string constants that hold a space (messages and help texts). Text between backticks and flags
such as `--optimiser` are names, which are frozen, and are not read.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES: tuple[str, ...] = ("engine", "compress", "calibrate", "cli.py", "tests", "benchmarks", "examples", "docs")
"""Folders and files whose Python code is read."""
PHRASES = re.compile(
    r"\bfew(er)? bits\b|\b(is|are) not our engine\b|\btransformers has no class\b",
    re.IGNORECASE,
)
BRITISH = re.compile(
    r"\b\w*(?:(?:quanti|normali|seriali|initiali|vectori|recogni|summari|tokeni)s(?:e|ing|ation)|(?:optimi|organi)s(?:e|ing|ation)"
    r"|artefact|behaviour|favour|colour|neighbour|honour|licence|modelling)\w*|\bcentre[sd]?\b",
    re.IGNORECASE,
)
NAMES = re.compile(r"`[^`]*`|--[\w-]+|https?://\S+|\]\([^)]*\)")
"""Parts of a text that are names."""
NO_OPENING = re.compile(r"(Of|What|The same)\b")
"""A docstring or comment that begins so names no subject."""
NO_SENTENCE = re.compile(r"(Of|What)\s")
"""A sentence in a document that begins so is allowed only as a question."""


class Text(NamedTuple):
    """One piece of prose and its first line."""

    line: int
    words: str
    opens: bool = False
    """Whether it is a docstring or comment, whose first words count."""


def markdown_files() -> list[Path]:
    """Return all documents. The command reference is made of help texts and is read together with cli.py."""
    found = [
        *ROOT.glob("*.md"),
        *(path for folder in ("docs", "examples", "engine") for path in (ROOT / folder).rglob("*.md")),
    ]
    return sorted(path for path in found if "cli.py" in SOURCES or path != ROOT / "docs" / "cli.md")


def source_files() -> list[Path]:
    """Return the Python files of SOURCES, except this one, which quotes the list."""
    paths = [ROOT / name for name in SOURCES]
    found = [path for place in paths for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    return [path for path in found if path != Path(__file__).resolve()]


def paragraphs(markdown: str) -> Iterator[Text]:
    """Yield paragraphs, list items, headings and table rows, without code blocks; wrapped lines are joined."""
    start, lines, is_code = 1, list[str](), False
    for number, line in enumerate([*markdown.splitlines(), ""], start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        begins = re.match(r"\s*([-*] |\d+\. |\||#)", line) is not None
        if not line.strip() or begins or line.lstrip().startswith("```") or is_code:
            if lines:
                yield Text(start, " ".join(lines))
            lines = []
        if line.strip() and not is_code and not line.startswith("    ") and not line.lstrip().startswith("```"):
            if not lines:
                start = number
            lines.append(line.strip())


def prose_of(source: str) -> Iterator[Text]:
    """Yield docstrings, comments, and string constants that hold a space."""
    docstrings, nodes = set(), list(ast.walk(ast.parse(source)))
    for node in nodes:
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(statement.value)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(node.lineno, node.value, opens=node in docstrings)
    previous = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string.lstrip("#: "), opens=token.start[0] != previous + 1)
            previous = token.start[0]


def plain(words: str) -> str:
    """Return the text without names. A link keeps its words."""
    return NAMES.sub(" ", words)


def faults(text: Text) -> Iterator[str]:
    """Yield the phrases and spellings in a text that are not allowed."""
    yield from (match[0] for pattern in (PHRASES, BRITISH) for match in pattern.finditer(plain(text.words)))
    if text.opens and NO_OPENING.match(text.words):
        yield text.words.split("\n")[0][:60]


def openings(paragraph: str) -> Iterator[str]:
    """Yield sentences of a paragraph or list item that begin with "Of" or "What" and are no questions."""
    if paragraph.startswith(("#", "|")):
        return
    bare = re.sub(r"^([-*]|\d+\.) |[*_\[\]]", "", paragraph)
    for sentence in re.split(r"(?<=[.!?])\s+", bare):
        if NO_SENTENCE.match(sentence) and not sentence.rstrip().endswith("?"):
            yield sentence[:60]


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_have_plain_words(path: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.line}: {fault}"
        for text in paragraphs(path.read_text(encoding="utf-8"))
        for fault in (*faults(text), *openings(text.words))
    ]
    assert not found


def test_sources_have_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.line}: {fault}"
        for path in source_files()
        for text in prose_of(path.read_text(encoding="utf-8"))
        for fault in faults(text)
    ]
    assert not found


@pytest.mark.parametrize(
    "page",
    [
        "Weights of few\nbits are small.",
        "It is compared with what is not our engine.",
        "A family that\ntransformers has no class of.",
        "Of each layer it keeps one.",
        "It ends. What is left is written.",
        "- What is left is written.",
        "The quantised model.",
        "| a table | with colours |",
    ],
)
def test_faults_of_documents_are_found(page: str) -> None:
    assert [fault for text in paragraphs(page) for fault in (*faults(text), *openings(text.words))]


@pytest.mark.parametrize(
    "page",
    [
        "What is left? Nothing.",
        "## What was tried",
        "Use `normalised` and `--optimiser adamw`, or --optimiser sgd.",
        "```console\n$ the colours of code\n```",
        "    colours = 3",
        "An optimistic organism.",
    ],
)
def test_names_and_questions_are_allowed(page: str) -> None:
    assert not [fault for text in paragraphs(page) for fault in (*faults(text), *openings(text.words))]


@pytest.mark.parametrize(
    "code",
    [
        '"""Of a layer: its experts."""',
        'def f():\n    """What a run costs."""',
        'x = 1\n"""The same for y."""',
        "# What follows is slow.",
        'raise ValueError(f"{x} has few bits")',
        'print("normalised weights")',
    ],
)
def test_faults_of_sources_are_found(code: str) -> None:
    assert [fault for text in prose_of(code) for fault in faults(text)]


def test_code_is_not_prose() -> None:
    code = 'x = {"normalised": colours}\n# the bits of `optimiser`\ny = "Of this message"\n'
    assert not [fault for text in prose_of(code) for fault in faults(text)]
