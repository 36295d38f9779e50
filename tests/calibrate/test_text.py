"""Sources of text: their content, order and splits, and how bad sources are refused."""

import json
import sys
import types
from typing import get_args

import pytest
import torch

from calibrate import text
from calibrate.text import Split, belongs, load_documents, split_of, token_batches
from engine.errors import DataError, OptionError


class Words:
    """Whitespace tokenizer: the id of a word is its rank by first occurrence, from 1. It counts the calls."""

    def __init__(self, eos_token_id=0):
        self.eos_token_id = eos_token_id
        self.ids = {}
        self.calls = 0

    def __call__(self, text, *, add_special_tokens, verbose):
        assert not add_special_tokens
        self.calls += 1
        return {"input_ids": [self.ids.setdefault(word, len(self.ids) + 1) for word in text.split()]}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    """A folder of 60 one-line files in two levels, with entries that must be ignored: hidden, binary, caches, empty."""
    for number in range(60):
        folder = tmp_path / f"part{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02}.txt").write_text(f"document {number} has nine words in it all told\n")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.txt").write_text("cached")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "empty.txt").write_text(" \n")
    return str(tmp_path)


# Sources


def test_text_file_is_cut_at_line_ends_and_loses_nothing(tmp_path):
    lines = [f"line {number} of the file, with a letter that takes two bytes: é\r\n" for number in range(3000)]
    path = tmp_path / "a.txt"
    path.write_bytes("".join(lines).encode())
    documents = list(load_documents(str(path)))
    assert len(documents) > 20
    assert all(document.endswith("\n") for document in documents)
    assert max(len(document.encode()) for document in documents) < text.DOCUMENT_BYTES + 100
    assert sorted("".join(documents).splitlines(keepends=True)) == sorted(lines)


def test_large_text_file_is_cut_in_documents_of_32_kb(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a line of text\n" * 200_000)
    sizes = [len(document) for document in load_documents(str(path))]
    assert sum(sizes) == 3_000_000
    assert sorted(sizes)[1:] == [text.DOCUMENT_BYTES // 15 * 15 + 15] * (len(sizes) - 1)


def test_text_keeps_no_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello\n")
    assert list(load_documents(str(tmp_path / "a.txt"))) == ["hello\n"]


def test_folder_gives_every_text_file_once(corpus):
    documents = list(load_documents(corpus))
    assert sorted(int(document.split()[1]) for document in documents) == list(range(60))


def test_folder_reads_its_jsonl_by_row(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    (tmp_path / "b.txt").write_text("three")
    assert sorted(load_documents(str(tmp_path))) == ["one", "three", "two"]


def test_jsonl_templates(tmp_path):
    rows = [
        {"text": "as it is", "other": 1},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Sing.", "input": "", "output": "La."},
        {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]},
    ]
    assert sorted(load_documents(write_rows(tmp_path / "a.jsonl", rows))) == sorted(
        [
            "as it is",
            "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3",
            "### Instruction:\nSing.\n\n### Response:\nLa.",
            "### User:\nHi.\n\n### Assistant:\nHello.",
        ]
    )


def test_standard_library_is_always_there():
    documents = load_documents("stdlib", limit_bytes=300_000)
    first = list(documents)
    assert sum(len(document.encode()) for document in first) >= 300_000
    assert any("def " in document for document in first)
    assert first == list(load_documents("stdlib", limit_bytes=300_000))


def test_standard_library_leaves_out_installed_packages_and_undecodable_files(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a.py").write_text("installed = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    (tmp_path / "notes.txt").write_text("not Python")
    (tmp_path / "good.py").write_text("good = 1\n")
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(load_documents("stdlib")) == ["good = 1\n"]


# Order, limit, splits


def test_order_depends_on_the_seed_only(corpus):
    assert list(load_documents(corpus, seed=1)) == list(load_documents(corpus, seed=1))
    assert list(load_documents(corpus, seed=1)) != list(load_documents(corpus, seed=2))
    assert sorted(load_documents(corpus, seed=1)) == sorted(load_documents(corpus, seed=2))


def test_limit_stops_after_the_document_that_reaches_it(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "éé"}, {"text": "üü"}, {"text": "öö"}])
    assert [len(list(load_documents(source, limit_bytes=limit))) for limit in (1, 4, 5, 100)] == [1, 1, 2, 3]


def test_splits_are_disjoint_complete_and_stable(tmp_path):
    rows = [{"text": f"text number {number}"} for number in range(2000)]
    source = write_rows(tmp_path / "a.jsonl", rows)
    held_out = set(load_documents(source, seed=1, split="held-out"))
    calibration = set(load_documents(source, seed=2, split="calibration"))
    assert not held_out & calibration
    assert held_out | calibration == {row["text"] for row in rows}
    assert 0.08 < len(held_out) / len(rows) < 0.12
    # Computed with sha256sum: the first 16 hex digits, as a number, end in 0 for the first and in 3 for the second.
    assert split_of("text number 1") == "held-out"
    assert split_of("text number 0") == "calibration"


def test_a_small_text_file_has_both_splits(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"this is line {number}\n" for number in range(1500)))
    assert len(list(load_documents(str(path), split="held-out"))) > 0
    assert len(list(load_documents(str(path), split="calibration"))) > 40


