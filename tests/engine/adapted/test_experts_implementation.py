"""Our experts implementation inside transformers' own models, compared with transformers' `eager` implementation."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_for_tests import needs_numba
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from engine.adapted import experts_implementation
from engine.adapted.experts_implementation import (
    FEW_ROWS,
    StackedExperts,
    compiled_gate,
    experts_forward,
    obstacle,
)
from engine.families.layer_config import GatedGelu
from engine.kernels.kernel_choice import KernelChoice
from engine.transformers_experts import NAME

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 20, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 16},
    "deepseek_v3": {"moe_intermediate_size": 12, "intermediate_size": 48, "first_k_dense_replace": 1} | LATENT | GROUPS,
    "gpt_oss": {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "nemotron_h": {
        "layers_block_type": ["attention", "moe"],
        "moe_intermediate_size": 20,
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_latent_size": None,
    },
}
"""Shapes of each family: plain ones, groups of experts, biases with a clamp and transposed weights, and no gate."""
COMPILED = ("mixtral", "qwen3_moe", "deepseek_v3")
"""Families whose experts the compiled kernels compute."""
TOKENS = (0, 1, 3, 40, 200)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Allowed differences, as shares of the largest output. bfloat16 has 8 bits of precision."""


def tiny(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny random model of a family, whose experts have outputs of about 1."""
    sizes = {
        key: value for key, value in SIZES.items() if "layers_block_type" not in FAMILIES[family] or "layers" not in key
    }
    config = AutoConfig.for_model(family, **sizes | FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=NAME, dtype=torch.float32).eval()
    for module in experts_of(model):
        for weight in module.parameters():
            nn.init.normal_(weight, std=0.3)
    return model.to(dtype).requires_grad_(False)


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def routed(tokens: int, experts: int, slots: int, dtype: torch.dtype, hidden: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, indices and weights. The last expert is chosen by no token."""
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=generator)
    logits[:, -1] = -100.0
    weights, indices = logits.softmax(-1).topk(slots)
    return torch.randn(tokens, hidden, generator=generator).to(dtype), indices, weights.to(dtype)


def eager(module: Any, *given: Tensor) -> Tensor:
    """Return what the module's own forward computes."""
    made: Tensor = type(module).forward.__wrapped__(module, *given)
    return made


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    allowed = TOLERANCES[found.dtype] * max([1.0, *expected.detach().abs().reshape(-1).tolist()])
    assert bool(((found - expected).detach().float().abs() <= allowed).all())


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail if transformers computes the experts."""

    def refuse(module: Any, reason: str, *given: Tensor) -> Tensor:
        raise AssertionError(reason)

    monkeypatch.setattr(experts_implementation, "_by_transformers", refuse)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_equal_eager(family: str, dtype: torch.dtype) -> None:
    (module, *_) = experts_of(tiny(family, dtype))
    for tokens in TOKENS:
        given = routed(tokens, len(StackedExperts(module)), 2, dtype)
        assert_close(module(*given), eager(module, *given))


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("family", FAMILIES)
def test_models_equal_eager(family: str) -> None:
    model = tiny(family)
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    ours, step = model(ids), {"max_new_tokens": 6, "do_sample": False}
    generated = model.generate(ids, **step)
    model.set_experts_implementation("eager")
    assert_close(ours.logits, model(ids).logits)
    assert torch.equal(generated, model.generate(ids, **step))


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the set of ways in which experts have been computed, which a test can clear."""
    found: set[str] = set()

    def noted(name: str) -> None:
        compute = getattr(experts_implementation, name)

        def note(*given: Any, **options: Any) -> Tensor:
            found.add(name)
            made: Tensor = compute(*given, **options)
            return made

        monkeypatch.setattr(experts_implementation, name, note)

    noted("_compiled"), noted("_through_views")
    return found


@needs_numba
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_compute_the_experts_that_they_have(family: str, ways: set[str]) -> None:
    for dtype in TOLERANCES:
        (module, *_) = experts_of(tiny(family, dtype))
        ways.clear()
        module(*routed(FEW_ROWS, len(StackedExperts(module)), 2, dtype))
        compiles = family in COMPILED and dtype == torch.bfloat16
        assert ways == {"_compiled" if compiles else "_through_views"}


