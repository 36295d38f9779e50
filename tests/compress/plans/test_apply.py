"""`apply` carries out any plan: pruning equals masking, merging and concatenation equal their formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import EVERY_MOE_FAMILY, MOE_FAMILIES, enough, save_reference
from torch import Tensor

from compress.densify import checked_mixture
from compress.options.densify import DensifyOptions
from compress.options.prune import PruneOptions
from compress.plans.apply import apply
from compress.plans.plan import (
    SHARED_EXPERT,
    Part,
    Plan,
    PlannedExpert,
    Source,
    concatenation_plan,
    kept_expert,
    pruning_plan,
)
from compress.plans.selection import Budget
from compress.prune import checked_budget
from engine.checkpoint import remote_code
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.stacks import joined
from engine.decoder.model import Decoder, own_routing, routed_by
from engine.decoder.routing import Masked
from engine.errors import CheckpointError, OptionError, PlanError, UnsupportedError
from engine.families.table import ARCHITECTURES
from engine.families.tensor_names import (
    expert_parts,
    expert_tensor,
    router_in_memory,
    router_tensor,
    shared_tensor,
    stacks_in_memory,
)

TOKENS = torch.randint(3, 96, (2, 17), generator=torch.Generator().manual_seed(1))
UNIFORM = {0: [1, 4, 5], 1: [0, 2, 3], 2: [0, 1, 5]}
NON_UNIFORM = {0: [4], 1: [0, 1, 2, 3, 4, 5], 2: [0, 2, 3]}
FAMILIES = pytest.mark.parametrize("family", MOE_FAMILIES)
EVERY_FAMILY = pytest.mark.parametrize("family", EVERY_MOE_FAMILY)


def model(family: str, path: Path, **changes: Any) -> Checkpoint:
    save_reference(family, path, **changes)
    return Checkpoint(path)


@torch.no_grad()
def logits(checkpoint: Checkpoint) -> Tensor:
    return Decoder(checkpoint.config, checkpoint.source(torch.float32))(TOKENS)


@torch.no_grad()
def masked_logits(checkpoint: Checkpoint, kept: dict[int, list[int]]) -> Tensor:
    """Return the full model's logits with the pruned experts' router logits at −∞."""
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    routings = []
    for index, experts in kept.items():
        moe = checkpoint.config.layers[index].moe
        assert moe is not None
        routings.append(Masked(own_routing(moe), torch.isin(torch.arange(moe.experts), torch.tensor(experts))))
    with routed_by(decoder, routings):
        return decoder(TOKENS)


def transformers_logits(path: Path, **options: Any) -> Tensor:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32, **options)
    with torch.no_grad():
        return loaded.eval()(TOKENS).logits


def worst(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())


# Pruning


@FAMILIES
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("kept", [UNIFORM, NON_UNIFORM], ids=["uniform", "non-uniform"])
def test_removing_experts_equals_masking_their_logits(
    family: str, normalise: bool, kept: dict[int, list[int]], tmp_path: Path
) -> None:
    changes = {} if ARCHITECTURES[family].router.normalized else {"norm_topk_prob": normalise}
    full, kept = model(family, tmp_path / "full", **changes), enough(family, kept)
    apply(pruning_plan(kept), full, tmp_path / "pruned")
    pruned = Checkpoint(tmp_path / "pruned")
    assert pruned.config.experts_per_layer == tuple(map(len, kept.values()))
    assert worst(logits(pruned), masked_logits(full, kept)) <= 1e-5
    assert worst(logits(pruned), logits(full)) > 1e-2, "and it is another function than the full model's"


@FAMILIES
def test_a_uniform_result_is_a_plain_checkpoint_of_its_family(family: str, tmp_path: Path) -> None:
    apply(pruning_plan(UNIFORM), model(family, tmp_path / "full"), tmp_path / "pruned")
    config = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert "auto_map" not in config and "block_configs" not in config
    written = ["config.json", "model.safetensors", "model.safetensors.index.json"]
    assert sorted(path.name for path in (tmp_path / "pruned").iterdir()) == written
    assert worst(transformers_logits(tmp_path / "pruned"), logits(Checkpoint(tmp_path / "pruned"))) <= 1e-4


def test_one_expert_a_layer_loads_in_transformers_too(tmp_path: Path) -> None:
    """A layer has fewer experts than the model's top-k, so k shrinks to their number."""
    apply(pruning_plan({0: [1], 1: [5], 2: [0]}), model("mixtral", tmp_path / "full"), tmp_path / "one")
    one = Checkpoint(tmp_path / "one")
    assert one.config.experts_per_token == 1
    assert worst(transformers_logits(tmp_path / "one"), logits(one)) <= 1e-4


