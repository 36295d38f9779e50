"""Low-bit weights: by hand, by naive implementations of the rounding and of the format, and in the decoder."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.options.quantize import QuantiserOptions
from compress.plans.apply import apply, planned_decoder
from compress.plans.plan import concatenation_plan, pruning_plan, same_plan
from compress.rounding.quantizer import Quantiser
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.pack_quantized import QuantizedView, schemes_of, tensors_of
from engine.decoder.experts import Expert
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.errors import CheckpointError, UnsupportedError
from engine.families.results import loading_note
from engine.families.tensor_names import expert_tensor
from engine.families.tensor_shapes import names_on_disk
from engine.files.safetensors_file import SafetensorsFile
from engine.generation.generate import Engine
from engine.kernels.kernel_choice import DECODING
from engine.kernels.stored.quantized_weight import QuantizedWeight, packed, quantise, unpacked
from engine.kernels.stored.scheme import BITS, WHOLE_ROW, Scheme

TOKENS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))
KINDS = ("mixtral", "qwen2_moe", "llama_moe", "granitemoeshared", "phimoe", "gpt_oss", "deepseek_v3", "ernie4_5_moe")
KINDS = (*KINDS, "minimax_m2", "glm4_moe", "qwen3_next", "lfm2_moe", "gemma4_text", "nemotron_h", "llama")
"""Families with experts one by one and stacked, biases and clamps, shared experts with a gate and without, latent
and linear attention, short convolutions, other names on disk, norms of experts, experts without a gate in layers of a
single block, and a dense model."""
FAMILIES = pytest.mark.parametrize("family", KINDS)
DIVISIBLE = {family: {"q_lora_rank": 24} for family in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")}
"""Sizes that are multiples of 8, where conftest has others."""


SHARES = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8)}
SHARES[3] = (1.0, 1.1, 0.9, 0.8, 0.7, 0.6, -1.1, -1.0, -0.9, -0.8, -0.7)
SHARES[2] = (1.0, 1.2, 1.1, 0.9, 0.8, 0.7, 0.6, 0.5, -1.2, -1.1, -1.0, -0.9, -0.8, -0.7, -0.6, -0.5)
"""Scales that are tried, as parts of that with which the largest weight becomes the lowest value."""


def packed_rows(values: list[list[int]], bits: int) -> Tensor:
    """Return int32 words. Each row is one long number whose lowest bits are its first value."""
    words = -(-len(values[0]) * bits // 32)
    numbers = [sum(value << (bits * place) for place, value in enumerate(row)) for row in values]
    data = bytearray(b"".join(number.to_bytes(4 * words, "little") for number in numbers))
    return torch.frombuffer(data, dtype=torch.int32).view(len(values), words)


def unpacked_rows(words: Tensor, bits: int, inputs: int) -> list[list[int]]:
    numbers = [int.from_bytes(row.numpy().tobytes(), "little") for row in words]
    return [[number >> (bits * place) & (2**bits - 1) for place in range(inputs)] for number in numbers]


def naive_weights(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint by its name in a decoder, packed ones as scale · (stored − 2^(bits−1)).

    Rows fill whole words, whose number says how many bits a weight has.
    """
    stored = load_file(directory / "model.safetensors")
    names = {on_disk: name for name, on_disk in names_on_disk(Checkpoint(directory).config).items()}
    packed = [name.removesuffix("_packed") for name in stored if name.endswith("_packed")]
    parts = {f"{name}{part}" for name in packed for part in ("_packed", "_scale", "_shape")}
    weights = {name: tensor.to(dtype) for name, tensor in stored.items() if name not in parts}
    for name, words in stored.items():
        if name.endswith("_packed"):
            own = name.removesuffix("_packed")
            (outputs, inputs), scales = stored[f"{own}_shape"].tolist(), stored[f"{own}_scale"]
            bits = words.shape[1] * 32 // inputs
            values = torch.tensor(unpacked_rows(words, bits, inputs)) - 2 ** (bits - 1)
            wide = values * scales.double().repeat_interleave(inputs // scales.shape[1], dim=1)
            assert wide.shape == (outputs, inputs)
            weights[own] = wide.to(dtype)
    return {names.get(name, name): weight for name, weight in weights.items()}


def quantised(family: str, path: Path, bits: int, group_size: int = 8, **options: Any) -> Checkpoint:
    """Return a tiny low-bit model, in `path / "quantised"`. The original is in `path / "full"`."""
    save_reference(family, path / "full", **DIVISIBLE.get(family, {}))
    full = Checkpoint(path / "full")
    quantiser = Quantiser(QuantiserOptions(bits, group_size, **options))
    apply(same_plan(full.config.experts_by_layer), full, path / "quantised", quantiser=quantiser)
    return Checkpoint(path / "quantised")


# Rounding and packing


@pytest.mark.parametrize(
    ("bits", "weights", "scale", "word"),
    [
        (4, [-4.0, 3.5, 0.0, 0.5, -0.5, 1.5, -2.0, 1.0], 0.5, 0xA4B798F0),
        # The largest is positive, so the scale is negative, and the largest again the lowest value.
        (4, [4.0, -3.5, 0.0, -0.5, 0.5, -1.5, 2.0, -1.0], -0.5, 0xA4B798F0),
        (8, [-32.0, 31.75, 0.0, 0.25], 0.25, 0x8180FF00),
        (8, [-128.0, 2.5, 3.5, 126.6], 1.0, 0xFF848200),  # ties to even: 2 and 4
        (4, [0.0] * 8, 0.0, 0x88888888),
        # 0, 1, 2, 3 repeated, each in two bits from the lowest ones on: 0b11100100 in each byte.
        (2, [-1.0, -0.5, 0.0, 0.5] * 4, 0.5, 0xE4E4E4E4),
        (2, [1.0, 0.5, 0.0, -0.5] * 4, -0.5, 0xE4E4E4E4),
    ],
)
def test_by_hand(bits: int, weights: list[float], scale: float, word: int) -> None:
    rounded = quantise(torch.tensor([weights]), bits, len(weights))
    assert rounded.scales_OC.tolist() == [[scale]] and rounded.group_size == len(weights)
    stored = tensors_of("w", rounded)
    assert stored["w_packed"].tolist() == [[word - 2**32]] and stored["w_shape"].tolist() == [1, len(weights)]
    if weights[1] != 2.5:
        assert rounded.dequantised(torch.float32).tolist() == [weights]


def tried(own: Tensor, scale: Tensor, middle: int) -> tuple[float, float, Tensor]:
    """Return the squared error of a group with a scale, the scale, and the integers."""
    values = (own / scale).round().clamp(-middle, middle - 1)
    return float((values * scale - own).square().sum()), float(scale), values


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 8), (4, WHOLE_ROW), (8, 8), (8, WHOLE_ROW), (2, 16), (3, 32)])
def test_rounding_equals_a_naive_one(bits: int, group_size: int, scale_dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr("engine.kernels.stored.quantized_weight.ROUND_ELEMENTS", 64)  # several pieces even for small weights
    inputs = 64 if bits < 4 else 24
    weight = torch.randn(5, inputs, generator=torch.Generator().manual_seed(0))
    rounded = quantise(weight, bits, group_size, scale_dtype)
    size, middle = inputs if group_size == WHOLE_ROW else group_size, 2 ** (bits - 1)
    found = unpacked_rows(tensors_of("w", rounded)["w_packed"], bits, inputs)
    for row in range(5):
        for group, own in enumerate(weight[row].split(size)):
            best = (float("inf"), 0.0, own)
            largest = own[own.abs().argmax()]
            for share in SHARES[bits]:
                scale = (-largest * share / middle).to(scale_dtype).float()
                best = min(best, tried(own, scale, middle), key=lambda each: each[0])
            if bits < 4:  # the scale that suits the integers best
                scale = ((own * best[2]).sum() / best[2].square().sum()).to(scale_dtype).float()
                best = min(best, tried(own, scale, middle), key=lambda each: each[0])
            assert float(rounded.scales_OC[row, group]) == best[1]
            assert found[row][group * size : (group + 1) * size] == (best[2] + middle).int().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "group"), [(2, 16), (3, 32), (4, 8), (8, 8), (2, WHOLE_ROW), (3, WHOLE_ROW)])
