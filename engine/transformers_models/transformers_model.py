"""Models that transformers builds and runs: loaded from safetensors and checked against their config."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.remote_code import check_loadable, check_no_code, class_of
from engine.errors import CheckpointError, OptionError
from engine.files.gguf_file import is_gguf

_SPARE = 1 << 24
"""Allowance for numbers that a model has besides those in its files, such as position tables."""
SAME_MODEL = "config.json and the weights must be of the same model"


def load_decoder(
    directory: Path, config: Mapping[str, Any], dtype: torch.dtype | str = "auto", model_class: Any = None
) -> Any:
    """Return a decoder built by transformers, in eval mode, without running code of the directory. `config`: config.json.

    model_class: of transformers; None for the one that transformers finds for generation.
    Raises OptionError if transformers cannot load it in this way, CheckpointError for a model that transformers
    refuses.
    """
    if is_gguf(directory):
        raise OptionError(f"{directory}: is a GGUF file, which only the engine reads here; choose the engine as the backend")
    check_loadable(directory, config)
    from transformers import AutoModelForCausalLM

    loader: Any = model_class or AutoModelForCausalLM
    with quiet_transformers():
        try:
            if config.get("auto_map") and model_class is None:
                loader = class_of(config)
            model = loader.from_pretrained(
                directory, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # any exception of transformers for a config that it cannot build
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{directory}: transformers cannot load it ({reason}); {SAME_MODEL}") from error
    return model.eval()


def load_model(auto_class: Any, directory: Path, config: Mapping[str, Any], dtype: torch.dtype, stored: int) -> nn.Module:
    """Return the model, frozen and in eval mode.

    `auto_class`: of transformers; `config`: config.json; `stored`: number of stored parameters. Raises CheckpointError
    for a tensor that is missing, extra or misshapen, OptionError as `check_no_code` does.
    """
    family = config["model_type"]
    check_no_code(directory)
    if config.get("quantization_config"):
        raise CheckpointError(f"{directory}: config.json has a quantization_config; quantized weights are not read")
    _check_size(auto_class, directory, stored)
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
        except Exception as error:  # any exception of transformers for a config that it cannot build
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


def _check_size(auto_class: Any, directory: Path, stored: int) -> None:
    """Raise CheckpointError for a config.json that describes far more numbers than the files hold."""
    from transformers import AutoConfig

    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                described = sum(part.numel() for part in _outlined(auto_class, config))
        except Exception as error:  # any exception of transformers for a config that it cannot build
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CheckpointError(f"{directory}: transformers cannot build it ({reason}); {SAME_MODEL}") from error
    if described > 2 * stored + _SPARE:
        raise CheckpointError(
            f"{directory}: config.json describes {described} numbers and the files hold {stored}; {SAME_MODEL}"
        )


def _outlined(auto_class: Any, config: Any) -> Iterator[Tensor]:
    """Yield all parameters and buffers of a model of this config."""
    model = auto_class.from_config(config, trust_remote_code=False)
    yield from model.parameters()
    yield from model.buffers()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable transformers' progress bars and reports during the body; our errors report problems."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity(ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
