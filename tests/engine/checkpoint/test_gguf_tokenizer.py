"""Tokenizers in the metadata of GGUF files, and commands on such files."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, make_workplace
from click.testing import CliRunner
from family_matrix import own_logits
from gguf_for_tests import write_gguf
from gguf_models_for_tests import gguf_metadata, gguf_tensors

import cli
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import end_tokens, load_tokenizer, load_transformers_tokenizer
from engine.errors import CheckpointError, CompressError
from engine.families.gguf.splits import SPLITS

TEXTS = ("The quick brown fox, don't!", "héllo\n\n  12345 🚀", "<s>a</s>", "")


def vocabulary_of(checkpoint: Checkpoint, **changes: Any) -> dict[str, Any]:
    """Return a byte-level tokenizer as metadata. A change of None removes a key."""
    found = load_tokenizer(checkpoint).get_vocab()
    tokens = sorted(found, key=found.__getitem__)
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    values |= {f"tokenizer.{key}": value for key, value in changes.items()}
    return {key: value for key, value in values.items() if value is not None}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with `model`, the file `m.gguf` of it, and text."""
    path = tmp_path_factory.mktemp("gguf")
    make_workplace(path)
    write(path, path / "m.gguf")
    return path


def write(workplace: Path, path: Path, **changes: Any) -> Checkpoint:
    own = Checkpoint(workplace / "model")
    write_gguf(path, gguf_metadata(own) | vocabulary_of(own, **changes), gguf_tensors(own))
    return Checkpoint(path)


def test_the_tokenizer_is_that_of_the_model(workplace: Path) -> None:
    own, read = Checkpoint(workplace / "model"), Checkpoint(workplace / "m.gguf")
    first, then = load_tokenizer(own), load_tokenizer(read)
    assert [then(text)["input_ids"] for text in TEXTS] == [first(text)["input_ids"] for text in TEXTS]
    assert then.get_vocab() == first.get_vocab() and then.special_tokens_map == first.special_tokens_map
    assert then.chat_template == "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert load_transformers_tokenizer(read)("ab")["input_ids"] == first("ab")["input_ids"]
    assert end_tokens(read) == {2, 5}


def test_a_begin_token_is_added_where_the_file_says_so(workplace: Path, tmp_path: Path) -> None:
    read = write(workplace, tmp_path / "m.gguf", **{"ggml.add_bos_token": True})
    assert load_tokenizer(read)("a")["input_ids"] == [1, *load_tokenizer(Checkpoint(workplace / "model"))("a")["input_ids"]]


def test_a_tokenizer_beside_the_file_takes_the_place_of_an_unknown_one(workplace: Path, tmp_path: Path) -> None:
    read = write(workplace, tmp_path / "m.gguf", **{"ggml.pre": "unheard-of"})
    with pytest.raises(CheckpointError, match=r"m\.gguf: tokenizer\.ggml\.pre is 'unheard-of'.*beside the file"):
        load_tokenizer(read)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(workplace / "model" / name, tmp_path)
    assert load_tokenizer(Checkpoint(tmp_path / "m.gguf"))("ab") == load_tokenizer(Checkpoint(workplace / "model"))("ab")


def test_a_damaged_tokenizer_is_taken_from_beside_the_file(workplace: Path, tmp_path: Path) -> None:
    """Only files of the directory itself are taken: a link to another place would be copied into results."""
    path = tmp_path / "m.gguf"
    read = write(workplace, path, **{"ggml.merges": ["nothing known"]})
    with pytest.raises(CheckpointError, match=r"m\.gguf: the tokenizer cannot be read") as caught:
        end_tokens(read)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").symlink_to(workplace / "model" / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: link leads out"):
        load_tokenizer(Checkpoint(path))
    (tmp_path / "tokenizer.json").unlink()
    shutil.copy(workplace / "model" / "tokenizer.json", tmp_path)
    own, read = (load_tokenizer(each) for each in (Checkpoint(workplace / "model"), Checkpoint(path)))
    assert read("ab")["input_ids"] == own("ab")["input_ids"]


@pytest.mark.parametrize(("name", "normalizes"), [("qwen2", True), ("olmo", True), ("gpt-2", False)])
def test_names_say_whether_texts_are_normalized(name: str, normalizes: bool, workplace: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(workplace, tmp_path / "m.gguf", **{"ggml.pre": name}))
    composed, decomposed = (tokenizer(text)["input_ids"] for text in ("\u00e9", "e\u0301"))
    assert (composed == decomposed) is normalizes


