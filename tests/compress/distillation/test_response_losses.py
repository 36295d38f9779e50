"""Losses on the responses of examples, against each response by itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import save_reference

from calibrate.instructions import Example
from compress.distillation.response_perplexity import response_losses, response_perplexity
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder

EXAMPLES = (Example([5, 6, 7], [8, 9]), Example([10], [11, 12, 13, 14, 2]), Example([3, 4], [2]))


def test_every_response_has_its_own_loss(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32)).eval()
    expected = []
    for example in EXAMPLES:
        tokens = example.prompt + example.response
        logits_LV = decoder(torch.tensor([tokens]))[0].log_softmax(-1)
        begin = len(example.prompt)
        expected.append(-sum(float(logits_LV[place - 1, tokens[place]]) for place in range(begin, len(tokens))))
    found = response_losses(decoder, EXAMPLES, 2)
    assert found.summed_S.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.predictions.tolist() == [2, 5, 1]  # type: ignore[union-attr]
    assert response_perplexity(decoder, EXAMPLES, 2) == pytest.approx(math.exp(sum(expected) / 8), rel=1e-5)


def test_losses_that_are_not_finite_give_no_perplexity(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32)).eval()
    with torch.no_grad():
        decoder.embedding_VD[9] = math.nan
    assert math.isnan(response_perplexity(decoder, EXAMPLES, 2))
