"""Published data sets are read as they are published: fields, files, several references, rows that are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calibrate.instructions import is_instructions, read_rows
from calibrate.pairs import text_pairs
from calibrate.rows import FORMS, Row, read_row
from calibrate.text import load_documents
from engine.errors import DataError

LAID_OUT = "Below is an instruction.\n\n### Instruction:\nAdd.\n\n### Response:\n"
PUBLISHED: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "MiniLLM": (
        {"instruction": "Add.", "prompt": LAID_OUT.replace("\n", "<n>"), "input": "", "output": ["3", "three", " "]},
        LAID_OUT,
        ("3", "three"),
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n",
        ("3",),
    ),
    "Dolly": (
        {"instruction": "Who?", "context": "Ada was.", "response": "Ada", "category": "closed_qa"},
        "### Instruction:\nWho?\n\n### Input:\nAda was.\n\n### Response:\n",
        ("Ada",),
    ),
    "GSM8K": (
        {"question": "1 + 2?", "answer": "1 + 2 = 3\n#### 3"},
        "### Instruction:\n1 + 2?\n\n### Response:\n",
        ("1 + 2 = 3\n#### 3",),
    ),
    "MATH": (
        {"problem": "1 + 2?", "level": "Level 1", "type": "Algebra", "solution": "$\\boxed{3}$"},
        "### Instruction:\n1 + 2?\n\n### Response:\n",
        ("$\\boxed{3}$",),
    ),
    "pairs": ({"source": "a", "target": "b"}, "### Instruction:\na\n\n### Response:\n", ("b",)),
    "chat": (
        {"messages": [{"role": role, "content": f"I am {role}."} for role in ("system", "user", "assistant")]},
        "### System:\nI am system.\n\n### User:\nI am user.\n\n### Assistant:\n",
        ("I am assistant.",),
    ),
    "ShareGPT": (
        {"id": "x", "conversations": [{"from": f, "value": f + n} for n in "12" for f in ("human", "gpt")]},
        "### User:\nhuman1\n\n### Assistant:\ngpt1\n\n### User:\nhuman2\n\n### Assistant:\n",
        ("gpt2",),
    ),
}
"""A row of each form as it is published, its prompt and its responses."""


def test_every_form_has_an_example() -> None:
    assert set(PUBLISHED) == set(FORMS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows(name: str, tmp_path: Path) -> None:
    """A form is read from lines, from a list, from one file for each row, and as text for calibration."""
    published, prompt, responses = PUBLISHED[name]
    row = read_row(published, "here")
    assert (row.prompt, row.responses) == (prompt, responses)
    other = json.loads(json.dumps(published).replace(json.dumps(responses[0])[1:-1], "another"))
    rows = [published, other]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8-sig")
    (tmp_path / "folder" / "algebra").mkdir(parents=True)
    for number, each in enumerate(rows):
        (tmp_path / "folder" / "algebra" / f"{number}.json").write_text(json.dumps(each))
    expected = [row, read_row(other, "there")]
    for source in ("a.jsonl", "list.json", "lines.json", "folder"):
        path = str(tmp_path / source)
        assert is_instructions(path) and read_rows(path) == (expected, 0), source
        assert sorted(load_documents(path)) == sorted(each.text for each in expected), source
        pairs = [pair for own in text_pairs(path).values() for pair in own]
        assert sorted(pairs) == sorted((each.contents, each.response) for each in expected), source
    assert expected[0].text == prompt + responses[0]


def test_unknown_fields_are_named_with_the_known_forms(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([{"frage": "?", "antwort": "!"}] * 2))
    with pytest.raises(DataError, match=r"list\.json, row 1: .*this one has `frage`, `antwort`$") as raised:
        list(load_documents(str(tmp_path / "list.json")))
    assert all(f"({name})" in str(raised.value) for name in FORMS)
    assert all(f"`{field}`" in str(raised.value) for form in FORMS.values() for field in form.needed)


def test_the_last_message_of_the_assistant_is_the_response() -> None:
    turns = [{"from": speaker, "value": speaker} for speaker in ("human", "gpt", "human")]
    row = read_row({"conversations": turns}, "here")
    assert (row.contents, row.responses) == ("human", ("gpt",))
    assert row.text == "### User:\nhuman\n\n### Assistant:\ngpt\n\n### User:\nhuman"
    alone = read_row({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "here")
    assert (alone.contents, alone.responses) == ("a", ("b",))


def test_rows_without_a_prompt_or_a_response_are_left_out_and_counted(tmp_path: Path) -> None:
    """Alpaca has rows with an empty output, and ShareGPT conversations without any message."""
    path = tmp_path / "a.json"
    rows: list[dict[str, Any]] = [
        {"instruction": "Add.", "input": "", "output": ""},
        {"instruction": "Sing.", "input": "", "output": "La."},
        {"conversations": []},
        {"instruction": "Sing.", "output": [" "]},
    ]
    path.write_text(json.dumps(rows))
    assert read_rows(str(path)) == ([Row((("Instruction", "Sing."),), "Response", ("La.",))], 3)
    path.write_text(json.dumps(rows[:1]))
    with pytest.raises(DataError, match=r"a\.json, row 1: has no response; give rows with a prompt and a response"):
        read_rows(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"question": "?", "answer": 3}]', "row 1: `answer` must be a string or a list of strings, and is int"),
        ('[{"question": "?", "answer": ["3", 4]}]', "row 1: an item of `answer` must be a string, and is int"),
        ('[{"question": "?", "answer": "3"}, 5]', "row 2: a row must be a JSON object, and this is a int"),
        ('[{"question": "?", ', r"a\.json: not JSON"),
        ('{"question": "?", "answer": "3"}\n{"question"', "line 2: not a line of JSON"),
        ("[]", "holds no row"),
        ('[{"conversations": "hi"}]', "must be a list of objects with `from` and `value`"),
    ],
)
def test_damaged_files_are_refused_with_their_place(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_rows(str(tmp_path / "a.json"))


def test_other_json_files_are_plain_text(tmp_path: Path) -> None:
    """Settings in a folder of documents stay text; a folder with other files than .json is one of texts."""
    (tmp_path / "a.json").write_text('{"name": "settings"}')
    (tmp_path / "b.json").write_text('[{"name": 1}, {"name": 2}]')
    (tmp_path / "c.json").write_text('[{"question": "?", "answer": "3"}]')
    (tmp_path / "d.txt").write_text("words")
    texts = {
        '{"name": "settings"}',
        '[{"name": 1}, {"name": 2}]',
        "### Instruction:\n?\n\n### Response:\n3",
        "words",
    }
    assert set(load_documents(str(tmp_path))) == texts
    assert list(load_documents(str(tmp_path / "a.json"))) == ['{"name": "settings"}']
    assert not is_instructions(str(tmp_path)) and not is_instructions(str(tmp_path / "a.json"))
