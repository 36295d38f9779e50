"""Families that only transformers runs: calibrated, evaluated and pruned, compared with transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import others_slow, save_reference
from safetensors.torch import load_file, save_file
from tiny_families import (
    COLUMNS,
    TOKENS_SL,
    by_name,
    difference,
    loaded,
    logits_of,
    masked,
    measured,
    save_tiny,
    some_removed,
    through_layers,
    tiny_config,
)
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

from calibrate.collect import collect
from compress.plans.apply import apply
from compress.plans.plan import pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.routing import NO_EXPERT, Gated, Selection, probabilities
from engine.errors import CheckpointError, CompressError, PlanError, UnsupportedError
from engine.families.table import ARCHITECTURES
from engine.transformers_models.adapted_block import OwnRouting
from engine.transformers_models.adapted_checkpoint import AdaptedCheckpoint, open_mixture_checkpoint
from engine.transformers_models.adapted_pass import adapted_pass
from engine.transformers_models.expert_layers import find_layers, skeleton
from engine.transformers_models.interface_families import interface_families

HANDFUL = others_slow(("exaone_moe", "nemotron_h", "gemma4", "qwen3_vl_moe"), "exaone_moe", "nemotron_h", "gemma4")
"""A bias of the choice, experts without gate, probabilities in the place of logits with a scale of each expert, and a vision
tower with stacked experts on disk."""
FAMILIES = interface_families()
REFUSED = {
    "deepseek_v4": "is a table of expert numbers",
    "diffusion_gemma": "do not lie in one list of layers",
    "ernie4_5_vl_moe": "the 8 experts of a ernie4_5_vl_moe are not found",
    "openai_privacy_filter": "none of its classes returns logits",
}
"""Families that cannot be pruned through transformers, with a part of the reason."""


@pytest.fixture(scope="module", params=HANDFUL)
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, AdaptedCheckpoint, Path]:
    """Return a model of transformers, its checkpoint and a directory."""
    path = tmp_path_factory.mktemp(request.param)
    model = save_tiny(by_name(request.param), path / "full")
    return model, AdaptedCheckpoint(path / "full"), path


def test_the_list_of_families_is_made_from_transformers() -> None:
    names = [family.name for family in FAMILIES]
    assert len(names) >= 60
    assert {"mixtral", "lfm2_moe", "nemotron_h", "qwen3_next"} <= set(names)
    assert "llama" not in names
    assert by_name("gemma4").model_type == "gemma4_text"  # the language model alone


def test_logits_are_those_of_transformers(made: Any) -> None:
    model, checkpoint, _ = made
    assert difference(through_layers(checkpoint), logits_of(model)) < 1e-4


def test_statistics_are_what_routers_and_experts_do(made: Any) -> None:
    """Observe the whole model of transformers with hooks, and count from what its routers return."""
    model, checkpoint, _ = made
    seen: dict[str, list[Any]] = {}
    handles = []
    for layer in checkpoint.found.experts:
        seen[layer.router], seen[layer.experts] = [], []
        router, experts = model.get_submodule(layer.router), model.get_submodule(layer.experts)
        handles.append(router.register_forward_hook(lambda m, given, made, to=seen[layer.router]: to.append(made)))
        handles.append(experts.register_forward_hook(lambda m, given, made, to=seen[layer.experts]: to.append(given)))
    logits_of(model)
    for handle in handles:
        handle.remove()
    statistics = collect(checkpoint, TOKENS_SL, dtype=torch.float32)
    for layer in checkpoint.found.experts:
        (_, weights_TS, indices_TS, *_), (x_TD, *_) = seen[layer.router][0], seen[layer.experts][0]
        counts_N = torch.bincount(indices_TS.flatten(), minlength=layer.count)
        found = statistics.layers[layer.index]
        assert torch.equal(found.tokens_routed, counts_N)
        one_hot_TSN = torch.nn.functional.one_hot(indices_TS.view(weights_TS.shape), layer.count)
        outputs_NTD = torch.stack(
            [_alone(model.get_submodule(layer.experts), expert, x_TD) for expert in range(layer.count)]
        )
        weight_TN = (one_hot_TSN * weights_TS[..., None]).sum(1)
        norm_N = (weight_TN * outputs_NTD.norm(dim=-1).T).sum(0)
        assert torch.allclose(found.weighted_norm_sum.float(), norm_N, atol=1e-4)
        assert abs(float(found.probability_sum.sum()) / TOKENS_SL.numel() - 1.0) < 1e-3


@torch.no_grad()
def _alone(experts: nn.Module, expert: int, x_TD: Tensor) -> Tensor:
    """Return the output of one expert for all tokens with a weight of one, by transformers."""
    made: Tensor = experts(x_TD, torch.full((len(x_TD), 1), expert), torch.ones(len(x_TD), 1))
    return made


def test_removing_experts_equals_masking_them(made: Any) -> None:
    model, checkpoint, path = made
    kept = some_removed(checkpoint)
    (path / "pruned").mkdir()
    apply(pruning_plan(kept), checkpoint, path / "pruned")
    with masked(model, checkpoint, kept):
        reference = logits_of(model)
    family = next(each for each in FAMILIES if each.model_type == checkpoint.model_type)
    assert difference(reference, logits_of(model)) > 1e-3
    assert difference(logits_of(loaded(family, path / "pruned")), reference) < 1e-4
    assert difference(through_layers(open_mixture_checkpoint(path / "pruned")), reference) < 1e-4


def test_results_are_copies_of_stored_bytes(tmp_path: Path) -> None:
    """Vision towers and tensors that the model has no place for are copied; kept experts get new numbers only."""
    save_tiny(by_name("qwen3_vl_moe"), tmp_path / "stacked")
    save_tiny(by_name("exaone_moe"), tmp_path / "single")
    for name in ("stacked", "single"):
        stored = load_file(tmp_path / name / "model.safetensors")
        stored["model.layers.9.mlp.experts.0.w1.weight"] = torch.arange(6, dtype=torch.uint8).view(2, 3)
        save_file(stored, tmp_path / name / "model.safetensors")
        checkpoint = AdaptedCheckpoint(tmp_path / name)
        kept = {layer: [1, 2, 4, 7] for layer in checkpoint.config.moe_layers}
        (tmp_path / f"{name}-pruned").mkdir()
        apply(pruning_plan(kept), checkpoint, tmp_path / f"{name}-pruned")
        result = load_file(tmp_path / f"{name}-pruned" / "model.safetensors")
        changed = [key for key in result if key not in stored or not torch.equal(result[key], stored[key])]
        assert changed
        assert all(".experts." in key or "gate" in key or "bias" in key for key in changed)
        for key in changed:
            if ".experts.0." in key or ".experts.1." in key:
                origin = key.replace(".experts.1.", ".experts.2.").replace(".experts.0.", ".experts.1.")
                assert torch.equal(result[key], stored[origin])
            elif ".experts." not in key or name == "stacked":
                assert torch.equal(result[key], stored[key][[1, 2, 4, 7]])
        assert torch.equal(
            result["model.layers.9.mlp.experts.0.w1.weight"], stored["model.layers.9.mlp.experts.0.w1.weight"]
        )


def test_gates_scale_what_the_router_has_chosen(tmp_path: Path) -> None:
    """Routings that change a Selection work on a layer that transformers runs: a closed gate equals an expert of zeros."""
    model = save_tiny(by_name("exaone_moe"), tmp_path)
    checkpoint, before = AdaptedCheckpoint(tmp_path), logits_of(model)
    first = checkpoint.found.experts[0]
    model.get_submodule(first.experts).down_proj.data[0] = 0.0
    found: list[Tensor] = []

    def close(index: int, layer: Any) -> None:
        if index == first.index:
            layer.feed_forward.routing = Gated(layer.feed_forward.own, torch.tensor([0.0, *[1.0] * 7]))

    adapted_pass(checkpoint, TOKENS_SL, close, lambda rows, logits: found.append(logits), dtype=torch.float32)
    assert difference(found[0], logits_of(model)) < 1e-4 < difference(found[0], before)


def test_a_routing_without_the_routers_logits_is_refused() -> None:
    own = OwnRouting(4)
    own.see(torch.randn(2, 5), torch.tensor([[0.2, 0.8], [1.0, 0.0]]), torch.tensor([[0, 4], [2, 1]]))
    assert own(own.logits_TN).experts.tolist() == [[NO_EXPERT, 0], [2, 1]]  # the largest weight first
    assert own.logits_TN.shape == (2, 4)
    with pytest.raises(UnsupportedError, match="cannot choose by other logits"):
        own(own.logits_TN + 1.0)


@pytest.mark.parametrize("scores", [torch.softmax, lambda logits, dim: logits.sigmoid()])
def test_probabilities_follow_from_the_weights(scores: Any) -> None:
    logits_TN = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    scored_TN = scores(logits_TN, dim=-1)
    weights_TK, experts_TK = scored_TN.topk(3)
    own = OwnRouting(8)
    own.see(logits_TN, weights_TK / weights_TK.sum(-1, keepdim=True), experts_TK)
    assert torch.allclose(probabilities(own, own.logits_TN), scored_TN / scored_TN.sum(-1, keepdim=True), atol=1e-6)
    assert isinstance(own(own.logits_TN), Selection)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "some_moe"}, "'some_moe' has no row of its own here, and transformers"),
        ({"model_type": "some_moe", "auto_map": {"AutoModel": "a.B"}}, "code lies beside the weights .trust_remote_code."),
        ({"quantization_config": {"quant_method": "fp8"}}, "exaone_moe has a quantization_config"),
        ({"model_type": "llama4"}, "text_config is missing"),
        ({"model_type": "bert"}, "a bert has no experts with the interface"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "no class of transformers for a vit reads text"),
        ({"num_attention_heads": 5}, "a exaone_moe cannot be examined without its weights"),
    ],
)
def test_models_that_do_not_fit_are_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    raw = json.loads(tiny_config("exaone_moe").to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(raw | config))
    with pytest.raises(CompressError, match=message) as error:
        open_mixture_checkpoint(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_tiny(by_name("exaone_moe"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = next(each for each in stored if each.endswith("input_layernorm.weight"))
    save_file({key: tensor for key, tensor in stored.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        AdaptedCheckpoint(tmp_path)


def test_routers_that_do_not_fit_are_refused() -> None:
    model = skeleton(Qwen3MoeForCausalLM, tiny_config("qwen3_moe"), torch.float32)
    blocks = [layer.mlp for layer in model.model.layers]
    own = blocks[0].gate
    blocks[1].gate = own
    with pytest.raises(UnsupportedError, match="several layers of a qwen3_moe share a router"):
        find_layers(model, "qwen3_moe")
    blocks[1].gate = _Copying(own)
    with pytest.raises(UnsupportedError, match="not called with what one module returns"):
        find_layers(model, "qwen3_moe")


class _Copying(nn.Module):
    """Returns indices and weights in another form than the interface's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]

    def forward(self, hidden_states: Tensor) -> Any:
        logits, weights, indices = self.inner[0](hidden_states)
        return [logits, weights, indices.clone()]


