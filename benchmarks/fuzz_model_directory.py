"""Mutates model directories and the files beside them, and checks the outcome of every entry.

    python benchmarks/fuzz_model_directory.py [--mutations 10000] [--seed 0] [--jobs 2]
        python benchmarks/fuzz_model_directory.py --only 1234        # repeats one mutation, with all output

Each mutation changes one file of a tiny artifact, of an exported one, or of a run's other inputs: bytes (flip, cut, insert,
splice, repeat) or structure (an absurd value, a key removed, renamed or given twice, two values swapped, steps of a
tokenizer or pieces of a template inserted). Half of the changed artifacts are signed again: their compression.json lists the
present files, as an attacker can write it. Then one or two entries (tests/support/entries_for_tests.py) are opened, each in
a forked process with limits on memory and time. There must be no traceback, no signal, no hang, no file written outside the
output, and under --checksums, unless the artifact was signed again, no text but the original's. The mutations are in
mutations.py and tokenizer_mutations.py.

Kinds take turns. An interrupted run resumes: benchmarks/results/fuzz_model_directory.jsonl has a line for each mutation. The
script prints a table, and exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine" / "server"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from entries_for_tests import ENTRIES, Outcome, make_place, run_entry
from mutations import Change, change_bytes, change_digested, change_graph, change_header, change_json
from results import RESULTS, markdown, remember, remembered, save
from test_attacks import sign
from tokenizer_mutations import TEMPLATE, change_template, change_tokenizer, change_tokenizer_config

NAME = "fuzz_model_directory"
STATE = RESULTS / f"{NAME}.jsonl"
CPU_SECONDS, SECONDS = 20, 90
OUTCOMES = ("refused", "loaded", "loaded differently", "traceback", "signal", "hang", "written outside", "mixed up")
FAILURES = OUTCOMES[3:]
"""Outcomes that must not occur. The last one is another text under --checksums without a new signature."""


@dataclass(frozen=True)
class Kind:
    """One kind of mutation: the files of a place that it changes, how, and the entries that read them."""

    files: tuple[str, ...]
    entries: tuple[str, ...]
    """Entries of which one is opened for each mutation."""
    structure: Change | None = None
    always: tuple[str, ...] = ("generate --checksums",)
    """Entries that are opened for every mutation."""
    of: str = "artifact"


READERS = ("generate", "inspect", "evaluate", "prune", "calibrate")
KINDS: dict[str, Kind] = {
    "safetensors": Kind(
        ("model.safetensors",), (*READERS, "bench --backend transformers", "export", "quantize"), change_header
    ),
    "ONNX export": Kind(
        ("model.onnx", "model.onnx.data", "config.json"), ("generate", "inspect", "serve"), change_graph, of="export"
    ),
    "tokenizer": Kind(("tokenizer.json",), ("generate", "serve", "evaluate", "prune"), change_tokenizer),
    "template": Kind(("chat_template.jinja", "tokenizer_config.json"), ("chat",), change_template, always=()),
    "config": Kind(("config.json",), (*READERS, "serve", "densify", "merge", "quantize", "export"), change_json),
    "transformers": Kind(("config.json", "generation_config.json"), ("bench --backend transformers",), change_json),
    "generation config": Kind(("generation_config.json",), ("generate", "serve", "prune"), change_json),
    "index": Kind(("model.safetensors.index.json",), READERS, change_json),
    "compression.json": Kind(("compression.json",), (*READERS, "inspect --checksums", "merge"), change_json),
    "skip tables": Kind(("skip_tables.safetensors",), ("generate --skip-threshold", "inspect"), change_header),
    "statistics": Kind(("../statistics",), ("prune --statistics",), change_digested, always=()),
    "plan": Kind(("../plan.json",), ("prune --plan",), change_json, always=()),
    "work directory": Kind(("../work/*",), ("prune --resume",), None, always=()),
}
BY_FORMAT: dict[str, Change] = {
    ".json": change_json,
    ".safetensors": change_digested,
    ".onnx": change_graph,
    ".data": change_bytes,
}
"""Changes for files whose kind's own change is for another format."""


