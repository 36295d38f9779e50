"""Models in GGUF files compute what the models that they were converted from compute; damaged ones are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, FURTHER_FAMILIES, others_slow, save_reference
from family_matrix import TOKENS, decoder_of, logits_of, own_logits, worst
from gguf_for_tests import Tensors, gguf_bytes, q8_0, write_gguf
from gguf_models_for_tests import (
    ARCHITECTURES,
    CHANGED_VALUES,
    FURTHER_SIZES,
    QUICK,
    READ_AS,
    gguf_metadata,
    gguf_tensors,
    save_gguf,
)

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf import blocks
from engine.decoder.model import Decoder
from engine.errors import CheckpointError, CompressError, UnsupportedError
from engine.families.gguf.divisors import divisors_of
from engine.families.gguf.metadata import decimal
from engine.families.gguf.table import gguf_model_types
from engine.families.tensor_names import expert_tensor

SIZES: dict[str, dict[str, Any]] = {"gpt_oss": {"swiglu_limit": 7.0}, **FURTHER_SIZES}
"""Sizes that GGUF files cannot say."""
ALIGNED = {"hidden_size": 64, "intermediate_size": 64}
"""Sizes that blocks divide."""


def make(tmp_path: Path, family: str = "mixtral", **sizes: Any) -> Checkpoint:
    save_reference(family, tmp_path / "model", **SIZES.get(family, {}), **sizes)
    return Checkpoint(tmp_path / "model")


def test_every_family_with_a_row_is_tested() -> None:
    assert set(gguf_model_types()) == set(ARCHITECTURES) and set(ARCHITECTURES) <= set(FAMILIES | FURTHER_FAMILIES)


@pytest.mark.parametrize("family", others_slow(ARCHITECTURES, *QUICK))
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = save_reference(family, tmp_path / "model", **SIZES.get(family, {}))
    own = Checkpoint(tmp_path / "model")
    read = Checkpoint(save_gguf(own, tmp_path / "model.gguf"))
    assert read.config.architecture.model_type == READ_AS.get(family, family) and read.shapes == own.shapes
    changed = {name for name in own.shapes if name.endswith(CHANGED_VALUES.get(family, ()))}
    assert all(torch.equal(read.tensor(name), own.tensor(name)) for name in own.shapes.keys() - changed)
    assert all(worst(read.tensor(name), own.tensor(name)) <= 1e-6 for name in changed)
    assert worst(own_logits(read), logits_of(reference)) <= 1e-4
    assert read.bytes == own.bytes and read.parameters == own.parameters


def quantized(tensors: dict[str, torch.Tensor]) -> Tensors:
    """Return the tensors with matrices in blocks of type Q8_0, as llama.cpp has them, which never rounds routers."""
    is_kept = ("_norm", "_inp", "bias", "sinks")
    return {name: tensor if any(map(name.__contains__, is_kept)) else q8_0(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v2"])
def test_blocks_are_read_as_their_numbers(family: str, tmp_path: Path) -> None:
    """The rounded weights are within half a step of the model's, and are the same numbers in float32 and in a decoder."""
    latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 32, "qk_nope_head_dim": 32, "moe_intermediate_size": 32}
    own = make(tmp_path, family, **ALIGNED, **(latent if family == "deepseek_v2" else {}))
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(own), quantized(gguf_tensors(own)))
    read = Checkpoint(path)
    assert read.model_dtype == torch.bfloat16 and read.bytes < own.bytes / 3
    for name in own.shapes:
        exact, plain = read.tensor(name, torch.float32), own.tensor(name)
        assert worst(exact, plain) <= float(plain.abs().max()) / 120
        assert torch.equal(read.tensor(name), exact.to(read.dtype(name)))
        assert read.tensor(name).shape == read.shapes[name]
    tensors = {name: read.tensor(name, torch.float32) for name in read.shapes}

    assert torch.equal(decoder_of(read)(TOKENS), Decoder(own.config, tensors.__getitem__)(TOKENS))
    read.check_finite()


