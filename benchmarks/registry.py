"""Every benchmark: its script, the results that it writes, and the code that they measure. `make bench` runs all of them.

    python benchmarks/registry.py [--all] [--trial] [NAME …]

Runs each benchmark in a process of its own, those without names whose results are older than their code (`--all`: every
one), and writes the pages anew. `--trial` runs everything at a size of seconds and writes nothing below benchmarks/results.
What a run lacks (a peer, a right of the system) is said, and the others go on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENGINE = ("engine/kernels", "engine/decoder", "engine/generation", "engine/batching")
PASSES = ("engine/decoder", "engine/passes", "calibrate", "compress")


@dataclass(frozen=True)
class Benchmark:
    """One script of this directory."""

    script: str
    results: tuple[str, ...]
    """The names of the files that it writes below benchmarks/results."""
    code: tuple[str, ...]
    """Paths of the code that the figures are of; a result older than their last change is marked."""
    arguments: tuple[str, ...] = ()
    """Its arguments in `make bench`."""
    trial: tuple[str, ...] = ()
    """Its arguments for a run of seconds."""
    needs: str = ""
    """What must be installed or allowed beside the development environment."""


BENCHMARKS = (
    Benchmark("engine_speed", ("engine_speed",), ENGINE, trial=("--repetitions", "1", "--layers", "1")),
    Benchmark("decode_batches", ("decode_batches",), ENGINE, trial=("--rounds", "1")),
    Benchmark("demo", ("demo",), ("cli.py", "compress", "calibrate", "engine")),
)


def benchmark_of(result: str) -> Benchmark:
    """Return the benchmark that writes a result. Raises KeyError where none does."""
    for benchmark in BENCHMARKS:
        if result in benchmark.results:
            return benchmark
    raise KeyError(f"no row of benchmarks/registry.py writes {result}.json")


def is_current(benchmark: Benchmark) -> bool:
    """Whether every result of a benchmark is stored and as new as the code that it measures."""
    from results import is_older_than_its_code, results

    stored = results()
    return all(name in stored and not is_older_than_its_code(stored[name], name) for name in benchmark.results)


def run(benchmarks: Sequence[Benchmark], environment: dict[str, str], is_trial: bool) -> list[str]:
    """Run each and return the scripts that failed."""
    failed = []
    for number, benchmark in enumerate(benchmarks, 1):
        arguments = benchmark.trial if is_trial else benchmark.arguments
        command = [sys.executable, str(HERE / f"{benchmark.script}.py"), *arguments]
        print(f"[{number}/{len(benchmarks)}] {benchmark.script}", file=sys.stderr, flush=True)
        started = time.monotonic()
        done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.DEVNULL)
        print(f"    {time.monotonic() - started:.0f} s, exit {done.returncode}", file=sys.stderr, flush=True)
        if done.returncode:
            failed.append(benchmark.script + (f" (needs {benchmark.needs})" if benchmark.needs else ""))
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts; by default those whose results are not current")
    parser.add_argument("--all", action="store_true", help="also those whose results are as new as their code")
    parser.add_argument("--trial", action="store_true", help="run everything at a size of seconds and keep no result")
    options = parser.parse_args()
    if unknown := set(options.names) - {each.script for each in BENCHMARKS}:
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}")
    wanted = [each for each in BENCHMARKS if each.script in options.names or not options.names]
    if options.trial:
        with tempfile.TemporaryDirectory() as scratch:
            failed = run(wanted, {"COMPRESS_BENCHMARK_RESULTS": scratch}, is_trial=True)
    else:
        failed = run([each for each in wanted if options.all or options.names or not is_current(each)], {}, is_trial=False)
        subprocess.run([sys.executable, str(HERE / "results.py")], check=True)
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
