"""The types in which a model's tensors are written as GGUF, under llama.cpp's names of mixtures of types.

The rules are those of llama-quantize (github.com/ggml-org/llama.cpp, src/llama-quant.cpp, `llama_tensor_get_type_impl` and
`tensor_type_fallback`), for the families that are written here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.errors import UnsupportedError
from engine.families.gguf.description import Description
from engine.families.gguf.metadata import ARCHITECTURE
from engine.families.gguf.names import StoredTensor
from engine.families.gguf.parts import EMBEDDINGS, HEAD
from engine.files.gguf_types import BLOCK_TYPES, BlockType

_BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}
_NEVER_ROUNDED = (
    *(".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight"),
    *(".ssm_conv1d.weight", ".ssm_ba.weight", ".ssm_alpha.weight", ".ssm_beta.weight"),
    *(".shortconv.conv.weight", "_norm.weight", ".indexer.attn_k.weight", ".indexer.proj.weight"),
)
"""Ends of the names of tensors that stay in float32: routers, where a small error changes the choice of experts, filters,
norms, and small matrices of the gated delta rule and of indexers."""
_VALUES = ("attn_v", "attn_kv_b", "attn_qkv")
"""Matrices with the values of attention."""
_HEAD, _OTHER_HEAD = "Q6_K", "Q8_0"
"""Types of the output head in a quantized file: if blocks of the matrices' type divide its rows, and otherwise."""
_NARROWER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Types for rows that blocks of 256 numbers do not divide."""
_EIGHT = 8
"""Number of experts with which attention, a small part of the model, gets more bits."""
_LARGE_LAYERS, _LARGE = 80, {"llama": True, "qwen2": False}
"""Number of layers of models with 70 B parameters; their architectures, and whether query heads must share key heads."""


def _nothing(number: int, count: int, sharing: int) -> str | None:
    return None


def _more_bits(kind: str) -> Callable[[int, int, int], str | None]:
    """Return a rule: this type in the first and last eighth of all layers, and in every third one between."""

    def rule(number: int, count: int, sharing: int) -> str | None:
        first = count // 8
        has_more = number < first or number >= 7 * count // 8 or (number - first) % 3 == 2
        return kind if has_more else None

    return rule


def _first(limit: Callable[[int], int], kind: str, other: str | None = None) -> Callable[[int, int, int], str | None]:
    """Return a rule: `kind` in the layers below a limit, which depends on their number, and `other` in the others."""
    return lambda number, count, sharing: kind if number < limit(count) else other


def _always(kind: str) -> Callable[[int, int, int], str | None]:
    return lambda number, count, sharing: kind


@dataclass(frozen=True)
class WrittenType:
    """A type, or mixture of types, in which a model is written. Rules take a layer's number, the number of layers and how
    many query heads share a key head, and return a type, or None for that of all matrices."""

    matrices: str
    """Name of the type of matrices."""
    number: int
    """The number of such files (`general.file_type`)."""
    values: Callable[[int, int, int], str | None] = _nothing
    """The type of attention's value projections, numbered among those of the model."""
    down: Callable[[int, int, int], str | None] = _nothing
    """The type of down projections."""
    output: Mapping[bool, str] = field(default_factory=dict)
    """The type of attention's output projection, by whether the model has eight experts."""