def test_one_expert_is_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make(tmp_path, **ALIGNED)
    read = Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own), quantized(gguf_tensors(own))))
    whole, seen = blocks.dequantized, list[int]()

    def counted(blocks: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(blocks.numel())
        return whole(blocks, *others)

    monkeypatch.setattr(blocks, "dequantized", counted)
    read.tensor(expert_tensor(read.config.architecture, 1, 4, 0))
    assert seen == [64 * 64 // 32 * 34]


def test_other_layouts_are_read(tmp_path: Path) -> None:
    """Gate and up projections in one stack, experts one by one, and keys and values of latent attention in one matrix."""
    own = make(tmp_path, "mixtral")
    tensors, layers = gguf_tensors(own), range(len(own.config.layers))
    joined, alone = dict(tensors), dict(tensors)
    for layer in layers:
        gate, up = (joined.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        joined[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat([gate, up], 1)
        for part in ("gate", "up", "down"):
            for expert, tensor in enumerate(alone.pop(f"blk.{layer}.ffn_{part}_exps.weight")):
                alone[f"blk.{layer}.ffn_{part}.{expert}.weight"] = tensor
    for name, made in (("joined", joined), ("alone", alone)):
        read = Checkpoint(write_gguf(tmp_path / f"{name}.gguf", gguf_metadata(own), made))
        assert all(torch.equal(read.tensor(name), own.tensor(name)) for name in own.shapes)


def padded(tensor: Any) -> Any:
    """Return a tensor with one more dimension, of 1."""
    return (tensor[0], (1, *tensor[1]), tensor[2]) if isinstance(tensor, tuple) else tensor[None]


@pytest.mark.parametrize("blocks", [False, True], ids=["numbers", "blocks"])
def test_dimensions_of_one_do_not_matter(blocks: bool, tmp_path: Path) -> None:
    """Stacks of experts, and the rows of heads that are stored in pairs, are taken apart after such dimensions."""
    own = make(tmp_path, **ALIGNED, num_hidden_layers=1)
    tensors: Any = quantized(gguf_tensors(own)) if blocks else gguf_tensors(own)
    wider = {name: padded(each) if "_exps" in name or "attn_" in name else each for name, each in tensors.items()}
    first, then = (
        Checkpoint(write_gguf(tmp_path / f"{name}.gguf", gguf_metadata(own), each))
        for name, each in (("plain", tensors), ("wider", wider))
    )
    assert all(torch.equal(then.tensor(name), first.tensor(name)) for name in own.shapes)


def test_a_single_expert_needs_no_stack(tmp_path: Path) -> None:
    own = make(tmp_path, num_local_experts=1, num_experts_per_tok=1, num_hidden_layers=1)
    tensors = gguf_tensors(own)
    alone = {name: each.squeeze(0) if "_exps" in name or "_inp" in name else each for name, each in tensors.items()}
    assert alone["blk.0.ffn_up_exps.weight"].dim() == 2 and alone["blk.0.ffn_gate_inp.weight"].dim() == 1
    read = Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own), alone))
    assert all(torch.equal(read.tensor(name), own.tensor(name)) for name in own.shapes)


def test_earlier_files_of_latent_attention_are_read(tmp_path: Path) -> None:
    own = make(tmp_path, "deepseek_v2")
    latent, heads = own.config.latent, own.config.attention_heads
    assert latent is not None
    tensors = {name: tensor for name, tensor in gguf_tensors(own).items() if "k_b." not in name and "v_b." not in name}
    kept = {
        f"blk.{layer}.attn_kv_b.weight": own.tensor(f"model.layers.{layer}.self_attn.kv_b_proj.weight") for layer in range(3)
    }
    sizes = {"attention.key_length": latent.plain_dimension + latent.rotary_dimension, "attention.head_count_kv": heads}
    sizes |= {"attention.value_length": latent.value_dimension}
    earlier = {"attention.key_length_mla": None, "attention.value_length_mla": None}
    read = Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own, **sizes, **earlier), tensors | kept))
    assert torch.equal(own_logits(read), own_logits(own))