def test_plans_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_tiny(by_name("exaone_moe"), tmp_path / "full")
    checkpoint = AdaptedCheckpoint(tmp_path / "full")
    first, *others = checkpoint.config.moe_layers
    ragged = {first: [0, 1, 2]} | {layer: [0, 1, 2, 3] for layer in others}
    for kept, error, message in (
        (ragged, UnsupportedError, "keeps 3 to 4 in a layer; add --uniform"),
        (
            {layer: [3] for layer in checkpoint.config.moe_layers},
            PlanError,
            "keeps 1 experts, and the router of a exaone_moe needs 2",
        ),
    ):
        with pytest.raises(error, match=message):
            apply(pruning_plan(kept), checkpoint, tmp_path / "result")
    with pytest.raises(UnsupportedError, match="runs through transformers here"):
        checkpoint.source(torch.float32)
    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize("family", ["mixtral"])
def test_families_with_a_row_keep_their_own_path(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path)
    assert family in ARCHITECTURES
    assert type(open_mixture_checkpoint(tmp_path)) is Checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family(family: Any, tmp_path: Path) -> None:
    found = measured(family, tmp_path)
    if family.name in REFUSED:
        assert isinstance(found, str)
        assert REFUSED[family.name] in found
    else:
        assert isinstance(found, dict), found
        assert set(found) == set(COLUMNS)
        assert max(found.values()) < 1e-4
