"""The `compress` command: a group of verbs, each defined in a file of compress/commands."""

from __future__ import annotations

from importlib import import_module

import click

VERBS = (
    "bench",
    "calibrate",
    "compare",
    "densify",
    "distill",
    "evaluate",
    "export",
    "fit",
    "generate",
    "inspect",
    "layout",
    "merge",
    "plan_run",
    "prune",
    "push",
    "quantize",
    "serve",
)
"""Files of compress/commands."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="moe-compress", prog_name="compress")
def main() -> None:
    """Make a Mixture-of-Experts language model small, write it as safetensors, run it, and say what it costs."""


for verb in VERBS:
    main.add_command(import_module(f"compress.commands.{verb}").COMMAND)


if __name__ == "__main__":
    main()
