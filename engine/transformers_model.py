"""A model that transformers builds and runs: loaded from safetensors, its tensors compared with its config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.errors import CheckpointError

SAME_MODEL = "config.json and the weights must be of the same model"


def load_model(auto_class: Any, directory: Path, family: str, dtype: torch.dtype) -> nn.Module:
    """The model, frozen and in eval mode. `auto_class`: of transformers; `family`: what messages call the model.

    Raises CheckpointError for a tensor that is missing, extra or misshapen.
    """
    with quiet_transformers():
        try:
            model, report = auto_class.from_pretrained(
                directory,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:  # whatever transformers makes of a config that it cannot build a model from
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{directory}: transformers cannot load it ({reason}); {SAME_MODEL}") from error
    for what, names in (
        ("is missing", report["missing_keys"]),
        (f"is not part of this {family}", report["unexpected_keys"]),
        ("has another shape than config.json says", [entry[0] for entry in report["mismatched_keys"]]),
    ):
        if names:
            raise CheckpointError(f"{directory}: tensor {min(names)} {what}; {SAME_MODEL}")
    loaded: nn.Module = model.eval().requires_grad_(False)
    return loaded


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no report of its own: what is wrong is said by our errors."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