def test_split_models_and_tied_embeddings_are_read(tmp_path: Path) -> None:
    own = make(tmp_path, "llama", tie_word_embeddings=True)
    tensors, metadata = gguf_tensors(own), gguf_metadata(own)
    assert "output.weight" not in tensors
    names = sorted(tensors)
    for number, part in enumerate((names[:10], names[10:])):
        about = {"split.no": (2, number), "split.count": (2, 2), "split.tensors.count": (5, len(names))}
        path = tmp_path / f"m-{number + 1:05}-of-00002.gguf"
        write_gguf(path, about if number else metadata | about, {name: tensors[name] for name in part})
    read = Checkpoint(tmp_path / "m-00001-of-00002.gguf")
    assert read.config.tied_embeddings and torch.equal(own_logits(read), own_logits(own))


LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("family", "changes", "divisors"),
    [
        # 8192 positions have 1304, 49.03, 1.844 and 0.06934 waves; 1.844 waves are 0.2812 of the way from 1 to 4.
        ("llama", {}, [1.0, 1.0, 1 / (0.7188 / 8 + 0.2812), 8.0]),
        ("mixtral", {"factor": 32.0}, [1.0, 1.0, 1 / (0.7188 / 32 + 0.2812), 32.0]),
        ("llama4_text", {"factor": 16.0, "high_freq_factor": 1.0}, [1.0, 1.0, 1.0, 16.0]),
    ],
)
def test_divisors_of_frequencies_are_read(
    family: str, changes: dict[str, float], divisors: list[float], tmp_path: Path
) -> None:
    own = make(tmp_path, family, head_dim=8, rope_parameters=LLAMA_3 | changes)
    assert divisors_of(own.config)["rope_freqs.weight"] == pytest.approx(divisors, rel=1e-3)
    read = Checkpoint(
        write_gguf(
            tmp_path / "m.gguf",
            gguf_metadata(own),
            gguf_tensors(own) | {"rope_freqs.weight": torch.tensor(divisors_of(own.config)["rope_freqs.weight"])},
        )
    )
    assert read.config.transformers_config.rope_parameters == LLAMA_3 | changes
    torch.testing.assert_close(own_logits(read), own_logits(own), rtol=1e-5, atol=1e-5)


REFUSED: list[tuple[dict[str, Any], type[CompressError], str]] = [
    ({"rope.scaling.type": "longrope"}, UnsupportedError, "longrope"),
    ({"attention.sliding_window": 64}, UnsupportedError, "sliding_window"),
    ({"attention.head_count": None}, CheckpointError, "head_count is missing"),
    ({"attention.value_length": 4}, UnsupportedError, "value_length"),
    ({"rope.dimension_count": 4}, UnsupportedError, "rope.dimension_count"),
    ({"block_count": "three"}, CheckpointError, "number of things"),
    ({"block_count": 4}, CheckpointError, "missing"),
    ({"block_count": 2}, CheckpointError, "not part of this"),
    ({"block_count": 2**31}, CheckpointError, "no real model"),
    ({"expert_count": 7}, CheckpointError, "experts"),
    ({"expert_count": 2**30}, CheckpointError, "no real model"),
    ({"expert_used_count": 7}, CheckpointError, "7 of 6"),
    ({"expert_gating_func": 2}, UnsupportedError, "gating"),
    ({"expert_weights_norm": False}, UnsupportedError, "expert_weights_norm"),
    ({"embedding_length": 64}, CheckpointError, "shape"),
    ({"vocab_size": 97}, UnsupportedError, "vocab_size"),
    ({"feed_forward_length": 40}, CheckpointError, "shape"),
    ({"attention.layer_norm_rms_epsilon": float("nan")}, CheckpointError, "must be a number"),
    ({"attention.head_count_kv": [2, 1, 2]}, UnsupportedError, "differs by layer"),
    ({"attention.causal": False}, UnsupportedError, "causal"),
]


