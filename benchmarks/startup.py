"""Start-up time of commands, each in fresh processes: `python benchmarks/startup.py [--rounds 5]`.

The first round fills the file caches and is not counted. The others are taken in turn, and each figure is their median. The
parts of `generate demo` are timed inside one process. The time of loading the kernels is the first token's time minus that
of the first token of a second run in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from results import ROOT, markdown, save

COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "python -c 'import torch'": ("-c", "import torch"),
    "compress --help": ("-m", "cli", "--help"),
    "compress prune --help": ("-m", "cli", "prune", "--help"),
    "compress inspect demo": ("-m", "cli", "inspect", "demo"),
    "compress generate demo --tokens 1": ("-m", "cli", "generate", "demo", "--prompt", "The", "--tokens", "1"),
}
PARTS = """
import json, time
times = [time.perf_counter()]
def took(): times.append(time.perf_counter()); return times[-1] - times[-2]
import torch
parts = {"import torch": took()}
from engine import Engine
parts["import the engine"] = took()
engine = Engine.open("demo")
parts["open the model"] = took()
engine.tokenizer, engine.end_tokens
parts["load the tokenizer"] = took()
next(engine.stream("The", max_new_tokens=1))
first = took()
next(engine.stream("The", max_new_tokens=1))
again = took()
print(json.dumps(parts | {"load the kernels": first - again, "the first token": again}))
"""


def run(arguments: tuple[str, ...]) -> tuple[float, str]:
    """Return the seconds of one fresh process, and its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    ended = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)
    return time.perf_counter() - started, ended.stdout


def measure(rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each command and of each part, by round."""
    commands: dict[str, list[float]] = {name: [] for name in COMMANDS}
    parts: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        found = {name: run(arguments)[0] for name, arguments in COMMANDS.items()}
        timed: dict[str, float] = json.loads(run(("-c", PARTS))[1])
        if number:
            for name, seconds in found.items():
                commands[name].append(seconds)
            for name, seconds in timed.items():
                parts.setdefault(name, []).append(seconds)
    return commands, parts


def table(figures: dict[str, Any]) -> str:
    """Return the median seconds of each command, and of each part of one."""
    parts = figures["parts"]
    rows = [[name, _seconds(own)] for name, own in figures["commands"].items()]
    rows += [[f"generate: {name}", _seconds(own)] for name, own in parts.items()]
    later = [own for name, own in parts.items() if name != "import torch"]
    after = [sum(times) for times in zip(*later, strict=True)]
    rows.append(["generate: from torch imported to the first token", _seconds(after)])
    return markdown(["fresh process", "seconds, median"], rows)


TABLES = {"startup": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    commands, parts = measure(parser.parse_args().rounds)
    save("startup", {"commands": commands, "parts": parts})


def _seconds(times: list[float]) -> str:
    return f"{statistics.median(times):.2f}"


if __name__ == "__main__":
    main()
