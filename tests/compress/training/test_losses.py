"""The chunked losses equal their plain definitions, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compress.training.losses
from compress.training.losses import next_token_loss, reconstruction_loss
from engine.passes.streaming import chunk_tokens


def test_next_token_loss_and_its_gradients_equal_plain_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    length = chunk_tokens(11) // 2 + 50  # two sequences: more than one chunk, and a chunk that spans both
    hidden = torch.randn(2, length, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(11, (2, length), generator=generator)
    loss = next_token_loss(hidden, head, tokens, bias)
    log_probabilities = (hidden @ head.T + bias).log_softmax(-1)
    plain = -sum(log_probabilities[b, i, tokens[b, i + 1]] for b in range(2) for i in range(length - 1))
    assert torch.isclose(loss, plain, rtol=1e-12)
    got = torch.autograd.grad(loss, (hidden, head, bias))
    expected = torch.autograd.grad(plain, (hidden, head, bias))
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)


def test_a_chunk_of_a_large_vocabulary_stays_small() -> None:
    assert chunk_tokens(4096) == 512 and chunk_tokens(128_256) == 65 and chunk_tokens(10**7) == 16


def test_next_token_loss_of_a_bfloat16_model_is_summed_in_float32() -> None:
    hidden, head = torch.randn(1, 600, 8).bfloat16(), torch.randn(11, 8).bfloat16()
    tokens = torch.randint(11, (1, 600))
    loss = next_token_loss(hidden, head, tokens)
    logits = F.linear(hidden, head).double()[0, :-1]
    assert loss.dtype == torch.float32
    assert torch.isclose(loss.double(), F.cross_entropy(logits, tokens[0, 1:], reduction="sum"), rtol=1e-5)


def test_the_gradient_of_a_bfloat16_head_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are added some at a time, the last piece a smaller one, to a sum that is rounded once."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3 * chunk_tokens(11), 8, generator=generator).bfloat16()
    head = torch.randn(11, 8, generator=generator).bfloat16().requires_grad_()
    tokens = torch.randint(11, hidden.shape[:2], generator=generator)
    found = []
    for rows in (4, 4096):
        monkeypatch.setattr(compress.training.losses, "ROWS_ADDED", rows)
        found.append(torch.autograd.grad(next_token_loss(hidden, head, tokens), head)[0])
    assert torch.equal(*found)
    wide = head.detach().double().requires_grad_()
    loss = F.cross_entropy(F.linear(hidden.double(), wide)[0, :-1], tokens[0, 1:], reduction="sum")
    expected = torch.autograd.grad(loss, wide)[0]
    assert torch.allclose(found[0].double(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_reconstruction_loss_is_the_frobenius_norm_of_each_sequence_summed() -> None:
    full = torch.zeros(2, 2, 2)
    hidden = torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]]])
    assert float(reconstruction_loss(hidden, full)) == 5.0 + 2.0


def test_no_difference_has_the_gradient_zero() -> None:
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    full = hidden.detach().clone()
    full[1] += 1.0
    reconstruction_loss(hidden, full).backward()
    assert torch.equal(hidden.grad[0], torch.zeros(3, 4)), "at the kink, zero and not NaN"
    assert torch.allclose(hidden.grad[1], torch.full((3, 4), -1 / 12**0.5)), "(hidden − full) / norm"
