"""Removing hidden units by a plan equals multiplying them by zero in the full model, in every family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import FAMILIES, FURTHER_FAMILIES, others_slow, save_reference
from safetensors.torch import load_file, save_file
from test_mxfp4 import save_packed
from torch import Tensor

import cli
from compress.cost.counts import Passes
from compress.options.quantize import QuantiserOptions
from compress.plans.apply import apply, planned_decoder
from compress.plans.plan import (
    Part,
    Plan,
    PlannedExpert,
    Source,
    kept_expert,
    narrowed_expert,
    pruning_plan,
    same_plan,
)
from compress.plans.unit_selection import default_multiple
from compress.rounding.quantizer import Quantiser
from engine.checkpoint import remote_code
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder, own_routings, routed_by
from engine.decoder.routing import Masked
from engine.errors import CheckpointError, OptionError, PlanError, UnsupportedError
from engine.families.block_configs import WIDTH_KEY, WIDTHS_KEY
from engine.families.experts import DOWN
from engine.families.results import loading_note
from engine.families.table import ARCHITECTURES
from engine.families.tensor_names import expert_tensor
from engine.inspect import inspect
from engine.kernels.stored.scheme import WHOLE_ROW, Scheme
from engine.progress import no_progress

TOKENS = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
MIXTURES = [name for name in (*FAMILIES, *FURTHER_FAMILIES) if ARCHITECTURES[name].has_experts]
IN_TRANSFORMERS = [name for name in MIXTURES if ARCHITECTURES[name].in_transformers]
EACH_MIXTURE = pytest.mark.parametrize("family", others_slow(MIXTURES, "mixtral", "deepseek_v3", "gpt_oss"))
KINDS = ("expert", "layer", "uniform")
Units = dict[int, dict[int, list[int]]]
"""The hidden units that stay, by layer and expert; an expert that is not named goes."""


def full_model(family: str, path: Path, **changes: Any) -> Checkpoint:
    save_reference(family, path, **changes)
    return Checkpoint(path)


def chosen_units(checkpoint: Checkpoint, kind: str, multiple: int = 1) -> Units:
    """Return other units for each expert. Widths differ by expert, by layer, or nowhere; "expert" also drops an expert."""
    generator, units = torch.Generator().manual_seed(5), Units()
    for place, layer in enumerate(checkpoint.config.moe_layers):
        moe = checkpoint.config.layers[layer].moe
        assert moe is not None
        units[layer] = {}
        for expert in range(moe.experts):
            own = {"expert": 1 + (expert + place) % 3, "layer": 1 + place}.get(kind, 0)
            if kind != "expert" or expert != 1:
                order = torch.randperm(moe.widths[expert], generator=generator)
                units[layer][expert] = sorted(order[: own * multiple or moe.expert_width // 2].tolist())
    return units


def width_of(checkpoint: Checkpoint) -> int:
    """Return the number of hidden units of the first layer's experts."""
    moe = checkpoint.config.layers[0].moe
    assert moe is not None
    return moe.expert_width


def unit_plan(units: Units) -> Plan:
    return Plan(
        {layer: tuple(narrowed_expert(expert, kept) for expert, kept in own.items()) for layer, own in units.items()}
    )


@torch.no_grad()
def prompt_and_steps(decoder: Decoder) -> Tensor:
    """Return the logits of the whole text, and those of a prompt of 7 tokens and of each later token after it."""
    cache = KeyValueCache(decoder.config, 2, TOKENS.shape[1], decoder.dtype)
    steps = [decoder(TOKENS[:, :7], cache=cache)]
    steps += [decoder(TOKENS[:, place : place + 1], cache=cache) for place in range(7, TOKENS.shape[1])]
    return torch.stack([decoder(TOKENS), torch.cat(steps, 1)])


