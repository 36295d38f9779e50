"""The two models of the benchmarks, their held-out text, and losses on it.

Perplexities are measured on windows spread over all held-out documents, and their standard errors are those over documents
(compress/run/losses.py).
"""

from __future__ import annotations

from typing import Any

import torch
from results import ROOT
from torch import Tensor

from compress.run.losses import Losses
from compress.training.losses import next_token_loss

SECOND_MODEL = ROOT / "benchmarks" / "reference_model"
MODELS = {"demo": "demo", "shared-expert": str(SECOND_MODEL)}
WINDOWS, LENGTH = 256, 256
SEQUENCES_AT_ONCE = 16


def windows_of(model: str, half: str, count: int = WINDOWS, source: str = "stdlib") -> Any:
    """Return the windows [count, LENGTH] of one half of the held-out documents of a text, the same for all methods.

    model: one of MODELS, or a directory.
    """
    from calibrate.windows import text_windows
    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.model_directory import resolve
    from engine.checkpoint.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Checkpoint(resolve(MODELS.get(model, model))))
    return text_windows(source, tokenizer, samples=count, sequence_length=LENGTH, seed=0, split=half)


@torch.no_grad()
def window_losses(decoder: Any, tokens_SL: Tensor) -> list[float]:
    """Return the summed negative log-likelihood of each window, in nats."""
    found = []
    for tokens_BL in tokens_SL.split(SEQUENCES_AT_ONCE):
        pairs = zip(decoder.hidden_states(tokens_BL).split(1), tokens_BL.split(1), strict=True)
        losses = [
            next_token_loss(hidden_1LD, decoder.head_VD, tokens_1L, decoder.head_bias_V) for hidden_1LD, tokens_1L in pairs
        ]
        found += [round(float(loss), 4) for loss in losses]
    return found


def measured(decoder: Any, windows: Any) -> dict[str, float]:
    """Return a decoder's perplexity on these windows and its standard error over documents."""
    summed_S = torch.tensor(window_losses(decoder, windows.tokens_SL), dtype=torch.float64)
    losses = Losses(summed_S, windows.tokens_SL.shape[1] - 1)
    return {"perplexity": losses.perplexity, "perplexity_stderr": losses.standard_error(windows.documents_S)}
