"""Loading a checkpoint's tokenizer, and checking it against the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import ModelDirectory
from engine.checkpoint.plain_tokenizer import read_plain_tokenizer
from engine.checkpoint.tokenizer_checks import check_tokenizer_files, tokenizing
from engine.errors import CheckpointError, OptionError
from engine.families.resolve import load_transformers_config
from engine.files.json_file import load_json, shown


def load_tokenizer(checkpoint: ModelDirectory) -> Any:
    """Return the checkpoint's tokenizer: a PlainTokenizer if that suffices, otherwise an object of transformers.

    Raises CheckpointError if it is missing, damaged or of another vocabulary.
    """
    config = checkpoint.config
    with _named(checkpoint) as directory:

        def load() -> Any:
            plain = read_plain_tokenizer(directory, config.transformers_config)
            return _of_transformers(directory, _foreign_config(checkpoint)) if plain is None else plain

        return _checked(directory, config.vocabulary_size, load)


def load_transformers_tokenizer(checkpoint: ModelDirectory) -> Any:
    """Return the checkpoint's tokenizer as an object of transformers, for libraries that ask for one; errors as above."""
    with _named(checkpoint) as directory:
        return load_tokenizer_of(directory, checkpoint.config.vocabulary_size, _foreign_config(checkpoint))


@contextmanager
def _named(checkpoint: ModelDirectory) -> Iterator[Path]:
    """Yield the directory of the tokenizer. Errors name the model's own path, also for a directory that was made for it."""
    directory = checkpoint.directory
    try:
        with tokenizing(checkpoint.directory):
            directory = checkpoint.files_directory
        yield directory
    except CheckpointError as error:
        own = str(checkpoint.directory)
        message = str(error).replace(str(directory), own)
        raise CheckpointError(message if message.startswith(own) else f"{own}: {message}") from error


def load_tokenizer_of(directory: Path, vocabulary: int, config: Any = None) -> Any:
    """Return the transformers tokenizer in `directory` for a model with `vocabulary` tokens.

    `config`: the transformers config; None to read config.json. Raises CheckpointError as `load_tokenizer` does.
    """
    return _checked(directory, vocabulary, lambda: _of_transformers(directory, config))


def _foreign_config(checkpoint: ModelDirectory) -> Any:
    """Return the config for a family without a class in transformers, which would fail at its config.json; else None."""
    is_known = checkpoint.config.architecture.in_transformers
    return None if is_known else load_transformers_config(checkpoint.raw_config)


def _of_transformers(directory: Path, config: Any) -> Any:
    from transformers import AutoTokenizer  # here: most tokenizers are read without transformers

    return AutoTokenizer.from_pretrained(directory, config=config, local_files_only=True, trust_remote_code=False)


def _checked(directory: Path, vocabulary: int, load: Callable[[], Any]) -> Any:
    """Return what `load` does, after checking that the files and the tokenizer fit a model with `vocabulary` tokens."""
    names = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
    if not any((directory / name).is_file() for name in names):
        raise CheckpointError(f"{directory}: has no tokenizer (tokenizer.json); copy the model's tokenizer files there")
    check_tokenizer_files(directory, vocabulary)
    with tokenizing(directory):
        tokenizer = load()
        length = tokenizer.model_max_length
        if isinstance(length, bool) or not isinstance(length, int | float) or not length >= 1:
            raise CheckpointError(
                f"{directory}: tokenizer_config.json: model_max_length is {shown(length)}; it must be a number of tokens"
            )
        tokenizer.decode(tokenizer("a b", verbose=False)["input_ids"])
        largest = max(tokenizer.get_vocab().values(), default=-1)
    # Models pad their vocabulary a little; a tokenizer that is larger or much smaller belongs to another model.
    if not 0.9 * vocabulary <= len(tokenizer) <= vocabulary:
        raise CheckpointError(
            f"{directory}: the tokenizer has {len(tokenizer)} tokens and the model {vocabulary}; it is of another model"
        )
    if largest >= vocabulary:
        raise CheckpointError(
            f"{directory}: the tokenizer has token {largest} and the model {vocabulary} tokens; it is of another model"
        )
    return tokenizer


def check_same_tokens(first: Checkpoint, second: Checkpoint) -> None:
    """Raise OptionError unless both models predict the tokens of one vocabulary."""
    sizes = first.config.vocabulary_size, second.config.vocabulary_size
    vocabularies = [load_tokenizer(checkpoint).get_vocab() for checkpoint in (first, second)]
    if vocabularies[0] != vocabularies[1]:
        raise OptionError(
            f"{first.directory} and {second.directory} have different tokenizers ({sizes[0]} and {sizes[1]} tokens), so "
            "their predictions cannot be compared; take two models with the same tokenizer"
        )
    if sizes[0] != sizes[1]:
        raise OptionError(
            f"{first.directory} and {second.directory} have one tokenizer, but {sizes[0]} and {sizes[1]} rows of "
            "embeddings; cut or pad one to the size of the other"
        )


def end_tokens(checkpoint: ModelDirectory) -> frozenset[int]:
    """Return the tokens that end a sequence, from the first file that names any.

    Raises CheckpointError if the entry is not a token id or a list of ids.
    """
    directory = checkpoint.files_directory
    found = None
    if (directory / "generation_config.json").is_file():
        found = load_json(directory / "generation_config.json", "generation config").get("eos_token_id")
    if found is None:
        found = getattr(checkpoint.config.transformers_config, "eos_token_id", None)
    if found is None:
        found = load_tokenizer(checkpoint).eos_token_id
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(f"{directory}: eos_token_id is {found!r:.80}; it must be a token id or a list of ids")
    return frozenset(ids)
