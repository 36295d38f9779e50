"""Kills `compress prune` at random moments and looks at what is left: nothing, or a whole artifact.

    python benchmarks/kill_prune.py [--kills 50] [--seed 0]

Each run is a process of its own, forked after the imports so that no kill is wasted on them, and ended by SIGKILL. Every
second kill falls anywhere in the run, the others between the first file of the result and the end. Runs take turns in
writing a new directory and in replacing an old artifact. After each kill:

- the directory is absent or the old artifact, byte for byte, or the new one, which passes `inspect --checksums`;
- `--resume` finishes, with the weights, plan and skip tables of a run that was never interrupted;
- nothing is left beside the result.

Prints a table; exit 1 if any of this does not hold. tests/test_interruption.py runs it with fewer kills.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import chdir, redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from artifacts_for_tests import CALIBRATION, listing, make_workplace

import cli
from engine.artifact import read_provenance
from engine.inspect import inspect

SEARCH = ["--sparsity", "0.34", "--method", "diep", "--epochs", "8", "--batch-size", "4", "--evaluation-samples", "4"]
COMMAND = ["prune", "model", *SEARCH, *CALIBRATION, "--samples", "48", "--sequence-length", "64", "-o", "out"]
OLD = ["prune", "model", "--sparsity", "0.5", "--method", "random", *CALIBRATION, "-o", "old"]
WORK, PARTIAL = ".out.work", ".out.partial"


def start(place: Path, arguments: list[str]) -> int:
    """Run a command in a forked process that is silent; its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.chdir(place)
        log = os.open(place.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        cli.main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


def finish(place: Path, arguments: list[str]) -> None:
    """Run a command to its end, which must be a good one."""
    _, status = os.waitpid(start(place, arguments), 0)
    if status:
        raise AssertionError(f"{' '.join(arguments)} failed:\n{(place.parent / 'log').read_text()}")


def measure(place: Path) -> tuple[float, float]:
    """Seconds of an uninterrupted run, and of its end from the first file of the result on."""
    started, written = time.monotonic(), None
    process = start(place, COMMAND)
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if written is None and (place / PARTIAL).exists():
            written = time.monotonic()
        time.sleep(0.0005)
    ended = time.monotonic()
    assert written is not None
    return ended - started, ended - written


def result(directory: Path) -> dict[str, object]:
    """What an artifact is: its plan, and every file but those that tell the time."""
    provenance = read_provenance(directory)
    assert provenance is not None
    told = ("compression.json", "README.md")
    return {"plan": provenance["plan"]} | {
        name: content for name, (_, content) in listing(directory).items() if name not in told
    }


def check_state(place: Path, old: dict[str, object] | None, new: dict[str, object]) -> str:
    """What a killed run left, in words. AssertionError where that is not one of the states that may be."""
    out = place / "out"
    beside = [name for name in (WORK, PARTIAL) if (place / name).exists()]
    if (place / WORK / "diep.safetensors").exists():
        beside.append("search state")
    if not out.exists():
        assert old is None, "the old artifact is gone"
        return " + ".join(["absent", *beside])
    inspect(str(out), checksums=True, progress=lambda items, _: items)
    found = result(out)
    assert found in (old, new), "the artifact is neither the old nor the new one"
    return " + ".join(["old" if found == old else "new, whole", *beside])


def kill_once(place: Path, chosen: random.Random, times: tuple[float, float], in_writing: bool) -> tuple[float, bool]:
    """Start the run and kill it; seconds after its start, and whether it was still running."""
    whole, end = times
    started = time.monotonic()
    replaced = [] if not (place / "out").exists() else ["--overwrite"]
    process = start(place, [*COMMAND, *replaced])
    if in_writing:
        while not (place / PARTIAL).exists() and time.monotonic() - started < 10 * whole:
            time.sleep(0.0005)
        time.sleep(chosen.uniform(0, 1.05 * end))
    else:
        time.sleep(chosen.uniform(0, whole))
    os.kill(process, signal.SIGKILL)
    moment = time.monotonic() - started
    _, status = os.waitpid(process, 0)
    return moment, os.WIFSIGNALED(status)


def kill_many(kills: int, seed: int, folder: Path) -> list[tuple[float, bool, str]]:
    """Seconds, whether that was before the end, and the state found, for each kill."""
    place = folder / "place"
    place.mkdir()
    make_workplace(place)
    with chdir(place), redirect_stdout(io.StringIO()):
        cli.main(OLD, standalone_mode=False)  # in this process, so that the forked ones find everything imported
    measure(place)
    shutil.rmtree(place / "out")
    times = measure(place)
    old, new = result(place / "old"), result(place / "out")
    assert old != new
    originals = set(listing(place)) - {name for name in listing(place) if name.split("/")[0] == "out"}
    print(f"uninterrupted: {times[0]:.2f} s, the last {times[1]:.2f} s of it writing the result", flush=True)
    found = []
    for number in range(kills):
        replaces = number % 4 >= 2
        shutil.rmtree(place / "out")
        if replaces:
            shutil.copytree(place / "old", place / "out")
        moment, running = kill_once(place, random.Random(seed * 1_000 + number), times, in_writing=number % 2 == 1)
        state = check_state(place, old if replaces else None, new)
        print(f"{number + 1:3}  {moment:5.2f} s  {'' if running else 'ended before; '}{state}", flush=True)
        found.append((moment, running, state))
        finish(place, [*COMMAND, "--resume", *(["--overwrite"] if replaces else [])])
        assert result(place / "out") == new, "the resumed run gives another result"
        inspect(str(place / "out"), checksums=True, progress=lambda items, _: items)
        beside = {name for name in listing(place) if name.split("/")[0] != "out"}
        assert beside == originals, f"left behind: {sorted(beside - originals)}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process would wait for threads of a pool that it did not inherit
    with tempfile.TemporaryDirectory() as folder:
        found = kill_many(options.kills, options.seed, Path(folder))
    print(f"\n{len(found)} kills, {sum(running for _, running, _ in found)} of them before the end; states found:")
    for state, count in Counter(state for _, _, state in found).most_common():
        print(f"{count:4}  {state}")


if __name__ == "__main__":
    main()
