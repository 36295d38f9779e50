"""A family is one short row of parts: the length of the rows, a family composed here, and no family named elsewhere."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, FINE_GRAINED, GROUPS, reference_model
from shape import ROOT, source_files

from compress.plans.apply import apply
from compress.plans.plan import pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.errors import CheckpointError, UnsupportedError
from engine.families import table
from engine.families.architecture import Architecture
from engine.families.encoder_decoders import ENCODER_DECODERS
from engine.families.resolve import decoder_config
from engine.families.table import ARCHITECTURES
from engine.families.wrappers import WRAPPERS

ROOM = ROOT / "engine" / "families"
REPLIES = ROOM.parent / "replies"
"""The room whose table has rows for the forms in which families write calls."""
MOST_LINES = 15
TOKENS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))
PARTS = {name for name, field in Architecture.__dataclass_fields__.items() if field.type not in ("str", "str | None")}
"""Fields of a row that are parts."""


# Length of rows


def lines_of_rows(source: str) -> dict[str, int]:
    """Return the lines of each family's row, together with those of the module's constants that no other row mentions."""
    body = ast.parse(source).body
    constants = {
        node.targets[0].id: node.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    listed = constants.pop("_ROWS")
    assert isinstance(listed, ast.Tuple)
    rows = {id(row): row for row in (constants[e.id] if isinstance(e, ast.Name) else e for e in listed.elts)}
    mentions = {key: mentioned(row, constants) for key, row in rows.items()}
    made = {}
    for key, row in rows.items():
        others = set().union(*(names for other, names in mentions.items() if other != key))
        own = [constants[name] for name in mentions[key] - others if id(constants[name]) not in rows]
        made[model_type(row)] = sum(each.end_lineno - each.lineno + 1 for each in (row, *own))
    return made


def mentioned(node: ast.AST, constants: dict[str, ast.expr]) -> set[str]:
    """Return the names of the constants that some code is made from, directly or through others."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in constants}
    return names.union(*(mentioned(constants[name], constants) for name in names))


def model_type(row: ast.expr) -> str:
    assert isinstance(row, ast.Call)
    named = [keyword.value for keyword in row.keywords if keyword.arg == "model_type"]
    found = (named or row.args)[0]
    assert isinstance(found, ast.Constant) and isinstance(found.value, str)
    return found.value


@pytest.mark.parametrize("family", ["llama_moe", "gpt_oss", "llama4_text", "mixtral"])
def test_the_most_particular_families_are_short(family: str) -> None:
    assert 4 <= lines_of_rows((ROOM / "table.py").read_text())[family] <= MOST_LINES


def test_every_family_is_short() -> None:
    rows = lines_of_rows((ROOM / "table.py").read_text())
    assert set(rows) == set(ARCHITECTURES)
    assert {family: lines for family, lines in rows.items() if lines > MOST_LINES} == {}


def test_constants_of_one_row_are_counted_with_it() -> None:
    source = '_A = f(\n    1,\n)\n_B = 2\n_ROWS = (\n    Architecture("one", _A, _B),\n    Architecture("two", _B),\n)\n'
    assert lines_of_rows(source) == {"one": 4, "two": 1}


# A family composed of existing parts


def documented_row() -> Architecture:
    """Return the row that docs/adding-a-family.md shows, made with the imports of table.py."""
    text = (ROOT / "docs" / "adding-a-family.md").read_text()
    source = re.search(r"```python\n(.*?)```", text, re.S)
    assert source is not None and source[1].count("\n") <= MOST_LINES
    row = eval(source[1], vars(table))
    assert isinstance(row, Architecture)
    return row


