"""Every way in which this program reads a model directory. Each is run in a forked process that is watched from outside.

A place has `artifact` (a pruned model whose layers differ, with skip tables), `export` (the artifact as an ONNX graph),
`model.gguf` (the model before it was pruned),
`text.txt`, `plan.json`, `statistics`, `work` (files of an interrupted run) and `run`, an empty directory to run entries in.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from artifacts_for_tests import CALIBRATION, make_workplace

import cli

TINY = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16}
PLAN = {"schema_version": 1, "kind": "moe", "layers": {"0": [0, 2, 4], "1": [1, 5]}}
AGAIN = {"schema_version": 1, "kind": "moe", "layers": {"0": [0, 2], "1": [0, 1]}}
"""A plan for the artifact."""
TEXT = ["--data", "../text.txt", *CALIBRATION[2:]]
OUT = ["-o", "out"]
FEW = ["--evaluation-samples", "2"]
UNTIMED = ["-p", "4", "-n", "2", "-r", "1"]
PRUNE = ["prune", "{model}", "--min-experts", "2", *FEW, *TEXT, *OUT]
SEARCH = [*PRUNE, "--experts", "2", "--method", "diep", "--epochs", "2", "--batch-size", "2"]
GENERATE = ["generate", "{model}", "-p", "the quick", "-n", "8", "--json"]

IMPORTED = (
    *(
        f"compress.{name}"
        for name in ("compare", "densify", "evaluate", "export.decoder", "prune", "quantize", "statistics_file")
    ),
    *(f"engine.{name}" for name in ("bench.side_by_side", "bench.backends", "inspect", "server.serve")),
    *(f"transformers.models.{name}" for name in ("mixtral.modeling_mixtral", "mistral.modeling_mistral")),
    *("transformers.generation.utils", "tokenizers", "onnx", "onnxruntime", "tqdm"),
)
MEMORY_BYTES = 3 << 30
"""Limit of an entry's address space, beyond the parent's."""
CPU_SECONDS, SECONDS = 30, 120
"""Limits of an entry's CPU time and wall time. An entry takes well under a second, so a busy machine does not look like a
hang."""
FILE_BYTES = 200 << 20


class _Worker:
    """A worker of a benchmark that runs in this process, because a process of its own would import everything again."""

    def __init__(self, spec: Any, module: str) -> None:
        self.spec, self._module = spec, importlib.import_module(module)

    def __enter__(self) -> _Worker:
        with patch.object(self._module, "serve_requests", lambda start: start()):
            self.about, self.ask = self._module.main([json.dumps(asdict(self.spec))])
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _command(*arguments: str) -> Callable[[Path], None]:
    """Return an entry that runs the command line with the model's path in the place of {model}."""

    def enter(model: Path) -> None:
        with patch("engine.bench.side_by_side.Worker", _Worker):
            cli.main([argument.format(model=model) for argument in arguments])

    return enter


def _serve(model: Path) -> None:
    """Do the work of `compress serve` before it takes requests."""
    from engine.errors import CompressError
    from engine.server.options import ServeOptions
    from engine.server.serve import load

    try:
        service = load(ServeOptions(models=(str(model),), threads=1))
        service.close()
    except CompressError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick <a>"}]


def _chat(model: Path) -> None:
    """Make the token ids of a conversation, as the process that reads /v1/chat/completions does."""
    from engine.errors import CompressError
    from engine.generation.generate import Engine
    from engine.server.errors import ApiError
    from engine.server.reading.body_reader import BodyReader
    from engine.server.requests import reading_settings

    try:
        engine = Engine.open(model, threads=1)
        most = {"max_model_length": engine.checkpoint.config.max_positions, "max_queue": 16, "skip_threshold": 0.0}
        reader = BodyReader(reading_settings(engine, model_name="tiny", **most))
        read = reader.read("/v1/chat/completions", json.dumps({"messages": MESSAGES}).encode())
        print(json.dumps({"tokens": list(read.prompts[0])}))
    except (CompressError, ApiError) as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)