def test_a_non_uniform_result_brings_its_counts_and_its_modelling_file(tmp_path: Path) -> None:
    apply(pruning_plan(NON_UNIFORM), model("olmoe", tmp_path / "full"), tmp_path / "pruned")
    config = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert [block["ffn"]["moe"]["num_local_experts"] for block in config["block_configs"]] == [1, 6, 3]
    assert config["auto_map"] == remote_code.auto_map() and remote_code.is_ours(tmp_path / "pruned")


@EVERY_FAMILY
def test_pruning_again_what_is_pruned_and_non_uniform(family: str, tmp_path: Path) -> None:
    full = model(family, tmp_path / "full")
    apply(pruning_plan({0: [3, 4], 1: [0, 1, 2, 3, 4, 5], 2: [0, 2, 3]}), full, tmp_path / "once")
    once = Checkpoint(tmp_path / "once")
    apply(pruning_plan({0: [0, 1], 1: [1, 3, 5, 0], 2: [0, 2]}), once, tmp_path / "twice")
    kept = {0: [3, 4], 1: [0, 1, 3, 5], 2: [0, 3]}
    assert worst(logits(Checkpoint(tmp_path / "twice")), masked_logits(full, kept)) <= 1e-5
    apply(pruning_plan({0: [0, 1], 1: [2, 5], 2: [1, 2]}), once, tmp_path / "uniform")
    uniform = Checkpoint(tmp_path / "uniform")
    assert "block_configs" not in uniform.raw_config and "auto_map" not in uniform.raw_config
    assert worst(logits(uniform), masked_logits(full, {0: [3, 4], 1: [2, 5], 2: [2, 3]})) <= 1e-5


def test_layers_without_experts_stay_as_they_are(tmp_path: Path) -> None:
    full = model("qwen2_moe", tmp_path / "full", mlp_only_layers=[1])
    kept = {0: [2, 3], 2: [0, 1, 4]}
    apply(pruning_plan(kept), full, tmp_path / "pruned")
    pruned = Checkpoint(tmp_path / "pruned")
    assert [layer.moe.experts if layer.moe else 0 for layer in pruned.config.layers] == [2, 0, 3]
    assert worst(logits(pruned), masked_logits(full, kept)) <= 1e-5


def test_shards_are_small_and_together_the_same_model(tmp_path: Path) -> None:
    full = model("qwen3_moe", tmp_path / "full")
    apply(pruning_plan(NON_UNIFORM), full, tmp_path / "one")
    apply(pruning_plan(NON_UNIFORM), full, tmp_path / "many", shard_bytes=20_000)
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 5 and (tmp_path / "many" / "model.safetensors.index.json").is_file()
    one, many = Checkpoint(tmp_path / "one"), Checkpoint(tmp_path / "many")
    assert one.shapes == many.shapes
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.shapes)


