"""Families that only transformers runs: calibrated, evaluated and pruned, compared with transformers' own models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
from compress.plans.plan import Plan, Source, kept_expert, narrowed_expert, pruning_plan
from engine.adapted.adapted_block import OwnRouting
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint, open_mixture_checkpoint
from engine.adapted.adapted_config import adapted_config, groups_of, least_experts
from engine.adapted.adapted_pass import adapted_pass
from engine.adapted.expert_layers import find_layers, skeleton
from engine.adapted.interface_families import interface_families
from engine.adapted.stored_names import StoredNames
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.routing import NO_EXPERT, Gated, Selection, probabilities
from engine.errors import CheckpointError, CompressError, OptionError, PlanError, UnsupportedError
from engine.families.table import ARCHITECTURES
from engine.passes.memory_need import MemoryDemand, budget_for

HANDFUL = others_slow(("exaone_moe", "nemotron_h", "gemma4", "qwen3_vl_moe"), "exaone_moe", "nemotron_h", "gemma4")
"""A bias of the choice, experts without gate, probabilities in the place of logits with a scale of each expert, and a vision
tower with stacked experts on disk."""
FAMILIES = interface_families()
REFUSED = {
    "deepseek_v4": "is a table of expert numbers",
    "diffusion_gemma": "do not lie in one list of layers",
    "ernie4_5_vl_moe": "the 8 experts of a model of the family ernie4_5_vl_moe are not found",
    "openai_privacy_filter": "none of its classes returns logits",
}
"""Families that cannot be pruned through transformers, with a part of the reason."""


@pytest.fixture(scope="module", params=HANDFUL)
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, AdaptedCheckpoint, Path]:
    """Return a model of transformers, its checkpoint and a directory."""
    path = tmp_path_factory.mktemp(request.param)
    model = save_tiny(by_name(request.param), path / "full")
    return model, AdaptedCheckpoint(path / "full"), path


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny exaone_moe; tests copy it."""
    path = tmp_path_factory.mktemp("stored")
    save_tiny(by_name("exaone_moe"), path)
    return path


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
        stored["mtp.layers.9.mlp.experts.0.w1.weight"] = torch.arange(6, dtype=torch.uint8).view(2, 3)
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
        assert torch.equal(result["mtp.layers.9.mlp.experts.0.w1.weight"], stored["mtp.layers.9.mlp.experts.0.w1.weight"])


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
    found = own(own.logits_TN)
    assert found.experts.tolist() == [[NO_EXPERT, 0], [2, NO_EXPERT]]  # the largest weight first; a weight of 0 is no slot
    own.use(torch.tensor([[0.4, 0.6], [1.0, 0.5]]), torch.tensor([[0, 4], [2, 1]]))  # the block has changed the weights
    assert own(own.logits_TN).experts.tolist() == [[NO_EXPERT, 0], [2, 1]]
    assert own(own.logits_TN).weights.tolist() == torch.tensor([[0.6, 0.4], [1.0, 0.5]]).tolist()
    assert own.logits_TN.shape == (2, 4)
    with pytest.raises(UnsupportedError, match="cannot choose by other logits"):
        own(own.logits_TN + 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slots", [3, 1])
@pytest.mark.parametrize("scores", [torch.softmax, lambda logits, dim: logits.sigmoid()])
def test_probabilities_follow_from_the_weights(scores: Any, slots: int, dtype: torch.dtype) -> None:
    """Weights of one slot are those of the scores, as a sum of one weight would leave nothing of them."""
    logits_TN = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    scored_TN = scores(logits_TN, dim=-1)
    weights_TK, experts_TK = scored_TN.topk(slots)
    own = OwnRouting(8)
    own.see(logits_TN, (weights_TK if slots == 1 else weights_TK / weights_TK.sum(-1, keepdim=True)).to(dtype), experts_TK)
    assert torch.allclose(probabilities(own, own.logits_TN), scored_TN / scored_TN.sum(-1, keepdim=True), atol=1e-6)
    assert isinstance(own(own.logits_TN), Selection)


def test_weights_of_no_known_function_are_refused() -> None:
    """Weights that are all 1, for one slot, tell nothing; then softmax is taken."""
    logits_TN = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    values_TK, experts_TK = logits_TN.topk(3)
    own, single = OwnRouting(8, "layers.0.gate"), OwnRouting(8)
    own.see(logits_TN, values_TK.exp().sqrt(), experts_TK)
    with pytest.raises(UnsupportedError, match=r"weights of layers\.0\.gate are proportional to no function"):
        own.probabilities(own.logits_TN)
    single.see(logits_TN, torch.ones(6, 1), experts_TK[:, :1])
    assert torch.equal(single.probabilities(single.logits_TN), logits_TN.softmax(-1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "some_moe"}, "'some_moe' has no row of its own here, and transformers"),
        ({"model_type": "some_moe", "auto_map": {"AutoModel": "a.B"}}, "code lies beside the weights .trust_remote_code."),
        ({"quantization_config": {"quant_method": "fp8"}}, "exaone_moe has a quantization_config"),
        ({"text_config": {"quantization_config": {"bits": 4}}}, "exaone_moe has a quantization_config"),
        ({"model_type": "llama4"}, "text_config is missing"),
        ({"model_type": "bert"}, "model family .bert. has no experts with the interface"),
        (
            {"model_type": "vit", "architectures": ["ViTModel"]},
            "model family .vit. has no experts with the interface",
        ),
        ({"num_attention_heads": 5}, "a model of the family exaone_moe cannot be examined without its weights"),
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


def _changed_file(directory: Path, changes: dict[str, Tensor | None]) -> None:
    """Add or replace tensors of a model's only file; None removes one."""
    stored = load_file(directory / "model.safetensors") | changes
    save_file({name: each for name, each in stored.items() if each is not None}, directory / "model.safetensors")


def test_stored_tensors_that_are_not_read_are_refused(stored: Path, tmp_path: Path) -> None:
    """A layer after the last one is refused unless the config has layers for multi-token prediction; so are low bits."""
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    extra, norm = "model.layers.4.mlp.experts.7.w1.weight", "model.layers.1.input_layernorm.weight"
    _changed_file(tmp_path, {extra: torch.ones(2)})
    with pytest.raises(CheckpointError, match=f"{extra} belongs to layer 4, and config.json has 4 layers"):
        AdaptedCheckpoint(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    assert AdaptedCheckpoint(tmp_path).prediction_note is None
    _changed_file(tmp_path, {norm: torch.ones(32, dtype=torch.uint8)})
    with pytest.raises(UnsupportedError, match=f"{norm} is stored as torch.uint8"):
        AdaptedCheckpoint(tmp_path)


def test_a_result_says_that_prediction_layers_keep_their_experts(stored: Path, tmp_path: Path) -> None:
    shutil.copytree(stored, tmp_path / "full", dirs_exist_ok=True)
    _changed_file(tmp_path / "full", {f"mtp.layers.0.mlp.experts.{number}.w1.weight": torch.ones(2) for number in range(8)})
    checkpoint = AdaptedCheckpoint(tmp_path / "full")
    assert checkpoint.prediction_note is None
    (tmp_path / "pruned").mkdir()
    apply(pruning_plan({layer: [1, 2, 4, 7] for layer in checkpoint.config.moe_layers}), checkpoint, tmp_path / "pruned")
    note = AdaptedCheckpoint(tmp_path / "pruned").prediction_note
    assert note is not None
    assert "have 8 experts, while config.json says 4" in note


@pytest.mark.parametrize("before", ["mtp.layers.0.", "model.layers.4."])
def test_experts_of_prediction_layers_go_with_those_of_the_last_layer(stored: Path, tmp_path: Path, before: str) -> None:
    shutil.copytree(stored, tmp_path / "full", dirs_exist_ok=True)
    raw = json.loads((tmp_path / "full" / "config.json").read_text())
    (tmp_path / "full" / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    tensors = load_file(stored / "model.safetensors")
    last = {name.removeprefix("model.layers.3."): each for name, each in tensors.items() if ".layers.3." in name}
    _changed_file(tmp_path / "full", {f"{before}{name}": each + 1.0 for name, each in last.items()})
    checkpoint, kept = AdaptedCheckpoint(tmp_path / "full"), [1, 2, 4, 7]
    (tmp_path / "pruned").mkdir()
    apply(pruning_plan(dict.fromkeys(checkpoint.config.moe_layers, kept)), checkpoint, tmp_path / "pruned")
    result, made = AdaptedCheckpoint(tmp_path / "pruned"), load_file(tmp_path / "pruned" / "model.safetensors")
    assert result.prediction_note is None
    assert "they keep those that layer 3 keeps" in str(result.prediction_choice(checkpoint))
    own = {name.removeprefix(before) for name in made if name.startswith(before)}
    assert own == {name.removeprefix("model.layers.3.") for name in made if ".layers.3." in name}
    for name in own:
        assert torch.equal(made[before + name], made[f"model.layers.3.{name}"] + 1.0)


def test_what_is_around_the_layers_must_be_there_after_loading(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversions with several results hide names from the check at opening; the load itself finds what is missing."""
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    _changed_file(tmp_path, {"model.norm.weight": None})
    monkeypatch.setattr(StoredNames, "check", lambda names: None)
    emptied = AdaptedCheckpoint(tmp_path)
    emptied.names.by_layer = {layer: [] for layer in range(emptied.found.count)}
    with pytest.raises(CheckpointError, match="no file has a tensor of a decoder layer"):
        emptied.model_element  # noqa: B018
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing"):
        through_layers(AdaptedCheckpoint(tmp_path))


def test_groups_that_the_router_does_not_use_are_left_out() -> None:
    text = SimpleNamespace(n_group=3, topk_group=2, topk_method="group_limited_greedy")
    assert groups_of(text) == (3, 2)
    text.topk_method = "greedy"
    assert groups_of(text) == (1, 1)
    assert least_experts(text, (SimpleNamespace(per_token=4),)) == 4  # type: ignore[arg-type]
    model = skeleton(Qwen3MoeForCausalLM, tiny_config("qwen3_moe", n_group=3, topk_group=1), torch.float32)
    with pytest.raises(UnsupportedError, match="the 8 experts of a layer are not 3 groups of one size"):
        adapted_config(model.config, "Qwen3MoeForCausalLM", find_layers(model, "qwen3_moe"))


def test_a_memory_limit_counts_the_hidden_states_of_all_text(stored: Path) -> None:
    checkpoint, demand = AdaptedCheckpoint(stored), MemoryDemand(torch.bfloat16, 16)
    limit = 4 << 30
    assert budget_for(limit, checkpoint, demand).limit == limit
    assert checkpoint.kept_bytes(1000, torch.bfloat16, gradients=False) == 2 * 1000 * 32 * 2
    with pytest.raises(OptionError, match="and this needs"):
        budget_for(limit, checkpoint, replace(demand, tokens=limit // (32 * 4)))


def test_routers_that_do_not_fit_are_refused() -> None:
    model = skeleton(Qwen3MoeForCausalLM, tiny_config("qwen3_moe"), torch.float32)
    blocks = [layer.mlp for layer in model.model.layers]
    own = blocks[0].gate
    blocks[1].gate = own
    with pytest.raises(UnsupportedError, match="several layers of a model of the family qwen3_moe share a router"):
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
    message = "keeps 1 experts, and the router of a model of the family exaone_moe needs 2"
    with pytest.raises(PlanError, match=message):
        apply(pruning_plan({layer: [3] for layer in checkpoint.config.moe_layers}), checkpoint, tmp_path / "result")
    others_whole = kept_expert(1), kept_expert(2)
    for changed, message in (
        (narrowed_expert(0, range(4)), "keeps 4 to 16 hidden units in layer 1; keep as many of each"),
        (kept_expert(1), "runs through transformers here"),
        (replace(kept_expert(0), router=(Source(0), Source(3))), "runs through transformers here"),
    ):
        plan = Plan(dict.fromkeys(checkpoint.config.moe_layers, (changed, *others_whole)))
        with pytest.raises(UnsupportedError, match=message):
            apply(plan, checkpoint, tmp_path / "result")
    with pytest.raises(UnsupportedError, match="runs through transformers here"):
        checkpoint.source(torch.float32)
    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize("family", ["mixtral", "nemotron_h"])
def test_families_with_a_row_keep_their_own_path(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path)
    assert family in ARCHITECTURES
    assert type(open_mixture_checkpoint(tmp_path)) is Checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family(family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    found = measured(family, tmp_path)
    if family.name in REFUSED:
        assert isinstance(found, str)
        assert REFUSED[family.name] in found
    else:
        assert isinstance(found, dict), found
        assert set(found) == set(COLUMNS)
        assert max(each for each in found.values() if isinstance(each, float)) < 1e-4
        reasons = {column: each for column, each in found.items() if isinstance(each, str)}
        assert reasons.keys() <= {"DiEP, routed"}
        assert all("are not one product of its input" in reason for reason in reasons.values())


def test_checking_weights_gives_their_pages_back_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(by_name("exaone_moe"), tmp_path)
    checkpoint, released = AdaptedCheckpoint(tmp_path), []
    monkeypatch.setattr("engine.files.mapped_file.RELEASE_EVERY_BYTES", 0)
    monkeypatch.setattr(checkpoint, "release", lambda: released.append(True))
    checkpoint.check_finite()
    assert len(released) == len(checkpoint.stored_shapes) + 1