@pytest.fixture(name="dots")
def composed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a reference model of a family that the table lacks, saved in tmp_path, with the documented row in the table."""
    row = documented_row()
    assert row.model_type not in ARCHITECTURES
    monkeypatch.setitem(ARCHITECTURES, row.model_type, row)
    sizes = FINE_GRAINED | GROUPS | {"n_shared_experts": 2, "norm_topk_prob": True, "head_dim": 8, "sliding_window": 7}
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    monkeypatch.setitem(FAMILIES, row.model_type, sizes | {"layer_types": kinds})
    model = reference_model(row.model_type)
    model.save_pretrained(tmp_path / "model")
    return model


def test_a_family_of_existing_parts_opens_and_matches(dots: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = dots(TOKENS).logits
    checkpoint = Checkpoint(tmp_path / "model")
    logits = Decoder(checkpoint.config, checkpoint.source(torch.float32))(TOKENS)
    assert float((logits - expected).abs().max()) <= 1e-4 and float(expected.abs().max()) > 0.1


def test_a_family_of_existing_parts_is_pruned(dots: Any, tmp_path: Path) -> None:
    full = Checkpoint(tmp_path / "model")
    kept = {layer: [0, 1, 3, 4, 6, 7, 9, 11] for layer in full.config.moe_layers}  # two of every group
    apply(pruning_plan(kept), full, tmp_path / "pruned")
    pruned = Checkpoint(tmp_path / "pruned")
    assert pruned.config.experts_per_layer == (8,) * len(kept)
    reloaded = type(dots).from_pretrained(tmp_path / "pruned").eval()
    logits = Decoder(pruned.config, pruned.source(torch.float32))(TOKENS)
    with torch.no_grad():
        assert float((logits - reloaded(TOKENS).logits).abs().max()) <= 1e-4


def test_parts_refuse_what_they_cannot_honor(dots: Any, tmp_path: Path) -> None:
    config = Checkpoint(tmp_path / "model").raw_config
    assert decoder_config(config).layers[1].window == 7
    with pytest.raises(UnsupportedError, match="layer_types="):
        decoder_config(config | {"layer_types": ["full_attention", "linear_attention", "full_attention"]})
    with pytest.raises(CheckpointError, match="cannot share 5 groups"):
        decoder_config(config | {"n_group": 5})
    with pytest.raises(UnsupportedError, match="unheard_of=1"):
        decoder_config(config | {"unheard_of": 1})


def test_a_part_is_exchanged_by_itself() -> None:
    """A row with another attention part has the same sizes, and nothing else changes."""
    row = ARCHITECTURES["mixtral"]
    changed = replace(row, attention=replace(row.attention, qk_norm="head"))
    assert changed.router is row.router and changed.reads == row.reads and changed != row


# Families are named in their room


def outside_the_room() -> list[Path]:
    return [path for path in source_files() if path.parent not in (ROOM, ROOM / "gguf", REPLIES)]


def named_families(source: str) -> set[str]:
    """Return the families, and their classes, that some code has as string literals."""
    rows = [*ARCHITECTURES.values(), *ENCODER_DECODERS.values()]
    classes = {getattr(row, "causal_lm_class", None) or row.model_class for row in rows}
    names = classes | {row.model_type for row in rows} | set(WRAPPERS)
    literals = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    return {each for each in literals if isinstance(each, str) and each in names}


def test_families_are_named_in_their_room_only() -> None:
    named = {path.relative_to(ROOT).as_posix(): named_families(path.read_text()) for path in outside_the_room()}
    assert {path: names for path, names in named.items() if names} == {}
    assert named_families((ROOM / "table.py").read_text()) >= set(ARCHITECTURES), "the search finds what there is"


def part_fields(source: str) -> set[str]:
    """Return the parts of a row that some code reads, as `row.router` or `config.architecture.router`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr in PARTS
        and (getattr(node.value, "attr", None) == "architecture" or getattr(node.value, "id", None) == "row")
    }


def test_parts_are_read_in_their_room_only() -> None:
    read = {path.relative_to(ROOT).as_posix(): part_fields(path.read_text()) for path in outside_the_room()}
    assert {path: names for path, names in read.items() if names} == {}
    assert "router" in part_fields((ROOM / "tensor_names.py").read_text()), "the search finds what there is"