def with_zeroed_units(checkpoint: Checkpoint, units: Units) -> Tensor:
    """Return the full model's logits with the other columns of down at zero and the experts that go at −∞."""
    row, source = checkpoint.config.architecture, checkpoint.source(torch.float32)
    kept = {expert_tensor(row, layer, e, DOWN): own[e] for layer, own in units.items() for e in own}

    def zeroed(name: str) -> Tensor:
        if name not in kept:
            return source(name)
        down_DF = torch.zeros_like(source(name))
        down_DF[:, kept[name]] = source(name)[:, kept[name]]
        return down_DF

    counts = checkpoint.config.experts_by_layer
    masks = [torch.isin(torch.arange(counts[layer]), torch.tensor(list(own))) for layer, own in units.items()]
    own = own_routings(checkpoint.config, source)
    decoder = Decoder(checkpoint.config, zeroed)
    with routed_by(decoder, [Masked(rule, mask) for rule, mask in zip(own, masks, strict=True)]):
        return prompt_and_steps(decoder)


def logits(checkpoint: Checkpoint) -> Tensor:
    return prompt_and_steps(Decoder(checkpoint.config, checkpoint.source(torch.float32)))


def worst(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())


def in_transformers(directory: Path, **options: Any) -> Tensor:
    """Return the logits of transformers' class, into which every tensor was loaded."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model, info = auto.from_pretrained(directory, output_loading_info=True, dtype=torch.float32, **options)
    assert not any(info.values()), info
    with torch.no_grad():
        found: Tensor = model.eval()(TOKENS).logits
    return found


def moe_blocks(directory: Path) -> list[dict[str, Any]]:
    blocks = json.loads((directory / "config.json").read_text())["block_configs"]
    return [block["ffn"]["moe"] for block in blocks if block["ffn"]["moe"] is not None]


@pytest.mark.parametrize("kind", KINDS)
@EACH_MIXTURE
def test_removing_units_equals_multiplying_them_by_zero(family: str, kind: str, tmp_path: Path) -> None:
    full = full_model(family, tmp_path / "full")
    units = chosen_units(full, kind)
    apply(unit_plan(units), full, tmp_path / "narrow")
    narrow, expected = Checkpoint(tmp_path / "narrow"), with_zeroed_units(full, units)
    widths = [tuple(map(len, own.values())) for own in units.values()]
    moes = [layer.moe for layer in narrow.config.layers if layer.moe is not None]
    assert [moe.widths for moe in moes] == widths and [moe.expert_width for moe in moes] == [max(own) for own in widths]
    assert worst(logits(narrow), expected) <= 1e-5
    assert worst(expected, logits(full)) > 1e-3, "and it is another function than the full model's"
    unwritten = planned_decoder(unit_plan(units), full, torch.float32)
    assert worst(prompt_and_steps(unwritten), expected) <= 1e-5


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_one_width_everywhere_is_a_plain_checkpoint_of_the_family(family: str, tmp_path: Path) -> None:
    """The shared expert of a DeepSeek is as wide as several routed ones: their number doubles where their width halves."""
    full = full_model(family, tmp_path / "full")
    apply(unit_plan(chosen_units(full, "uniform")), full, tmp_path / "narrow")
    narrow = Checkpoint(tmp_path / "narrow")
    assert not {"block_configs", "auto_map"} & narrow.raw_config.keys()
    assert [path.name for path in (tmp_path / "narrow").glob("*.py")] == []
    key, shared = full.config.architecture.experts.width, "n_shared_experts"
    assert narrow.raw_config[key] * 2 == full.raw_config[key]
    assert narrow.raw_config.get(shared, 0) == 2 * full.raw_config.get(shared, 0)
    assert worst(in_transformers(tmp_path / "narrow"), logits(narrow)[0]) <= 1e-4


def test_a_key_that_is_also_the_shared_expert_s_width_keeps_its_value(tmp_path: Path) -> None:
    """Widths that the family's key cannot say are in block_configs, because the shared expert keeps its width."""
    full = full_model("deepseek_v3", tmp_path / "full", n_shared_experts=1)
    units: Units = {layer: {e: [*range(4), *range(6, 14)] for e in range(12)} for layer in full.config.moe_layers}
    apply(unit_plan(units), full, tmp_path / "narrow")
    narrow = Checkpoint(tmp_path / "narrow")
    assert narrow.raw_config["moe_intermediate_size"] == 16 and narrow.raw_config["n_shared_experts"] == 1
    assert moe_blocks(tmp_path / "narrow") == [{"num_local_experts": 12, WIDTH_KEY: 12}] * 2
    assert worst(logits(narrow), with_zeroed_units(full, units)) <= 1e-5
    assert worst(in_transformers(tmp_path / "narrow", trust_remote_code=True), logits(narrow)[0]) <= 1e-4


