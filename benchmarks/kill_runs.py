"""Kills runs at random moments, each with a second run on the same output at the same time, and checks the remaining files.

    python benchmarks/kill_runs.py [--kills 200] [--seed 0] [--commands prune,push] [--no-results]

The commands of COMMANDS take turns: prune, quantize, export, calibrate, and push to a stand-in of the hub. Each run is a
process of its own, forked after the imports so that no kill is wasted on them. SIGKILL ends the first run. Every second kill
falls anywhere in the run, the others after it has begun to write. The second run has other options, so that a mixture of the
two would be detected. It starts while the first runs or just after the kill, and is not killed. Runs alternate between
writing something new and replacing something old. After each kill:

- the result is absent, or the old one, or the result of exactly one of the two runs, byte for byte, with the
  provenance of that run;
- the second run has succeeded, or was refused in one line because of the first;
- a further run (with --resume, if the command has it) gives the result of an uninterrupted run;
- no other files are left beside the result.

Exits with 1 if any of this does not hold. tests/compress/run/test_interruption.py runs it with fewer kills.
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
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # before `tests`, which has folders of the same names

import torch
from artifacts_for_tests import CALIBRATION, listing, make_workplace
from hub_for_tests import Hub, served
from results import markdown, save

import cli
from compress.report import canvas
from engine.checkpoint.artifact import compare_checksums, read_provenance

RUNS = ("old", "first", "second")
REPOSITORY = "ada/out"
REFUSALS = ("is being written by another run", "exists already", "written there meanwhile")
SAID_IN = ("compression.json", "README.md")
"""Files that state times."""
TEXT = [*CALIBRATION, "--evaluation-samples", "2"]


@dataclass(frozen=True)
class Command:
    """One row of COMMANDS."""

    arguments: list[str]
    own: dict[str, list[str]]
    """The options in which the runs differ: those of the replaced result, of the first run and of the second."""
    written: str
    """The file or directory that is written first, or "" if there is none."""
    resumes: bool = True


COMMANDS = {
    "prune": Command(
        ["prune", "model", *TEXT, "--samples", "16", "--sequence-length", "32", "-o", "out"],
        {
            "old": ["--sparsity", "0.5", "--method", "random", "--seed", "3"],
            "first": ["--sparsity", "0.34", "--method", "diep", "--epochs", "4", "--batch-size", "4", "--seed", "1"],
            "second": ["--sparsity", "0.5", "--method", "frequency", "--seed", "2"],
        },
        ".out.partial",
    ),
    "quantize": Command(
        ["quantize", "model", *TEXT, "--group-size", "-1", "-o", "out"],
        {
            "old": ["--bits", "8", "--experts-only"],
            "first": ["--bits", "8", "--activation-aware"],
            "second": ["--bits", "4", "--activation-aware", "--seed", "2"],
        },
        ".out.partial",
    ),
    "export": Command(
        ["export", "model", "-o", "out"],
        {"old": ["--experts", "portable"], "first": [], "second": ["--precision", "float16"]},
        ".out.partial",
        resumes=False,
    ),
    "calibrate": Command(
        ["calibrate", "model", *CALIBRATION, "--samples", "32", "--sequence-length", "64", "-o", "out"],
        {"old": ["--seed", "3"], "first": ["--seed", "1"], "second": ["--seed", "2"]},
        ".out.work",
    ),
    "push": Command(
        ["push"],
        {name: [f"of-{name}", REPOSITORY] for name in RUNS},
        "",
        resumes=False,
    ),
}


def start(place: Path, arguments: list[str], log: str) -> int:
    """Start a command in a silent forked process, and return its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.chdir(place)
        descriptor = os.open(place.parent / log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        cli.main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


def finish(place: Path, arguments: list[str]) -> None:
    """Run a command to its end, which must be a success."""
    _, status = os.waitpid(start(place, arguments, "log"), 0)
    assert status == 0, f"{' '.join(arguments)} failed:\n{(place.parent / 'log').read_text()}"


class Bench:
    """One command in a place of its own: the results and durations of its undisturbed runs."""

    def __init__(self, name: str, place: Path, hub: Hub) -> None:
        self.name, self.command, self.place, self.hub = name, COMMANDS[name], place, hub
        self.expected: dict[str, Any] = {}
        for run in RUNS:
            self.clear()
            started = time.monotonic()
            finish(place, self.arguments(run))
            if run == "first":
                self.whole = time.monotonic() - started
            self.expected[run] = self.result()
            self._keep(run)
        assert all(self.expected[a] != self.expected[b] for a, b in (("old", "first"), ("old", "second"), RUNS[1:]))
        self.clear()
        self.originals = set(listing(place))

    def arguments(self, run: str, *more: str) -> list[str]:
        """Return the arguments of one of the runs."""
        return [*self.command.arguments, *self.command.own[run], *more]

    # The result: a directory, a file, or the content of the hub.

    def result(self) -> Any:
        """Return the present state, checked to be whole, without times; None if there is no result."""
        if self.name == "push":
            repository = self.hub.repositories.get(REPOSITORY)
            files = {} if repository is None else {k: v for k, v in repository.files.items() if k != ".gitattributes"}
            return files or None
        out = self.place / "out"
        if not out.exists():
            return None
        if out.is_file():
            return out.read_bytes()
        compare_checksums(out)
        provenance = read_provenance(out)
        assert provenance is not None
        files = {name: content for name, (_, content) in listing(out).items() if name not in SAID_IN}
        return files | {key: provenance.get(key) for key in ("options", "plan", "seed", "method")}

    def clear(self) -> None:
        """Remove the result."""
        self.hub.repositories.pop(REPOSITORY, None)
        self.hub.large.clear()
        out = self.place / "out"
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)

    def _keep(self, run: str) -> None:
        kept = self.place.parent / f"{self.name}-{run}"
        if self.name != "push":
            (shutil.copytree if (self.place / "out").is_dir() else shutil.copy)(self.place / "out", kept)

    def put_old(self) -> None:
        """Write an old result, which will be replaced."""
        if self.name == "push":
            self.hub.add(REPOSITORY, self.expected["old"])
            return
        kept = self.place.parent / f"{self.name}-old"
        (shutil.copytree if kept.is_dir() else shutil.copy)(kept, self.place / "out")

    # One kill

    def kill(self, chosen: random.Random, replaces: bool, in_writing: bool) -> dict[str, Any]:
        """Kill one run beside a second, then run a further one. Returns findings, raises AssertionError for violations."""
        self.clear()
        if replaces:
            self.put_old()
        more = ["--overwrite"] if replaces else []
        first, second, moment = self._two_runs(chosen, more, in_writing)
        log = (self.place.parent / "second").read_text()
        killed, refused = os.WIFSIGNALED(first), second != 0
        self.whole *= 1.03 if killed else 0.9  # other load on the machine makes runs longer or shorter
        assert not refused or (log.count("\n") == 1 and any(words in log for words in REFUSALS)), log
        found = self.result()
        state = next((run for run in RUNS if found == self.expected[run]), None) if found is not None else "absent"
        assert state is not None, "the result is of neither run"
        assert state != "absent" or not replaces, "what was there before is gone"
        assert state != "old" or replaces
        ended = first == 0 or second == 0
        assert not ended or state in ("first", "second"), f"a run ended well, and the result is {state}"
        beside = sorted({name.split("/")[0] for name in listing(self.place)} - self.originals - {"out"})
        again = [*(["--resume"] if self.command.resumes else []), *(["--overwrite"] if found is not None else [])]
        finish(self.place, self.arguments("first", *again))
        assert self.result() == self.expected["first"], "the run that follows gives another result"
        left = {name for name in listing(self.place) if name.split("/")[0] != "out"} - self.originals
        assert not left, f"left behind: {sorted(left)}"
        return {
            "command": self.name,
            "replaces": replaces,
            "seconds": round(moment, 3),
            "killed": killed,
            "state": state,
            "second": "refused" if refused else "finished",
            "beside": beside,
        }

    def _two_runs(self, chosen: random.Random, more: list[str], in_writing: bool) -> tuple[int, int, float]:
        """Run both, and kill the first. Returns their exit statuses, and the time of the kill."""
        started = time.monotonic()
        first = start(self.place, self.arguments("first", *more), "first")
        delay = chosen.uniform(0, self.whole)
        if in_writing and self.command.written:
            path = self.place / self.command.written
            begins = self._waited(lambda: path.exists() or _ended(first))
            delay = begins - started + chosen.uniform(0, max(0.05, 1.05 * (self.whole - (begins - started))))
        # In about one of six cases, the second run begins just after the kill.
        at = max(time.monotonic() - started, chosen.uniform(0, 1.2 * delay))
        events = sorted([(delay, "kill"), (at, "start")])
        second = 0
        for moment, event in events:
            time.sleep(max(0.0, started + moment - time.monotonic()))
            if event == "kill":
                os.kill(first, signal.SIGKILL)
            else:
                second = start(self.place, self.arguments("second", *more), "second")
        statuses = [os.waitpid(process, 0)[1] for process in (first, second)]
        return statuses[0], statuses[1], delay

    def _waited(self, comes: Callable[[], bool]) -> float:
        limit = time.monotonic() + 10 * self.whole + 5
        while not comes() and time.monotonic() < limit:
            time.sleep(0.0005)
        return time.monotonic()