@dataclass
class Fuzz:
    """A place that is mutated, and the results of its entries without a mutation."""

    good: Path
    place: Path
    seed: int

    def try_one(self, number: int, show: bool = False) -> dict[str, Any]:
        """Try one mutation, and return its description and its outcome at each entry."""
        kind_name = list(KINDS)[number % len(KINDS)]
        kind, chosen = KINDS[kind_name], random.Random(self.seed * 10**9 + number)
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.good, self.place)
        directory = self.place / kind.of
        how = self._mutate(directory, kind, chosen)
        signed = how["file"] != "compression.json" and not kind.files[0].startswith("../") and chosen.random() < 0.5
        if signed:
            sign(directory)
        found: dict[str, str] = {}
        seconds = 0.0
        for entry in (*kind.always, chosen.choice(kind.entries)):
            outcome = run_entry(entry, ENTRIES[entry], self.place, directory, cpu_seconds=CPU_SECONDS, seconds=SECONDS)
            seconds += outcome.seconds
            found[entry] = self._verdict(outcome, kind, signed)
            if show or found[entry] in FAILURES:
                print(
                    f"{number}: {kind_name}, {how}, {'signed' if signed else 'as it is'}: {found[entry]}: {outcome}",
                    flush=True,
                )
        return {"number": number, "kind": kind_name, **how, "signed": signed, "entries": found, "seconds": round(seconds, 3)}

    def _mutate(self, directory: Path, kind: Kind, chosen: random.Random) -> dict[str, str]:
        pattern = chosen.choice(kind.files)
        path = chosen.choice(sorted(directory.glob(pattern))) if "*" in pattern else directory / pattern
        if path.name == "chat_template.jinja":
            path.write_text(TEMPLATE)
        if path.name == "tokenizer_config.json":
            change: Change | None = change_tokenizer_config
        else:
            change = BY_FORMAT.get(path.suffix, kind.structure) if kind.structure in (None, change_graph) else kind.structure
        structural = change is not None and chosen.random() < 0.6
        data = path.read_bytes()
        changed = change(data, chosen) if change is not None and structural else change_bytes(data, chosen)
        path.write_bytes(changed)
        return {"file": pattern if "*" not in pattern else path.name, "how": "structure" if structural else "bytes"}

    def _verdict(self, outcome: Outcome, kind: Kind, signed: bool) -> str:
        if outcome.kind not in ("refused", "done"):
            named = {"outside": "written outside", "traceback": "traceback", "hang": "hang"}
            return named.get(outcome.kind, "signal")
        if outcome.kind == "refused":
            return "refused"
        if outcome.result == self.result(outcome.entry, kind.of):
            return "loaded"
        return "mixed up" if outcome.entry.endswith("--checksums") and not signed else "loaded differently"

    def result(self, entry: str, of: str) -> Any:
        """Return the result of an entry without a mutation."""
        if (entry, of) not in _RESULTS:
            outcome = run_entry(entry, ENTRIES[entry], self.good, self.good / of)
            assert outcome.kind == "done", outcome
            _RESULTS[entry, of] = outcome.result
        return _RESULTS[entry, of]


_RESULTS: dict[tuple[str, str], Any] = {}


def run_many(good: Path, folder: Path, seed: int, numbers: list[int], jobs: int) -> None:
    """Try all numbers in so many processes, each with a place of its own."""
    workers = []
    for worker in range(jobs):
        process = os.fork()
        if process:
            workers.append(process)
            continue
        code = 1
        try:
            fuzz = Fuzz(good, folder / f"place-{worker}", seed)
            for number in numbers[worker::jobs]:
                remember(STATE, {"seed": seed} | fuzz.try_one(number))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    for process in workers:
        _, status = os.waitpid(process, 0)
        assert status == 0, "a worker failed"


def counted(lines: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return counts of the entries' outcomes by kind."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for line in lines:
        counts[line["kind"]].update(line["entries"].values())
        counts[line["kind"]]["mutations"] += 1
    return {kind: dict(own) for kind, own in counts.items()}


def table(figures: dict[str, Any]) -> str:
    """Return a row for each kind, and one for all."""
    counts = {kind: Counter(own) for kind, own in figures["outcomes"].items()}
    counts["all"] = sum(counts.values(), Counter())
    columns = ("mutations", *OUTCOMES)
    return markdown(("kind", *columns), [[kind, *(f"{own[name]:,}" for name in columns)] for kind, own in counts.items()])


TABLES = {NAME: table}


def main() -> int:
    """Parse the arguments, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS), help="Of the mutations only those of these kinds.")
    parser.add_argument("--only", type=int, metavar="NUMBER")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = folder / "good"
        make_place(good)
        fuzz = Fuzz(good, folder / "place", options.seed)
        if options.only is not None:
            return int(bool(set(fuzz.try_one(options.only, show=True)["entries"].values()) & set(FAILURES)))
        for kind in KINDS.values():
            for entry in (*kind.always, *kind.entries):
                fuzz.result(entry, kind.of)  # computed before the fork, so that all processes share it
        done = {line["number"] for line in remembered(STATE) if line["seed"] == options.seed}
        wanted = [list(KINDS).index(kind) for kind in options.kinds.split(",")]
        numbers = [n for n in range(options.mutations) if n not in done and n % len(KINDS) in wanted]
        started, before = time.monotonic(), os.times()
        run_many(good, folder, options.seed, numbers, options.jobs)
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"{len(numbers)} mutations in {time.monotonic() - started:.0f} s, {spent:.0f} s of CPU", flush=True)
    lines = [line for line in remembered(STATE) if line["seed"] == options.seed and line["number"] < options.mutations]
    counts = counted(lines)
    save(NAME, {"mutations": len(lines), "seed": options.seed, "outcomes": counts})
    return int(any(own.get(name) for own in counts.values() for name in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