def test_kept_tensors_are_the_source_s_to_the_bit_in_any_dtype(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path / "full").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    full = Checkpoint(tmp_path / "half")
    row = full.config.architecture
    apply(pruning_plan(UNIFORM), full, tmp_path / "pruned")
    pruned = Checkpoint(tmp_path / "pruned")
    assert {pruned.dtype(name) for name in pruned.shapes} == {torch.bfloat16}
    for layer, experts in UNIFORM.items():
        assert torch.equal(pruned.tensor(router_tensor(row, layer)), full.tensor(router_tensor(row, layer))[experts])
        for new, old in enumerate(experts):
            for p in range(3):
                got, source = (c.tensor(expert_tensor(row, layer, e, p)) for c, e in ((pruned, new), (full, old)))
                assert torch.equal(got, source)


# Merging


def shuffled(seed: int, width: int) -> tuple[int, ...]:
    return tuple(torch.randperm(width, generator=torch.Generator().manual_seed(seed)).tolist())


@EVERY_FAMILY
def test_merging_equals_the_weighted_sum_of_permuted_experts(family: str, tmp_path: Path) -> None:
    full = model(family, tmp_path / "full")
    row, width = full.config.architecture, full.config.layers[0].moe.expert_width
    p = shuffled(1, width)
    merged = PlannedExpert(
        (Part((Source(0, 0.7), Source(3, 0.2, p), Source(5, 0.1)), scale=1.5),), (Source(0, 0.5), Source(2, 0.25))
    )
    plan = Plan({layer: (merged, kept_expert(4)) for layer in range(3)})
    apply(plan, full, tmp_path / "merged")
    result = Checkpoint(tmp_path / "merged")
    for layer in range(3):
        router, old = result.tensor(router_tensor(row, layer)), full.tensor(router_tensor(row, layer))
        assert torch.allclose(router, torch.stack([0.5 * old[0] + 0.25 * old[2], old[4]]), atol=1e-6)
        for projection in range(3):
            zero, three, four, five = (full.tensor(expert_tensor(row, layer, e, projection)) for e in (0, 3, 4, 5))
            naive = torch.empty_like(zero)
            for j in range(width):
                at, taken = ((slice(None), j), (slice(None), p[j])) if projection == 2 else (j, p[j])
                naive[at] = 0.7 * zero[at] + 0.2 * three[taken] + 0.1 * five[at]
            got = result.tensor(expert_tensor(row, layer, 0, projection))
            assert torch.allclose(got, naive * (1.5 if projection == 2 else 1.0), atol=1e-6)
            assert torch.equal(result.tensor(expert_tensor(row, layer, 1, projection)), four)
    assert bool(logits(result).isfinite().all())


def test_an_expert_merged_with_its_own_shuffle_is_the_expert(tmp_path: Path) -> None:
    """Permuting hidden units changes no function. The inverse permutation makes 0.5 + 0.5 the whole expert."""
    reference = save_reference("mixtral", tmp_path / "source")
    full = Checkpoint(tmp_path / "source")
    row, width = full.config.architecture, 48
    q = list(shuffled(2, width))
    tensors = {name: full.tensor(name).clone() for name in full.shapes}
    for layer in range(3):
        for projection in range(3):
            source = tensors[expert_tensor(row, layer, 0, projection)]
            tensors[expert_tensor(row, layer, 1, projection)] = source[:, q] if projection == 2 else source[q]
    write(tensors, reference.config, tmp_path / "shuffled")
    twin = Checkpoint(tmp_path / "shuffled")
    undo = tuple(sorted(range(width), key=q.__getitem__))  # unit undo[j] of the shuffled expert is unit j
    merged = PlannedExpert((Part((Source(0, 0.5), Source(1, 0.5, undo))),), (Source(0),))
    apply(Plan({layer: (merged, kept_expert(3)) for layer in range(3)}), twin, tmp_path / "merged")
    apply(pruning_plan({layer: [0, 3] for layer in range(3)}), twin, tmp_path / "pruned")
    merged_model, pruned = Checkpoint(tmp_path / "merged"), Checkpoint(tmp_path / "pruned")
    assert all(torch.equal(merged_model.tensor(name), pruned.tensor(name)) for name in pruned.shapes)
    blind = PlannedExpert((Part((Source(0, 0.5), Source(1, 0.5))),), (Source(0),))
    apply(Plan({layer: (blind, kept_expert(3)) for layer in range(3)}), twin, tmp_path / "blind")
    assert worst(logits(Checkpoint(tmp_path / "blind")), logits(pruned)) > 1e-2