def test_what_is_stored_stands_for_one_product_rounded_once(
    bits: int, group: int, scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    inputs = 64 if bits < 4 else 16
    weight = torch.randn(6, inputs, generator=torch.Generator().manual_seed(0))
    rounded = quantise(weight, bits, group, scale_dtype)
    values = torch.tensor(unpacked_rows(tensors_of("w", rounded)["w_packed"], bits, inputs)) - 2 ** (bits - 1)
    exact = values.double() * rounded.scales_OC.double().repeat_interleave(rounded.group_size, dim=1)
    got = rounded.dequantised(dtype)
    assert got.dtype == dtype and got.is_contiguous()
    assert torch.equal(got, exact.to(dtype if dtype != torch.bfloat16 else torch.float32).to(dtype))
    if bits >= 4:
        again = quantise(got, bits, group, scale_dtype)
        assert torch.equal(again.packed_OB, rounded.packed_OB), "rounding what was rounded changes nothing"


@pytest.mark.parametrize("group", [32, 64, 128, WHOLE_ROW])
@pytest.mark.parametrize("bits", BITS)
def test_every_width_and_group_goes_to_disk_and_back(bits: int, group: int, tmp_path: Path) -> None:
    weight = quantise(torch.randn(6, 256, generator=torch.Generator().manual_seed(0)), bits, group, torch.bfloat16)
    values = torch.randint(0, 2**bits, (6, 256), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    weight.packed_OB = packed(values, bits)
    stored = tensors_of("w", weight)
    assert torch.equal(stored["w_packed"], packed_rows(values.tolist(), bits))
    assert torch.equal(unpacked(weight.packed_OB, bits).to(torch.uint8), values)
    size, groups = 256 if group == WHOLE_ROW else group, 1 if group == WHOLE_ROW else 256 // group
    assert sum(tensor.nbytes for tensor in stored.values()) == 6 * (256 * bits // 8 + 2 * groups) + 16
    save_file(stored, tmp_path / "w.safetensors")
    with SafetensorsFile(tmp_path / "w.safetensors") as file:
        view = QuantizedView("w", (6, 256), dict.fromkeys(stored, file), [Scheme(each, group) for each in BITS])
        back = view.weight()
        assert (view.scheme, back.group_size) == (Scheme(bits, group), size)
        exact = (values.double() - 2 ** (bits - 1)) * weight.scales_OC.double().repeat_interleave(size, dim=1)
        assert torch.equal(back.dequantised(torch.float64), exact)


def test_three_bits_cross_words_by_hand() -> None:
    """The eleventh of 32 integers is in bits 30, 31 and 32; the first word ends with its two low bits."""
    values = torch.zeros(1, 32, dtype=torch.uint8)
    values[0, 0], values[0, 10], values[0, 31] = 1, 7, 5
    words = packed(values, 3).view(torch.int32)
    assert words.tolist() == [[1 + (3 << 30) - 2**32, 1, (5 << 29) - 2**32]]


# On disk and in the decoder


@torch.inference_mode()
def prefill_and_steps(decoder: Decoder) -> Tensor:
    """Return the logits of a prefill of 20 positions and of 4 single steps."""
    cache = KeyValueCache(decoder.config, 2, 24, decoder.dtype)
    logits = [decoder(TOKENS[:, :20], None, cache)]
    logits += [decoder(TOKENS[:, i : i + 1], None, cache, DECODING) for i in range(20, 24)]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("bits", [4, 8])
@FAMILIES
def test_logits_equal_those_of_a_plain_model_with_the_same_weights(family: str, bits: int, tmp_path: Path) -> None:
    checkpoint = quantised(family, tmp_path, bits)
    naive = naive_weights(tmp_path / "quantised")
    assert checkpoint.shapes.keys() <= naive.keys()
    packed = Decoder(checkpoint.config, checkpoint.weights(torch.float32)).eval()
    logits = prefill_and_steps(packed)
    plain = prefill_and_steps(Decoder(checkpoint.config, naive.__getitem__).eval())
    assert float((logits - plain).abs().max()) <= 1e-5
    full = Checkpoint(tmp_path / "full")
    original = prefill_and_steps(Decoder(full.config, full.weights(torch.float32)).eval())
    # Some tokens use other experts.
    assert 1e-3 < float((logits - original).norm() / original.norm()) < (0.7 if bits == 4 else 0.25)
    assert all(torch.equal(checkpoint.tensor(name), naive[name]) for name in checkpoint.shapes)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "granitemoeshared", "deepseek_v3"])
def test_pruned_it_is_what_it_was_with_fewer_experts(family: str, tmp_path: Path) -> None:
    checkpoint = quantised(family, tmp_path, 4)
    kept = {layer: [0, 1, *range(3, experts)] for layer, experts in checkpoint.config.experts_by_layer.items()}
    plan = pruning_plan(kept)
    apply(plan, checkpoint, tmp_path / "pruned")
    pruned = Checkpoint(tmp_path / "pruned")
    assert pruned.schemes_used == checkpoint.schemes_used
    assert pruned.raw_config["quantization_config"] == checkpoint.raw_config["quantization_config"]
    row = checkpoint.config.architecture
    for layer, experts in kept.items():
        for number, own in enumerate(experts):
            for projection in range(3):
                after = pruned.stored(expert_tensor(row, layer, number, projection))
                before = checkpoint.stored(expert_tensor(row, layer, own, projection))
                assert isinstance(after, QuantizedWeight) and isinstance(before, QuantizedWeight)
                assert torch.equal(after.packed_OB, before.packed_OB) and torch.equal(after.scales_OC, before.scales_OC)
    logits = prefill_and_steps(Decoder(pruned.config, pruned.weights(torch.float32)).eval())
    unwritten = prefill_and_steps(planned_decoder(plan, checkpoint, torch.float32).eval())
    assert float((logits - unwritten).abs().max()) <= 1e-6
    few = family in ("gpt_oss", "granitemoeshared")
    assert ("only moe-compress loads it" in (loading_note(pruned.raw_config, True) or "")) == few
    with pytest.raises(UnsupportedError, match="would be made of low-bit weights"):
        apply(concatenation_plan({layer: [(0, 1.0)] for layer in kept}), checkpoint, tmp_path / "dense")


def test_only_layers_matrices_are_rounded_and_the_config_names_the_others(tmp_path: Path) -> None:
    checkpoint = quantised("qwen2_moe", tmp_path, 4)
    packed = {name for name in checkpoint.shapes if checkpoint.scheme(name) is not None}
    expected = {
        name for name in checkpoint.shapes if any(part in name for part in ("experts.", "shared_expert.", "q_proj.weight"))
    }
    assert expected < packed and all("_proj.weight" in name for name in packed)
    config = checkpoint.raw_config["quantization_config"]
    gates = [f"model.layers.{layer}.mlp.{name}" for layer in range(3) for name in ("gate", "shared_expert_gate")]
    assert config["ignore"] == ["lm_head", *gates]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert schemes_of(checkpoint.raw_config) == checkpoint.schemes_used == (Scheme(4, 8),)
    for name in set(checkpoint.shapes) - packed:
        assert torch.equal(checkpoint.tensor(name), Checkpoint(tmp_path / "full").tensor(name))
    experts = quantised("qwen2_moe", tmp_path / "experts", 8, WHOLE_ROW, experts_only=True)
    assert {name for name in experts.shapes if experts.scheme(name)} == {name for name in packed if ".mlp." in name}
    assert "model.layers.2.self_attn.o_proj" in experts.raw_config["quantization_config"]["ignore"]


def test_bytes_stay_in_the_map_and_are_counted_as_they_are(tmp_path: Path) -> None:
    checkpoint = quantised("mixtral", tmp_path, 4)
    decoder = Decoder(checkpoint.config, checkpoint.weights(torch.float32))
    (file,) = checkpoint.files
    begin = ctypes.addressof(ctypes.c_char.from_buffer(file._mapping()))
    weights = [module for module in decoder.modules() if isinstance(module, QuantizedWeight)]
    assert len(weights) == 3 * (4 + 6 * 3)
    for weight in weights:
        for part in (weight.packed_OB, weight.scales_OC):
            assert begin <= part.data_ptr() < begin + file.size
        assert weight.scales_OC.is_contiguous() and weight.packed_OB.stride() == (weight.shape[1] // 2, 1)
    shapes = 16 * len(weights)
    assert decoder.weights_bytes == checkpoint.bytes - shapes == Engine(checkpoint, decoder).weights_bytes
    matrices = sum(torch.Size(checkpoint.shapes[name]).numel() for name in checkpoint.shapes if checkpoint.scheme(name))
    assert checkpoint.bytes - checkpoint.plain_bytes - shapes == matrices // 2 + matrices // 8 * 4
    assert checkpoint.parameters == Checkpoint(tmp_path / "full").parameters


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_an_expert_in_bfloat16(tokens: int) -> None:
    """Few tokens and many use different paths. Each multiplies by the same matrices as a plain expert."""
    torch.manual_seed(0)
    shapes = ((48, 32), (48, 32), (32, 48))
    rounded = [quantise(torch.randn(shape) * 0.2, 4, 16, torch.bfloat16) for shape in shapes]
    plain = Expert(*(weight.dequantised(torch.bfloat16) for weight in rounded))
    x = torch.randn(tokens, 32).bfloat16()
    with torch.no_grad():
        assert torch.equal(Expert(*rounded)(x), plain(x))


def test_anybodys_checkpoint_of_that_format(tmp_path: Path) -> None:
    """The checkpoint has two groups of settings, rows that end within a word, float16 scales, and a packed head."""
    save_reference("mixtral", tmp_path, num_hidden_layers=1, hidden_size=36, head_dim=8)
    stored, packed = load_file(tmp_path / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in list(stored):
        if stored[name].dim() == 2 and "embed" not in name and "gate" not in name:
            bits, (outputs, inputs) = 8 if "self_attn" in name else 4, stored.pop(name).shape
            values = torch.randint(2**bits, (outputs, inputs), generator=generator)
            groups = inputs // 4 if bits == 8 else 1
            scales = (torch.rand(outputs, groups, generator=generator) * 0.3 / 2 ** (bits - 1)).half()
            packed[name] = (values - 2 ** (bits - 1)) * scales.double().repeat_interleave(inputs // groups, dim=1)
            stored[f"{name}_packed"] = packed_rows(values.tolist(), bits)
            stored[f"{name}_scale"], stored[f"{name}_shape"] = scales, torch.tensor([outputs, inputs])
    assert stored["model.layers.0.block_sparse_moe.experts.0.w1.weight_packed"].shape == (48, 5)
    save_file(stored, tmp_path / "model.safetensors")
    group = {"targets": ["re:.*self_attn.*"], "weights": WEIGHTS | {"num_bits": 8, "group_size": 4}}
    rest = {"targets": ["Linear"], "weights": WEIGHTS | {"strategy": "channel", "group_size": None, "observer": "mse"}}
    change_config(tmp_path, lambda config: config["config_groups"].update({"group_0": group, "group_1": rest}))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.schemes_used == (Scheme(8, 4), Scheme(4, WHOLE_ROW)) and checkpoint.fewest_bits == Scheme(4, WHOLE_ROW)
    plain = {name: tensor.float() for name, tensor in (stored | packed).items()}
    logits = prefill_and_steps(Decoder(checkpoint.config, checkpoint.weights(torch.float32)).eval())
    assert float((logits - prefill_and_steps(Decoder(checkpoint.config, plain.__getitem__).eval())).abs().max()) <= 1e-5
    router = stored.pop("model.layers.0.block_sparse_moe.gate.weight")
    save_file(stored | {"model.layers.0.block_sparse_moe.gate.weight_packed": router}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"gate\.weight is packed, and the engine reads plain routers only"):
        Checkpoint(tmp_path)


# Refusals

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8, "dynamic": False}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
}


def change_config(directory: Path, change: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config.setdefault("quantization_config", json.loads(json.dumps(CONFIG))))
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("format", "int-quantized", "format is 'int-quantized'"),
        ("config_groups.group_0.format", "nvfp4-pack-quantized", "format is 'nvfp4-pack-quantized'"),
        ("quantization_status", "frozen", "quantization_status"),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
        ("transform_config", {"config_groups": {}}, "transform_config"),
        ("config_groups.group_0.input_activations", {"num_bits": 8}, "input_activations"),
        ("config_groups.group_0.weights.num_bits", 5, "weights.num_bits is 5, and the engine reads 2 or 3 or 4 or 8"),
        ("config_groups.group_0.weights.num_bits", True, "weights.num_bits is True"),
        ("config_groups.group_0.weights.type", "float", "weights.type"),
        ("config_groups.group_0.weights.symmetric", False, "weights.symmetric"),
        ("config_groups.group_0.weights.symmetric", 1, "weights.symmetric"),
        ("config_groups.group_0.weights.strategy", "block", "weights.strategy"),
        ("config_groups.group_0.weights.actorder", "group", "weights.actorder"),
        ("config_groups.group_0.weights.dynamic", True, "weights.dynamic"),
    ],
)
def test_settings_that_are_not_read_are_named(path: str, value: Any, said: str) -> None:
    config = json.loads(json.dumps(CONFIG))
    *above, key = path.split(".")
    place = config
    for step in above:
        place = place[step]
    place[key] = value
    with pytest.raises(UnsupportedError, match="quantize") as error:
        schemes_of({"quantization_config": config})
    assert said in str(error.value)