@pytest.mark.parametrize("kind", ["expert", "layer"])
@pytest.mark.parametrize(
    "family", others_slow([f for f in MIXTURES if ARCHITECTURES[f].in_transformers], "mixtral", "glm4_moe")
)
def test_transformers_loads_other_widths_by_the_modeling_file(family: str, kind: str, tmp_path: Path) -> None:
    full = full_model(family, tmp_path / "full")
    apply(unit_plan(chosen_units(full, kind, multiple=4)), full, tmp_path / "narrow")
    narrow = Checkpoint(tmp_path / "narrow")
    keys = {WIDTH_KEY, WIDTHS_KEY} if kind == "expert" else {WIDTH_KEY}
    assert all(keys == moe.keys() & {WIDTH_KEY, WIDTHS_KEY} for moe in moe_blocks(tmp_path / "narrow"))
    if kind == "expert" and narrow.config.architecture.experts.names.stacks:
        assert "auto_map" not in narrow.raw_config and "prune" in str(loading_note(narrow.raw_config))
        with pytest.raises(OptionError, match="differ in width"):
            remote_code.check_loadable(tmp_path / "narrow", narrow.raw_config)
        return
    assert loading_note(narrow.raw_config) is None
    assert worst(in_transformers(tmp_path / "narrow", trust_remote_code=True), logits(narrow)[0]) <= 1e-4


def test_transformers_saves_each_expert_with_its_own_width(tmp_path: Path) -> None:
    full = full_model("mixtral", tmp_path / "full")
    apply(unit_plan(chosen_units(full, "expert")), full, tmp_path / "narrow")
    own = remote_code.own_class(full.config.architecture)
    own.from_pretrained(tmp_path / "narrow").save_pretrained(tmp_path / "again")
    again, narrow = Checkpoint(tmp_path / "again"), Checkpoint(tmp_path / "narrow")
    assert again.shapes == narrow.shapes
    assert all(torch.equal(again.tensor(name), narrow.tensor(name)) for name in narrow.shapes)


def test_units_go_again_and_the_result_may_be_plain(tmp_path: Path) -> None:
    """Units of a narrowed source are numbered anew; nothing is left of block_configs where all widths are equal."""
    full = full_model("qwen3_moe", tmp_path / "full")
    units = chosen_units(full, "expert", multiple=4)
    apply(unit_plan(units), full, tmp_path / "once")
    once = Checkpoint(tmp_path / "once")
    second: Units = {
        layer: {place: list(range(len(kept) - 4, len(kept))) for place, kept in enumerate(own.values())}
        for layer, own in units.items()
    }
    apply(unit_plan(second), once, tmp_path / "twice")
    twice = Checkpoint(tmp_path / "twice")
    assert "block_configs" not in twice.raw_config and twice.raw_config["moe_intermediate_size"] == 4
    left = {layer: {e: kept[-4:] for e, kept in own.items()} for layer, own in units.items()}
    assert worst(logits(twice), with_zeroed_units(full, left)) <= 1e-5
    assert worst(in_transformers(tmp_path / "twice"), logits(twice)[0]) <= 1e-4


def test_dropping_experts_of_a_narrowed_model_keeps_the_others_widths(tmp_path: Path) -> None:
    full = full_model("mixtral", tmp_path / "full")
    units = chosen_units(full, "expert")
    apply(unit_plan(units), full, tmp_path / "once")
    apply(pruning_plan({layer: [0, 2, 3] for layer in units}), Checkpoint(tmp_path / "once"), tmp_path / "twice")
    experts = {layer: list(own)[:1] + list(own)[2:4] for layer, own in units.items()}
    left = {layer: {e: units[layer][e] for e in own} for layer, own in experts.items()}
    assert worst(logits(Checkpoint(tmp_path / "twice")), with_zeroed_units(full, left)) <= 1e-5


