"""A tokenizer that is its tokenizer.json and nothing else, without transformers, whose import takes over a second.

transformers has classes that build a tokenizer anew from its vocabulary and leave out part of tokenizer.json. A tokenizer
is read here only if tokenizer_config.json names the generic class and has no setting that changes the tokenizer;
transformers loads all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from engine.families.plain_config import PlainConfig, has_generic_tokenizer, may_be_corrected
from engine.files.json_file import load_json

GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNLIMITED = int(1e30)
"""The length that transformers gives where tokenizer_config.json has none."""
_WITHOUT_EFFECT = frozenset(
    ["tokenizer_class", "backend", "is_local", "local_files_only", "padding_side", "truncation_side", "model_input_names"]
)
_CHANGED_BY_OTHERS = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates", "tekken.json")


class PlainTokenizer:
    """A tokenizer of the tokenizers library, with the part of transformers' interface that is used here.

    Attributes: `chat_template` (None for none), `model_max_length`, `special_tokens_map` (by name, such as "bos_token").
    """

    split_special_tokens = False

    def __init__(
        self, own: Tokenizer, special_tokens: Mapping[str, str], model_max_length: float, chat_template: str | None
    ) -> None:
        own.no_truncation()
        own.no_padding()
        own.encode_special_tokens = False
        self.backend_tokenizer = own
        self.special_tokens_map = dict(special_tokens)
        self.model_max_length, self.chat_template = model_max_length, chat_template

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, verbose: bool = False
    ) -> dict[str, Any]:
        """{"input_ids": the token ids of a text}, or a list of them for several. `verbose` changes nothing."""
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}
        found = self.backend_tokenizer.encode_batch(list(text), add_special_tokens=add_special_tokens)
        return {"input_ids": [each.ids for each in found]}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(
        self,
        ids: int | Iterable[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """The text of tokens, with the spaces that they have: `clean_up_tokenization_spaces` may only be false."""
        if clean_up_tokenization_spaces:
            raise ValueError("spaces are never cleaned up here")
        each = [ids] if isinstance(ids, int) else [int(token) for token in ids]
        return str(self.backend_tokenizer.decode(each, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str | None] | None:
        """The vocabulary's piece of a token, or those of several; None for an id that it does not have."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(token)) for token in ids]

    def get_vocab(self) -> dict[str, int]:
        """The id of each piece, with added tokens."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by their ids."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def __getattr__(self, name: str) -> Any:
        """Named special tokens and their ids, such as `eos_token` and `eos_token_id`; None where there is none."""
        token = name.removesuffix("_id")
        if token not in NAMED:
            raise AttributeError(name)
        found = self.special_tokens_map.get(token)
        return found if token == name or found is None else self.backend_tokenizer.token_to_id(found)


def read_plain_tokenizer(directory: Path, family: Any) -> PlainTokenizer | None:
    """The tokenizer of a model in a directory; None where transformers must load it. `family`: its resolved config.

    Raises CheckpointError for files that are no JSON objects, and what the tokenizers library raises.
    """
    config_path, path = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not isinstance(family, PlainConfig) or not config_path.is_file() or not path.is_file():
        return None
    if any((directory / name).exists() for name in _CHANGED_BY_OTHERS):
        return None
    config, content = load_json(config_path, "tokenizer config"), load_json(path, "tokenizer")
    if not has_generic_tokenizer(family) or config.get("tokenizer_class") not in GENERIC_CLASSES:
        return None
    if not _is_plain(config, content):
        return None
    own = Tokenizer.from_file(str(path))
    if may_be_corrected(family, own.get_vocab_size()):
        return None
    template_path = directory / "chat_template.jinja"
    template = template_path.read_text(encoding="utf-8") if template_path.is_file() else config.get("chat_template")
    special_tokens = {name: config[name] for name in NAMED if config.get(name) is not None}
    length = config.get("model_max_length")
    return PlainTokenizer(own, special_tokens, _UNLIMITED if length is None else length, template)


def _is_plain(config: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
    """Whether transformers would use tokenizer.json as it is, beside this tokenizer_config.json."""
    added = content.get("added_tokens") or []
    flagged = {token["content"]: bool(token.get("special")) for token in added}
    for key, value in config.items():
        if key in NAMED:
            taken = value is None or (type(value) is str and flagged.get(value) is True)
        elif key in ("extra_special_tokens", "additional_special_tokens"):
            taken = value == {} or (type(value) is list and all(type(each) is str and flagged.get(each) for each in value))
        elif key == "added_tokens_decoder":
            own = {str(token["id"]): {name: token.get(name) for name in token if name != "id"} for token in added}
            taken = value == own
        else:
            taken = key in _WITHOUT_EFFECT or _is_setting(key, value)
        if not taken:
            return False
    return content.get("truncation") is None and content.get("padding") is None


def _is_setting(key: str, value: Any) -> bool:
    """Whether a setting is of a kind and a value that are known."""
    if key == "model_max_length":
        return value is None or type(value) in (int, float)
    if key == "chat_template":
        return value is None or type(value) is str
    return key in ("clean_up_tokenization_spaces", "split_special_tokens") and value is False
