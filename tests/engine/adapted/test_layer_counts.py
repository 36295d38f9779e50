"""Layers with different numbers of experts in families that transformers runs: the modeling file, and config.json."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import others_slow
from safetensors.torch import load_file, save_file
from tiny_families import (
    TOKENS_SL,
    by_name,
    difference,
    loaded,
    logits_of,
    masked,
    ragged_difference,
    remotely,
    save_tiny,
    some_removed,
    through_layers,
)
from torch import Tensor

from compress.plans.apply import apply
from compress.plans.plan import pruning_plan
from compress.plans.unit_selection import units_plan
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_decoder import AdaptedDecoder
from engine.adapted.layer_sizes import LayerSize
from engine.checkpoint import family_code
from engine.checkpoint.remote_code import check_loadable, is_ours
from engine.errors import CheckpointError, OptionError, UnsupportedError
from engine.transformers_models.transformers_model import load_decoder

pytestmark = pytest.mark.usefixtures("modules_cache")
HANDFUL = others_slow(("exaone_moe", "gemma4", "qwen3_vl_moe", "dots1", "minimax_m2", "nemotron_h"), "gemma4")
"""Experts one by one, a block that is a whole layer, stacks on disk in a config within a config, groups of experts, a bias
of the choice outside of the router, and a family with a row whose latent projection is left to transformers."""
ALONE = """
import sys
sys.modules.update(dict.fromkeys(("engine", "compress", "calibrate")))  # None: importing one of them raises
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32)
with torch.no_grad():
    save_file({"logits": model(load_file(sys.argv[2])["tokens"]).logits}, sys.argv[3])