@pytest.mark.parametrize("family", ["mixtral", "granitemoe"])
@pytest.mark.parametrize("kind", ["expert", "uniform"])
def test_refitted_down_projections_are_tensors_of_the_result(family: str, kind: str, tmp_path: Path) -> None:
    full = full_model(family, tmp_path / "full")
    units = chosen_units(full, kind)
    name = expert_tensor(full.config.architecture, 1, 1, DOWN)
    refitted = torch.randn(full.config.hidden_size, len(list(units[1].values())[1]))
    apply(unit_plan(units), full, tmp_path / "narrow", replaced={name: refitted})
    narrow = Checkpoint(tmp_path / "narrow")
    assert torch.equal(narrow.tensor(name), refitted)
    unwritten = planned_decoder(unit_plan(units), full, torch.float32, replaced={name: refitted})
    assert worst(prompt_and_steps(unwritten), logits(narrow)) <= 1e-5


def test_units_of_a_merged_expert_are_those_of_the_permuted_sum(tmp_path: Path) -> None:
    full = full_model("gpt_oss", tmp_path / "full")
    order = tuple(reversed(range(width_of(full))))
    sources = (Source(0, 0.75), Source(1, 0.25, order))
    whole, some = Part(sources), Part(sources, units=(0, 5, 6, 7))
    for name, part in (("whole", whole), ("some", some)):
        planned = PlannedExpert((part,), (Source(0),)), kept_expert(3)
        apply(Plan(dict.fromkeys(range(3), planned)), full, tmp_path / name)
    one, other, row = Checkpoint(tmp_path / "some"), Checkpoint(tmp_path / "whole"), full.config.architecture
    for projection in range(6):
        name = expert_tensor(row, 1, 0, projection)
        wide, along = other.tensor(name), 1 if projection == DOWN else 0
        expected = wide if projection == 5 else wide.index_select(along, torch.tensor([0, 5, 6, 7]))
        assert torch.allclose(one.tensor(name), expected, atol=1e-6)


def test_parts_with_units_become_one_dense_network(tmp_path: Path) -> None:
    """Layers of different widths are padded with units that are zero, which add nothing."""
    full = full_model("mixtral", tmp_path / "full")
    parts = (Part((Source(0),), 0.5, (1, 2, 9)), Part((Source(4),), 2.0))
    plan = Plan({0: (PlannedExpert(parts),), 1: (PlannedExpert(parts[:1]),), 2: (PlannedExpert(parts[1:]),)}, kind="dense")
    apply(plan, full, tmp_path / "dense")
    dense = Checkpoint(tmp_path / "dense")
    assert dense.config.layers[0].dense_width == 3 + width_of(full)
    down = dense.tensor("model.layers.1.mlp.down_proj.weight")
    one = full.tensor(expert_tensor(full.config.architecture, 1, 0, DOWN))
    assert torch.allclose(down[:, :3], 0.5 * one[:, [1, 2, 9]]) and not bool(down[:, 3:].any())