ENTRIES: dict[str, Callable[[Path], None]] = {
    "inspect": _command("inspect", "{model}", "--json"),
    "inspect --checksums": _command("inspect", "{model}", "--checksums", "--json"),
    "generate": _command(*GENERATE),
    "generate --checksums": _command(*GENERATE, "--checksums"),
    "generate --skip-threshold": _command(*GENERATE, "--skip-threshold", "1"),
    "evaluate": _command("evaluate", "{model}", *TEXT, "--json"),
    "evaluate --tasks": _command("evaluate", "{model}", "--tasks", "arc_easy"),
    "bench": _command("bench", "{model}", *UNTIMED, "--json"),
    "bench --backend transformers": _command("bench", "{model}", *UNTIMED, "--backend", "transformers", "--json"),
    "calibrate": _command("calibrate", "{model}", *TEXT, *OUT),
    "prune": _command(*PRUNE, "--experts", "2", "--method", "frequency"),
    "prune --statistics": _command(*PRUNE, "--experts", "2", "--method", "frequency", "--statistics", "../statistics"),
    "prune --plan": _command(*PRUNE, "--plan", "../plan.json"),
    "prune --resume": _command(*SEARCH, "--resume"),
    "merge": _command("merge", "{model}", "--experts", "2", *FEW, *TEXT, *OUT),
    "densify": _command("densify", "{model}", *FEW, *TEXT, *OUT),
    "quantize": _command("quantize", "{model}", "--bits", "8", "--group-size", "-1", "--evaluation-samples", "0", *OUT),
    "export": _command("export", "{model}", *OUT),
    "compare": _command("compare", "{model}", "--no-speed", *TEXT, "--json"),
    "serve": _serve,
    "chat": _chat,
}
OF_EXPORTS = (
    "inspect",
    "inspect --checksums",
    "generate",
    "generate --checksums",
    "evaluate",
    "bench",
    "compare",
    "serve",
    "chat",
)
"""Entries that take an exported model."""
OF_GGUF = (
    *("inspect", "generate", "evaluate", "bench", "calibrate", "prune", "merge", "densify", "quantize", "export"),
    *("compare", "serve", "chat"),
)
"""Entries that take a GGUF file."""
NEEDS_A_NETWORK = ("evaluate --tasks",)
"""Entries that use the network unless they refuse. They run only for attacks that they must refuse."""
SAID = {
    "generate": ("text",),
    "evaluate": ("value",),
    "chat": ("tokens",),
    "inspect": ("experts_per_layer", "parameters", "bytes"),
}
"""Keys of a command's JSON that are its result. The result of other commands is the tensors in the files that they write."""


@dataclass
class Outcome:
    """The outcome of one entry."""

    entry: str
    seconds: float
    code: int | None
    """Exit status, or None if a signal ended the process."""
    ended_by: str
    """Name of that signal, or "hang"."""
    stdout: str
    stderr: str
    result: Any = None
    """Result of a run that was completed."""
    written: list[str] = field(default_factory=list)
    """Changes outside the output, and every file named `pwned`."""

    @property
    def kind(self) -> str:
        """One of refused, done, traceback, hang, outside, or the signal's name."""
        if self.written:
            return "outside"
        if self.ended_by:
            return self.ended_by
        if self.code == 0:
            return "done"
        one_line = self.stderr.startswith("Error: ") and self.stderr.count("\n") == 1 and self.stderr.endswith("\n")
        return "refused" if self.code == 1 and one_line else "traceback"

    def __str__(self) -> str:
        said = self.stderr if self.kind != "done" else str(self.result)
        return f"{self.entry}: {self.kind} ({self.seconds:.2f} s) {self.written or ''} {said[-3000:]}"


def make_place(place: Path) -> None:
    """Make a whole place, with all files that entries read."""
    import_everything()
    make_workplace(place, **TINY)
    (place / "run").mkdir()
    (place / "cut.json").write_text(json.dumps(PLAN))
    (place / "plan.json").write_text(json.dumps(AGAIN))
    for enter in (
        _command("prune", "../model", "--plan", "../cut.json", *TEXT, "--evaluation-samples", "0", "-o", "../artifact"),
        _command("export", "{model}", "-o", "../export"),
        _command("calibrate", "{model}", *TEXT, "-o", "../statistics"),
        _command("export", "../model", "--format", "gguf", "--type", "f32", "-o", "../model.gguf"),
    ):
        _must_end_well(enter, place, place / "artifact")
    _interrupt(place)
    shutil.rmtree(place / "model")
    (place / "cut.json").unlink()


def _must_end_well(enter: Callable[[Path], None], place: Path, model: Path) -> None:
    outcome = run_entry("", enter, place, model)
    assert outcome.code == 0, outcome


def _interrupt(place: Path) -> None:
    """Make `work`: the files of a search that was interrupted when it began to write."""

    def enter(model: Path) -> None:
        with patch("compress.run.result.whole_or_nothing", side_effect=KeyboardInterrupt):
            cli.main([argument.format(model=model) for argument in SEARCH])

    outcome = run_entry("", enter, place, place / "artifact", keep=True)
    assert outcome.code == 130, outcome
    (place / "run" / ".out.work").rename(place / "work")


