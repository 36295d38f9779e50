"""Kernels: functions that Numba compiles for this processor, each separately, when the kernel is first needed.

A kernel takes integers and float32 values and returns nothing; it reads and writes memory by address. A kernel is loaded
from disk (cache_directory.py), or compiled and kept there. Kernels call each other through a table of addresses, so none is
compiled into another and none is compiled twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from engine.kernels.compiler.cache_directory import KernelCache
from engine.progress import Progress, announced, no_progress

_MATHS = {"reassoc", "contract", "nsz"}
"""Sums may be reordered, so that they use vector registers; NaN and infinity stay what they are. LLVM applies these flags to
all of a kernel, also to instructions written here that have no flags of their own, so results depend on them."""
NOTICE = "compiling kernels for this processor (once)"
JOB = "void(int64)"
"""The signature of a kernel that is given the address of a record."""
BLOCK = "void(int64, int64)"
"""The signature of a kernel that does one part of the work of a record. Its arguments are the address and the part's
number."""


def inline(function: Any) -> Any:
    """Decorate a function that is inlined into each function that calls it."""
    return numba.njit(fastmath=_MATHS, inline="always", error_model="numpy")(function)


_HELPERS: set[tuple[str, str]] = set()
"""Modules and names of all helpers."""


def helper(function: Any, name: str = "") -> Any:
    """Decorate a function that is compiled with each kernel that calls it, and that cannot be called from Python.

    name: its name, where several functions are made of the same lines. If two had one name, and different processes had
    compiled the kernels that call them, a process that loads both kernels would run the first function in both.

    Raises:
        ValueError: another helper has this name.
    """
    function.__qualname__ = name or function.__qualname__
    if (place := (function.__module__, function.__qualname__)) in _HELPERS:
        raise ValueError(f"{place[0]} has two helpers with the name {place[1]}; give each a name of its own")
    _HELPERS.add(place)
    made = numba.njit(fastmath=_MATHS, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
    return made(function)


class Kernel:
    """One compiled function."""

    def __init__(
        self, function: Callable[..., None], signature: str, calls: tuple[str, ...], options: dict[str, Any]
    ) -> None:
        """calls: names of other kernels, whose addresses this kernel reads from the table."""
        self.name = function.__name__
        self._calls = calls
        self._function: Any = CFunc(function, normalize_signature(signature), locals={}, options=options)
        self._lock = threading.RLock()
        self._has_code = False
        self._is_loaded = False

    def load(self) -> None:
        """Load the kernel and those that it calls, from disk or by compiling them."""
        if self._is_loaded:
            return
        with self._lock:
            if not self._is_loaded:
                for name in self._calls:
                    KERNELS[name].load()
                self._build()
                if self.name in (TABLE.dtype.names or ()):
                    TABLE[0][self.name] = self._function.address
                self._is_loaded = True

    def compile_unless_busy(self) -> None:
        """Compile the kernel, so that it lies on disk, unless another process is compiling it at this moment."""
        with self._lock:
            self._build(waits=False)

    def _build(self, *, waits: bool = True) -> None:
        """Take the kernel's own code from disk, or compile it and keep it there."""
        function = self._function
        if self._has_code:
            return
        function._cache = KernelCache(function.__wrapped__)
        is_kept = function._cache.holds(function._sig, function._targetdescr.target_context)
        with nullcontext(True) if is_kept else function._cache.locked(waits=waits) as may_compile:
            if may_compile:
                function.compile()  # takes the code from disk if another process has compiled it in the meantime
                self._has_code = True

    def assembly(self) -> str:
        """Return the kernel's assembly code, compiled anew."""
        return str(self._function._compile_uncached().library.get_asm_str())

    @property
    def is_kept(self) -> bool:
        """Return whether the kernel is loaded, or lies on disk ready to be loaded."""
        function = self._function
        if self._is_loaded:
            return True
        found = KernelCache(function.__wrapped__)
        return found.holds(function._sig, function._targetdescr.target_context)

    @property
    def needs(self) -> list[Kernel]:
        """Return all kernels that this kernel calls, and then the kernel itself."""
        return [*(each for name in self._calls for each in KERNELS[name].needs), self]

    @property
    def address(self) -> int:
        """Return the address of the kernel's code."""
        self.load()
        address: int = self._function.address
        return address

    def __call__(self, *arguments: float) -> None:
        self.load()
        self._function.ctypes(*arguments)


KERNELS: dict[str, Kernel] = {}
"""All kernels by their names."""


def kernel(
    signature: str, calls: tuple[str, ...] = (), *, is_parallel: bool = False
) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate a function that becomes a kernel. calls: names of the kernels that it calls."""
    options = {"parallel": is_parallel, "error_model": "numpy", "fastmath": _MATHS}

    def made(function: Callable[..., None]) -> Kernel:
        KERNELS[function.__name__] = Kernel(function, signature, calls, options)
        return KERNELS[function.__name__]

    return made


def add_kernel(name: str, signature: str, template: Callable[..., None], work: Any) -> None:
    """Add a kernel with the code of `template`, in which the global `WORK` is `work`.

    Numba's cache knows a function by its name and its line, and cannot keep functions that are closures.
    """
    function = FunctionType(template.__code__, {"WORK": work, "__name__": template.__module__}, name)
    function.__qualname__ = name
    kernel(signature)(function)


def prepare(wanted: Iterable[Kernel], progress: Progress = no_progress) -> None:
    """Load these kernels and those that they call.

    If some must be compiled first, a progress bar is shown, or one line on stderr where there is no bar. Processes that do
    so at the same time share the work: each first compiles what no other process is compiling.
    """
    every = list(dict.fromkeys(each for kernel in wanted for each in kernel.needs))
    missing = [each for each in every if not each.is_kept]
    if missing:
        for each in announced(missing, NOTICE, progress):
            each.compile_unless_busy()
    for each in every:
        each.load()


TABLE_OF_ADDRESSES = np.dtype(
    [
        (name, np.int64)
        for name in (
            *(
                "parallel_for",
                "serial_for",
                "multiply_wide",
                "score_pairs",
                "score_bytes",
                "widen_block",
                "rms_norm",
                "products",
                "products_block",
                "swiglu",
                "units_block",
            ),
            *(
                "middle_block",
                "down_block",
                "attend",
                "append_block",
                "attend_piece",
                "finish_block",
                "add_weighted",
                "add_weighted_pairs",
                "add_weighted_bytes",
            ),
            *("multiply_panel", "multiply_paired", "attend_panel", "pack_block", "panel_products_block"),
            *("gated_delta_block", "mamba2_block"),
            *(
                "decode",
                "decode_tokens",
                "attention_layer",
                "feed_forward_layer",
                "routed_experts",
                "attend_steps",
                "norm_columns",
                "gate_outputs",
                "add_columns",
                "add_to_residual",
            ),
            *("choose_experts", "skip_slots", "gate_shared", "tell_observers", "require_experts"),
            *("pack_experts_block", "unit_panels_block", "down_panels_block"),
            *("centered_norm", "mix_layer", "recurrent_layer", "choose_with_bias", "scale_chosen"),
            *("latent_layer", "attend_latent", "latent_query_block", "latent_piece", "latent_value_block"),
            "crew_for",
        )
    ]
)
TABLE = np.zeros(1, TABLE_OF_ADDRESSES)
"""Addresses of the loaded kernels."""
