"""Runs the commands of docs/reproduce at demo size, and writes their output below them.

    python benchmarks/reproduce.py [--directory DIR] [PAGE …]

In a page a block of `sh` has the commands of a table or figure at full size, with loops over models and values, and a block
of `console` the same at demo size: lines that begin with "$ " are commands, and all others are what they print. The page is
the place where commands are written. This script runs the commands of a page in order in a directory, where an interrupted
run goes on, and saves what they print and take in benchmarks/results/reproduce_PAGE.json.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from results import ROOT, markdown, remember, remembered, save

PAGES = tuple(sorted(path.stem for path in (ROOT / "docs" / "reproduce").glob("*.md")))
CONSOLE = re.compile(r"(```console\n)(.*?)(```\n)", re.DOTALL)
FULL_SIZE = re.compile(r"```sh\n(.*?)```\n", re.DOTALL)
LOOP = re.compile(r"^( *)for (\w+) in ([^;\n]+); do\n(.*?)^\1done\n", re.DOTALL | re.MULTILINE)
SHELL = "/bin/bash"
"""The shell of the pages: prompts of several lines are written as $'…'."""
MATERIALS = f"{sys.executable} {ROOT / 'benchmarks' / 'paper_materials.py'} materials"


def page_path(page: str) -> Path:
    """Return the file of a page."""
    return ROOT / "docs" / "reproduce" / f"{page}.md"


def commands(block: str) -> list[str]:
    """Return the commands of a block, with continued lines joined."""
    joined = block.replace("\\\n", " ")
    marked = [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]
    return [" ".join(line.split()) for line in marked]


def demo_commands(text: str) -> Iterator[str]:
    """Yield the commands of a page at demo size, in order."""
    for match in CONSOLE.finditer(text):
        yield from commands(match[2])


def full_size_commands(text: str, once: Collection[str] = ()) -> Iterator[str]:
    """Yield the commands of a page at full size, those of a loop once for each of its words.

    once: variables whose loops run with their first word only.
    """
    for match in FULL_SIZE.finditer(text):
        for line in unrolled(match[1].replace("\\\n", " "), once).splitlines():
            if line.strip() and not line.startswith("#"):
                yield " ".join(line.split())


def unrolled(block: str, once: Collection[str] = ()) -> str:
    """Return the commands of a block with every `for NAME in WORDS; do … done` written out."""

    def turns(loop: re.Match[str]) -> str:
        words = loop[3].split()
        variable = re.compile(rf"\${loop[2]}\b|\$\{{{loop[2]}\}}")
        return "".join(variable.sub(word, loop[4]) for word in words[: 1 if loop[2] in once else None])

    while (written := LOOP.sub(turns, block)) != block:
        block = written
    return block


def run_commands(wanted: Sequence[str], directory: Path, state: Path) -> list[dict[str, Any]]:
    """Return each command with its standard output and seconds. Finished ones are taken from `state`."""
    known = {line["command"]: line for line in remembered(state)}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in wanted:
        if command in known:
            continue
        started = time.monotonic()
        ran = subprocess.run(
            command,
            shell=True,
            executable=SHELL,
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        if ran.returncode:
            sys.exit(f"{command}\nended with {ran.returncode}")
        known[command] = {"command": command, "output": ran.stdout, "seconds": time.monotonic() - started}
        print(f"{known[command]['seconds']:6.1f} s  {command}", file=sys.stderr, flush=True)
        remember(state, known[command])
    return [known[command] for command in wanted]


def with_outputs(text: str, figures: Mapping[str, Any]) -> str:
    """Return a page with the output of each command below it."""
    outputs = {each["command"]: each["output"] for each in figures["commands"]}

    def filled(match: re.Match[str]) -> str:
        lines, shown = match[2].splitlines(), []
        for place, line in enumerate(lines):
            if not line.startswith("$ ") and not (place and lines[place - 1].endswith("\\")):
                continue
            shown.append(line)
            if not line.endswith("\\"):
                start = max(number for number in range(place + 1) if lines[number].startswith("$ "))
                (command,) = commands("\n".join(lines[start : place + 1]))
                shown += [printed.rstrip() for printed in outputs.get(command, "").rstrip().splitlines()]
        return match[1] + "\n".join(shown) + "\n" + match[3]

    return CONSOLE.sub(filled, text)


def table(figures: Mapping[str, Any]) -> str:
    """Return how long the commands of a page took together."""
    seconds = [each["seconds"] for each in figures["commands"]]
    return markdown(["commands", "minutes"], [[str(len(seconds)), f"{sum(seconds) / 60:.1f}"]])


TABLES = {f"reproduce_{page}": table for page in PAGES}
FILL = {f"reproduce_{page}": with_outputs for page in PAGES}
"""The functions that fill a page beside its table: they write the outputs below the commands."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE", default=list(PAGES))
    parser.add_argument("--directory", type=Path, help="where the models are made, and found again")
    parser.add_argument("--commands", type=int, help="run so many commands of each page, the first ones; by default all")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(MATERIALS, shell=True, cwd=directory, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        for page in arguments.pages:
            work = directory / page
            work.mkdir(exist_ok=True)
            for place in (directory.resolve() / "materials", ROOT / "benchmarks"):
                if not (work / place.name).exists():
                    (work / place.name).symlink_to(place)
            wanted = list(demo_commands(page_path(page).read_text()))[: arguments.commands]
            ran = run_commands(wanted, work, directory / f"{page}.jsonl")
            save(f"reproduce_{page}", {"commands": ran})


if __name__ == "__main__":
    main()
