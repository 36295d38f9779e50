"""Layers whose experts keep different numbers of hidden units, in families that transformers runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_references import without_units
from test_layer_counts import logits_alone
from tiny_families import (
    TOKENS_SL,
    by_name,
    difference,
    loaded,
    logits_of,
    masked,
    ragged_units,
    ragged_units_difference,
    remotely,
    save_tiny,
    some_removed,
    through_layers,
)

from compress.plans.apply import apply
from compress.plans.unit_selection import units_plan
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_decoder import AdaptedDecoder
from engine.adapted.config_keys import WidthKey
from engine.checkpoint import family_code
from engine.checkpoint.remote_code import check_loadable, is_ours
from engine.errors import CheckpointError, OptionError, UnsupportedError
from engine.transformers_models.transformers_model import load_decoder

pytestmark = pytest.mark.usefixtures("modules_cache")
HANDFUL = ("gpt_oss", "gemma4", "qwen3_vl_moe", "nemotron_h", "dots1")
"""Transposed stacks with biases, a block that is a whole layer, stacks on disk, experts without gate, and groups."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, AdaptedCheckpoint, Path]:
    """Return a tiny exaone_moe, its checkpoint, and a result whose layers have 8 experts of 16, 12 and 8 hidden units."""
    path = tmp_path_factory.mktemp("widths")
    model = save_tiny(by_name("exaone_moe"), path / "full")
    checkpoint = AdaptedCheckpoint(path / "full")
    (path / "narrow").mkdir()
    apply(units_plan(_units(checkpoint), checkpoint.config.ffn_widths()), checkpoint, path / "narrow")
    return model, checkpoint, path / "narrow"


def _units(checkpoint: AdaptedCheckpoint) -> dict[int, list[list[int]]]:
    return ragged_units(checkpoint, {layer: list(range(8)) for layer in checkpoint.config.moe_layers})


@pytest.mark.slow
@pytest.mark.parametrize("family", HANDFUL)
def test_removing_experts_and_units_equals_masking_and_zeros(family: str, tmp_path: Path) -> None:
    """In transformers with the modeling file, and in a pass layer by layer without it."""
    model = save_tiny(by_name(family), tmp_path / "full")
    found = ragged_units_difference(model, AdaptedCheckpoint(tmp_path / "full"), tmp_path / "ragged")
    assert isinstance(found, float), found
    assert found < 1e-5


def test_units_that_stay_are_those_of_the_plan(stored: Any) -> None:
    model, checkpoint, path = stored
    with without_units(model, checkpoint, _units(checkpoint)):
        reference = logits_of(model)
    result = AdaptedCheckpoint(path)
    assert result.config.ffn_widths() == {1: (16,) * 8, 2: (12,) * 8, 3: (8,) * 8}
    assert difference(reference, logits_of(model)) > 1e-3
    with torch.no_grad():
        assert difference(AdaptedDecoder(result, torch.float32)(TOKENS_SL), reference) < 1e-5
        made = load_decoder(path, result.raw_config, torch.float32, result.model_class)
        assert difference(logits_of(made), reference) < 1e-5
        assert difference(logits_of(load_decoder(path, result.raw_config, torch.float32)), reference) < 1e-5
    whole, own = checkpoint.stored_shapes, result.stored_shapes
    gone = sum(torch.Size(whole[name][1]).numel() - torch.Size(own[name][1]).numel() for name in own)
    assert checkpoint.parameters - result.parameters == gone == 8 * 3 * 32 * (4 + 8)


@pytest.mark.slow
def test_transformers_loads_it_where_this_package_is_not_importable(stored: Any, tmp_path: Path) -> None:
    _, _, path = stored
    assert difference(logits_alone(path, tmp_path), through_layers(AdaptedCheckpoint(path))) < 1e-5


def test_no_code_of_the_directory_is_run(stored: Any, tmp_path: Path) -> None:
    _, _, path = stored
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    checkpoint, source = AdaptedCheckpoint(path), (path / family_code.FILE_NAME).read_text()
    assert is_ours(path)
    (tmp_path / family_code.FILE_NAME).write_text(source + "raise SystemExit\n")
    assert torch.equal(through_layers(AdaptedCheckpoint(tmp_path)), through_layers(checkpoint))
    with pytest.raises(OptionError, match="run code from this directory that this version did not write"):
        check_loadable(tmp_path, checkpoint.raw_config)


def test_transformers_saves_and_loads_it_again(stored: Any, tmp_path: Path) -> None:
    first = remotely(stored[2])
    first.save_pretrained(tmp_path / "again")
    assert torch.equal(logits_of(remotely(tmp_path / "again")), logits_of(first))
    assert AdaptedCheckpoint(tmp_path / "again").config.ffn_widths() == AdaptedCheckpoint(stored[2]).config.ffn_widths()
    check_loadable(tmp_path / "again", AdaptedCheckpoint(tmp_path / "again").raw_config)


