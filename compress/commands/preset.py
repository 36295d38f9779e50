"""The option `--preset`: a paper's values (compress/options/presets.py) take the place of defaults and are printed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from compress.commands.click_options import all_leaves
from compress.commands.command import Given
from compress.commands.output import table
from compress.options.presets import Preset, preset_of
from engine.options import Leaf


def with_preset(given: Given, options: Iterable[type], command: str, kind: str = "") -> Given:
    """Return the values with those of `--preset` in place of defaults, and print them; unchanged without a preset.

    options: the dataclasses of the job's options. Options on the command line keep their values. Raises OptionError for a
    preset without settings of this job.
    """
    name = given.values["preset"]
    if name is None:
        return given
    preset = preset_of(name, command, kind)
    leaves = all_leaves(options)
    parsed = {option: _parsed(leaves[option], value) for option, (value, _) in preset.values.items()}
    given.say(f"preset {name}: {preset.paper}")
    given.say(table(preset_rows(given, preset, leaves)))
    if preset.note:
        given.say(f"note: {preset.note}")
    values = {**given.values, **{option: value for option, value in parsed.items() if option not in given.named}}
    return replace(given, values=values, named=given.named | parsed.keys())


def preset_rows(given: Given, preset: Preset, leaves: dict[str, Leaf]) -> list[list[str]]:
    """Return one row for each option: its value, and its place in the paper or the paper's value that it replaces."""
    rows = []
    for option, (value, place) in preset.values.items():
        paper = written(leaves[option], value)
        if option in given.named:
            rows.append([f"  {written(leaves[option], given.values[option])}", f"yours, in place of {paper} ({place})"])
        else:
            rows.append([f"  {paper}", place])
    width = max(len(place) for _, place in rows)
    return [[setting, place.ljust(width)] for setting, place in rows]


def written(leaf: Leaf, value: Any) -> str:
    """Return an option with its value as on the command line."""
    if isinstance(value, bool):
        return f"--{leaf.flag if value else leaf.option.off}"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else value
    return f"--{leaf.flag} {text}"


def _parsed(leaf: Leaf, value: Any) -> Any:
    """Return a value as click gives it for this option."""
    return (value,) if leaf.option.several is not None and not isinstance(value, tuple) else value
