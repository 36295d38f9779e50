"""Windows of a source of text on which perplexity is measured, and the document of each.

Shape suffixes: S windows, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from tqdm import tqdm

from calibrate.cutting import SPREAD, WINDOWS
from calibrate.text import Split, Tokenizer, named, tokenized_documents
from engine.errors import DataError, OptionError


@dataclass(frozen=True)
class Windows:
    """Windows of equal length, each with its document."""

    tokens_SL: Tensor
    documents_S: Tensor
    """Number of the document that gives most of a window's tokens. Windows with one number are not independent."""

    @property
    def documents(self) -> int:
        """Number of different documents."""
        return len(self.documents_S.unique())

    @property
    def predictions(self) -> int:
        """Number of predicted tokens: all but the first of each window."""
        return self.tokens_SL.numel() - len(self.tokens_SL)


def text_windows(
    source: str,
    tokenizer: Tokenizer,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    split: Split = "held-out",
    windows: str = SPREAD,
) -> Windows:
    """Return windows [samples, sequence_length] of a split, taken as WINDOWS says.

    Raises DataError where the split has too little text.
    """
    if samples < 1 or sequence_length < 1:
        raise OptionError(f"{samples} windows of {sequence_length} tokens cannot be taken: both must be at least 1")
    documents = enumerate(tokenized_documents(source, tokenizer, seed, split))
    with tqdm(total=samples, unit=" windows", desc="reading text", delay=2, leave=False, disable=None) as progress:
        found = []
        for window in islice(WINDOWS[windows](documents, samples, sequence_length, seed), samples):
            found.append(window)
            progress.update()
    if len(found) < samples:
        raise DataError(
            f"{source}: too short: {named(split)} has {len(found)} sequences of {sequence_length} tokens, and {samples} are "
            "needed; give more text, or ask for fewer samples or a shorter sequence length"
        )
    ids, owners = zip(*found, strict=True)
    return Windows(torch.tensor(ids, dtype=torch.long), torch.tensor(owners, dtype=torch.long))
