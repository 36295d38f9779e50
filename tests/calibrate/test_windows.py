"""Windows of text for perplexity: spread over all documents, with no text lost, and the document of each."""

import json

import pytest
import torch
from test_text import Words, write_rows

from calibrate.cutting import WINDOWS, EndToEnd, spread
from calibrate.text import load_documents, token_batches
from calibrate.windows import text_windows
from engine.errors import DataError, OptionError


def numbered(*sizes):
    """Return documents of these sizes. A token is 100 times its document's number plus its place."""
    return [(number, [100 * number + place for place in range(size)]) for number, size in enumerate(sizes)]


def cut(documents, samples, length, seed=0):
    return list(spread(documents, samples, length, seed))[:samples]


def test_each_document_gives_one_window_before_any_gives_two():
    """Packed end to end, the first document alone would fill all windows."""
    found = cut(numbered(40, 12, 9), 5, 4)
    assert [window.document for window in found] == [0, 1, 2, 0, 1]
    assert all(len(window.ids) == 4 and {token // 100 for token in window.ids} == {window.document} for window in found)
    assert [window.document for window in list(WINDOWS["packed"](numbered(40, 12, 9), 5, 4, 0))[:5]] == [0] * 5


def test_windows_of_a_document_do_not_overlap_and_their_places_are_of_the_seed():
    documents = numbered(90)
    for seed in range(5):
        tokens = [token for window in cut(documents, 11, 8, seed) for token in window.ids]
        assert len(set(tokens)) == len(tokens) == 88
    assert len({cut(documents, 1, 8, seed)[0].ids[0] for seed in range(8)}) > 4
    assert cut(documents, 3, 8, 1) == cut(documents, 3, 8, 1) != cut(documents, 3, 8, 2)


def test_fewer_windows_are_the_first_of_more():
    documents = numbered(*range(8, 40))
    assert cut(documents, 30, 8)[:10] == cut(documents, 10, 8)


def test_short_documents_share_a_window():
    found = cut(numbered(3, 20, 2, 3, 5, 5), 3, 8)
    assert [window.ids for window in found][1] == [0, 1, 2, 200, 201, 300, 301, 302]
    assert found[0].document == 1 and found[2].ids[:5] == [400, 401, 402, 403, 404] and found[2].document == 4


def test_no_text_is_lost():
    """A source gives as many windows as end to end, of exactly its tokens."""
    documents = numbered(3, 21, 7, 19, 8, 1, 2, 30, 5)
    total = sum(len(ids) for _, ids in documents)
    found = cut(documents, 1000, 8)
    assert len(found) == total // 8
    tokens = [token for window in found for token in window.ids]
    assert len(set(tokens)) == len(tokens) and set(tokens) <= {token for _, ids in documents for token in ids}


def test_a_mixed_window_is_of_the_document_that_gives_most_of_it():
    pack = EndToEnd(8)
    assert pack.add(7, [1] * 3) == []
    (window,) = pack.add(9, [2] * 6)
    assert window.ids == [1] * 3 + [2] * 5 and window.document == 9
    assert pack.ids == [2] and pack.documents == [9]


def test_only_as_many_documents_are_read_as_there_are_windows(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "one two three four five " * 4 + str(n)} for n in range(50)])
    tokenizer = Words()
    windows = text_windows(source, tokenizer, samples=6, sequence_length=8, seed=0, split="all")
    assert tokenizer.calls == windows.documents == 6
    assert windows.tokens_SL.shape == (6, 8) and windows.predictions == 42


def test_held_out_windows_are_of_held_out_documents(tmp_path):
    rows = [{"text": f"{n} " * 30} for n in range(200)]
    source = write_rows(tmp_path / "a.jsonl", rows)
    tokenizer = Words()
    windows = text_windows(source, tokenizer, samples=12, sequence_length=16, seed=3)
    words = {index: word for word, index in tokenizer.ids.items()}
    read = {words[token] for token in windows.tokens_SL.flatten().tolist() if token}
    assert windows.documents == len(read) == 12
    assert read <= {text.split()[0] for text in load_documents(source, split="held-out")}


def test_packed_windows_are_the_batches_of_calibration(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": json.dumps(list(range(n, n + 40)))} for n in range(20)])
    asked = {"samples": 7, "sequence_length": 16, "seed": 2, "split": "all"}
    windows = text_windows(source, Words(), windows="packed", **asked)
    assert torch.equal(windows.tokens_SL, token_batches(source, Words(), **asked))
    assert windows.documents_S.tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_too_little_text_says_how_much_there_is(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "a b c d e f g"}])
    with pytest.raises(DataError, match=r"a\.jsonl: too short: the source has 2 sequences of 4 tokens, and 3 are needed"):
        text_windows(source, Words(), samples=3, sequence_length=4, seed=0, split="all")
    with pytest.raises(OptionError, match="at least 1"):
        text_windows(source, Words(), samples=0, sequence_length=4, seed=0)