@needs_numba
def test_experts_of_many_tokens_are_widened_where_bfloat16_is(ways: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the experts is left to the kernels, unless these have their own way for many tokens."""
    monkeypatch.setattr(experts_implementation, "serves_rows", lambda *given, many: False)
    (module, *_) = experts_of(tiny("mixtral", torch.bfloat16))
    x_TD, indices, weights = routed(FEW_ROWS + 1, 8, 2, torch.bfloat16)
    indices[:, 0], indices[:, 1] = 2, indices[:, 1] % 2
    for given, expected in (
        ((x_TD, indices, weights), {"_compiled", "_through_views"}),
        ((x_TD, indices[:, :1], weights[:, :1]), {"_through_views"}),
        ((x_TD[1:], indices[1:], weights[1:]), {"_compiled"}),
    ):
        ways.clear()
        assert_close(module(*given), eager(module, *given))
        assert ways == expected


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_all_tokens_may_choose_one_expert_twice(dtype: torch.dtype) -> None:
    (module, *_) = experts_of(tiny("mixtral", dtype))
    for tokens in TOKENS:
        x_TD, indices, weights = routed(tokens, 8, 2, dtype)
        given = x_TD, torch.full_like(indices, 3), weights
        assert_close(module(*given), eager(module, *given))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_nobody_chooses_are_not_read(family: str, dtype: torch.dtype) -> None:
    (module, *_) = experts_of(tiny(family, dtype))
    for weight in module.parameters():
        weight[-1] = torch.nan
    for tokens in TOKENS:
        assert module(*routed(tokens, len(StackedExperts(module)), 2, dtype)).isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("trains", [False, True])
def test_a_slot_without_an_expert_is_empty(dtype: torch.dtype, tokens: int, trains: bool) -> None:
    (module, *_) = experts_of(tiny("qwen3_moe", dtype))
    x_TD, indices, weights = routed(tokens, 16, 3, dtype)
    x_TD.requires_grad_(trains)
    with_empty = indices.clone()
    with_empty[:, 1], with_empty[:, 2] = -1, 16
    expected = eager(module, x_TD, indices[:, :1], weights[:, :1])
    assert_close(module(x_TD, with_empty, weights), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_eager(family: str) -> None:
    (module, *_) = experts_of(tiny(family))
    module.requires_grad_(True)
    found = []
    for forward in (module, lambda *given: eager(module, *given)):
        x_TD, indices, weights = routed(5, len(StackedExperts(module)), 2, torch.float32)
        x_TD.requires_grad_(), weights.requires_grad_()
        leaves = [x_TD, weights, *module.parameters()]
        found.append(torch.autograd.grad(forward(x_TD, indices, weights).square().sum(), leaves))
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


@needs_numba
def test_changed_weights_and_gates_are_seen() -> None:
    (module, *_) = experts_of(tiny("mixtral", torch.bfloat16))
    given = routed(3, 8, 2, torch.bfloat16)
    module(*given)
    module.down_proj.mul_(2.0)  # in place
    assert_close(module(*given), eager(module, *given))
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.flip(1).contiguous(), requires_grad=False)
    assert_close(module(*given), eager(module, *given))
    copied = copy.deepcopy(module)
    copied.gate_up_proj.mul_(0.5)
    assert_close(copied(*given), eager(copied, *given))
    module.act_fn = nn.GELU()
    assert_close(module(*given), eager(module, *given))


class Gated(nn.Module):
    """Experts as a program outside of transformers may write them."""

    def __init__(self, config: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 16, dtype=dtype), requires_grad=False)
        self.down_proj = nn.Parameter(torch.randn(4, 16, 16, dtype=dtype), requires_grad=False)
        self.num_experts, self.act_fn = 4, nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError("eager is not wanted")


def clamped_halves(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)


@use_experts_implementation
class Clamped(Gated):
    """A clamped SwiGLU over halves."""

    alpha, limit = 1.702, 2.0

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = clamped_halves(gate_up, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


@use_experts_implementation
class ClampedOtherwise(Gated):
    """A clamp that the kernels lack, beside the attributes of one that they have."""

    alpha, limit = 1.0, 2.0

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = clamped_halves(gate_up, self.limit)
        return nn.functional.silu(gate) * up


@use_experts_implementation
class Gelu(Gated):
    """gelu in the place of silu."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.gelu(gate, approximate="tanh") * up


@use_experts_implementation(is_concatenated=False)
class Interleaved(Gated):
    """Gate and up in alternating rows."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return nn.functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


@use_experts_implementation(has_post_expert_norm=True)
class Normed(Gated):
    """A norm behind each expert."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.post_expert_norm = nn.RMSNorm(16, dtype=torch.bfloat16).requires_grad_(False)


def made(kind: type[Gated]) -> Any:
    torch.manual_seed(0)
    return kind(AutoConfig.for_model("mixtral", experts_implementation=NAME)).requires_grad_(False)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize(
    ("kind", "gate"),
    [
        *((Clamped, ((1.702, 2.0),)), (ClampedOtherwise, None), (Interleaved, None), (Normed, (None,))),
        (Gelu, ((GatedGelu.alpha, GatedGelu.limit),)),
    ],
)
def test_the_gate_is_found_by_what_it_computes(kind: type[Gated], gate: Any) -> None:
    module = made(kind)
    assert compiled_gate(module, 16) == gate
    for tokens in TOKENS:
        given = routed(tokens, 4, 2, torch.bfloat16, hidden=16)
        assert_close(module(*given), ALL_EXPERTS_FUNCTIONS["batched_mm"](module, *given))


def test_obstacles_are_named_and_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_implementation, "_reported", set())
    (module, *_) = experts_of(tiny("mixtral"))
    given = routed(3, 8, 2, torch.float32)
    assert obstacle(StackedExperts(module), *given) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in str(obstacle(StackedExperts(module), *given))
    assert "dtypes" in str(obstacle(StackedExperts(module), given[0].bfloat16(), *given[1:]))
    meta = [each.to("meta") for each in given]
    assert "CPU" in str(obstacle(StackedExperts(module), *meta))
    module._is_expert_parallel = True
    assert "processes" in str(obstacle(StackedExperts(module), *given))
    module._is_expert_parallel = False
    module.requires_grad_(True)
    with caplog.at_level(logging.WARNING):
        module(*given)
        module(*given)
    assert [record.getMessage() for record in caplog.records] == [
        "experts_implementation 'moe-compress': gradients are enabled (torch.inference_mode() and generate() disable them); "
        "transformers computes the experts"
    ]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_without_compiled_kernels_torch_computes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelChoice, "for_any", lambda self, *tensors: None)
    (module, *_) = experts_of(tiny(family, torch.bfloat16))
    for tokens in TOKENS:
        given = routed(tokens, 8, 2, torch.bfloat16)
        assert_close(module(*given), eager(module, *given))