# Token batches


def test_batches_are_the_documents_end_to_end(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "a b c"}, {"text": "d e"}])
    tokenizer = Words()
    order = list(load_documents(source, seed=3))
    batch = token_batches(source, tokenizer, samples=2, sequence_length=3, seed=3, split="all")
    assert batch.dtype == torch.long
    names = {index: word for word, index in tokenizer.ids.items()} | {0: "<end>"}
    packed = " <end> ".join(order).split()
    assert [names[index] for index in batch.flatten().tolist()] == packed[:6]


def test_batches_without_an_end_token(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "a b c"}, {"text": "d e f"}])
    tokenizer = Words(eos_token_id=None)
    batch = token_batches(source, tokenizer, samples=3, sequence_length=2, seed=0, split="all")
    assert batch.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_batches_depend_on_the_seed_only(corpus):
    def batch(seed):
        return token_batches(corpus, Words(), samples=4, sequence_length=16, seed=seed)

    assert torch.equal(batch(1), batch(1))
    first, second = (list(load_documents(corpus, seed=seed, split="calibration")) for seed in (1, 2))
    assert first != second


def test_only_what_is_needed_is_tokenised(corpus):
    tokenizer = Words()
    token_batches(corpus, tokenizer, samples=1, sequence_length=25, seed=0)
    assert tokenizer.calls == 3  # ten tokens a document, including the end token


def test_too_short_says_what_there_is_and_what_is_needed(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "a b c"}])
    with pytest.raises(DataError, match=r"a\.jsonl.* has 4 tokens, and 8 sequences of 16 need 128; give more text"):
        token_batches(source, Words(), samples=8, sequence_length=16, seed=0, split="all")


@pytest.mark.parametrize(("samples", "sequence_length"), [(0, 4), (4, 0), (-1, 4)])
def test_nothing_cannot_be_asked_for(corpus, samples, sequence_length):
    with pytest.raises(OptionError, match="at least 1"):
        token_batches(corpus, Words(), samples=samples, sequence_length=sequence_length, seed=0)


# Refusals


@pytest.mark.parametrize("source", ["missing.txt", "/no/such/folder", "wikitext", "data/rows.jsonl", "../a/b"])
def test_missing_source_is_refused_at_once(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is no such file or folder"):
        load_documents(source)


def test_empty_name_is_refused():
    with pytest.raises(DataError, match="no source of text was named"):
        load_documents("")


def test_only_files_and_folders_are_read():
    with pytest.raises(DataError, match="neither a regular file nor a folder"):
        load_documents("/dev/null")


@pytest.mark.parametrize("content", ["", " \n\n \t\n"])
def test_empty_text_is_refused(tmp_path, content):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=r"a\.(txt|jsonl): the source has no text"):
            list(load_documents(str(tmp_path / name)))


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no text"):
        list(load_documents(str(tmp_path)))


