"""Mixtures of types are those of llama-quantize, in models whose layers and experts decide."""

from __future__ import annotations

from collections import Counter
from typing import Any

import gguf
import pytest

from engine.families.gguf.description import described
from engine.families.gguf.mixes import ALIASES, WRITTEN_TYPES, tensor_types
from engine.families.resolve import decoder_config

FIRST, LAST = range(4), range(28, 32)
MORE = {*FIRST, *LAST, *range(6, 28, 3)}
"""Layers of 32 with more bits: the first and last eighth, and every third one between."""


def config(**changes: Any) -> dict[str, Any]:
    """Return the config.json of a Mixtral with 32 layers."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    every = {
        **{"model_type": "mixtral", "vocab_size": 64, "num_hidden_layers": 32, "head_dim": 32, "rms_norm_eps": 1e-5},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64, "rope_theta": 1e4},
        **sizes,
        **changes,
    }
    return {name: value for name, value in every.items() if value is not None}


def types(name: str, **changes: Any) -> dict[str, str]:
    description = described(decoder_config(config(**changes)))
    return {tensor: kind.name for tensor, kind in tensor_types(description, WRITTEN_TYPES[name]).items()}


def layers_of(found: dict[str, str], part: str, kind: str) -> set[int]:
    return {layer for layer in range(32) if found[f"blk.{layer}.{part}.weight"] == kind}


def of_part(found: dict[str, str], part: str) -> set[str]:
    return {kind for name, kind in found.items() if f".{part}." in name}


def test_q4_k_m_of_eight_experts() -> None:
    found = types("q4_k_m")
    assert layers_of(found, "ffn_down_exps", "Q6_K") == MORE and of_part(found, "ffn_down_exps") == {"Q4_K", "Q6_K"}
    assert of_part(found, "attn_v") == of_part(found, "attn_k") == {"Q8_0"} and of_part(found, "attn_output") == {"Q5_K"}
    assert of_part(found, "ffn_gate_exps") == of_part(found, "ffn_up_exps") == of_part(found, "attn_q") == {"Q4_K"}
    assert found["output.weight"] == "Q6_K" and found["token_embd.weight"] == "Q4_K"
    assert of_part(found, "ffn_gate_inp") == of_part(found, "attn_norm") == {"F32"}


def test_q4_k_m_of_other_numbers_of_experts() -> None:
    found = types("q4_k_m", num_local_experts=16)
    assert layers_of(found, "attn_v", "Q6_K") == MORE == layers_of(found, "ffn_down_exps", "Q6_K")
    assert of_part(found, "attn_k") == of_part(found, "attn_output") == {"Q4_K"}


VALUES_AND_DOWN = {
    "q2_k": ({"Q4_K": range(32)}, {"Q3_K": range(32)}, "Q3_K"),
    "q3_k_s": ({}, {}, "Q3_K"),
    "q3_k_m": ({"Q5_K": range(2), "Q4_K": range(2, 32)}, {"Q5_K": range(2), "Q4_K": range(2, 32)}, "Q4_K"),
    "q3_k_l": ({"Q5_K": range(32)}, {"Q5_K": range(32)}, "Q5_K"),
    "q4_k_s": ({"Q5_K": range(4)}, {"Q5_K": range(4)}, "Q4_K"),
    "q5_k_s": ({}, {}, "Q5_K"),
    "q5_k_m": ({"Q6_K": MORE}, {"Q6_K": MORE}, "Q5_K"),
    "q6_k": ({}, {}, "Q6_K"),
}


@pytest.mark.parametrize("name", VALUES_AND_DOWN)
def test_the_other_mixtures(name: str) -> None:
    found, (values, down, output) = types(name, num_local_experts=16), VALUES_AND_DOWN[name]
    usual = WRITTEN_TYPES[name].matrices
    for part, own in (("attn_v", values), ("ffn_down_exps", down)):
        for kind in (*own, usual):
            others = {layer for other, layers in own.items() if other != usual for layer in layers}
            assert layers_of(found, part, kind) == (set(own[kind]) if kind in own else set(range(32)) - others), (part, kind)
    assert of_part(found, "attn_output") == {output} and found["output.weight"] == "Q6_K"
    assert of_part(found, "ffn_up_exps") == of_part(found, "attn_k") == {usual}
    eight = of_part(types(name), "attn_output")
    assert eight == ({"Q5_K"} if name in ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s") else {usual})


def test_q2_k_of_few_sharing_heads() -> None:
    assert of_part(types("q2_k", num_local_experts=16, num_key_value_heads=4), "attn_v") == {"Q3_K"}


def test_a_large_dense_model_has_more_bits_for_values() -> None:
    sizes = {"model_type": "llama", "num_hidden_layers": 80, "num_local_experts": None, "num_experts_per_tok": None}
    assert of_part(types("q4_k_s", **sizes), "attn_v") == {"Q5_K"}
    own = types("q4_k_s", **sizes, num_key_value_heads=8)
    assert Counter(own[f"blk.{layer}.attn_v.weight"] for layer in range(80)) == {"Q5_K": 4, "Q4_K": 76}


def test_rows_that_blocks_of_256_do_not_divide_have_blocks_of_32() -> None:
    """A row of 160 numbers has 32 in a block, and one of 80 has none."""
    for name, narrower, more in (("q4_k_m", "Q5_0", "Q8_0"), ("q3_k_s", "Q4_0", "Q4_0"), ("q5_k_m", "Q5_1", "Q8_0")):
        found = types(name, num_local_experts=16, intermediate_size=160)
        assert of_part(found, "ffn_down_exps") == {narrower, more}
        assert of_part(types(name, num_local_experts=16, intermediate_size=80), "ffn_down_exps") == {"F16"}
    narrow = types("q4_k_m", hidden_size=160, head_dim=20)
    assert narrow["output.weight"] == "Q8_0" and narrow["token_embd.weight"] == "Q5_0"


def test_tied_embeddings_have_the_type_of_the_head() -> None:
    found = types("q4_0", tie_word_embeddings=True)
    assert found["token_embd.weight"] == "Q6_K" and "output.weight" not in found
    assert types("q4_0")["token_embd.weight"] == "Q4_0"


def test_numbers_of_files_are_those_of_the_package_gguf() -> None:
    names = {"q6_k": "MOSTLY_Q6_K", "q2_k": "MOSTLY_Q2_K", "f32": "ALL_F32"}
    for name, written in WRITTEN_TYPES.items():
        assert gguf.LlamaFileType[names.get(name, f"MOSTLY_{name.upper()}")] == written.number
    assert set(ALIASES.values()) <= set(WRITTEN_TYPES)