def _ended(process: int) -> bool:
    """Return whether a process has ended, without reaping it."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def use(url: str, folder: Path) -> None:
    """Use the stand-in for the hub, as an account with write access."""
    from huggingface_hub import constants

    os.environ["HF_TOKEN"] = "writer"
    constants.HF_HUB_OFFLINE = False
    constants.ENDPOINT = url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE = str(folder / "cache")
    constants.HF_HUB_DISABLE_XET = True


def prepared(folder: Path, names: list[str], hub: Hub) -> list[Bench]:
    """Return a place for each command. Commands run once in this process first, so that forked ones need no imports."""
    benches = []
    for name in names:
        place = folder / name / "place"
        place.mkdir(parents=True)
        make_workplace(place)
        with chdir(place), redirect_stdout(io.StringIO()):
            if name == "push":
                for run in RUNS:
                    made = [*COMMANDS["prune"].arguments[:-2], *COMMANDS["prune"].own[run], "-o", f"of-{run}"]
                    cli.main(made, standalone_mode=False)
            bench = COMMANDS[name]
            cli.main([*bench.arguments, *bench.own["first"]], standalone_mode=False)
        benches.append(Bench(name, place, hub))
        print(f"{name}: {benches[-1].whole:.2f} s uninterrupted", flush=True)
    return benches


def kill_many(kills: int, seed: int, names: list[str], folder: Path, hub: Hub) -> list[dict[str, Any]]:
    """Return the state that each kill left."""
    benches, found = prepared(folder, names, hub), []
    for number in range(kills):
        turn, bench = number // len(benches), benches[number % len(benches)]
        chosen = random.Random(seed * 1_000_003 + number)
        try:
            found.append(bench.kill(chosen, replaces=turn % 4 >= 2, in_writing=turn % 2 == 1))
        except AssertionError as error:
            raise AssertionError(f"kill {number + 1}, {bench.name}: {error}") from error
        last = found[-1]
        killed = f"{last['seconds']:5.2f} s{'' if last['killed'] else ', ended before'}"
        beside = f", beside it {' '.join(last['beside'])}" if last["beside"] else ""
        print(f"{number + 1:3}  {bench.name:9}  {killed}: {last['state']}; second run {last['second']}{beside}", flush=True)
    return found


def table(figures: dict[str, Any]) -> str:
    """Return one row for each command."""
    rows, found = [], figures["kills"]
    for name in dict.fromkeys(each["command"] for each in found):
        own = [each for each in found if each["command"] == name]
        states, seconds = Counter(each["state"] for each in own), Counter(each["second"] for each in own)
        left = [states["absent"] + states["old"], states["first"], states["second"]]
        ends = [seconds["refused"], seconds["finished"]]
        others = len(own) - sum(left) + len(own) - sum(ends)
        rows.append([name, *map(str, [len(own), sum(each["killed"] for each in own), *left, *ends, others])])
    head = ["command", "kills", "before the end", "old state left", "first result left", "second result left"]
    return markdown([*head, "second refused", "second finished", "anything else"], rows)


TABLES = {"kill_runs": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--no-results", action="store_true", help="Print the table and write no files.")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process would wait for threads of a pool that it did not inherit
    canvas.available = lambda: False  # drawing takes longer than everything else
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, served() as (hub, url):
        use(url, Path(folder))
        found = kill_many(options.kills, options.seed, options.commands.split(","), Path(folder), hub)
    print(f"\n{len(found)} kills, {sum(each['killed'] for each in found)} of them before the end")
    if options.no_results:
        print(table({"kills": found}))
    else:
        save("kill_runs", {"seconds": time.monotonic() - started, "kills": found})


if __name__ == "__main__":
    main()
