"""Sums of squared inputs, compared with those that hooks on the modules of transformers see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from torch import Tensor, nn

from calibrate.product_inputs import InputSums, collect_inputs
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.families.tensor_names import expert_tensor

TOKENS = torch.randint(3, 96, (5, 7), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def naive_linear_inputs(model: Any) -> dict[str, Tensor]:
    """Return Σ x² of every linear module of a model of transformers, by the name of its weight, sequence by sequence."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def add(module: Any, given: Any, name: str = f"{name}.weight") -> None:
                own = given[0].reshape(-1, given[0].shape[-1]).double() ** 2
                found[name] = found.get(name, torch.zeros(own.shape[1], dtype=torch.float64)) + own.sum(0)

            module.register_forward_pre_hook(add)
    for row in TOKENS:
        model(row[None])
    return found


@torch.no_grad()
def naive_expert_inputs(model: Any, checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return Σ x² and the number of tokens of the experts of a Mixtral, token by token."""
    squares: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}
    seen: dict[int, list[Tensor]] = {}
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(
            lambda module, given, index=index: seen.setdefault(index, []).append(given[0].flatten(0, -2))
        )
    model(TOKENS)
    row = checkpoint.config.architecture
    for index, layer in enumerate(model.model.layers):
        for x in torch.cat(seen[index]).double():
            chosen = (layer.mlp.gate.weight.double() @ x).topk(2).indices.tolist()
            for expert in chosen:
                gate, up = layer.mlp.experts.gate_up_proj[expert].double().chunk(2)
                inputs = [x, x, torch.nn.functional.silu(gate @ x) * (up @ x)]
                for part, own in enumerate(inputs):
                    name = expert_tensor(row, index, expert, part)
                    squares[name] = squares.get(name, torch.zeros_like(own)) + own**2
                    tokens[name] = tokens.get(name, 0) + 1
    return squares, tokens


def collected(tmp_path: Path, family: str, **changes: Any) -> tuple[Any, Checkpoint, InputSums]:
    model = save_reference(family, tmp_path / "model", **changes)
    checkpoint = Checkpoint(tmp_path / "model")
    return model, checkpoint, collect_inputs(checkpoint, TOKENS, dtype=torch.float32)


@pytest.mark.parametrize(
    "family", ["mixtral", "deepseek_v3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gpt_oss", "qwen2_moe"))]
)
def test_sums_are_those_of_the_modules_of_transformers(family: str, tmp_path: Path) -> None:
    """Attention, shared experts, dense layers and the head are linear modules there."""
    model, checkpoint, found = collected(tmp_path, family)
    naive = naive_linear_inputs(model)
    assert "lm_head.weight" in naive and "model.layers.0.self_attn.o_proj.weight" in naive
    for name, square in naive.items():
        torch.testing.assert_close(found.squares[name].double(), square, rtol=1e-4, atol=1e-6)
        assert found.tokens[name] == TOKENS.numel()
    assert found.squares.keys() <= checkpoint.shapes.keys()


def test_experts_have_the_tokens_that_are_routed_to_them(tmp_path: Path) -> None:
    model, checkpoint, found = collected(tmp_path, "mixtral")
    squares, tokens = naive_expert_inputs(model, checkpoint)
    assert {name for name in found.squares if ".experts." in name} == squares.keys()
    for name, square in squares.items():
        torch.testing.assert_close(found.squares[name].double(), square, rtol=1e-4, atol=1e-6)
        assert found.tokens[name] == tokens[name]
    assert sum(own for name, own in tokens.items() if "layers.0." in name) == 3 * 2 * TOKENS.numel()


def test_tied_embeddings_have_the_inputs_of_the_head(tmp_path: Path) -> None:
    _, checkpoint, found = collected(tmp_path, "mixtral", tie_word_embeddings=True)
    assert found.tokens["model.embed_tokens.weight"] == TOKENS.numel() and "lm_head.weight" not in found.squares
    assert found.squares["model.embed_tokens.weight"].shape == (checkpoint.config.hidden_size,)


def test_bfloat16_gives_nearly_the_same(tmp_path: Path) -> None:
    _, checkpoint, found = collected(tmp_path, "qwen2_moe")
    half = collect_inputs(checkpoint, TOKENS, dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.o_proj.weight"
    torch.testing.assert_close(half.squares[name], found.squares[name], rtol=0.05, atol=1e-3)
    assert half.tokens[name] == found.tokens[name]


def test_inputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_reference("mixtral", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.input_layernorm.weight"][3] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"inputs of model\.layers\.1\.\S+ are NaN or infinite; check"):
        collect_inputs(Checkpoint(tmp_path / "model"), TOKENS, dtype=torch.float32)