@pytest.mark.parametrize("family", ["mixtral", "granitemoe"])
def test_low_bit_experts_of_different_widths(family: str, tmp_path: Path) -> None:
    """They are rounded as they are written, and stay as they are when experts go afterwards."""
    full = full_model(family, tmp_path / "full")
    units = chosen_units(full, "expert", multiple=8)
    quantiser = Quantiser(QuantiserOptions(8, 8))
    apply(unit_plan(units), full, tmp_path / "low", quantiser=quantiser)
    low = Checkpoint(tmp_path / "low")
    assert low.config.widths_per_layer == tuple(tuple(map(len, own.values())) for own in units.values())
    for layer, own in units.items():
        for place, (expert, kept) in enumerate(own.items()):
            name = expert_tensor(full.config.architecture, layer, expert, DOWN)
            plain = full.tensor(name)[:, kept]
            found = low.tensor(expert_tensor(full.config.architecture, layer, place, DOWN))
            assert float((found - plain).abs().max()) <= float(plain.abs().max()) / 127
    assert "auto_map" not in low.raw_config and "only moe-compress" in str(loading_note(low.raw_config, True))
    apply(pruning_plan({layer: [0, 2, 3] for layer in units}), low, tmp_path / "fewer")
    fewer = Checkpoint(tmp_path / "fewer")
    assert fewer.schemes_used == low.schemes_used
    name, source = (expert_tensor(full.config.architecture, 1, expert, DOWN) for expert in (1, 2))
    assert torch.equal(fewer.tensor(name), low.tensor(source))


def test_a_width_that_no_group_fits_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    full = full_model("mixtral", tmp_path / "full")
    plan = unit_plan(chosen_units(full, "expert", multiple=4))
    with pytest.raises(OptionError, match="has 12 inputs, which groups of 8 do not fill"):
        apply(plan, full, tmp_path / "low", quantiser=Quantiser(QuantiserOptions(8, 8)))
    assert not (tmp_path / "low").exists()


HIDDEN = """
import sys
sys.modules.update(dict.fromkeys(("engine", "compress", "calibrate")))  # None: importing one of them raises
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
for argument in sys.argv[1:]:
    directory, trust = argument.split("=")
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=trust == "code", dtype=torch.float32)
    with torch.no_grad():
        logits = model(load_file(directory + "/tokens.safetensors")["tokens"]).logits
    save_file({"logits": logits}, directory + "/logits.safetensors")
"""


@pytest.mark.slow
def test_transformers_loads_the_results_where_this_package_is_not_importable(tmp_path: Path) -> None:
    cases = dict.fromkeys(("mixtral", "qwen3_moe", "deepseek_v3"), "plain") | {"olmoe": "code"}
    for family, loading in cases.items():
        full = full_model(family, tmp_path / "full" / family)
        apply(unit_plan(chosen_units(full, "uniform" if loading == "plain" else "expert", 4)), full, tmp_path / family)
        save_file({"tokens": TOKENS}, tmp_path / family / "tokens.safetensors")
    arguments = [f"{tmp_path / family}={loading}" for family, loading in cases.items()]
    settings = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HIDDEN, *arguments]
    subprocess.run(command, check=True, cwd=tmp_path, env=os.environ | settings, capture_output=True)
    for family in cases:
        found = load_file(tmp_path / family / "logits.safetensors")["logits"]
        for name in ("logits", "tokens"):
            (tmp_path / family / f"{name}.safetensors").unlink()
        assert worst(found, logits(Checkpoint(tmp_path / family))[0]) <= 1e-4


def test_pictures_know_from_which_expert_units_went() -> None:
    plan = Plan({0: (narrowed_expert(3, [0, 2]), kept_expert(5))})
    assert [expert.origin for expert in plan.layers[0]] == [3, 5]
    assert PlannedExpert((Part((Source(1),), 2.0, (0,)),), (Source(1),)).origin is None