WRITTEN_TYPES: dict[str, WrittenType] = {
    "f32": WrittenType("F32", 0),
    "bf16": WrittenType("BF16", 32),
    "f16": WrittenType("F16", 1),
    "q8_0": WrittenType("Q8_0", 7),
    "q6_k": WrittenType("Q6_K", 18),
    "q5_k_m": WrittenType("Q5_K", 17, values=_more_bits("Q6_K"), down=_more_bits("Q6_K")),
    "q5_k_s": WrittenType("Q5_K", 16),
    "q5_1": WrittenType("Q5_1", 9),
    "q5_0": WrittenType("Q5_0", 8),
    "q4_k_m": WrittenType("Q4_K", 15, values=_more_bits("Q6_K"), down=_more_bits("Q6_K"), output={True: "Q5_K"}),
    "q4_k_s": WrittenType(
        "Q4_K",
        14,
        values=_first(lambda count: 4, "Q5_K"),
        down=_first(lambda count: count // 8, "Q5_K"),
        output={True: "Q5_K"},
    ),
    "q4_1": WrittenType("Q4_1", 3),
    "q4_0": WrittenType("Q4_0", 2),
    "q3_k_l": WrittenType("Q3_K", 13, values=_always("Q5_K"), down=_always("Q5_K"), output={False: "Q5_K"}),
    "q3_k_m": WrittenType(
        "Q3_K",
        12,
        values=_first(lambda count: 2, "Q5_K", "Q4_K"),
        down=_first(lambda count: count // 16, "Q5_K", "Q4_K"),
        output={True: "Q5_K", False: "Q4_K"},
    ),
    "q3_k_s": WrittenType("Q3_K", 11, output={True: "Q5_K"}),
    "q2_k": WrittenType(
        "Q2_K",
        10,
        values=lambda number, count, sharing: "Q4_K" if sharing >= 4 else "Q3_K",
        down=_always("Q3_K"),
        output={True: "Q5_K", False: "Q3_K"},
    ),
}
"""Types by the name on the command line."""
ALIASES = {"q5_k": "q5_k_m", "q4_k": "q4_k_m", "q3_k": "q3_k_m"}
"""Other names of these types, as llama-quantize has them."""


def tensor_types(description: Description, written: WrittenType) -> dict[str, BlockType]:
    """Return the type of every tensor of a file, by its name there."""
    mix = _Mix(description, written)
    return {tensor.name: mix.type_of(tensor) for tensor in description.tensors}


_BY_FORM = {2: "Q2_K", 3: "Q3_K", 4: "Q4_0", 8: "Q8_0", "MXFP4": "MXFP4"}
"""The type of matrices of packed integers, by their bits, and of packed floats, by their name."""
_PACKED_FLOATS = WrittenType("MXFP4", 38)
"""A file whose experts are packed floats. It is written of such experts only."""


def types_by_form(
    description: Description, form_of: Callable[[str], int | str | None]
) -> tuple[dict[str, BlockType], WrittenType]:
    """Return the type of every tensor of a file, each matrix in the type of its own form, and that of most numbers.

    form_of: returns the bits of a source tensor's packed integers, or the name of its packed floats; None for one that is
    not packed, which becomes bf16. Raises UnsupportedError for experts of one stack in different forms, because a stack has
    one type.
    """
    types, numbers = tensor_types(description, WRITTEN_TYPES["bf16"]), Counter[str]()
    for tensor in description.tensors:
        found = {form_of(source) for source in tensor.sources}
        if len(found) > 1:
            said = " and ".join(
                f"{form} bits" if isinstance(form, int) else form or "bf16" for form in sorted(found, key=str)
            )
            raise UnsupportedError(
                f"{tensor.name} stacks matrices of {said}, and a stack has one type in a GGUF file; take --type q4_k_m or "
                "another type for all, or give each projection of a layer one width"
            )
        form = found.pop() if found else None
        if form is not None and types[tensor.name].element is not None:
            kind = _BY_NAME[_BY_FORM[form]]
            if tensor.shape[-1] % kind.numbers:
                kind = _BY_NAME[_NARROWER.get(kind.name, kind.name)]
            types[tensor.name] = _BY_NAME["F16"] if tensor.shape[-1] % kind.numbers else kind
        numbers[types[tensor.name].name] += math.prod(tensor.shape)
    usual = next(name for name, _ in numbers.most_common())
    return types, next(written for written in (*WRITTEN_TYPES.values(), _PACKED_FLOATS) if written.matrices == usual)


class _Mix:
    """The types of one model's tensors."""

    def __init__(self, description: Description, written: WrittenType) -> None:
        self.written, self.metadata = written, description.metadata
        self.architecture = str(description.metadata[ARCHITECTURE])
        self.layers, self.experts = self._number("block_count"), self._number("expert_count")
        self.heads, self.key_heads = self._number("attention.head_count"), self._number("attention.head_count_kv")
        names = [tensor.name for tensor in description.tensors]
        self.is_tied = HEAD not in names
        numbers = sorted(
            int(found[1]) for name in names if (found := re.search(rf"blk\.(\d+)\.({'|'.join(_VALUES)})\.weight", name))
        )
        self.values = {layer: number for number, layer in enumerate(numbers)}

    def _number(self, key: str) -> int:
        found = self.metadata.get(f"{self.architecture}.{key}", 0)
        return int(max(found) if isinstance(found, list) else found)

    def type_of(self, tensor: StoredTensor) -> BlockType:
        """Return the type of one tensor. Tensors that are no matrices, and those of _NEVER_ROUNDED, are in float32."""
        if len(tensor.shape) == 1 or not tensor.name.endswith(".weight") or tensor.name.endswith(_NEVER_ROUNDED):
            return _BY_NAME["F32"]
        matrices = _BY_NAME[self.written.matrices]
        if matrices.element is not None:
            return matrices
        kind = _BY_NAME[self._chosen(tensor, matrices)]
        if tensor.shape[-1] % kind.numbers:
            kind = _BY_NAME[_NARROWER.get(kind.name, kind.name)]
        return _BY_NAME["F16"] if tensor.shape[-1] % kind.numbers else kind

    def _chosen(self, tensor: StoredTensor, matrices: BlockType) -> str:
        """Return the name of the type of a matrix whose rows have any length."""
        is_eight, named = self.experts == _EIGHT, re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if tensor.name == (EMBEDDINGS if self.is_tied else HEAD):
            if tensor.shape[-1] % matrices.numbers:
                return _OTHER_HEAD
            return matrices.name if matrices.name == _OTHER_HEAD else _HEAD
        if named is None:
            return matrices.name
        layer, part = int(named[1]), named[2]
        chosen: str | None = None
        if part in _VALUES:
            chosen = _OTHER_HEAD if is_eight else self._of_values(self.values[layer], matrices.name)
        elif part == "attn_k":
            chosen = _OTHER_HEAD if is_eight else None
        elif part == "attn_output":
            chosen = self.written.output.get(is_eight)
        elif part.startswith("ffn_down"):
            chosen = self.written.down(layer, self.layers, 1)
        return chosen or matrices.name

    def _of_values(self, number: int, usual: str) -> str:
        sharing = self.heads // max(1, self.key_heads)
        chosen = self.written.values(number, len(self.values), sharing) or usual
        is_large = self.layers == _LARGE_LAYERS and self.architecture in _LARGE
        is_large = is_large and (sharing > 1 or not _LARGE[self.architecture])
        return "Q5_K" if is_large and chosen in ("Q3_K", "Q4_K") else chosen