def test_a_compiled_model_and_a_traced_one_are_left_to_transformers() -> None:
    (module, *_) = experts_of(tiny("mixtral"))
    given, other = routed(3, 8, 2, torch.float32), routed(4, 8, 2, torch.float32)
    assert_close(torch.compile(module, backend="eager")(*given), eager(module, *given))
    with pytest.warns(DeprecationWarning, match="torch.jit.trace"):
        traced = torch.jit.trace(module, given, check_trace=False)
    assert_close(traced(*given), eager(module, *given))
    assert_close(traced(other[0][:3], other[1][:3], other[2][:3]), eager(module, *(each[:3] for each in other)))


@pytest.mark.usefixtures("no_fallback")
def test_checkpoints_open_with_the_name(tmp_path: Path) -> None:
    saved = tiny("mixtral")
    saved.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=NAME).requires_grad_(False)
    assert opened.config._experts_implementation == "moe-compress"
    assert torch.equal(opened(torch.tensor([[5, 9]])).logits, saved(torch.tensor([[5, 9]])).logits)


def test_the_name_is_in_the_registries() -> None:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

    assert ALL_EXPERTS_FUNCTIONS[NAME] is experts_forward
    assert ALL_FP8_EXPERTS_FUNCTIONS[NAME] is ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"]