@pytest.mark.parametrize("groups", [None, {}, [], {"group_0": None}, {"group_0": {"weights": 4}}])
def test_settings_that_are_no_settings(groups: Any) -> None:
    with pytest.raises(CheckpointError, match="must be an object"):
        schemes_of({"quantization_config": CONFIG | {"config_groups": groups}})


@pytest.mark.parametrize("size", [0, -1, None, "32", True])
def test_group_sizes_that_are_none(size: Any) -> None:
    group = {"targets": ["Linear"], "weights": WEIGHTS | {"group_size": size}}
    with pytest.raises(CheckpointError, match=r"group_size is .*must be a number from 1"):
        schemes_of({"quantization_config": CONFIG | {"config_groups": {"group_0": group}}})


def test_harmless_settings_are_let_through() -> None:
    more = {"sparsity_config": {"format": "dense"}, "quantization_status": "compressed", "transform_config": {}}
    assert schemes_of({"quantization_config": CONFIG | more}) == (Scheme(4, 8),)
    assert schemes_of({}) == schemes_of({"quantization_config": None}) == ()
    assert schemes_of({"quantization_config": CONFIG | {"quant_method": "fp8"}}) == (), "another form"


@pytest.mark.parametrize(
    ("schemes", "words", "said"),
    [
        ((Scheme(3, 64),), 7, "match no group"),  # ten integers of 3 bits in a word, as older programs pack them
        ((Scheme(3, WHOLE_ROW), Scheme(2, WHOLE_ROW)), 6, None),
        ((Scheme(4, WHOLE_ROW), Scheme(3, WHOLE_ROW)), 1, "may be of 4 and of 3 bits"),
    ],
)
def test_rows_whose_words_do_not_say_their_bits(
    schemes: tuple[Scheme, ...], words: int, said: str | None, tmp_path: Path
) -> None:
    inputs = 8 if words == 1 else 64
    tensors = {"w_packed": torch.zeros(4, words, dtype=torch.int32), "w_scale": torch.ones(4, 1).bfloat16()}
    save_file(tensors | {"w_shape": torch.tensor([4, inputs])}, tmp_path / "w.safetensors")
    with SafetensorsFile(tmp_path / "w.safetensors") as file:
        places = dict.fromkeys(("w_packed", "w_scale", "w_shape"), file)
        if said is None:
            assert QuantizedView("w", (4, inputs), places, schemes).scheme == schemes[0]
        else:
            with pytest.raises((CheckpointError, UnsupportedError), match=said):
                QuantizedView("w", (4, inputs), places, schemes)


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update({f"{NAME}_packed": t[f"{NAME}_packed"][:, :-1].clone()}), [f"{NAME}_packed", "[48, 3]"]),
        (lambda t: t.update({f"{NAME}_packed": t[f"{NAME}_packed"][:-1].clone()}), [f"{NAME}_packed", "[47, 4]"]),
        (lambda t: t.update({f"{NAME}_packed": t[f"{NAME}_packed"].float()}), [f"{NAME}_packed", "float32"]),
        (lambda t: t.update({f"{NAME}_scale": t[f"{NAME}_scale"][:, :-1].clone()}), [f"{NAME}_scale", "[48, 3]"]),
        (lambda t: t.update({f"{NAME}_scale": t[f"{NAME}_scale"].double()}), [f"{NAME}_scale", "float64"]),
        (lambda t: t.pop(f"{NAME}_scale"), [f"{NAME}_scale is missing"]),
        (lambda t: t.pop(f"{NAME}_shape"), [f"{NAME}_shape is missing"]),
        (lambda t: t.pop(f"{NAME}_packed"), [f"{NAME} is missing"]),
        (lambda t: t.update({f"{NAME}_zero_point": t[f"{NAME}_scale"].clone()}), [f"{NAME}_zero_point is not part"]),
        (lambda t: t.update({NAME: torch.ones(48, 32)}), [f"{NAME}_", "is not part"]),
    ],
)
def test_damaged_tensors_are_named(change: Any, said: list[str], tmp_path: Path) -> None:
    quantised("llama", tmp_path, 4)
    directory = tmp_path / "quantised"
    stored = load_file(directory / "model.safetensors")
    change(stored)
    save_file(stored, directory / "model.safetensors")
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError) as error:
        Checkpoint(directory)
    assert all(words in str(error.value) for words in said), error.value


def test_damage_that_shows_when_weights_are_read(tmp_path: Path) -> None:
    quantised("llama", tmp_path, 4)
    directory = tmp_path / "quantised"
    whole = load_file(directory / "model.safetensors")
    save_file(whole | {f"{NAME}_shape": torch.tensor([32, 48])}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_shape holds \[32, 48\], and config.json says \[48, 32\]"):
        Engine.open(directory)
    scales = whole[f"{NAME}_scale"].clone()
    scales[3, 1] = torch.nan
    save_file(whole | {f"{NAME}_scale": scales}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{NAME} holds NaN"):
        Checkpoint(directory).check_finite()


def test_packed_tensors_need_settings(tmp_path: Path) -> None:
    quantised("llama", tmp_path, 4)
    config = json.loads((tmp_path / "quantised" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weight_packed is packed, and config.json has no quantization_config for it"):
        Checkpoint(tmp_path / "quantised")
