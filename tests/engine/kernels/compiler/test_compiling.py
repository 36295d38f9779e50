"""When kernels are compiled and where they are kept: a change of any file, each by itself, told about, and never wrongly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from kernels_for_tests import kernels
from packages_for_tests import needs_numba
from support.artifacts_for_tests import ROOT

from compress.commands.output import progress_bar
from engine.progress import no_progress

if kernels is not None:
    from engine.kernels.compiler import cache_directory as places
    from engine.kernels.compiler import compiling


pytestmark = needs_numba  # all files that are tested here are written with Numba
ROUND = """
import numpy as np
from engine.kernels.compiled import KERNELS
values, rounded = np.array([1.0078125 - 1e-6], np.float32), np.zeros(1, np.uint16)
was_kept = KERNELS["prepare_pairs"].is_kept
KERNELS["prepare_pairs"](values.ctypes.data, 1, rounded.ctypes.data)
print(was_kept, hex(rounded[0]))
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the room and of what it needs of others."""
    (tmp_path / "engine").mkdir()
    for name in ("__init__.py", "progress.py"):
        shutil.copy(ROOT / "engine" / name, tmp_path / "engine")
    shutil.copytree(
        ROOT / "engine" / "kernels", tmp_path / "engine" / "kernels", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


def ran(copied: Path, program: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(copied), "NUMBA_CACHE_DIR": str(copied / "cache")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=copied, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_change_of_any_file_of_the_room_compiles_anew(copied: Path) -> None:
    """`prepare_pairs` rounds by `narrow`, which is in another file than itself."""
    (copied / "cache" / "numba_of_another_project").mkdir(parents=True)
    assert ran(copied, ROUND) == "False 0x3f81"
    assert ran(copied, ROUND) == "True 0x3f81"
    (first,) = (copied / "cache").glob("moe_compress_kernels-*")
    names = {path.name.split("-")[0] for path in first.iterdir()}
    assert names == {"dot_products.prepare_pairs"}, "a kernel that is not needed is not compiled"
    file = copied / "engine" / "kernels" / "compiler" / "arithmetic.py"
    text = file.read_text()
    assert text.count("np.uint32(0x7FFF)") == 1
    file.write_text(text.replace("np.uint32(0x7FFF)", "np.uint32(0)"))  # no longer to the nearest
    assert ran(copied, ROUND) == "False 0x3f80"
    (second,) = (copied / "cache").glob("moe_compress_kernels-*")
    assert second != first, "and the code of the old files is removed"
    assert (copied / "cache" / "numba_of_another_project").is_dir()


def test_code_of_other_processors_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may share a home; each kind has its own directory there."""
    monkeypatch.setattr(places, "_parents", lambda: iter([tmp_path]))
    find = places.cache_directory.__wrapped__
    own = find()
    monkeypatch.setattr(places, "NAME", "another")
    other = find()
    assert own.is_dir() and other.is_dir() and own != other
    monkeypatch.setattr(places, "source_digest", lambda: "changed")
    changed = find()
    assert [*tmp_path.iterdir()] == [changed], "code of other files is removed, whichever processor it is for"


def test_a_place_that_cannot_be_written_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(places, "_parents", lambda: iter([tmp_path / "file" / "under", tmp_path / "home"]))
    assert places.cache_directory.__wrapped__().parent == tmp_path / "home"
    monkeypatch.setattr(places, "_parents", lambda: iter([tmp_path / "file" / "under"]))
    with pytest.raises(RuntimeError, match="cannot be kept"):
        places.cache_directory.__wrapped__()


COMPILE_SLOWLY = """
import time
from numba.core.ccallback import CFunc
from engine.kernels.compiled import KERNELS, prepare
compile_it = CFunc._compile_uncached
def slowly(function):
    print(function.__name__)
    time.sleep(1)
    return compile_it(function)
CFunc._compile_uncached = slowly
wanted = [KERNELS[name] for name in ("prepare_pairs", "add_weighted", "rms_norm")]
prepare(wanted)
assert all(kernel.address for kernel in wanted)
"""
"""Program that prints the names of the kernels that it compiles itself."""


