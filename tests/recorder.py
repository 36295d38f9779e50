"""Records the results of the commands on the built-in model, and compares two recordings.

    python tests/recorder.py record FILE.json [--tree DIRECTORY]
    python tests/recorder.py compare OLD.json NEW.json [--leave-out KIND]

A change of structure must not change results. Record the tree before and after the change, on one machine, and compare.
Only the command line and the server are used, so the two trees may differ in all their modules. A recording takes about
five minutes of one core; recorded_runs.py lists what is run.

A recording is {"machine": …, "entries": {kind: {name: value}}}. Values are kept as they were observed; the comparison
leaves out the keys in IGNORED.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import recorded_runs

ROOT = Path(__file__).resolve().parent.parent

IGNORED = {
    "seconds": "time",
    "load_seconds": "time",
    "time_to_first_token_seconds": "time",
    "tokens_per_second": "time",
    "time_share": "time",
    "prompt_ms": "time",
    "prompt_per_token_ms": "time",
    "prompt_per_second": "time",
    "predicted_ms": "time",
    "predicted_per_token_ms": "time",
    "predicted_per_second": "time",
    "created": "time",
    "peak_memory_bytes": "memory of a process, which differs from run to run",
    "resident_memory_bytes": "memory of a process, which differs from run to run",
    "weights_resident_bytes": "memory of a process: pages of mapped files that happen to be resident",
    "other_memory_bytes": "memory of a process, which differs from run to run",
    "device_memory_bytes": "memory of this machine",
    "state": "modification times of the source's files",
    "teacher_state": "modification times of the teacher's files",
    "versions": "versions of packages: the recording has its own list, in which both must agree",
    "files": "checksums in compression.json: files are recorded themselves, and the model card in the list states the time",
}

PACKAGES = "torch transformers numpy scipy numba tokenizers safetensors onnx onnxruntime onnxruntime-genai"

RECORDED_FILES = (".safetensors", ".onnx", ".onnx.data", ".json")
"""Model cards and the modeling file are left out: the first state times, and the second is source code."""

FIGURE_FILE = "compression.json"
"""It states times, so its values are recorded instead of a checksum."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch._dynamo", "transformers", "scipy", "numba", "onnx", "onnxruntime"]
"""Commands are forked from a process that has imported these packages: their imports would take half of all the time."""


# Recording


@dataclass
class Recorder:
    """Runs commands of the tree and collects entries. `here` is an empty directory for what they write."""

    tree: Path
    here: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, kind: str, name: str, value: Any) -> None:
        self.entries.setdefault(kind, {})[name] = self._plain(value)

    def _plain(self, value: Any) -> Any:
        """The value without this run's directories and without random request ids."""
        text = json.dumps(value).replace(str(self.here), "HERE").replace(str(self.tree), "TREE")
        return json.loads(re.sub(r"cmpl-[0-9a-f]{32}", "cmpl-ID", text))

    def environment(self, kernels: str) -> dict[str, str]:
        """Return the environment of a command, without any of the caller's settings."""
        dropped = ("COMPRESS_", "PYTHON", "OMP_", "MKL_", "NUMBA_", "HF_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        return kept | ONE_THREAD | {"PYTHONPATH": str(self.tree), "HF_HUB_OFFLINE": "1", "COMPRESS_KERNELS": kernels}

    def arguments(self, command: str) -> list[str]:
        filled = [argument.replace("{here}", str(self.here)) for argument in shlex.split(command)]
        return [*filled, "--json", *([] if "plan-run" in filled else ["--threads", "1"])]

    def run(self, name: str, command: str, kernels: str = "compiled") -> dict[str, Any]:
        """Return the figures of a command, or none if it fails. Its exit status is recorded, and printed on stderr."""
        started = time.monotonic()
        output, errors = self.here / "stdout", self.here / "stderr"
        given = (self.tree, self.arguments(command), self.environment(kernels), output, errors)
        process = CONTEXT.Process(target=run_command, args=given)
        process.start()
        process.join()
        self.report(name, started, process.exitcode, errors)
        self.add("exit statuses", name, process.exitcode)
        return {} if process.exitcode else json.loads(output.read_text())

    def write(self, name: str, command: str) -> None:
        """Record a command that writes a result: its figures, and the files that it wrote."""
        output = self.here / (f"{name}.safetensors" if name == "calibrate" else name)
        self.add("figures", name, self.run(name, f"{command} --output {output}"))
        for path in sorted(output.rglob("*")) if output.is_dir() else [output]:
            label = f"{name}/{path.relative_to(output)}" if path != output else name
            if path.name == FIGURE_FILE:
                self.add("figures", label, json.loads(path.read_text()))
            elif path.is_file() and path.name.endswith(RECORDED_FILES):
                with path.open("rb") as file:
                    self.add("files", label, hashlib.file_digest(file, "sha256").hexdigest())

    def generate(self, name: str, command: str, kernels: str) -> None:
        figures = self.run(name, command, kernels)
        self.add("text", name, figures.pop("text", None))
        self.add("figures", name, figures)

    @contextmanager
    def served(self, name: str, command: str, kernels: str) -> Iterator[str | None]:
        """Yield the address of a server, which is ended by a signal afterwards; None if it does not start."""
        started = time.monotonic()
        with (self.here / "server.log").open("w") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "cli", *self.arguments(command), "--port", "0"],
                cwd=self.tree,
                env=self.environment(kernels),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            try:
                assert server.stdout is not None
                ready = json.loads(server.stdout.readline() or "null")
                self.add("answers", f"{name}/model", ready and ready["model"])
                yield ready and urlsplit(ready["url"]).netloc
                if ready:
                    server.terminate()
                self.add("exit statuses", name, server.wait(60))
            finally:
                server.kill()
                server.communicate()
        self.report(name, started, server.returncode, self.here / "server.log")

    def report(self, name: str, started: float, status: int | None, errors: Path) -> None:
        """Print a line on stderr, and the reason if a command failed."""
        said = f"\nexit status {status}\n{errors.read_text()}" if status else ""
        print(f"{name}: {time.monotonic() - started:.1f} s{said}", file=sys.stderr, flush=True)

    def ask(self, kind: str, name: str, address: str, requests: Mapping[str, tuple[str, Any]], at_once: int = 1) -> None:
        with ThreadPoolExecutor(at_once) as pool:
            answers = pool.map(lambda request: answer(address, *request), requests.values())
            for label, given in zip(requests, answers, strict=True):
                if kind == "refusals":  # the wording is a kind of its own, so that a comparison can leave it out
                    self.add("error messages", f"{name}/{label}", given["body"]["error"].pop("message"))
                self.add(kind, f"{name}/{label}", given)


