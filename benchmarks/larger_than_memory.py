"""A checkpoint of one and a half times the memory that its process may have still generates.

python benchmarks/larger_than_memory.py [--directory DIR] [--times 1.5] [--new-tokens 16] [--layers 16]

The limit is that of a control group, with the page cache and without swap. Making a group takes root or a delegated group.
The text is compared with that of the same command without a limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from memory_limit import NoControlGroupError, forget_files, memory_limit, peak_bytes, run_in
from random_model import shape, write_random_model
from results import NOT_POSSIBLE_HERE, markdown, save


def generated(command: list[str], directory: Path, limit: int) -> dict[str, Any]:
    """Return the JSON of `compress generate` in a group with this memory limit, and the group's peak."""
    forget_files(directory)
    with memory_limit(limit) as group:
        done = run_in(group, command)
        if done.returncode:
            raise SystemExit(f"ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(done.stdout) | {"group_peak_bytes": peak_bytes(group)}


def table(figures: dict[str, Any]) -> str:
    """Return the figures with the limit beside those without."""
    both = [figures["limited"], figures["free"]]
    rows = [
        ["checkpoint, GB", *(f"{figures['checkpoint_bytes'] / 1e9:.2f}" for _ in both)],
        ["memory limit, GB", f"{figures['limit_bytes'] / 1e9:.2f}", "none"],
        *(
            [title, *(f"{each[name] * scale:.2f}" for each in both)]
            for title, name, scale in (
                ("peak of its control group, GB", "group_peak_bytes", 1e-9),
                ("seconds to the first token", "time_to_first_token_seconds", 1),
                ("tokens/s after it", "tokens_per_second", 1),
            )
        ),
        ["the same text", "yes" if figures["same"] else "no", ""],
    ]
    return markdown(["", "limited", "free"], rows)


TABLES = {"larger_than_memory": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--times", type=float, default=1.5)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary) / "model"
        if not directory.is_dir():
            write_random_model(directory, shape(layers=arguments.layers))
        stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        limit = int(stored / arguments.times)
        command = [sys.executable, "-m", "cli", "generate", str(directory), "--json", "-p", "def add("]
        command += ["-n", str(arguments.new_tokens)]
        try:
            limited, free = generated(command, directory, limit), generated(command, directory, 4 * stored)
        except NoControlGroupError as error:
            print(error, file=sys.stderr)
            sys.exit(NOT_POSSIBLE_HERE)
    both = {"limited": limited, "free": free, "same": limited["text"] == free["text"]}
    save("larger_than_memory", {"checkpoint_bytes": stored, "limit_bytes": limit} | both)


if __name__ == "__main__":
    main()