def test_patterns_are_those_of_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    shared = GGUF_PRE_TOKENIZER_SPLITS.keys() & SPLITS.keys()
    assert len(shared) > 15
    assert {name: SPLITS[name] for name in shared} == {name: (GGUF_PRE_TOKENIZER_SPLITS[name],) for name in shared}


LETTERS = ["a"] * 300
DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"ggml.tokens": None}, "has no tokenizer"),
    ({"ggml.tokens": 7}, "not a list of texts"),
    ({"ggml.tokens": LETTERS}, "300 tokens and the model 264"),
    ({"ggml.tokens": ["a", "b"], "ggml.token_type": None}, "another model"),
    ({"ggml.tokens": ["a" * 5_000]}, "more than 4096 characters"),
    ({"ggml.token_type": [1, 2]}, "one number for each"),
    ({"ggml.tokens": ["a"] * 264, "ggml.token_type": None}, "a token twice"),
    ({"ggml.merges": ["a b c"]}, "not a pair"),
    ({"ggml.merges": ["nothing known"]}, "cannot be read"),
    ({"ggml.merges": None}, "merges is missing; put the model's tokenizer.json"),
    ({"ggml.model": "bert"}, "'bert'"),
    ({"ggml.eot_token_id": 264}, "no token of the model"),
]


@pytest.mark.parametrize("count", [50, pytest.param(2_000, marks=pytest.mark.slow)])
def test_damaged_metadata_of_a_tokenizer_raises_nothing_else(count: int, workplace: Path, tmp_path: Path) -> None:
    """A changed byte of the metadata: the tokenizer reads a text, or is refused in one line."""
    data, path, messages = (workplace / "m.gguf").read_bytes(), tmp_path / "m.gguf", list[str]()
    first, end = data.index(b"tokenizer.ggml.model"), data.index(b"token_embd.weight")
    for number in range(count):
        chosen = random.Random(number)
        place = chosen.randrange(first, end)
        path.write_bytes(data[:place] + bytes([data[place] ^ chosen.randrange(1, 256)]) + data[place + 1 :])
        try:
            read = Checkpoint(path)
            load_tokenizer(read)("The quick brown fox")
            end_tokens(read)
        except CompressError as error:
            messages.append(str(error))
    assert messages and not any("\n" in message for message in messages)


@pytest.mark.parametrize(("changes", "says"), DAMAGED, ids=[f"{key}-{number}" for number, (key, _) in enumerate(DAMAGED)])
def test_damaged_tokenizers_are_refused_by_name(changes: dict[str, Any], says: str, workplace: Path, tmp_path: Path) -> None:
    read = write(workplace, tmp_path / "m.gguf", **changes)
    with pytest.raises(CheckpointError, match=says) as caught:
        load_tokenizer(read)
    assert str(caught.value).startswith(str(tmp_path / "m.gguf")) and "\n" not in str(caught.value)


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else None


GENERATE = ("--prompt", "the quick", "--tokens", "8", "--json")
PRUNE = ("--sparsity", "0.5", "--granularity", "expert", "--method", "frequency", *CALIBRATION)


def test_commands_take_a_file_as_the_model(workplace: Path) -> None:
    """Every figure is that of the directory which the file was converted from."""
    with chdir(workplace):
        found = run("inspect", "m.gguf", "--json")
        assert found["architecture"] == "mixtral" and found["bytes"] == run("inspect", "model", "--json")["bytes"]
        assert run("generate", "m.gguf", *GENERATE)["text"] == run("generate", "model", *GENERATE)["text"]
        result = CliRunner().invoke(cli.main, ["inspect", "absent.gguf"])
    assert result.exit_code == 1 and "no such" in result.output


@pytest.mark.slow
def test_a_file_is_pruned_like_the_model_that_it_was_converted_from(workplace: Path) -> None:
    with chdir(workplace):
        for model in ("m.gguf", "model"):
            run("prune", model, *PRUNE, "-o", f"{model}-pruned")
        first, then = (Checkpoint(workplace / f"{name}-pruned") for name in ("model", "m.gguf"))
        assert torch.equal(own_logits(then), own_logits(first))
        assert run("generate", "m.gguf-pruned", *GENERATE)["text"] == run("generate", "model-pruned", *GENERATE)["text"]
