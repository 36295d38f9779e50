"""How byte-level tokenizers of GGUF files cut a text before they merge pieces, by `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizer.json. They are applied one after the other, each to what the one before
has left between its matches.
"""

from __future__ import annotations

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SINGLE_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SINGLE_DIGITS_AND_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_LETTERS, _MARKS = r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
_CHINESE_AND_KOREAN = "[一-龥\u0800-一가-\ud7ff]+"
_THREE_DIGITS, _CHINESE_AND_JAPANESE = r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+"

BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
"""Values of `tokenizer.ggml.model`."""
WHOLE_TOKENS_FIRST = frozenset(["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"])
"""Names of tokenizers that take a piece as one token if the vocabulary has it, without merging, and begin every text."""
NORMALIZED = frozenset(["qwen2", "qwen35", "command-r", "olmo", "mpt"])
"""Names of tokenizers that bring a text into Unicode's form NFC first, as the models' own tokenizer.json do.

transformers says so in its classes Qwen2Tokenizer, Qwen3_5Tokenizer, CohereTokenizer and GPTNeoXTokenizer; no key of a GGUF
file does.
"""
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", *sorted(WHOLE_TOKENS_FIRST)), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "kormo", "megrez"), (_SINGLE_DIGITS,)),
    "qwen35": (_SINGLE_DIGITS_AND_MARKS,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), (_CASED,)),
    "tekken": (_TEKKEN,),
    "deepseek-llm": (r"[\r\n]", _CASED_LETTERS, _MARKS, r"\s+$", _CHINESE_AND_KOREAN, r"\p{N}"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_AND_KOREAN, r"\p{N}"),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "mpt", "granite-docling"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (_THREE_DIGITS, _CHINESE_AND_JAPANESE, _PUNCTUATED)),
}
"""Patterns by the name. The first of several names that say the same is the one that is written."""


def split_name(patterns: tuple[str, ...], whole_tokens_first: bool, normalizes: bool) -> str | None:
    """Return the name of a tokenizer that cuts texts by these patterns, or None if no name says them.

    normalizes: whether texts are brought into the form NFC first.
    """
    wanted = patterns, whole_tokens_first, normalizes
    found = ((own, name in WHOLE_TOKENS_FIRST, name in NORMALIZED) for name, own in SPLITS.items())
    return next((name for name, said in zip(SPLITS, found, strict=True) if said == wanted), None)