"""


def logits_alone(model: Path, place: Path) -> Tensor:
    """Return the logits of TOKENS_SL where this package is not importable. place: a directory for files."""
    save_file({"tokens": TOKENS_SL}, place / "tokens")
    settings = {"HF_MODULES_CACHE": str(place / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    places = [str(each) for each in (model, place / "tokens", place / "logits")]
    command = [sys.executable, "-c", ALONE, *places]
    subprocess.run(command, check=True, cwd=place, env=os.environ | settings, capture_output=True)
    return load_file(place / "logits")["logits"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, AdaptedCheckpoint, Path]:
    """Return a tiny exaone_moe, its checkpoint, and a result whose layers have 4, 5 and 4 experts."""
    path = tmp_path_factory.mktemp("ragged")
    model = save_tiny(by_name("exaone_moe"), path / "full")
    checkpoint = AdaptedCheckpoint(path / "full")
    (path / "ragged").mkdir()
    apply(pruning_plan(some_removed(checkpoint, is_ragged=True)), checkpoint, path / "ragged")
    return model, checkpoint, path / "ragged"


@pytest.mark.parametrize("family", HANDFUL)
def test_removing_experts_equals_masking_them(family: str, tmp_path: Path) -> None:
    """In transformers with the modeling file, and in a pass layer by layer without it."""
    model = save_tiny(by_name(family), tmp_path / "full")
    found = ragged_difference(model, AdaptedCheckpoint(tmp_path / "full"), tmp_path / "ragged")
    assert isinstance(found, float)
    assert found < 1e-4


@pytest.mark.slow
def test_transformers_loads_it_where_this_package_is_not_importable(stored: Any, tmp_path: Path) -> None:
    _, _, path = stored
    assert difference(logits_alone(path, tmp_path), through_layers(AdaptedCheckpoint(path))) < 1e-5


def test_no_code_of_the_directory_is_run(stored: Any, tmp_path: Path) -> None:
    """The adapter, its decoder and transformers as a backend all compile the class from the template here."""
    _, _, path = stored
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    expected, source = logits_of(remotely(path)), (path / family_code.FILE_NAME).read_text()
    checkpoint = AdaptedCheckpoint(path)
    assert is_ours(path)
    with torch.no_grad():
        assert difference(AdaptedDecoder(checkpoint, torch.float32)(TOKENS_SL), expected) < 1e-5
        made = load_decoder(path, checkpoint.raw_config, torch.float32, checkpoint.model_class)
        assert difference(logits_of(made), expected) < 1e-5
        assert difference(logits_of(load_decoder(path, checkpoint.raw_config, torch.float32)), expected) < 1e-5
    (tmp_path / family_code.FILE_NAME).write_text(source + "raise SystemExit\n")
    assert difference(through_layers(AdaptedCheckpoint(tmp_path)), expected) < 1e-5
    with pytest.raises(OptionError, match="run code from this directory that this version did not write"):
        check_loadable(tmp_path, checkpoint.raw_config)
    for entry in ({"AutoModelForCausalLM": "other.Name"}, {"AutoModelForCausalLM": f"modeling_compressed.{'x' * 9}"}, ["x"]):
        assert family_code.base_of({"auto_map": entry}) is None


def test_transformers_saves_and_loads_it_again(stored: Any, tmp_path: Path) -> None:
    _, _, path = stored
    first = remotely(path)
    first.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / family_code.FILE_NAME).read_text() == (path / family_code.FILE_NAME).read_text()
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == set(load_file(path / "model.safetensors"))
    assert torch.equal(logits_of(remotely(tmp_path / "again")), logits_of(first))
    again = AdaptedCheckpoint(tmp_path / "again")
    assert again.config.experts_per_layer == AdaptedCheckpoint(path).config.experts_per_layer
    check_loadable(tmp_path / "again", again.raw_config)
    with pytest.raises(ValueError, match="same number of experts in every layer"):
        first(TOKENS_SL, output_router_logits=True)
    first.set_experts_implementation("eager")
    assert all(
        layer.mlp.experts.config._experts_implementation == "eager"
        for layer in first.model.layers
        if hasattr(layer.mlp, "experts")
    )


def test_results_are_pruned_again(stored: Any, tmp_path: Path) -> None:
    """To other numbers, to one number, and to half of their hidden units."""
    model, checkpoint, path = stored
    first = AdaptedCheckpoint(path)
    before = some_removed(checkpoint, is_ragged=True)
    layers, counts = list(before), (2, 4, 3)
    kept = {layer: list(range(count)) for layer, count in zip(layers, counts, strict=True)}
    for name, own in (("other", kept), ("one", {layer: [0, 1, 3] for layer in layers})):
        (tmp_path / name).mkdir()
        apply(pruning_plan(own), first, tmp_path / name)
        with masked(model, checkpoint, {layer: [before[layer][expert] for expert in own[layer]] for layer in own}):
            reference = logits_of(model)
        assert difference(through_layers(AdaptedCheckpoint(tmp_path / name)), reference) < 1e-5
        made = remotely(tmp_path / name) if name == "other" else loaded(by_name("exaone_moe"), tmp_path / name)
        assert difference(logits_of(made), reference) < 1e-5
    assert not (tmp_path / "one" / family_code.FILE_NAME).exists()
    assert {"auto_map", "block_configs", "block_places"}.isdisjoint(AdaptedCheckpoint(tmp_path / "one").raw_config)
    units = {layer: [list(range(8))] * len(own) for layer, own in before.items()}
    (tmp_path / "narrow").mkdir()
    apply(units_plan(units, first.config.ffn_widths()), first, tmp_path / "narrow")
    narrow = AdaptedCheckpoint(tmp_path / "narrow")
    assert narrow.config.ffn_widths() == {layer: (8,) * len(own) for layer, own in before.items()}
    assert difference(logits_of(remotely(tmp_path / "narrow")), through_layers(narrow)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_places": {"layers": "model.layers", "block": "", "experts": ["x"]}}, "config.json: block_places is "),
        ({"block_places": None}, "block_places is None, and the experts of this model are at "),
        ({"block_configs": [{"ffn": {"moe": None}}]}, "block_configs must be a list of 4 layers"),
        (
            {"block_configs": [{"ffn": {"moe": None}}, *[{"ffn": {"moe": {"num_local_experts": 9}}}] * 3]},
            "num_local_experts is 9; layer 1 can hold 1 to 5",
        ),
        (
            {"block_configs": [{"ffn": {"moe": None}}, *[{"ffn": {"moe": {"num_local_experts": 3}}}] * 3]},
            "has shape .* and config.json says",
        ),
    ],
)
def test_entries_that_do_not_fit_are_refused(stored: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    shutil.copytree(stored[2], tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(CheckpointError, match=message):
        through_layers(AdaptedCheckpoint(tmp_path))


def test_families_whose_layers_cannot_differ_are_refused_by_name(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, checkpoint, _ = stored
    counts = dict(zip(checkpoint.config.moe_layers, (4, 5, 4), strict=True))
    sizes = {layer: LayerSize(count, 16) for layer, count in counts.items()}
    checkpoint.check_sizes(sizes)
    own = family_code._TEMPLATE.replace("_take_block(self", "_entry(config) or _take_block(self")
    monkeypatch.setattr(family_code, "_TEMPLATE", own)
    monkeypatch.setattr(family_code, "MODULES", "compressed_models_that_do_nothing")
    with pytest.raises(
        UnsupportedError,
        match=r"layers of a model of the family exaone_moe cannot have different numbers of experts "
        r"\(model\.layers\.1\.mlp\..* does not follow the entry of its layer\); prune with --uniform",
    ):
        checkpoint.check_sizes(sizes)


def test_layers_for_multi_token_prediction_have_a_note(stored: Any, tmp_path: Path) -> None:
    shutil.copytree(stored[1].directory, tmp_path / "full")
    tensors = load_file(tmp_path / "full" / "model.safetensors")
    tensors |= {f"mtp.layers.0.mlp.experts.{number}.w1.weight": torch.ones(2) for number in range(8)}
    save_file(tensors, tmp_path / "full" / "model.safetensors")
    checkpoint = AdaptedCheckpoint(tmp_path / "full")
    (tmp_path / "ragged").mkdir()
    apply(pruning_plan(some_removed(checkpoint, is_ragged=True)), checkpoint, tmp_path / "ragged")
    assert "config.json has no number of experts for them alone" in str(
        AdaptedCheckpoint(tmp_path / "ragged").prediction_note
    )