@pytest.mark.parametrize(("changes", "error", "says"), REFUSED, ids=[next(iter(changes)) for changes, *_ in REFUSED])
def test_metadata_that_cannot_be_honored_is_refused(
    changes: dict[str, Any], error: type[CompressError], says: str, tmp_path: Path
) -> None:
    path = save_gguf(make(tmp_path), tmp_path / "m.gguf", **changes)
    with pytest.raises(error, match=says) as caught:
        Checkpoint(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_tensors_that_do_not_belong_are_refused(tmp_path: Path) -> None:
    own = make(tmp_path)
    metadata, tensors = gguf_metadata(own), gguf_tensors(own)
    router, path = "blk.1.ffn_gate_inp.weight", tmp_path / "m.gguf"
    for changed, says in (
        (tensors | {"rope_freqs.weight": torch.tensor([1.0, 2.0, 3.0, 4.0])}, "rope_freqs"),
        (tensors | {"rope_freqs.weight": torch.ones(3)}, "one number for each of 4 pairs"),
        (tensors | {"blk.0.attn_x.weight": torch.ones(4)}, r"blk\.0\.attn_x\.weight is not part"),
        ({name: tensor for name, tensor in tensors.items() if name != router}, "is missing"),
        ({name: tensor for name, tensor in tensors.items() if name != "token_embd.weight"}, "token_embd"),
        (
            {name: tensor for name, tensor in tensors.items() if name != "blk.0.attn_q.weight"},
            r"blk\.0\.attn_q\.weight is missing; its metadata and tensors",
        ),
        (tensors | {router: tensors[router].flatten()}, "shape"),
        (tensors | {"output_norm.weight": (26, (32,), bytes(128))}, r"output_norm\.weight is .*int32"),
    ):
        write_gguf(path, metadata, changed)
        with pytest.raises((CheckpointError, UnsupportedError), match=says):
            Checkpoint(path)
    write_gguf(path, metadata | {"general.architecture": "mamba"}, tensors)
    with pytest.raises(UnsupportedError, match="'mamba' is not supported; supported: llama"):
        Checkpoint(path)


def test_a_value_that_is_not_finite_is_found(tmp_path: Path) -> None:
    own = make(tmp_path)
    tensors = gguf_tensors(own)
    tensors["blk.2.ffn_up_exps.weight"][3, 1, 1] = torch.nan
    with pytest.raises(CheckpointError, match=r"blk\.2\.ffn_up_exps\.weight holds NaN"):
        Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own), tensors)).check_finite()


@pytest.mark.parametrize("count", [50, pytest.param(2_000, marks=pytest.mark.slow)])
def test_damaged_models_raise_nothing_else(count: int, tmp_path: Path) -> None:
    """A changed byte in the header, where the metadata is: the model is read or refused in one line."""
    own = make(tmp_path)
    data = gguf_bytes(gguf_metadata(own), gguf_tensors(own))
    path, messages, end = tmp_path / "m.gguf", list[str](), data.index(b"output.weight") + 200
    for number in range(count):
        chosen = random.Random(number)
        place = chosen.randrange(end)
        path.write_bytes(data[:place] + bytes([data[place] ^ chosen.randrange(1, 256)]) + data[place + 1 :])
        try:
            Checkpoint(path)
        except CompressError as error:
            messages.append(str(error))
    assert len(messages) > count / 2 and not any("\n" in message for message in messages)


def test_numbers_that_were_rounded_to_float32_are_decimals_again() -> None:
    for number in (1e-5, 1e-6, 0.22, 12.0, 0.1, 1e6, 0.015625, 1.7):
        assert decimal(float(torch.tensor(number))) == number
    assert decimal(0.1 + 1e-12) == 0.1 + 1e-12
