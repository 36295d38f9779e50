"""One run at a time for each output: refused runs, runs that take over from dead ones, and no files left behind."""

from __future__ import annotations

import errno
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from artifacts_for_tests import CALIBRATION, PRUNE, ROOT, listing, make_workplace
from click.testing import CliRunner
from safetensors.torch import load_file

import cli
from compress.push import upload
from compress.statistics_file import calibrate_to_file
from compress.sweep import sweep
from engine.checkpoint.artifact import compare_checksums, whole_or_nothing
from engine.errors import OutputError
from engine.files import output_lock
from engine.files.output_lock import STALE_SECONDS, claimed, lock_path

HOLDER = """
import sys
from pathlib import Path
from engine.files.output_lock import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
PAUSED = """
import sys, time
from pathlib import Path
import cli, compress.run.result
from calibrate.statistics import Statistics

def paused(own):
    def wait(*given):
        Path("paused").touch()
        while not Path("go").exists():
            time.sleep(0.01)
        return own(*given)
    return wait

if sys.argv[1] == "calibrate":
    Statistics.save = paused(Statistics.save)
else:
    compress.run.result.write_provenance = paused(compress.run.result.write_provenance)
cli.main(sys.argv[1:])
"""
REFUSED = "is being written by another run (process {process} on "


@contextmanager
def held(output: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that holds the lock of `output` until it is ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(output)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def leave_lock(output: Path, seconds_ago: float = 0, **changes: Any) -> Path:
    """Write the lock file of a run on another machine, last touched so many seconds ago."""
    path = lock_path(output)
    owner = {"host": "elsewhere", "machine": "another", "process": 7, "started": "2026-01-02T03:04:05+00:00"}
    path.write_text(json.dumps(owner | changes))
    touched = time.time() - seconds_ago
    os.utime(path, (touched, touched))
    return path


def in_thread(function: Callable[[], object]) -> BaseException | None:
    """Return the error that `function` raises in a thread of its own, if any."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def claim(output: Path) -> None:
    with claimed(output):
        assert lock_path(output).exists()


# The lock


def test_a_run_may_claim_again_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to("place")
    with claimed(tmp_path / "place" / "out"), claimed(tmp_path / "link" / "out"):
        with whole_or_nothing(tmp_path / "link" / "out", overwrite=False) as directory:
            (directory / "file").touch()
        assert lock_path(tmp_path / "link" / "out").exists()
        claim(tmp_path / "other")
    assert sorted(path.name for path in (tmp_path / "place").iterdir()) == ["out"]


def test_another_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with held(output) as process:
        words = f"{output}: {REFUSED.format(process=process.pid)}"
        with pytest.raises(OutputError) as refused:
            claim(output)
        assert str(refused.value).startswith(words) and "wait until it ends" in str(refused.value)
        partial = tmp_path / ".out.partial"
        partial.mkdir()
        with pytest.raises(OutputError), whole_or_nothing(output, overwrite=True):
            pass
        assert partial.exists(), "the partial result of the first run is untouched"
        partial.rmdir()
        process.communicate("")
    assert not any(tmp_path.iterdir())
    claim(output)


def test_another_thread_is_another_run(tmp_path: Path) -> None:
    with claimed(tmp_path / "out"):
        assert REFUSED.format(process=os.getpid()) in str(in_thread(lambda: claim(tmp_path / "out")))
        assert in_thread(lambda: claim(tmp_path / "other")) is None
    assert in_thread(lambda: claim(tmp_path / "out")) is None