def run_command(tree: Path, arguments: list[str], environment: dict[str, str], output: Path, errors: Path) -> None:
    """`python -m cli` of the tree, in a process that has imported other packages already, without matplotlib."""
    for stream, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix)))]
    sys.argv = ["cli.py", *arguments]
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # drawing takes a third of the time
    runpy.run_module("cli", run_name="__main__", alter_sys=True)


def answer(address: str, path: str, body: Any) -> dict[str, Any]:
    """Return status and body of an answer; a stream's events are joined. A body of None makes a GET request."""
    connection = HTTPConnection(address, timeout=120)
    try:
        content = None if body is None else body if isinstance(body, str) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        if "event-stream" not in response.getheader("content-type", ""):
            return {"status": response.status, "body": json.loads(text)}
        return {"status": response.status, "stream": gathered(text)}
    finally:
        connection.close()


def gathered(stream: str) -> dict[str, Any]:
    """Return the text, log-probabilities and last state of a stream. Its division into events may depend on time."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    events = [json.loads(line) for line in lines[:-1]]
    choices = [choice for event in events for choice in event["choices"]]
    own = [choice.get("delta", choice) for choice in choices]
    return {
        "last_line": lines[-1],
        "text": "".join(each.get("text") or each.get("content") or "" for each in own),
        "roles": [each["role"] for each in own if "role" in each],
        "logprobs": merged([choice["logprobs"] for choice in choices if choice["logprobs"]]),
        "finish_reasons": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [event["usage"] for event in events if event.get("usage")],
        "timings": [event["timings"] for event in events if event.get("timings")],
        "keys": sorted({key for event in events for key in event}),
        "objects": sorted({event["object"] for event in events}),
    }


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the lists of equal names, concatenated."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [entry for part in parts for entry in part.get(name) or ()] for name in names}


def machine() -> dict[str, Any]:
    """Return the processor and the packages, which determine the last bits of results. compare() refuses two machines."""
    facts = dict(line.split("\t", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if "\t" in line)
    named = {name.strip(): value.strip(": \t") for name, value in facts.items()}
    processor = named.get("model name") or platform.machine()
    instructions = hashlib.sha256(named.get("flags", named.get("Features", "")).encode()).hexdigest()
    versions = {"python": platform.python_version()} | {name: installed(name) for name in PACKAGES.split()}
    return {"processor": processor, "instructions": instructions, "versions": versions}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def record(tree: Path) -> dict[str, Any]:
    """Record everything in recorded_runs.py, in order. A command that fails is recorded as failed."""
    os.environ.update(ONE_THREAD)  # before the packages are imported
    CONTEXT.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as directory:
        recorder = Recorder(tree, Path(directory).resolve())
        lines = [json.dumps(row) + "\n" for row in recorded_runs.INSTRUCTIONS]
        (recorder.here / "prompts.jsonl").write_text("".join(lines))
        for name, command in recorded_runs.COMMANDS.items():
            recorder.write(name, command)
        for name, command in recorded_runs.READING_COMMANDS.items():
            recorder.add("figures", name, recorder.run(name, command))
        for name, (command, kernels) in recorded_runs.GENERATIONS.items():
            recorder.generate(name, command, kernels)
        for number, (name, (command, kernels)) in enumerate(recorded_runs.SERVERS.items()):
            with recorder.served(name, command, kernels) as address:
                if address is None:
                    continue
                recorder.ask("log-probabilities", name, address, recorded_runs.SCORED)
                if number == 0:
                    recorder.ask("answers", f"{name}/alone", address, recorded_runs.ALONE)
                    recorder.ask("answers", f"{name}/together", address, recorded_runs.TOGETHER, at_once=8)
                    recorder.ask("refusals", name, address, recorded_runs.REFUSED)
        return {"machine": machine(), "entries": recorder.entries}


# Comparison


def flat(value: Any, name: str) -> dict[str, str]:
    """Return single values by their path, as JSON, without the keys in IGNORED. An empty list or object is a value."""
    if isinstance(value, dict) and value:
        parts = [flat(own, f"{name} {key}") for key, own in value.items() if key not in IGNORED]
    elif isinstance(value, list) and value:
        parts = [flat(own, f"{name} {number}") for number, own in enumerate(value)]
    else:
        return {name: json.dumps(value)}
    return {key: own for part in parts for key, own in part.items()}


@dataclass(frozen=True)
class Compared:
    """Number of compared values of one kind, and a line for each difference."""

    count: int
    differences: tuple[str, ...]


def compare(old: Mapping[str, Any], new: Mapping[str, Any], leave_out: Sequence[str] = ()) -> dict[str, Compared]:
    """Compare every value of two recordings, by kind. Raises ValueError if they were made on different machines."""
    if old["machine"] != new["machine"]:
        raise ValueError(f"recordings of different machines cannot be compared: {old['machine']} and {new['machine']}")
    result = {}
    for kind in dict.fromkeys((*old["entries"], *new["entries"])):
        if kind not in leave_out:
            before, after = (flat(own[kind], kind) if kind in own else {} for own in (old["entries"], new["entries"]))
            paths = dict.fromkeys((*before, *after))
            lines = [difference(path, before.get(path), after.get(path)) for path in paths]
            result[kind] = Compared(len(paths), tuple(line for line in lines if line))
    return result


def difference(path: str, before: str | None, after: str | None) -> str:
    """Return a line that describes the difference of two values, or an empty line."""
    if before == after:
        return ""
    if before is None:
        return f"{path}: additional, {after}"
    if after is None:
        return f"{path}: missing, was {before}"
    return f"{path}: {before} became {after}"


def table(compared: Mapping[str, Compared]) -> str:
    rows = [f"| {kind} | {own.count:,} | {len(own.differences):,} |" for kind, own in compared.items()]
    total, differences = (
        sum(own.count for own in compared.values()),
        sum(len(own.differences) for own in compared.values()),
    )
    header = ["| kind | values compared | different |", "| --- | ---: | ---: |"]
    return "\n".join([*header, *rows, f"| all | {total:,} | {differences:,} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the commands of a tree and write what they gave")
    recording.add_argument("file", type=Path)
    recording.add_argument("--tree", type=Path, default=ROOT, help="directory with cli.py; default: this tree")
    comparison = commands.add_parser("compare", help="print differences; exit with 1 where there are some")
    comparison.add_argument("old", type=Path)
    comparison.add_argument("new", type=Path)
    comparison.add_argument("--leave-out", action="append", default=[], metavar="KIND", help="may be given several times")
    given = parser.parse_args()
    if given.command == "record":
        given.file.write_text(json.dumps(record(given.tree.resolve()), indent=1) + "\n")
        return
    try:
        compared = compare(*(json.loads(path.read_text()) for path in (given.old, given.new)), given.leave_out)
    except ValueError as error:
        sys.exit(str(error))
    print("\n".join([*(line for own in compared.values() for line in own.differences), table(compared)]))
    sys.exit(any(own.differences for own in compared.values()))


if __name__ == "__main__":
    main()
