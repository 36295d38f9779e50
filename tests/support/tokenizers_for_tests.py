"""A byte-level tokenizer without merges: one token for each byte of UTF-8, so that characters span tokens."""

from __future__ import annotations

from pathlib import Path

SPECIAL = ("<pad>", "<s>", "</s>")
VOCABULARY = 264
"""A `vocab_size` with room for this tokenizer and for the special tokens that some families' tokenizer classes add to it."""


def add_tokenizer(path: Path, bos: bool = True, **special: str) -> None:
    """Save the tokenizer beside a tiny checkpoint, with the ids of pad, bos and eos that conftest gives its models.

    special: further special tokens by name, whose ids follow those of the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[2]} | ({"bos_token": SPECIAL[1]} if bos else {})
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **names, **({"extra_special_tokens": special} if special else {})
    )
    own.save_pretrained(path)
