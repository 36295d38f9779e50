"""Whether the compiled kernels pay: they and torch multiply one large matrix in turn, and the verdict is kept on disk.

It lies beside the compiled code, whose directory is named after the processor and all versions but torch's; a verdict holds
for one version of torch and one number of threads. A verdict against the kernels holds for some minutes only, because a busy
machine may have made it. A file that does not hold verdicts is ignored and written anew.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engine.kernels.plain_forms import FLOATS, plain_form
from engine.kernels.torch_products import torch_linear

TRIAL_SHAPE = 4096, 4096
"""Shape of the trial's matrix: 32 MB in half precision, more than most caches hold."""
CLEARLY = 2.0
"""How many times as fast torch must be to be chosen, so that other work during the trial does not decide the choice."""
MOST_TRIALS = 8
REST_SECONDS = 0.05
"""Time between trials, in which other work may end."""
REFUSED_SECONDS = 600
"""Time for which a verdict against the kernels holds."""
Verdicts = dict[str, bool | float]
"""True for the kernels; against them, the time of the trial in seconds."""
FILE = "verdicts.json"


def pays(kernels: Any, rows: int, *, many: bool, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernels are not clearly slower than torch at so many rows, by an earlier trial or by one now."""
    file = kernels.cache_directory() / FILE
    key = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rows} rows"
    key += "" if dtype == torch.bfloat16 else f" of {str(dtype).removeprefix('torch.')}"
    verdicts = read_verdicts(file)
    if verdicts.get(key) is True:
        return True
    if key in verdicts and 0 <= time.time() - verdicts[key] < REFUSED_SECONDS:
        return False
    verdicts[key] = _try(kernels, rows, many, dtype) or time.time()
    _write(file, verdicts)
    return verdicts[key] is True


def read_verdicts(file: Path) -> Verdicts:
    """The verdicts of a file; none where it is missing, damaged or something else."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    is_valid = isinstance(found, dict) and all(isinstance(each, bool | float) for each in found.values())
    return found if is_valid else {}


def _write(file: Path, verdicts: Verdicts) -> None:
    """Replace the file as a whole; where that is not allowed, the next process tries again."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False) as made:
            json.dump(verdicts, made, indent=1)
        os.replace(made.name, file)
    except OSError:
        return


def _try(kernels: Any, rows: int, many: bool, dtype: torch.dtype) -> bool:
    """The trial: 50 ms for one row, 200 ms for 128."""
    weight_OI = torch.ones(TRIAL_SHAPE, dtype=dtype)
    x = torch.ones(rows, TRIAL_SHAPE[1], dtype=dtype)
    form, taken = plain_form(kernels, dtype), x.float() if dtype in FLOATS else x
    kernels.use_threads(torch.get_num_threads())

    def compiled() -> None:
        outputs, inputs = TRIAL_SHAPE
        kernels.products(taken.data_ptr(), rows, [(weight_OI.data_ptr(), 0)], [outputs], inputs, form, many=many)

    def of_torch() -> None:
        torch_linear(x, weight_OI)

    best = {compiled: math.inf, of_torch: math.inf}
    for _ in range(MOST_TRIALS):  # more than a few only where other work disturbs them, or torch is faster indeed
        for way in 3 * list(best):
            started = time.perf_counter()
            way()
            best[way] = min(best[way], time.perf_counter() - started)
        if best[compiled] <= CLEARLY * best[of_torch]:
            return True
        time.sleep(REST_SECONDS)
    return False
