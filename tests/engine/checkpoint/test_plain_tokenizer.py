"""Tokenizers that are read without transformers give the same tokens as transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers_for_tests import add_tokenizer
from transformers import CONFIG_MAPPING, AutoTokenizer

from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.checkpoint.plain_tokenizer import PlainTokenizer, read_plain_tokenizer
from engine.families.plain_config import RECORD, PlainConfig, has_generic_tokenizer, read_plainly

FAMILIES = sorted(json.loads(RECORD.read_text())["families"])
TEXTS = (
    "",
    "a b",
    " Two  spaces , and a comma .\n\n\tTabs don't  matter?",
    "naïve Ærøskøbing — 数学 🧮 \u200d e\u0301",
    "<s>special</s><|endoftext|> <pad>inside <extra>",
    "def f(x):\n    return x ** 2  # 12345",
    "\x00\x7f\u00ad",
)


def plain_config(model_type: str = "mixtral") -> PlainConfig:
    found = read_plainly(model_type, {})
    assert found is not None
    return found


def demo(path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(DEMO_DIRECTORY / name, path / name)


def of_bytes(path: Path) -> None:
    add_tokenizer(path)


def without_bos(path: Path) -> None:
    add_tokenizer(path, bos=False)


def with_template(path: Path) -> None:
    """Add a begin token before each text, as in Llama 3, an added token, and a chat template."""
    add_tokenizer(path)
    own = Tokenizer.from_file(str(path / "tokenizer.json"))
    own.add_tokens(["<extra>"])
    own.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    own.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    change_config(path, lambda config: config.update(model_max_length=77, extra_special_tokens=["<pad>"]))


def of_metaspace(path: Path) -> None:
    """Write pieces with ▁ and byte fallback, as in Llama 2, and the list of added tokens of older files."""
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: number for number, piece in enumerate(["<pad>", "<s>", "</s>", *letters, "▁", "a", "b", "▁a"])}
    own = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token="<pad>", fuse_unk=True))
    own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    own.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    own.add_special_tokens(["<pad>", "<s>", "</s>"])
    own.save(str(path / "tokenizer.json"))
    added = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    listed = {str(token.pop("id")): token for token in added}
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None}
    settings: dict[str, Any] = {"added_tokens_decoder": listed, "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(named | settings))


KINDS: dict[str, Callable[[Path], None]] = {
    "demo": demo,
    "bytes": of_bytes,
    "without bos": without_bos,
    "template": with_template,
    "metaspace": of_metaspace,
}


def change_config(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((path / "tokenizer_config.json").read_text())
    change(config)
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def both(path: Path) -> tuple[PlainTokenizer, Any]:
    (path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    plain = read_plain_tokenizer(path, plain_config())
    assert plain is not None
    return plain, AutoTokenizer.from_pretrained(path, local_files_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_tokens(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path)
    plain, theirs = both(tmp_path)
    for special in (True, False):
        for text in TEXTS:
            ids = theirs(text, add_special_tokens=special, verbose=False)["input_ids"]
            assert plain(text, add_special_tokens=special, verbose=False)["input_ids"] == ids
            assert plain.encode(text, add_special_tokens=special) == ids
            assert plain.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
            for skip in (True, False):
                shown = theirs.decode(ids, skip_special_tokens=skip)
                assert plain.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) == shown
        batch = theirs(list(TEXTS), add_special_tokens=special)["input_ids"]
        assert plain(TEXTS, add_special_tokens=special)["input_ids"] == batch
    every = range(len(theirs))
    assert [plain.decode(token) for token in every] == [theirs.decode(token) for token in every]
    assert [plain.convert_ids_to_tokens(token) for token in every] == [
        theirs.convert_ids_to_tokens(token) for token in every
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_else_is_used_of_it(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path)
    plain, theirs = both(tmp_path)
    for name in ("bos", "eos", "pad", "unk"):
        assert getattr(plain, f"{name}_token") == getattr(theirs, f"{name}_token")
        assert getattr(plain, f"{name}_token_id") == getattr(theirs, f"{name}_token_id")
    assert len(plain) == len(theirs)
    assert plain.get_vocab() == theirs.get_vocab()
    assert plain.special_tokens_map == theirs.special_tokens_map
    assert {token: repr(added) for token, added in plain.added_tokens_decoder.items()} == {
        token: repr(added) for token, added in theirs.added_tokens_decoder.items()
    }
    assert (plain.chat_template, plain.model_max_length) == (theirs.chat_template, theirs.model_max_length)
    assert plain.split_special_tokens == theirs.split_special_tokens
    assert copy.deepcopy(plain).encode(TEXTS[2]) == plain.encode(TEXTS[2])
    with pytest.raises(AttributeError):
        _ = plain.of_no_tokenizer


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families_whose_tokenizers_are_their_files(model_type: str, tmp_path: Path) -> None:
    """transformers has its own tokenizer classes for some families, which it uses instead of the generic class."""
    add_tokenizer(tmp_path)
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    is_generic = type(theirs).__name__ == "TokenizersBackend"
    assert has_generic_tokenizer(plain_config(model_type)) == is_generic
    assert (read_plain_tokenizer(tmp_path, plain_config(model_type)) is not None) == is_generic


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": None},
        {"pad_token": "<of nowhere>"},
        {"bos_token": {"__type": "AddedToken", "content": "<s>"}},
        {"split_special_tokens": True},
        {"clean_up_tokenization_spaces": True},
        {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"extra_special_tokens": ["<new>"]},
        {"added_tokens_decoder": {}},
        {"model_max_length": "long"},
        {"get_vocab": 1},
    ],
    ids=str,
)
def test_settings_that_only_transformers_knows(change: dict[str, Any], tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    assert read_plain_tokenizer(tmp_path, plain_config()) is not None
    change_config(tmp_path, lambda config: config.update(change))
    assert read_plain_tokenizer(tmp_path, plain_config()) is None


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "additional_chat_templates"])
def test_files_that_only_transformers_reads(name: str, tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    (tmp_path / name).write_text("{}")
    assert read_plain_tokenizer(tmp_path, plain_config()) is None


@pytest.mark.parametrize("part", ["truncation", "padding"])
def test_lengths_in_the_file_are_left_to_transformers(part: str, tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    own.enable_truncation(4) if part == "truncation" else own.enable_padding(length=4)
    own.save(str(tmp_path / "tokenizer.json"))
    assert read_plain_tokenizer(tmp_path, plain_config()) is None