def import_everything() -> None:
    """Import the modules that entries import, so that forked processes share them. No other thread may be running."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in IMPORTED:
        importlib.import_module(name)
    from engine.kernels.kernel_choice import prepare_decoding

    prepare_decoding(torch.bfloat16, torch.device("cpu"))  # compiled code is loaded once, here


def run_entry(
    name: str,
    enter: Callable[[Path], None],
    place: Path,
    model: Path,
    *,
    keep: bool = False,
    seconds: float = SECONDS,
    cpu_seconds: int = CPU_SECONDS,
) -> Outcome:
    """Run an entry in a forked process and inspect the files that it left. keep: whether to leave its output in place."""
    run = place / "run"
    if name == "prune --resume":
        shutil.copytree(place / "work", run / ".out.work")
    before = _seen(place, run)
    streams = [os.memfd_create(stream) for stream in ("stdout", "stderr")]
    started = time.monotonic()
    process = os.fork()
    if not process:
        _be_the_child(enter, Path("..") / model.relative_to(place), run, streams, cpu_seconds)
    code, ended_by = _wait(process, started + seconds)
    elapsed = time.monotonic() - started
    said = [_read_back(stream) for stream in streams]
    outcome = Outcome(name, elapsed, code, ended_by, *said)
    after = _seen(place, run)
    outcome.written = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    outcome.written += [str(path) for path in place.rglob("*") if path.name.startswith("pwned")]
    outcome.written += [entry.name for entry in run.iterdir() if entry.name not in _allowed(name, outcome, keep)]
    if code == 0:
        outcome.result = _result(name, outcome.stdout, run / "out")
    if not keep:
        shutil.rmtree(run)
        run.mkdir()
    return outcome


def _allowed(name: str, outcome: Outcome, keep: bool) -> tuple[str, ...]:
    """Return the files that an entry may leave in the directory that it runs in."""
    if outcome.ended_by or outcome.code == 130:
        return ("out", ".out.work", ".out.partial")  # the process was killed, and is counted as killed
    if outcome.code == 0:
        return ("out",)
    return (".out.work",) if name == "prune --resume" else ()


def _be_the_child(enter: Callable[[Path], None], model: Path, run: Path, streams: Sequence[int], cpu_seconds: int) -> None:
    code = 1
    try:
        os.setsid()
        os.chdir(run)
        for target, stream in zip((1, 2), streams, strict=True):
            os.dup2(stream, target)
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(target, "w", closefd=False)) for target in (1, 2))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for limit, value in (
            (resource.RLIMIT_AS, size + MEMORY_BYTES),
            (resource.RLIMIT_CPU, cpu_seconds),
            (resource.RLIMIT_FSIZE, FILE_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        sys.modules["matplotlib"] = None  # type: ignore[assignment]  # drawing would take most of the time
        enter(model)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(process: int, deadline: float) -> tuple[int | None, str]:
    """Return the exit status, or how the process was ended. All processes that it started are ended too."""
    late, pause = False, 0.001
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline and not late:
            late = True
            os.killpg(process, signal.SIGKILL)
        time.sleep(pause)
        pause = min(0.01, 1.3 * pause)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status), ""
    number = os.WTERMSIG(status)
    hang = late or number in (signal.SIGXCPU, signal.SIGKILL)  # the limit on CPU time sends SIGKILL
    return None, "hang" if hang else signal.Signals(number).name


def _read_back(stream: int) -> str:
    with os.fdopen(stream, "rb") as file:
        file.seek(0)
        return file.read(1 << 20).decode(errors="replace")


def _seen(place: Path, run: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return all entries of a place except those in `run`, without following links or opening files."""
    found = {}
    for folder, names, files in os.walk(place):
        if Path(folder) == run:
            names.clear()
            continue
        for name in (*names, *files):
            path = Path(folder, name)
            about = path.lstat()
            changed = 0 if path == run else about.st_mtime_ns
            found[path.relative_to(place).as_posix()] = (about.st_mode, about.st_ino, about.st_size, changed)
    return found


def _result(entry: str, stdout: str, out: Path) -> Any:
    """Return the result of an entry, without its measurements."""
    keys = SAID.get(entry.partition(" ")[0])
    if keys is not None:
        said = json.loads(stdout)
        return {key: said.get(key) for key in keys}
    if out.is_file():
        return hashlib.sha256(out.read_bytes()).hexdigest()
    tensors = [path for path in sorted(out.glob("*")) if path.suffix in (".safetensors", ".data")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tensors}
