"""Rules that hold for the options of every command."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import cli
from compress.commands.click_options import GroupedOption, all_leaves, default_of, make
from compress.commands.command import GROUPS, HUB, Common, Private, Push, Revision
from compress.commands.evaluate import task_rows
from compress.commands.inspect import InspectOptions
from compress.commands.prune import Afterwards, Uniform
from compress.commands.push import PushOptions
from compress.options.calibrate import CalibrateOptions
from compress.options.compare import CompareOptions
from compress.options.densify import DensifyOptions
from compress.options.distill import DistillOptions
from compress.options.distill_classifier import ClassifierOptions
from compress.options.evaluate import EvaluateOptions
from compress.options.export import ClassifierExportOptions, ExportOptions, GgufExportOptions
from compress.options.fit import FitOptions
from compress.options.layout import LayoutOptions
from compress.options.plan_run import RunOptions
from compress.options.presets import PresetOptions
from compress.options.prune import MergeOptions, PruneOptions
from compress.options.quantize import QuantizeOptions
from engine.bench.options import BenchOptions
from engine.generation.options import GenerateOptions
from engine.options import leaves
from engine.server.options import ServeOptions

OPTIONS: dict[str, tuple[type, ...]] = {
    "bench": (BenchOptions,),
    "calibrate": (CalibrateOptions, Revision),
    "compare": (CompareOptions,),
    "densify": (DensifyOptions, PresetOptions, *HUB),
    "distill": (DistillOptions, ClassifierOptions, PresetOptions, Push),
    "evaluate": (EvaluateOptions, Revision),
    "export": (ExportOptions, GgufExportOptions, ClassifierExportOptions, *HUB),
    "fit": (FitOptions, *HUB),
    "generate": (GenerateOptions, Revision),
    "inspect": (InspectOptions, Revision),
    "layout": (LayoutOptions, *HUB),
    "merge": (MergeOptions, Afterwards, *HUB),
    "plan-run": (RunOptions,),
    "prune": (PruneOptions, Uniform, Afterwards, PresetOptions, *HUB),
    "push": (PushOptions, Private),
    "quantize": (QuantizeOptions, *HUB),
    "serve": (ServeOptions, Revision),
}
COMMANDS = pytest.mark.parametrize("name", sorted(OPTIONS))


def parameters(name: str) -> dict[str, click.Parameter]:
    return {str(each.name): each for each in cli.main.commands[name].params}


def test_every_command_is_here() -> None:
    assert set(OPTIONS) == set(cli.main.commands)


@COMMANDS
def test_every_option_of_a_command_is_declared_on_a_field_and_none_elsewhere(name: str) -> None:
    assert set(parameters(name)) == set(all_leaves((*OPTIONS[name], Common)))


@COMMANDS
def test_every_option_has_help_and_a_known_group(name: str) -> None:
    for each in parameters(name).values():
        if not isinstance(each, click.Argument):
            assert isinstance(each, GroupedOption) and each.group in GROUPS
            assert each.help and each.help.split("  [")[0].endswith("."), each.name


@COMMANDS
def test_defaults_of_the_command_line_are_those_of_the_dataclass(name: str) -> None:
    """Omitting an option on the command line gives the dataclass that Python makes without it."""
    context = click.Context(cli.main.commands[name])
    for key, leaf in all_leaves((*OPTIONS[name], Common)).items():
        shown = parameters(name)[key].get_default(context)
        shown = None if repr(shown) == "Sentinel.UNSET" else shown  # click's name for no value
        assert shown == default_of(leaf) or (not shown and not default_of(leaf)), key
        of = next(each for each in (*OPTIONS[name], Common) if key in {own.name for own in leaves(each)})
        if leaf.default is not MISSING and leaf.path[0] not in PARTS:
            assert value_in(python_default(of), leaf.path) == leaf.default, key


PARTS = ("budget", "quantiser", "load")
"""Parts that are None unless one of their options is given, or that Python callers must give."""
REQUIRED: dict[str, Any] = {
    "output": Path("result.gguf"),
    "method": "",
    "model": "",
    "budget": None,
    "quantiser": None,
    "models": (),
    "prompts": (),
    "directory": None,
    "repo_id": "",
}


def python_default(of: type) -> Any:
    """Return the dataclass with as few arguments as possible."""
    required = {each.name for each in of.__dataclass_fields__.values() if each.default is each.default_factory is MISSING}
    return of(**{name: REQUIRED[name] for name in required})


def value_in(options: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        options = getattr(options, name)
    return options


@COMMANDS
def test_help_has_groups_and_the_own_group_of_a_command_comes_first(name: str) -> None:
    lines = CliRunner().invoke(cli.main, [name, "--help"]).output.splitlines()
    groups = [line[:-1] for line in lines if line.endswith(":") and line[:-1] in GROUPS]
    assert groups[-2:] == ["Machine", "Other"] and len(groups) == len(set(groups)) > 2
    assert "Options:" not in lines


def test_the_limit_of_drafts_is_that_of_the_kernels() -> None:
    from engine.generation.options import MOST_DRAFT_TOKENS
    from engine.kernels.kernel_choice import COMPILED_MAX_ROWS

    assert MOST_DRAFT_TOKENS == COMPILED_MAX_ROWS - 1


def test_a_value_is_made_from_each_command_line_default() -> None:
    assert make(ServeOptions, {}, {}) == ServeOptions()


HEAVY = "torch transformers numpy numba click.testing huggingface_hub"


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in sorted(OPTIONS))], ids=" ".join)
def test_help_appears_without_heavy_imports(arguments: list[str]) -> None:
    code = (
        "import sys, cli\n"
        "try:\n"
        f"    cli.main({arguments})\n"
        "finally:\n"
        f"    print([name for name in {HEAVY.split()} if name in sys.modules], file=sys.stderr)"
    )
    root = os.path.dirname(cli.__file__)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert "Usage:" in done.stdout and done.stderr.strip() == "[]"


def test_tasks_are_shown_with_their_errors() -> None:
    own = {"alias": "own", "sample_len": 8, "acc,none": 0.5, "acc_stderr,none": 0.125, "exact_match,strict": 1.0}
    assert task_rows({"own": own | {"exact_match_stderr,strict": "N/A"}}) == [
        ["task", "metric", "value"],
        ["own", "acc", "0.5000 ± 0.1250"],
        ["own", "exact_match (strict)", "1.0000"],
    ]
