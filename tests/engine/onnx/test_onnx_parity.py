"""Exported graphs give our engine's logits: every family, every kind of result, and every way of reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from conftest import EVERY_MOE_FAMILY, FAMILIES, NOT_DENSE, enough, save_reference
from onnx_for_tests import differences, exported
from test_parity import ROPES, VARIANTS

from compress.plans.apply import apply
from compress.plans.plan import SHARED_EXPERT, Plan, concatenation_plan, narrowed_expert, pruning_plan, same_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import own_routings
from engine.decoder.routing import NO_EXPERT, Routing, SigmoidTopK, select
from engine.decoder.skip_tables import SkipTables, skipping_routings
from engine.families.tensor_names import expert_tensor

EXPERTS = 6
TOP_K = {"llama_moe": "num_selects"}
LONGROPE = ROPES["longrope"] | {
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [2.0 + index for index in range(8)],
}
GROUPED = {"hidden_size": 64}
"""Sizes with heads of 16 dimensions, which onnxruntime's attention operator accepts. conftest's models have 8."""


def results(family: str) -> dict[str, Plan | None]:
    """Return the plans of the results that the family supports, by name. None is the model itself."""
    if family not in EVERY_MOE_FAMILY:
        return {"full": None}
    shared = [(SHARED_EXPERT, 0.5)] if family == "qwen2_moe" else []
    plans: dict[str, Plan | None] = {
        "full": None,
        "pruned": pruning_plan({layer: [1, 2, 4, 5] for layer in range(3)}),
        # One expert; fewer than the two experts of a token are none; all of them.
        "pruned non-uniform": pruning_plan(enough(family, {0: [3], 1: [0, 2, 5], 2: [*range(EXPERTS)]})),
    }
    if family not in NOT_DENSE:
        plans["densified"] = concatenation_plan({layer: [(1, 0.75), (4, 0.5), *shared] for layer in range(3)})
    return plans


CELLS = [(family, result) for family in FAMILIES for result in results(family)]


def made(family: str, result: str, path: Path, **changes: Any) -> Checkpoint:
    """Return a tiny model of the family, or the result of this name that is made from it."""
    save_reference(family, path / "full", **changes)
    plan = results(family)[result]
    if plan is None:
        return Checkpoint(path / "full")
    (path / "made").mkdir()
    apply(plan, Checkpoint(path / "full"), path / "made")
    return Checkpoint(path / "made")


def operators(directory: Path, name: str = "model.onnx") -> dict[str, set[str]]:
    """Return the operators of a graph by domain, including those of its branches."""
    found: dict[str, set[str]] = {}
    graphs = [onnx.load(directory / name, load_external_data=False).graph]
    for graph in graphs:
        for node in graph.node:
            found.setdefault(node.domain, set()).add(node.op_type)
            graphs += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return found


@pytest.mark.parametrize("portable", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["moe", "portable"])
@pytest.mark.parametrize(("family", "result"), CELLS, ids=[f"{f}-{r}".replace(" ", "-") for f, r in CELLS])
def test_logits_equal_the_engine(family: str, result: str, portable: bool, tmp_path: Path, onnx_parity: Any) -> None:
    checkpoint = made(family, result, tmp_path, **GROUPED)
    found = exported(checkpoint, tmp_path / "onnx", portable=portable)
    for what, difference in differences(checkpoint, found).items():
        onnx_parity(family, f"{result}, {'portable' if portable else 'moe'}", what, difference)
    onnx.checker.check_model(tmp_path / "onnx" / "model.onnx")
    used = operators(tmp_path / "onnx")
    assert set(used) == ({""} if portable else {"", "com.microsoft"})
    if not portable:
        mixtures = {"MoE"} if any(count > 1 for count in checkpoint.config.experts_per_layer) else set()
        assert used["com.microsoft"] == {"GroupQueryAttention"} | mixtures


def narrowed(family: str, path: Path, units: Any, **changes: Any) -> Checkpoint:
    """Return a tiny model whose experts keep their last `units(expert)` hidden units."""
    save_reference(family, path / "full", **GROUPED | changes)
    full = Checkpoint(path / "full")
    layers = {}
    for layer in full.config.moe_layers:
        moe = full.config.layers[layer].moe
        assert moe is not None
        kept = [range(moe.expert_width - units(expert), moe.expert_width) for expert in range(moe.experts)]
        layers[layer] = tuple(narrowed_expert(expert, own) for expert, own in enumerate(kept))
    apply(Plan(layers), full, path / "narrow")
    return Checkpoint(path / "narrow")


@pytest.mark.parametrize("portable", [False, True], ids=["moe", "portable"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_experts_of_different_widths(family: str, portable: bool, tmp_path: Path, onnx_parity: Any) -> None:
    checkpoint = narrowed(family, tmp_path, lambda expert: 3 + 2 * expert)
    found = exported(checkpoint, tmp_path / "onnx", portable=portable)
    for what, difference in differences(checkpoint, found).items():
        onnx_parity(family, f"other widths, {'portable' if portable else 'moe'}", what, difference)
    if portable:  # each expert has the width of its own
        graph = onnx.load(tmp_path / "onnx" / "model.onnx", load_external_data=False).graph
        shapes = {weight.name: tuple(weight.dims) for weight in graph.initializer}
        row = checkpoint.config.architecture
        down = [shapes[expert_tensor(row, 1, expert, 2)] for expert in range(EXPERTS)]
        assert down == [(64, 3 + 2 * expert) for expert in range(EXPERTS)]


@pytest.mark.parametrize("bits", [4, 8])
def test_low_bit_experts_of_different_widths(bits: int, tmp_path: Path) -> None:
    """The graph computes what that of a model computes whose experts have units of zeros in the place of missing ones."""
    checkpoint = narrowed("qwen3_moe", tmp_path, lambda expert: 32 * (1 + expert % 3), moe_intermediate_size=96)
    full, zeroed = Checkpoint(tmp_path / "full"), {}
    for name, tensor in ((name, checkpoint.tensor(name)) for name in checkpoint.shapes if ".experts." in name):
        zeroed[name] = torch.zeros(full.shapes[name])
        zeroed[name][: tensor.shape[0], : tensor.shape[1]] = tensor
    apply(same_plan(full.config.experts_by_layer), full, tmp_path / "zeroed", replaced=zeroed)
    tokens = torch.arange(3, 40)[None]
    logits = [
        exported(own, tmp_path / f"onnx-{number}", bits=bits)(tokens).float()
        for number, own in enumerate((checkpoint, Checkpoint(tmp_path / "zeroed")))
    ]
    assert float((logits[0] - logits[1]).abs().max()) <= 1e-5


CONFIGS = [
    (family, variant, changes)
    for family, variant, changes in VARIANTS
    if variant not in ("plain", "rope dynamic, long") and changes.get("head_dim") != 8
] + [
    ("mixtral", "rope longrope", {"head_dim": 16, "rope_parameters": LONGROPE}),
    ("mixtral", "rope llama3", {"head_dim": 16, "rope_parameters": ROPES["llama3"] | {"rope_theta": 10000.0}}),
    ("mixtral", "top-3 of 2", {"num_experts_per_tok": 3}),
]


@pytest.mark.parametrize(
    ("family", "variant", "changes"), CONFIGS, ids=[f"{f}-{v}".replace(" ", "-") for f, v, _ in CONFIGS]
)
def test_what_configs_ask_for_is_in_the_graph(
    family: str, variant: str, changes: dict[str, Any], tmp_path: Path, onnx_parity: Any
) -> None:
    """Tested are rotary scalings, windows, biases, clipping, tied embeddings, dense layers and head sizes, in both forms."""
    save_reference(family, tmp_path / "full", **GROUPED | changes)
    checkpoint = Checkpoint(tmp_path / "full")
    if variant == "top-3 of 2":
        (tmp_path / "made").mkdir()
        apply(pruning_plan({0: [3, 4], 1: [0, 2, 5], 2: range(EXPERTS)}), checkpoint, tmp_path / "made")
        checkpoint = Checkpoint(tmp_path / "made")
    for form in ("moe", "portable"):
        found = exported(checkpoint, tmp_path / form, portable=form == "portable")
        for what, difference in differences(checkpoint, found).items():
            onnx_parity(family, f"{variant}, {form}", what, difference)


@pytest.mark.parametrize("portable", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["moe", "portable"])
@pytest.mark.parametrize(("keep", "rule"), [(1, "diep"), (2, "diep"), (1, "mc-moe")])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "llama_moe"])
def test_skipping_in_the_graph_equals_the_engine_with_skipping(
    family: str, keep: int, rule: str, portable: bool, tmp_path: Path, onnx_parity: Any
) -> None:
    """Skipping acts on top-3 and on pruned layers, down to one expert: renormalized, not renormalized, and scaled."""
    checkpoint = made(family, "pruned non-uniform", tmp_path, **GROUPED | {TOP_K.get(family, "num_experts_per_tok"): 3})
    layers = [layer.moe for layer in checkpoint.config.layers if layer.moe is not None]
    generator = torch.Generator().manual_seed(0)
    tables = SkipTables(
        tuple(torch.rand(moe.experts_per_token - 1, generator=generator) for moe in layers),
        tuple(0.5 + torch.rand(moe.experts, moe.experts, generator=generator) for moe in layers),
        (torch.tensor([26.0]),) * len(layers),
    )
    own = own_routings(checkpoint.config, checkpoint.source(torch.float32))
    routings = skipping_routings(checkpoint.config, tables, 2.0, keep, own=own, rule=rule)
    shares = [skipped_share(routing, moe.experts) for routing, moe in zip(routings, layers, strict=True)]
    assert shares[0] == 0.0 and all(0.05 < share < 0.7 for share in shares[1:]), "the tables skip some and not all"
    found = exported(checkpoint, tmp_path / "onnx", routings, portable=portable)
    for what, difference in differences(checkpoint, found, routings).items():
        onnx_parity(family, f"skip {rule}, keep {keep}, {'portable' if portable else 'moe'}", what, difference)


@pytest.mark.parametrize("portable", [False, True], ids=["moe", "portable"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_text_can_be_read_in_pieces(batch: int, portable: bool, tmp_path: Path) -> None:
    checkpoint = made("mixtral", "full", tmp_path, **GROUPED, sliding_window=7)
    found = exported(checkpoint, tmp_path / "onnx", portable=portable)
    tokens_BL = torch.randint(3, 96, (batch, 20), generator=torch.Generator().manual_seed(3))
    cache = KeyValueCache(checkpoint.config, batch, 24, torch.float32)  # the cache need not be full
    pieces = [found(piece, None, cache) for piece in tokens_BL.split(6, dim=1)]
    assert torch.allclose(torch.cat(pieces, 1), found(tokens_BL), atol=1e-5)
    assert torch.allclose(found.last_logits(tokens_BL), pieces[-1][:, -1], atol=1e-5)


@pytest.mark.parametrize("portable", [False, True], ids=["moe", "portable"])
def test_a_sigmoid_router_with_a_correction_bias(portable: bool, tmp_path: Path, onnx_parity: Any) -> None:
    """The layers have a shared expert and different counts. The bias chooses other experts than the scores alone."""
    checkpoint = made("qwen2_moe", "pruned non-uniform", tmp_path, **GROUPED)
    generator = torch.Generator().manual_seed(0)
    counts = checkpoint.config.experts_per_layer
    routings = [SigmoidTopK(min(2, count), True, torch.randn(count, generator=generator), 2.5) for count in counts]
    found = exported(checkpoint, tmp_path / "onnx", routings, portable=portable)
    for what, difference in differences(checkpoint, found, routings).items():
        onnx_parity("qwen2_moe", f"sigmoid, {'portable' if portable else 'moe'}", what, difference)


def skipped_share(routing: Routing, experts: int) -> float:
    """Return the fraction of slots that a rule leaves empty on random tokens and logits."""
    return float((select(routing, torch.randn(500, 32), torch.randn(500, experts)).experts == NO_EXPERT).float().mean())


@pytest.mark.parametrize("portable", [False, True], ids=["moe", "portable"])
def test_experts_that_no_token_chose_are_not_computed(portable: bool, tmp_path: Path) -> None:
    """The weights of these experts are NaN, which would show in every logit."""
    reference = save_reference("mixtral", tmp_path / "model", **GROUPED)
    tokens_BL = torch.tensor([[5, 17, 40]])
    routers = reference(tokens_BL, output_router_logits=True).router_logits
    with torch.no_grad():
        for layer, logits_TN in zip(reference.model.layers, routers, strict=True):
            idle = sorted(set(range(EXPERTS)) - set(logits_TN.topk(2).indices.flatten().tolist()))
            assert idle
            layer.mlp.experts.down_proj[idle] = torch.nan
    reference.save_pretrained(tmp_path / "nan")
    found = exported(Checkpoint(tmp_path / "nan"), tmp_path / "onnx", portable=portable)
    assert bool(found(tokens_BL).isfinite().all())
    assert not bool(found(torch.arange(3, 90)[None]).isfinite().all()), "and other tokens do choose them"
