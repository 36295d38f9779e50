"""Recovery moves only routers and norms, towards the full model. It can be resumed, and the trained weights are written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EVERY_MOE_FAMILY, others_slow, save_reference

import compress.distillation.recover
from compress.distillation.recover import recover, recovery, trained_parameters
from compress.methods.diep import full_hidden_states
from compress.options.training import RecoverOptions
from compress.plans.apply import apply, planned_decoder
from compress.plans.plan import pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.errors import DataError, OptionError
from engine.passes.memory_budget import MemoryBudget

TOKENS = torch.randint(3, 96, (6, 12), generator=torch.Generator().manual_seed(1))
PLAN = pruning_plan({0: [1, 4, 5], 1: [0, 2], 2: [0, 1, 5]})
OPTIONS = RecoverOptions(steps=8, learning_rate=1e-2, batch_size=4)


def divergence(checkpoint: Checkpoint, decoder: Decoder) -> float:
    """Return the mean KL(p ‖ p') per token in float64, as the textbook sum."""
    with torch.no_grad():
        full = Decoder(checkpoint.config, checkpoint.source(torch.float64))(TOKENS).log_softmax(-1)
        own = decoder(TOKENS).double().log_softmax(-1)
    return float((full.exp() * (full - own)).sum() / TOKENS.numel())


@pytest.mark.parametrize("family", others_slow(EVERY_MOE_FAMILY, "mixtral", "gpt_oss", "qwen2_moe"))
def test_recovery_comes_closer_to_the_full_model(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    before_bytes = {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / "model").iterdir()}
    trained = recover(PLAN, checkpoint, TOKENS, RecoverOptions(30, 1e-2, 6), dtype=torch.float32)
    before = planned_decoder(PLAN, checkpoint, torch.float32)
    (tmp_path / "result").mkdir()
    apply(PLAN, checkpoint, tmp_path / "result", replaced=trained)
    result = Checkpoint(tmp_path / "result")
    after = Decoder(result.config, result.source(torch.float32))
    assert divergence(checkpoint, after) < 0.9 * divergence(checkpoint, before)
    written = trained_parameters(after)
    assert set(written) == set(trained)
    assert all(torch.equal(written[name], tensor) for name, tensor in trained.items())
    others = {id(p) for p in written.values()}
    for a, b in zip(before.parameters(), after.parameters(), strict=True):
        assert id(b) in others or torch.equal(a, b)
    assert before_bytes == {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / "model").iterdir()}


def test_one_step_is_the_mean_divergence(tmp_path: Path) -> None:
    in_pieces = MemoryBudget(tokens_per_batch=24)
    save_reference("mixtral", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    full = full_hidden_states(Decoder(checkpoint.config, checkpoint.source(torch.float32)), TOKENS)
    decoder = planned_decoder(PLAN, checkpoint, torch.float32)
    trainer = recovery(decoder, TOKENS, full, RecoverOptions(8, 1e-2, 6), in_pieces)
    expected = divergence(checkpoint, planned_decoder(PLAN, checkpoint, torch.float32))
    assert trainer.gradients(0)["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interrupted_recovery_ends_in_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(compress.distillation.recover, "SAVE_EVERY_STEPS", 3)
    save_reference("olmoe", tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    whole = recover(PLAN, checkpoint, TOKENS, OPTIONS, dtype=dtype)

    def stop(steps: range) -> object:
        for step in steps:
            if step == 5:
                raise KeyboardInterrupt
            yield step

    state = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        recover(PLAN, checkpoint, TOKENS, OPTIONS, dtype=dtype, state_path=state, progress=stop)
    resumed = recover(PLAN, checkpoint, TOKENS, OPTIONS, dtype=dtype, state_path=state, resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_state_of_something_else_is_refused(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(DataError, match="not the state of this training"):
        recover(
            PLAN,
            checkpoint,
            TOKENS,
            OPTIONS,
            dtype=torch.float32,
            state_path=next(tmp_path.glob("*.safetensors")),
            resume=True,
        )


@pytest.mark.parametrize("given", [(-1,), (1, 0.0), (1, 1e-3, 0)])
def test_options_that_cannot_be_used(given: tuple[Any, ...]) -> None:
    with pytest.raises(OptionError):
        RecoverOptions(*given).check()
