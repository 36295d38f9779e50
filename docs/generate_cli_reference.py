"""Writes docs/cli.md from the help texts of the commands.

python docs/generate_cli_reference.py            writes the file
python docs/generate_cli_reference.py --check    writes nothing; exits 1 if the file is not what would be written
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import click

import cli

REFERENCE = Path(__file__).resolve().parent / "cli.md"
PROGRAM = "compress"
WIDTH = 100

HEADER = """\
# Command-line reference

Generated from the help texts by `python docs/generate_cli_reference.py`; a test checks that it is current.
"""


def commands(command: click.Command, parent: click.Context | None = None) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield a command and all its subcommands, each with the context that its help is printed in, in order."""
    name = PROGRAM if parent is None else command.name
    width = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    context = command.make_context(name, [], parent, resilient_parsing=True, **width)
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            if subcommand is not None and not subcommand.hidden:
                yield from commands(subcommand, context)


def render() -> str:
    sections = [HEADER]
    for command, context in commands(cli.main):
        lines = [line.rstrip() for line in command.get_help(context).splitlines()]
        sections.append("\n".join([f"## {context.command_path}", "", "```text", *lines, "```", ""]))
    return "\n".join(sections)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if docs/cli.md is stale")
    if not parser.parse_args().check:
        REFERENCE.write_text(render(), encoding="utf-8")
    elif not REFERENCE.exists() or REFERENCE.read_text(encoding="utf-8") != render():
        sys.exit("docs/cli.md is stale; run: python docs/generate_cli_reference.py")


if __name__ == "__main__":
    main()