# Dense


def ffn(gate: Tensor, up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "granitemoe"])
def test_concatenated_experts_are_one_dense_ffn(family: str, tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": True, "sliding_window": 9} if family == "mixtral" else {}
    full = model(family, tmp_path / "full", **changes)
    row = full.config.architecture
    chosen: dict[int, list[tuple[int | str, float]]] = {
        0: [(3, 0.75), (0, 0.5)],
        1: [(1, 1.0), (5, -2.0)],
        2: [(2, 0.1), (4, 0.9)],
    }
    if row.shared:
        for experts in chosen.values():
            experts.append((SHARED_EXPERT, 0.4))
    apply(concatenation_plan(chosen), full, tmp_path / "dense")
    dense = Checkpoint(tmp_path / "dense")
    assert dense.config.architecture.model_type == row.dense_sibling and not dense.config.moe_layers
    decoder = Decoder(dense.config, dense.source(torch.float32))
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    for layer, experts in chosen.items():
        naive = torch.zeros(20, 32, dtype=torch.float64)
        for expert, scale in experts:
            names = [
                shared_tensor(row, layer, p) if expert == SHARED_EXPERT else expert_tensor(row, layer, int(expert), p)
                for p in range(3)
            ]
            naive += scale * ffn(*(full.tensor(name).double() for name in names), x.double())
        assert worst(decoder.layers[layer].feed_forward(x).double(), naive) <= 1e-5
    assert worst(transformers_logits(tmp_path / "dense"), logits(dense)) <= 1e-4
    for name in set(dense.shapes) & set(full.shapes):
        assert torch.equal(dense.tensor(name), full.tensor(name)), "what is not an expert is copied"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_dense_and_pruned_results_keep_what_an_old_config_says_in_its_own_way(family: str, tmp_path: Path) -> None:
    """Checkpoints from before transformers 5 have `rope_theta` at the top level, and omit the family's defaults."""
    model(family, tmp_path / "full", rope_parameters={"rope_type": "default", "rope_theta": 123.0}, rms_norm_eps=1e-5)
    path = tmp_path / "full" / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    if family == "mixtral":  # these are mixtral's defaults
        del config["num_experts_per_tok"], config["rms_norm_eps"]
    path.write_text(json.dumps(config | {"rope_theta": 123.0}))
    full = Checkpoint(tmp_path / "full")
    apply(pruning_plan(UNIFORM), full, tmp_path / "pruned")
    assert worst(logits(Checkpoint(tmp_path / "pruned")), masked_logits(full, UNIFORM)) <= 1e-5
    # One expert a layer is the same function as a renormalizing top-1 MoE and as a dense model.
    one = {0: [3], 1: [2], 2: [5]}
    apply(pruning_plan(one), full, tmp_path / "one")
    apply(concatenation_plan({layer: [(experts[0], 1.0)] for layer, experts in one.items()}), full, tmp_path / "dense")
    dense = Checkpoint(tmp_path / "dense")
    assert worst(logits(dense), logits(Checkpoint(tmp_path / "one"))) <= 1e-5
    assert worst(transformers_logits(tmp_path / "dense"), logits(dense)) <= 1e-4


# Stacked experts


def write(tensors: dict[str, Tensor], config: Any, path: Path) -> None:
    from safetensors.torch import save_file

    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    config.save_pretrained(path)


def stacked(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the weights in the layout that transformers 5 has in memory."""
    row = checkpoint.config.architecture
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.shapes}
    for layer in checkpoint.config.moe_layers:
        moe = checkpoint.config.layers[layer].moe
        assert moe is not None
        each = [[tensors.pop(expert_tensor(row, layer, e, p)) for p in expert_parts(row)] for e in range(moe.experts)]
        for stack in stacks_in_memory(row, layer):
            tensors[stack.name] = torch.stack([joined(stack, [parts[p] for p in stack.projections]) for parts in each])
        tensors[router_in_memory(row, layer)] = tensors.pop(router_tensor(row, layer))
    return tensors


@FAMILIES
def test_stacked_experts_read_as_single_ones(family: str, tmp_path: Path) -> None:
    reference = save_reference(family, tmp_path / "single")
    single = Checkpoint(tmp_path / "single")
    write(stacked(single), reference.config, tmp_path / "stacked")
    fused = Checkpoint(tmp_path / "stacked")
    assert fused.shapes == single.shapes and (fused.parameters, fused.bytes) == (single.parameters, single.bytes)
    assert all(torch.equal(fused.tensor(name), single.tensor(name)) for name in single.shapes)
    assert worst(logits(fused), logits(single)) <= 1e-5, "to the bit only where the data is aligned alike"
    fused.check_finite()
    kept = enough(family, NON_UNIFORM)
    apply(pruning_plan(kept), fused, tmp_path / "pruned")
    assert worst(logits(Checkpoint(tmp_path / "pruned")), masked_logits(single, kept)) <= 1e-5


def test_stacks_of_another_shape_are_refused(tmp_path: Path) -> None:
    reference = save_reference("mixtral", tmp_path / "single")
    whole = stacked(Checkpoint(tmp_path / "single"))
    gate_up, down = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
    wrong = [
        {gate_up: whole[gate_up][:5]},
        {down: whole[down][:5]},
        {gate_up: whole[gate_up][:5], down: whole[down][:5]},
        {gate_up: F.pad(whole[gate_up], (0, 0, 0, 1))},  # an odd row: half of it is neither gate nor up
        {gate_up: whole[gate_up].transpose(1, 2)},
        {gate_up: whole[gate_up][0, 0]},
        {gate_up: torch.ones(())},
        {down: torch.ones(())},
        {down: whole[down][..., :-1]},
    ]
    for number, changes in enumerate(wrong):
        write(whole | changes, reference.config, tmp_path / str(number))
        with pytest.raises(CheckpointError):
            Checkpoint(tmp_path / str(number))


# Refusals


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (pruning_plan({0: [0, 1], 1: [0, 1]}), "the plan is for layers"),
        (pruning_plan(UNIFORM | {3: [0]}), "the plan is for layers"),
        (pruning_plan(UNIFORM | {1: [6]}), "names expert 6"),
        (pruning_plan(UNIFORM | {1: []}), "no expert is kept"),
        (Plan({i: (PlannedExpert((Part((Source(0, 1.0, (0, 0)),)),), (Source(0),)),) for i in range(3)}), "permutation"),
        (Plan({i: (PlannedExpert((Part((Source(0),)),)),) for i in range(3)}), "router"),
        (concatenation_plan({0: [(0, 1.0)], 1: [(0, 1.0), (1, 1.0)], 2: [(0, 1.0)]}), "wide"),
        (
            Plan({i: (PlannedExpert((Part((Source(0), Source(SHARED_EXPERT))),)),) for i in range(3)}, "dense"),
            "wide",
        ),
        (
            Plan({i: (PlannedExpert((Part((Source(SHARED_EXPERT),)),), (Source(0),)),) for i in range(3)}),
            "wide",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused_with_nothing_written(plan: Plan, message: str, tmp_path: Path) -> None:
    full = model("qwen2_moe", tmp_path / "full")
    with pytest.raises(PlanError, match=message):
        apply(plan, full, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sibling_that_would_lose_a_tensor_is_refused_by_the_tensor_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(ARCHITECTURES["qwen3_moe"], dense_sibling="llama")  # llama has no norms of queries and keys
    monkeypatch.setitem(ARCHITECTURES, "qwen3_moe", row)
    plan = concatenation_plan({layer: [(0, 1.0)] for layer in range(3)})
    with pytest.raises(UnsupportedError, match=r"llama has no place for model\.layers\.0\.self_attn\.q_norm\.weight"):
        apply(plan, model("qwen3_moe", tmp_path / "full"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_keeps_as_many_experts_as_the_family_s_router_takes(tmp_path: Path) -> None:
    """transformers' sparsemixer takes two experts and gives NaN with one. Every plan that leaves one expert is refused."""
    full = model("phimoe", tmp_path / "full")
    one = {0: [1], 1: [0, 1], 2: [0, 1]}
    with pytest.raises(PlanError, match="layer 0: has 1 expert, and the router of a phimoe takes 2"):
        apply(pruning_plan(one), full, tmp_path / "out")
    options = {"model": str(tmp_path / "full"), "output": tmp_path / "out"}
    for budget in (Budget(sparsity=0.5, min_experts=1), Budget(experts=1, scope="layer", min_experts=0)):
        with pytest.raises(OptionError, match="min"):
            checked_budget(PruneOptions(**options, budget=budget), full)
    kept = checked_budget(PruneOptions(**options, budget=Budget(experts=2, min_experts=0)), full)
    assert kept is not None and kept.min_experts == 2
    with pytest.raises(UnsupportedError, match="phimoe cannot be made dense: it has no dense sibling, and its router takes"):
        checked_mixture(DensifyOptions(**options))
    assert not (tmp_path / "out").exists()


def test_a_family_without_a_sibling_keeps_one_expert_that_every_token_uses(tmp_path: Path) -> None:
    full = model("olmoe", tmp_path / "full")
    plan = concatenation_plan({layer: [(1, 0.75), (4, 0.5)] for layer in range(3)})
    apply(plan, full, tmp_path / "dense")
    dense = Checkpoint(tmp_path / "dense")
    assert dense.config.experts_per_layer == (1, 1, 1) and dense.config.experts_per_token == 1
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    for layer in range(3):
        naive = torch.zeros(9, 32, dtype=torch.float64)
        for expert, scale in ((1, 0.75), (4, 0.5)):
            tensors = (full.tensor(expert_tensor(full.config.architecture, layer, expert, p)).double() for p in range(3))
            naive += scale * ffn(*tensors, x.double())
        decoder = Decoder(dense.config, dense.source(torch.float32))
        assert worst(decoder.layers[layer].feed_forward(x).double(), naive) <= 1e-5
    assert worst(transformers_logits(tmp_path / "dense"), logits(dense)) <= 1e-4


def test_dense_plans_that_the_sibling_cannot_hold_are_refused_with_nothing_written(tmp_path: Path) -> None:
    plan = concatenation_plan({layer: [(0, 1.0)] for layer in range(3)})
    with pytest.raises(UnsupportedError, match="qwen2"):
        apply(plan, model("qwen2_moe", tmp_path / "unbiased", qkv_bias=False), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("width", [24, 48, 20], ids=["equal", "wider", "narrower"])
def test_a_layer_that_was_dense_and_those_made_dense_get_one_width(width: int, tmp_path: Path) -> None:
    """Zero hidden units fill the difference."""
    mixed = model("qwen2_moe", tmp_path / "mixed", mlp_only_layers=[1], intermediate_size=width)
    apply(concatenation_plan({0: [(0, 1.0)], 2: [(0, 1.0)]}), mixed, tmp_path / "out")
    dense = Checkpoint(tmp_path / "out")
    assert dense.raw_config["intermediate_size"] == max(width, 24)
    assert worst(transformers_logits(tmp_path / "out"), logits(dense)) <= 1e-4
    before, after = (Decoder(each.config, each.source(torch.float32)).layers for each in (mixed, dense))
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    assert worst(after[1].feed_forward(x), before[1].feed_forward(x)) <= 1e-6
    assert worst(after[0].feed_forward(x), before[0].feed_forward.experts[0](x)) <= 1e-6