def test_empty_split_is_refused_by_name(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "text number 0"}])
    with pytest.raises(DataError, match="its held-out part has no text"):
        list(load_documents(source, split="held-out"))


def test_bytes_that_are_not_utf8_are_refused_with_file_and_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 400 + b"caf\xe9\n" + b"fine\n" * 400)
    with pytest.raises(DataError, match=r"a\.txt, line 401: byte 0xe9 is not UTF-8"):
        list(load_documents(str(tmp_path / "a.txt")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "not a line of JSON"),
        (b"plain words", "not a line of JSON"),
        (b"[" * 100_000, "not a line of JSON"),
        (b'["text"]', "must be a JSON object, and this is a list"),
        (b"{}", "this one has nothing"),
        (b'{"title": "?", "answer": "!"}', "this one has `title`, `answer`"),
        (b'{"title": "?"}', "`question` and `answer` .GSM8K."),
        (b'{"instruction": "no output"}', "needs `text`"),
        (b'{"text": 5}', "`text` must be a string, and is int"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"messages": "hi"}', "must be a list of objects"),
        (b'{"messages": [{"role": "user"}]}', "`content` must be a string, and is NoneType"),
        (b'{"instruction": "a", "input": ["b"], "output": "c"}', "`input` must be a string, and is list"),
        (b'{"text": "caf\xe9"}', "byte 0xe9 is not UTF-8"),
    ],
)
def test_bad_row_is_refused_with_file_and_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(DataError, match=message) as raised:
        list(load_documents(str(tmp_path / "a.jsonl")))
    assert "a.jsonl, line 3: " in str(raised.value)
    assert "\n" not in str(raised.value)


# The hub, with a stand-in for the package that reads it


class Rows(list):
    def shuffle(self, seed, buffer_size):
        return Rows(self[seed:] + self[:seed])


def install_hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_hub_dataset_is_streamed(monkeypatch):
    asked = []

    def load_dataset(name, configuration, **options):
        asked.append((name, configuration, options))
        return Rows([{"text": "one"}, {"text": "two"}])

    install_hub(monkeypatch, load_dataset)
    assert list(load_documents("allenai/c4", seed=1)) == ["two", "one"]
    assert list(load_documents("owner/name:some-configuration")) == ["one", "two"]
    assert list(load_documents("owner/name")) == ["one", "two"]
    options = {"split": "train", "streaming": True}
    assert asked == [
        ("allenai/c4", "en", options),
        ("owner/name", "some-configuration", options),
        ("owner/name", None, options),
    ]


def test_hub_row_is_refused_by_number(monkeypatch):
    install_hub(monkeypatch, lambda *_, **__: Rows([{"text": "one"}, {"image": 1}]))
    with pytest.raises(DataError, match=r"owner/name, row 2: a row needs `text`"):
        list(load_documents("owner/name"))


def test_hub_out_of_reach_is_refused(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route to host\nand a long story")

    install_hub(monkeypatch, load_dataset)
    with pytest.raises(DataError, match=r"cannot be read from the hub \(no route to host\); check the id and the network"):
        list(load_documents("owner/name"))


def test_hub_without_its_extra_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'moe-compress\[hub-data\]'"):
        list(load_documents("owner/name"))


def test_training_and_validation_are_the_two_parts_of_calibration() -> None:
    documents = [f"document {number}" for number in range(2000)]
    parts = {split: {text for text in documents if belongs(text, split)} for split in get_args(Split)}
    assert parts["training"] | parts["validation"] == parts["calibration"] and not parts["training"] & parts["validation"]
    assert parts["all"] == parts["calibration"] | parts["held-out"] and not parts["calibration"] & parts["held-out"]
    assert parts["held-out"] == {text for text in documents if split_of(text) == "held-out"}
    assert 120 < len(parts["validation"]) < 240


def test_selection_and_report_are_the_halves_of_held_out() -> None:
    documents = [f"document {number}" for number in range(2000)]
    parts = {split: {text for text in documents if belongs(text, split)} for split in get_args(Split)}
    assert parts["selection"] | parts["report"] == parts["held-out"] and not parts["selection"] & parts["report"]
    assert 75 < len(parts["report"]) < 125
