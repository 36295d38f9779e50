"""The command `compress inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compress.commands.command import Figures, Given, Revision, command
from compress.commands.output import progress_bar, table
from compress.report.columns import size
from engine.options import option


@dataclass(frozen=True)
class InspectOptions:
    """Options of `compress inspect`."""

    path: str = option("demo", group="", is_argument=True, help="Directory, GGUF file, hub id or 'demo'.")
    checksums: bool = option(False, group="What to check", help="Also compare every file with the artifact's checksums.")


def inspect(given: Given) -> Figures:
    """Say what a checkpoint or artifact is, and check that it is whole."""
    from engine.inspect import inspect as run

    options = given.make(InspectOptions)
    figures = run(options.path, checksums=options.checksums, progress=progress_bar)
    shown = {key: value for key, value in figures.items() if key != "provenance" and value is not None}
    given.say(table([[key.replace("_", " "), _shown(key, value)] for key, value in shown.items()]))
    if figures["provenance"]:
        method, source = figures["provenance"].get("method"), figures["provenance"].get("source", {}).get("model")
        given.say("".join(each for each in f"made by method {method} from {source}" if each.isprintable()))
    return figures


def _shown(key: str, value: Any) -> str:
    if key.startswith("bytes"):
        return size(value)
    if isinstance(value, dict):
        return " ".join(f"{name} {count}" for name, count in value.items())
    if isinstance(value, list):
        return " ".join(f"{min(each)}–{max(each)}" if isinstance(each, list) else str(each) for each in value) or "–"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


COMMAND = command("inspect", inspect, InspectOptions, Revision)
