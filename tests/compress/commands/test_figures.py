"""The lines that commands print about the layers of a smaller model."""

from __future__ import annotations

from compress.commands.figures import layer_lines

WHOLE = {"experts_before": 8, "experts_after": 8, "experts_per_layer": [4, 4]}


def test_experts_are_shown_where_some_left() -> None:
    assert layer_lines(WHOLE) == []
    fewer = WHOLE | {"experts_after": 5, "experts_per_layer": [2, 3]}
    assert layer_lines(fewer) == ["experts per layer: 2 3"]


def test_widths_are_shown_where_units_left() -> None:
    narrow = WHOLE | {"granularity": "unit", "widths_per_layer": [[64, 64, 64, 64], [32, 96, 64, 32]]}
    assert layer_lines(narrow) == ["hidden units of an expert, by layer: 64 32–96"]


def test_both_are_shown_where_both_left() -> None:
    both = WHOLE | {"experts_after": 7, "experts_per_layer": [3, 4], "granularity": "both"}
    lines = layer_lines(both | {"widths_per_layer": [[64, 32, 64], [96, 96, 96, 96]]})
    assert lines == ["experts per layer: 3 4", "hidden units of an expert, by layer: 32–64 96"]