def test_what_a_killed_run_leaves_is_taken_over(tmp_path: Path) -> None:
    with held(tmp_path / "out") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert lock_path(tmp_path / "out").exists()
    claim(tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_forked_process_holds_nothing(tmp_path: Path) -> None:
    """A forked process neither releases its parent's lock nor keeps it."""
    with claimed(tmp_path / "out"):
        process = os.fork()
        if not process:
            os._exit(0 if not output_lock._claims else 1)
        assert os.waitpid(process, 0)[1] == 0
        assert in_thread(lambda: claim(tmp_path / "out")) is not None


@pytest.mark.parametrize(
    "content", ["", "{", '{"host": 1}', '{"process": true, "host": "a", "machine": "b", "started": "c"}']
)
def test_a_file_that_names_no_owner_is_taken_over(tmp_path: Path, content: str) -> None:
    lock_path(tmp_path / "out").write_text(content)
    claim(tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_run_of_another_machine_is_known_by_its_touches(tmp_path: Path) -> None:
    path = leave_lock(tmp_path / "out", STALE_SECONDS / 2)
    before = listing(tmp_path)
    with pytest.raises(
        OutputError, match=rf"process 7 on 'elsewhere' since .*a crash, its lock expires within {STALE_SECONDS:.0f} sec"
    ):
        claim(tmp_path / "out")
    assert listing(tmp_path) == before
    leave_lock(tmp_path / "out", 2 * STALE_SECONDS)
    claim(tmp_path / "out")
    assert not path.exists()


def test_the_owner_touches_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lock, "TOUCH_SECONDS", 0.01)
    with claimed(tmp_path / "out"):
        path = lock_path(tmp_path / "out")
        os.utime(path, (0, 0))
        limit = time.monotonic() + 60
        while path.stat().st_mtime == 0:
            assert time.monotonic() < limit
            time.sleep(0.01)


def test_without_flock_a_file_made_anew_is_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claimed(tmp_path / "out"):
        assert REFUSED.format(process=os.getpid()) in str(in_thread(lambda: claim(tmp_path / "out")))
    assert not any(tmp_path.iterdir())
    leave_lock(tmp_path / "out")
    with pytest.raises(OutputError, match="process 7 on 'elsewhere'"):
        claim(tmp_path / "out")
    leave_lock(tmp_path / "out", 2 * STALE_SECONDS)
    claim(tmp_path / "out")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own = {"host": output_lock.socket.gethostname(), "machine": output_lock._machine()}
    leave_lock(tmp_path / "out", **own, process=ended.pid)
    claim(tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
def test_what_is_no_lock_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = lock_path(tmp_path / "out")
    {"directory": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("elsewhere")}[kind]()
    with pytest.raises(OutputError, match="cannot be made"):
        claim(tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_parents_that_stay_empty_are_removed(tmp_path: Path) -> None:
    claim(tmp_path / "a" / "b" / "out")
    assert not any(tmp_path.iterdir())
    with claimed(tmp_path / "a" / "b" / "out"):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]
    with pytest.raises(OutputError, match="cannot be written"), claimed(tmp_path / "c" / "file", is_directory=False):
        pass
    assert not (tmp_path / "c").exists()


# Every command


JOBS = (
    "prune.prune",
    "densify.densify",
    "densify_encoder_decoder.densify_encoder_decoder",
    "distill.distill",
    "classifiers.distill.distill_classifier",
    "quantize.quantize",
    "export.decoder.export",
    "export.encoder_decoder.export_encoder_decoder",
    "export.classifier.export_classifier",
    "compare.compare",
)


def test_every_command_that_writes_is_refused_before_it_looks_at_anything(tmp_path: Path) -> None:
    """The options have nothing but outputs, so access to any other option would raise AttributeError."""
    output, other = tmp_path / "out", tmp_path / "other"
    cases: dict[str, Callable[[], object]] = {
        "sweep": lambda: sweep([SimpleNamespace(output=output / "a")], None),  # type: ignore
        "push": lambda: upload(output, None),  # type: ignore
        "calibrate": lambda: calibrate_to_file(SimpleNamespace(output=output)),  # type: ignore
    }
    for job in JOBS:
        module, _, name = job.rpartition(".")
        run = getattr(importlib.import_module(f"compress.{module}"), name)
        cases[job] = lambda run=run: run(SimpleNamespace(output=output))
        cases[f"plan of {job}"] = lambda run=run: run(SimpleNamespace(output=other, plan_output=output))
    with held(output):
        for case in cases.values():
            with pytest.raises(OutputError, match="is being written by another run"):
                case()
        assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]


SECOND_PRUNE = ["prune", "model", "--sparsity", "0.34", "--method", "random", "--seed", "7", *CALIBRATION, "-o", "out"]
CALIBRATE = ["calibrate", "model", *CALIBRATION]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PRUNE, SECOND_PRUNE),
        pytest.param(CALIBRATE, [*CALIBRATE, "--seed", "7", "-o", "out"], marks=pytest.mark.slow),
    ],
    ids=["prune", "calibrate"],
)
def test_of_two_runs_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: list[str], second: list[str]
) -> None:
    """The first run stops just before its result is complete. The second is refused, and leaves the files of the first."""
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", PAUSED, *first, "-o", "out"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        limit = time.monotonic() + 120
        while not Path("paused").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit
            time.sleep(0.01)
        before = set(listing(tmp_path))
        for more in ([], ["--overwrite"], ["--resume"]):
            outcome = CliRunner().invoke(cli.main, [*second, *more])
            assert outcome.exit_code == 1 and outcome.stderr.count("\n") == 1, outcome.output
            assert REFUSED.format(process=process.pid) in outcome.stderr
            assert set(listing(tmp_path)) == before
        Path("go").touch()
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, said
    assert CliRunner().invoke(cli.main, [*first, "-o", "alone"]).exit_code == 0
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"
    if first[0] == "calibrate":
        assert Path("out").read_bytes() == Path("alone").read_bytes()
        return
    compare_checksums(Path("out"))
    provenances = [json.loads(Path(name, "compression.json").read_text()) for name in ("out", "alone")]
    assert provenances[0]["plan"] == provenances[1]["plan"] and provenances[0]["options"]["method"] == "frequency"
    tensors = [load_file(Path(name, "model.safetensors")) for name in ("out", "alone")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(tensors[0][name].equal(tensor) for name, tensor in tensors[1].items())