def test_processes_that_start_together_share_the_work(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE_SLOWLY]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    compiled = [process.communicate()[0].split() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sorted(compiled[0] + compiled[1]) == ["add_weighted", "prepare_pairs", "rms_norm"], "each once"
    assert not list(tmp_path.rglob("*.lock"))


def test_a_lock_is_for_one_and_nobody_waits_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(places, "_LONGEST_WAIT", 0.1)
    first, second = (places.KernelCache(kernels.KERNELS["prepare_pairs"]._function.__wrapped__) for _ in range(2))
    with first.locked() as may_compile:
        assert may_compile
        with second.locked(waits=False) as may_compile:
            assert not may_compile
        with second.locked() as may_compile:
            assert may_compile, "the process that holds the lock may have been stopped"
        assert len(list(tmp_path.iterdir())) == 1, "the file belongs to the first"
    with second.locked(waits=False) as may_compile:
        assert may_compile
    monkeypatch.setattr(places, "cache_directory", lambda: tmp_path / "missing")
    with places.KernelCache(kernels.KERNELS["prepare_pairs"]._function.__wrapped__).locked() as may_compile:
        assert may_compile, "without a lock, the kernel is compiled all the same"


class Fake:
    """A kernel that only says what is done to it."""

    def __init__(self, is_kept: bool, done: list[str], name: str) -> None:
        self.is_kept, self.done, self.name = is_kept, done, name

    @property
    def needs(self) -> list[Fake]:
        return [self]

    def compile_unless_busy(self) -> None:
        self.done.append(f"compiled {self.name}")

    def load(self) -> None:
        self.done.append(self.name)


def test_only_what_is_compiled_is_shown() -> None:
    done: list[str] = []
    fakes: Any = [Fake(True, done, "kept"), Fake(False, done, "missing"), Fake(True, done, "another")]

    def progress(iterable: Iterable[Any], description: str) -> Iterable[Any]:
        for each in iterable:
            done.append(f"{description}: {each.name}")
            yield each

    compiling.prepare(fakes, progress)
    assert done == [f"{compiling.NOTICE}: missing", "compiled missing", "kept", "missing", "another"]
    done.clear()
    compiling.prepare(fakes[:1], lambda *_: pytest.fail("nothing is compiled"))
    assert done == ["kept"]


def test_compiling_is_announced_once_where_no_bar_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """The command line's bar shows nothing where stderr is no terminal; a server has no bar at all."""
    fakes: Any = [Fake(False, [], "one"), Fake(False, [], "two"), Fake(True, [], "kept")]
    for progress in (no_progress, progress_bar):
        compiling.prepare(fakes, progress)
        assert capfd.readouterr() == ("", f"{compiling.NOTICE}\n")
        compiling.prepare(fakes[2:], progress)
        assert capfd.readouterr() == ("", "")


def test_a_bar_that_is_shown_needs_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    fakes: Any = [Fake(False, [], "one")]
    compiling.prepare(fakes, lambda iterable, _: iter(iterable))
    assert capfd.readouterr() == ("", "")


def test_each_form_of_weights_has_kernels_of_its_own() -> None:
    plain, low_bit = ({kernel.name for kernel in kernels.needed(bits)} for bits in ((), (8,)))
    assert low_bit - plain == {"multiply_8", "prepare_8", "widen_8"} and plain < low_bit
    assert "decode_together" in plain and "decode_together" not in {
        kernel.name for kernel in kernels.needed((), is_whole=False)
    }


def test_every_kernel_that_another_calls_has_a_place_in_the_table() -> None:
    names = set(compiling.TABLE.dtype.names or ())
    called = {name for kernel in compiling.KERNELS.values() for name in kernel._calls}
    assert called <= names and all(name in compiling.KERNELS for name in names)


def test_no_two_helpers_have_one_name() -> None:
    """Numba tells functions of one name apart by a number, which two processes may give to different ones."""

    def made() -> Any:
        def some_work(value: Any) -> Any:
            return value

        return some_work

    first = compiling.helper(made())
    with pytest.raises(ValueError, match="two helpers with the name"):
        compiling.helper(made())
    second = compiling.helper(made(), "other_work")
    assert [each.py_func.__qualname__.rpartition(".")[2] for each in (first, second)] == ["some_work", "other_work"]