def test_a_narrowed_model_is_described_by_its_own_widths(tmp_path: Path) -> None:
    full = full_model("qwen3_moe", tmp_path / "full")
    units = chosen_units(full, "expert")
    apply(unit_plan(units), full, tmp_path / "narrow")
    widths = [list(map(len, own.values())) for own in units.values()]
    narrow = Checkpoint(tmp_path / "narrow")
    figures, before = (inspect(str(tmp_path / name), checksums=False, progress=no_progress) for name in ("narrow", "full"))
    assert figures["widths_per_layer"] == widths and before["widths_per_layer"] == [24] * 3
    shown = CliRunner().invoke(cli.main, ["inspect", str(tmp_path / "narrow")])
    assert "1–3 1–3 1–3" in shown.output
    hidden, unit = full.config.hidden_size, 3 * full.config.hidden_size
    gone = sum(3 * hidden * (24 * 6 - sum(own)) + hidden for own in widths)  # one router row too
    assert figures["parameters"] == full.parameters - gone
    idle = sum((len(own) - 2) * unit * sum(own) // len(own) for own in widths)
    assert figures["active_parameters"] == figures["parameters"] - idle
    counted = Passes(narrow.config, 4, 4.0).all_experts(0, 1).flops
    assert counted == pytest.approx(2 * unit * sum(widths[0]))


# Refusals


BAD = {
    "none": ([], "keeps no hidden unit"),
    "twice": ([1, 1], "hidden unit 1 twice"),
    "descending": ([2, 1], "ascending order"),
    "out of range": ([0, 999], "keeps hidden unit 999; its sources have units 0 to"),
}


@pytest.mark.parametrize("units", BAD)
def test_bad_units_are_one_line_and_nothing_is_written(units: str, tmp_path: Path) -> None:
    full = full_model("mixtral", tmp_path / "full")
    planned = narrowed_expert(0, BAD[units][0]), kept_expert(1)
    with pytest.raises(PlanError, match=BAD[units][1]) as raised:
        apply(Plan(dict.fromkeys(range(3), planned)), full, tmp_path / "narrow")
    assert "\n" not in str(raised.value) and not (tmp_path / "narrow").exists()


def test_the_default_multiple_fits_groups_of_any_size() -> None:
    assert default_multiple({0: [192, 256]}) == 16 and default_multiple({0: [14336]}) == 64
    assert default_multiple({0: [192]}, Scheme(4, 96).fits) == 96 and default_multiple({0: [96]}, Scheme(8, 48).fits) == 48
    assert default_multiple({0: [192]}, Scheme(4, WHOLE_ROW).fits) == 16
    assert default_multiple({0: [96]}, Scheme(8, 128).fits) == 8, "none fits, and what is asked for is refused elsewhere"


def test_units_of_packed_weights_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    full = full_model("mixtral", tmp_path / "full")
    quantiser = Quantiser(QuantiserOptions(8, 8))
    apply(same_plan(full.config.experts_by_layer), full, tmp_path / "packed", quantiser=quantiser)
    save_packed(tmp_path / "mxfp4")
    for name in ("packed", "mxfp4"):
        packed = Checkpoint(tmp_path / name)
        with pytest.raises(UnsupportedError, match="prune the unquantized model and `compress quantize`"):
            apply(unit_plan(chosen_units(packed, "layer")), packed, tmp_path / "narrow")
        assert not (tmp_path / "narrow").exists()


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        ({WIDTH_KEY: 0}, "1 to 24 hidden units"),
        ({WIDTH_KEY: 25}, "1 to 24 hidden units"),
        ({WIDTH_KEY: "5"}, "1 to 24 hidden units"),
        ({WIDTHS_KEY: [5] * 6}, "1 to 24 hidden units"),
        ({WIDTH_KEY: 5, WIDTHS_KEY: [5] * 5}, "a list of 6 widths"),
        ({WIDTH_KEY: 5, WIDTHS_KEY: [4] * 6}, "the largest of them 5"),
        ({WIDTH_KEY: 5, WIDTHS_KEY: [5, 5, 5, 5, 5, 0]}, "a list of 6 widths"),
        ({WIDTH_KEY: 5, WIDTHS_KEY: 5}, "a list of 6 widths"),
        ({WIDTH_KEY: 5}, "has shape"),
        ({WIDTH_KEY: 24, WIDTHS_KEY: [24, 5, 5, 5, 5, 5]}, "has shape|is missing"),
    ],
)
def test_damaged_widths_are_refused(moe: dict[str, Any], message: str, tmp_path: Path) -> None:
    full_model("qwen3_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    blocks = [{"ffn": {"moe": {"num_local_experts": 6} | moe}} for _ in range(3)]
    (tmp_path / "config.json").write_text(json.dumps(config | {"block_configs": blocks}))
    with pytest.raises(CheckpointError, match=message) as raised:
        Checkpoint(tmp_path)
    assert "\n" not in str(raised.value)
