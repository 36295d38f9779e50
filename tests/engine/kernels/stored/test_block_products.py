"""Products on the blocks of GGUF files equal products with the dequantized matrices."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import save_reference
from float_models_for_tests import save_mxfp4
from gguf_for_tests import Tensors, q8_0, write_gguf
from gguf_models_for_tests import gguf_metadata, gguf_tensors
from kernels_for_tests import kernels, needs_integers
from packages_for_tests import needs_numba

import engine.kernels.kernel_choice
from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf.blocks import dequantized
from engine.checkpoint.gguf.model import GgufView
from engine.decoder.experts import CompiledExperts, Expert
from engine.decoder.model import Decoder
from engine.decoder.routing import Selection
from engine.files.gguf_types import BLOCK_TYPES
from engine.generation.generate import Engine
from engine.kernels.kernel_choice import DECODING, PROMPT, block_types_multiplied
from engine.kernels.linear import embedding, kernel_form, linear, linears, plain
from engine.kernels.stored.block_weight import BlockWeight, kind_of
from engine.kernels.stored.quantized_weight import quantise

KINDS = {kind.name: kind for kind in BLOCK_TYPES.values()}
SCALES: dict[str, tuple[int, ...]] = dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,))
SCALES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
SCALES |= {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
"""Places of the float16 numbers in a block of each type that the kernels multiply."""

pytestmark = needs_numba


def block_weight(name: str, outputs: int, inputs: int) -> BlockWeight:
    """Return a weight of random blocks; scales are about 0.01."""
    kind = KINDS[name]
    blocks = np.frombuffer(bytearray(random.Random(name).randbytes(outputs * inputs // kind.numbers * kind.bytes)), np.uint8)
    each, random_scales = blocks.reshape(-1, kind.bytes), np.random.default_rng(0)
    for place in SCALES.get(name, ()):
        scales = random_scales.normal(0.0, 0.01, (len(each), 1)).astype(np.float16)
        each[:, place : place + 2] = scales.view(np.uint8)
    if name == "MXFP4":  # a power of two instead
        each[:, 0] = random_scales.integers(116, 122, len(each))
    return BlockWeight(torch.from_numpy(blocks).view(outputs, -1), kind_of(name), inputs, partial(dequantized, kind=kind))


def size(name: str) -> int:
    """Return a number of inputs that leaves a rest after whole steps of a product."""
    return KINDS[name].numbers * (7 if KINDS[name].numbers == 32 else 3)


@pytest.mark.parametrize("name", SCALES)
def test_exact_products_are_those_of_the_dequantized_matrix(name: str) -> None:
    weight, inputs = block_weight(name, 12, size(name)), size(name)
    x = torch.randn(7, inputs)
    exact = x.double() @ weight.dequantised(torch.float64).T
    for rows in (1, 2, 3, 7):
        y = torch.zeros(rows, 12)
        multiply = kernels.KERNELS[f"multiply_exact_{kind_of(name).lower()}"]
        multiply(weight.addresses[0], 0, 1, 12, inputs, x.data_ptr(), rows, y.data_ptr(), 12)
        assert float((y - exact[:rows]).abs().max()) <= 1e-5 * float(exact.abs().max())


@needs_integers
@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("further", [0, 12 * 1024])  # a short vector, and a long one
def test_products_differ_by_the_rounding_of_the_vectors(further: int, name: str) -> None:
    """Each value of a vector is rounded by at most 1 / 254 of the largest of its 32."""
    inputs = size(name) + further
    weight = block_weight(name, 12, inputs)
    x = torch.randn(7, inputs).bfloat16()
    x[2, 32:64] = 0.0
    assert kernel_form(kernels, [weight]) == kernels.BLOCKS
    y, plain_DO = linear(x, weight, choice=DECODING), weight.dequantised(torch.float64).T
    steps = x.double().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 254
    bound = steps.expand(-1, -1, 32).flatten(1) @ plain_DO.abs()
    exact = x.double() @ plain_DO
    assert bool(((y.double() - exact).abs() <= bound + exact.abs() / 128 + 1e-6 * exact.abs().max()).all())
    assert float((y.double() - exact).norm() / exact.norm()) < 0.01
    alone = torch.cat([linear(row[None], weight, choice=DECODING) for row in x])
    assert torch.equal(alone, y), "to the bit, whatever is computed beside it"


@pytest.mark.parametrize("name", SCALES)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    """To the bit, on so many outputs that a sum in another order would show."""
    weight = block_weight(name, 1028, 768)
    x = torch.randn(7, 768).bfloat16()
    together = linear(x, weight, choice=DECODING)
    for count in (1, 2, 3):
        assert torch.equal(torch.cat([linear(rows, weight, choice=DECODING) for rows in x.split(count)]), together)


@pytest.mark.parametrize("name", SCALES)
def test_widened_matrices_are_the_dequantized_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, tokens = block_weight(name, 36, size(name)), torch.tensor([[3, 0], [35, 3]])
    exact = weight.dequantised(torch.float32).bfloat16()
    monkeypatch.setattr("engine.kernels.linear.loaded_kernels", lambda: kernels)
    assert torch.equal(plain(weight, torch.bfloat16), exact)
    assert torch.equal(embedding(tokens, weight, torch.bfloat16), exact[tokens])
    monkeypatch.setattr("engine.kernels.linear.loaded_kernels", lambda: None)
    assert torch.equal(plain(weight, torch.bfloat16), exact)


def test_float16_is_widened_without_an_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba import njit, types
    from numba.extending import intrinsic

    from engine.kernels.compiler import instructions
    from engine.kernels.compiler.instructions import FLOAT, SHORT, load, many

    monkeypatch.setattr(instructions, "WIDENS_HALVES", False)

    @intrinsic  # type: ignore[untyped-decorator]
    def widen(context: Any, source: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            wide = instructions.wide_halves(builder, load(builder, arguments[0], many(SHORT, 8)))
            place = builder.inttoptr(arguments[1], many(FLOAT, 8).as_pointer())
            builder.store(wide, place, align=2)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @njit  # type: ignore[untyped-decorator]
    def every(source: Any, target: Any) -> None:
        for first in range(0, 1 << 16, 8):
            widen(source + 2 * first, target + 4 * first)

    halves, wide = np.arange(1 << 16, dtype=np.uint16), np.zeros(1 << 16, np.float32)
    every(halves.ctypes.data, wide.ctypes.data)
    with np.errstate(invalid="ignore"):  # numpy warns of signalling NaN on some processors
        expected = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(wide, expected, equal_nan=True)


@needs_integers
def test_weights_of_several_types_are_multiplied_together() -> None:
    """Matrices in blocks share one call; beside a plain matrix or a packed one each has its own."""
    x = torch.randn(3, 256).bfloat16()
    blocks = [block_weight(name, 8, 256) for name in SCALES]
    assert kernel_form(kernels, blocks) == kernels.BLOCKS
    others = [torch.randn(8, 256).bfloat16(), quantise(torch.randn(8, 256), 4, 32, torch.bfloat16)]
    assert kernel_form(kernels, [*blocks, others[0]]) is None
    for weights in (blocks, [*blocks, *others]):
        alone = [linear(x, weight, choice=DECODING) for weight in weights]
        together = linears(x, weights, [None] * len(weights), DECODING)
        assert all(map(torch.equal, together, alone))


@needs_integers
def test_experts_of_several_types() -> None:
    """Few tokens take the kernels for few rows; prompts are computed from dequantized rows."""
    torch.manual_seed(0)
    shapes = {"Q4_K": (64, 256), "Q6_K": (64, 256), "Q4_0": (256, 64)}
    experts = [Expert(*(block_weight(name, *shape) for name, shape in shapes.items())) for _ in range(3)]
    plains = [Expert(*(plain(weight, torch.float32) for weight in expert.projections)) for expert in experts]
    for tokens, choice, bound in ((5, DECODING, 0.02), (40, PROMPT, 0.01)):
        x, weights = torch.randn(tokens, 256).bfloat16(), torch.rand(tokens, 2)
        chosen = torch.stack([torch.randperm(3)[:2] for _ in range(tokens)])
        y = CompiledExperts()(x, experts, Selection(chosen, weights), choice=choice)
        assert y is not None
        exact = torch.stack(
            [
                sum(w * plains[int(e)](x[t : t + 1].float())[0] for e, w in zip(chosen[t], weights[t], strict=True))
                for t in range(tokens)
            ]
        )
        assert float((y.float() - exact).norm() / exact.norm()) < bound


@needs_integers
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_overflow_is_hidden(value: float) -> None:
    x = torch.ones(1, 64).bfloat16()
    x[0, 40] = value
    assert not linear(x, block_weight("Q4_1", 4, 64), choice=DECODING).isfinite().any()


def test_other_weights_are_not_served() -> None:
    assert kernel_form(kernels, [block_weight("Q4_0", 7, 64)]) is None, "rows are multiplied four at a time"
    other = BlockWeight(torch.zeros(8, 34, dtype=torch.uint8), "Q8_1", 32, lambda blocks, dtype: blocks)
    assert kernel_form(kernels, [other]) is None
    assert {kind_of(name) for name in SCALES} == set(kernels.BLOCK_KINDS)
    assert set(SCALES) == {name for name, kind in KINDS.items() if kind.numbers > 1}, "every type of blocks that is read"


def aligned(tmp_path: Path, family: str) -> Path:
    """Return a GGUF file of a tiny model, whose matrices are in blocks and whose tokens take turns."""
    latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 32, "qk_nope_head_dim": 32, "moe_intermediate_size": 32}
    sizes = {"hidden_size": 64, "intermediate_size": 64} | (latent if family == "deepseek_v2" else {})
    save_reference(family, tmp_path / "model", **sizes)
    own = Checkpoint(tmp_path / "model")
    kept = ("_norm", "_inp", "bias", "sinks")
    tensors: Tensors = {
        name: tensor if any(map(name.__contains__, kept)) else q8_0(tensor) for name, tensor in gguf_tensors(own).items()
    }
    return write_gguf(tmp_path / "m.gguf", gguf_metadata(own), tensors)


@needs_numba
def test_rows_that_the_kernels_do_not_take_together_are_dequantized_once(tmp_path: Path) -> None:
    checkpoint = Checkpoint(aligned(tmp_path, "mixtral"))
    view = checkpoint._views["lm_head.weight"]
    assert isinstance(view, GgufView) and isinstance(view.weight(tuple(kernels.BLOCK_KINDS)), BlockWeight)
    view.shape = (view.shape[0] - 1, view.shape[1])
    assert view.weight(tuple(kernels.BLOCK_KINDS)) is None


@pytest.mark.parametrize("family", ["mixtral", "llama", "deepseek_v2"])
def test_a_model_stays_in_blocks(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine.kernels.kernel_choice.KERNELS, "compiled")
    engine.kernels.kernel_choice._load_kernels.cache_clear()
    engine_in_blocks = Engine.open(aligned(tmp_path, family))
    checkpoint, in_blocks = engine_in_blocks.checkpoint, engine_in_blocks.decoder
    assert isinstance(checkpoint, Checkpoint)
    assert isinstance(in_blocks, Decoder) and isinstance(in_blocks.embedding, BlockWeight)
    weights = [module for module in in_blocks.modules() if isinstance(module, BlockWeight)]
    assert {weight.kind for weight in weights} == {"Q8_0"}
    assert in_blocks.weights_bytes < 0.7 * Decoder(checkpoint.config, checkpoint.weights(torch.bfloat16)).weights_bytes
    mapped = checkpoint.files[0].tensor("token_embd.weight")
    assert mapped.data_ptr() == in_blocks.embedding.blocks_OB.data_ptr(), "no copy"
    plain_decoder = Decoder(checkpoint.config, checkpoint.weights(torch.float32))
    tokens = torch.randint(0, checkpoint.config.vocabulary_size, (1, 12))
    with torch.inference_mode():
        exact = plain_decoder(tokens)[0]
        cache, rows = engine_in_blocks.new_cache(1, 16), []
        for token in tokens[0]:
            rows.append(in_blocks.last_logits(token.view(1, 1), None, cache, DECODING)[0])
        read = in_blocks(tokens, choice=PROMPT)[0]
    for made in (torch.stack(rows), read):
        assert float((made.float() - exact).norm(dim=-1).median() / exact.norm(dim=-1).median()) < 0.05
    assert not block_types_multiplied(torch.float32, torch.device("cpu"))


def test_a_gpt_oss_file_decodes_in_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts are MXFP4, which is also the name of a type of packed floats, and so has a name of its own in kernels."""
    monkeypatch.setenv(engine.kernels.kernel_choice.KERNELS, "compiled")
    engine.kernels.kernel_choice._load_kernels.cache_clear()
    save_mxfp4(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"swiglu_limit": 7.0}))
    export_gguf(GgufExportOptions(model=str(tmp_path / "model"), output=tmp_path / "m.gguf", type="stored"))
    own = Engine.open(tmp_path / "m.gguf")
    assert isinstance(own.decoder, Decoder) and isinstance(own.checkpoint, Checkpoint)
    weights = [module for module in own.decoder.modules() if isinstance(module, BlockWeight)]
    assert {weight.kind for weight in weights} == {"MXFP4_BLOCKS"}
    exact = Decoder(own.checkpoint.config, own.checkpoint.weights(torch.float32))
    tokens = torch.randint(0, own.checkpoint.config.vocabulary_size, (1, 12))
    cache = own.new_cache(1, 16)
    with torch.inference_mode():
        rows = torch.stack([own.decoder.last_logits(token.view(1, 1), None, cache, DECODING)[0] for token in tokens[0]])
        expected = exact(tokens)[0]
    assert float((rows.float() - expected).norm(dim=-1).median() / expected.norm(dim=-1).median()) < 0.05