def test_results_are_pruned_again(stored: Any, tmp_path: Path) -> None:
    """To other numbers of experts, to one width, and to whole experts of the widths that they have."""
    model, checkpoint, path = stored
    first, before = AdaptedCheckpoint(path), _units(stored[1])
    kept = some_removed(checkpoint, is_ragged=True)
    every = {layer: list(range(8)) for layer in kept}
    for name, experts, width in (
        ("other", kept, 16),
        ("one", every, 8),
        ("experts", {layer: [0, 3, 5] for layer in kept}, 16),
    ):
        again = {
            layer: [
                range(min(width, len(own))) if expert in experts[layer] else [] for expert, own in enumerate(before[layer])
            ]
            for layer in before
        }
        (tmp_path / name).mkdir()
        apply(units_plan(again, first.config.ffn_widths()), first, tmp_path / name)
        left = {
            layer: [[own[unit] for unit in units] for own, units in zip(before[layer], again[layer], strict=True)]
            for layer in before
        }
        with masked(model, checkpoint, experts), without_units(model, checkpoint, left):
            reference = logits_of(model)
        assert difference(through_layers(AdaptedCheckpoint(tmp_path / name)), reference) < 1e-5
        made = loaded(by_name("exaone_moe"), tmp_path / name) if name == "one" else remotely(tmp_path / name)
        assert difference(logits_of(made), reference) < 1e-5


def test_one_width_that_the_familys_entry_cannot_say(stored: Any, tmp_path: Path) -> None:
    """Twelve units are no divisor of the 16 of the shared expert, so that every layer has them in block_configs."""
    model, checkpoint, _ = stored
    units = {layer: [list(range(12))] * 8 for layer in checkpoint.config.moe_layers}
    apply(units_plan(units, checkpoint.config.ffn_widths()), checkpoint, tmp_path)
    with without_units(model, checkpoint, units):
        reference = logits_of(model)
    assert json.loads((tmp_path / "config.json").read_text())["moe_intermediate_size"] == 16
    assert difference(logits_of(remotely(tmp_path)), reference) < 1e-5
    assert difference(through_layers(AdaptedCheckpoint(tmp_path)), reference) < 1e-5


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        ({"intermediate_size": 17}, "intermediate_size is 17; experts of this model have 1 to 16 hidden units"),
        ({"intermediate_size": 0}, "intermediate_size is 0; experts of this model"),
        (
            {"intermediate_size": 12, "expert_widths": [12] * 7 + [8]},
            r"block_configs\[2\]\.ffn\.moe\.expert_widths gives the experts of a layer different widths",
        ),
        ({"intermediate_size": 8}, "has shape .* and config.json says"),
        ({}, "has shape .* and config.json says"),
    ],
)
def test_entries_that_do_not_fit_are_refused(stored: Any, tmp_path: Path, moe: dict[str, Any], message: str) -> None:
    shutil.copytree(stored[2], tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["block_configs"][2]["ffn"]["moe"] = {"num_local_experts": 8} | moe
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message):
        through_layers(AdaptedCheckpoint(tmp_path))


@pytest.mark.parametrize("places", [{"width": ["other"]}, {"module": "mlp"}, {"width": None}])
def test_places_that_do_not_fit_are_refused(stored: Any, tmp_path: Path, places: dict[str, Any]) -> None:
    shutil.copytree(stored[2], tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"block_places": raw["block_places"] | places}))
    with pytest.raises(CheckpointError, match=r"config\.json: block_places is .*, and the experts of this model are at "):
        AdaptedCheckpoint(tmp_path)


def test_what_cannot_be_is_refused_by_name(stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Different widths in one layer, and families whose layers cannot differ."""
    _, checkpoint, _ = stored
    units = _units(checkpoint)
    units[2][3] = units[2][3][:5]
    with pytest.raises(
        UnsupportedError, match="have one width, and the plan keeps 5 to 12 hidden units in layer 2; keep as"
    ):
        apply(units_plan(units, checkpoint.config.ffn_widths()), checkpoint, tmp_path / "result")
    monkeypatch.setitem(checkpoint.__dict__, "width_key", WidthKey(("num_attention_heads",), 16, beyond="other"))
    with pytest.raises(
        UnsupportedError,
        match=r"layers of a model of the family exaone_moe cannot have different widths of experts \(.*--uniform",
    ):
        apply(units_plan(_units(checkpoint), checkpoint.config.ffn_widths()), checkpoint, tmp_path / "result")
