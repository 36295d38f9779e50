"""Recovery after pruning: a few hundred training steps of the kept router rows and the norms, with all else frozen.

Pruning re-routes tokens: logits that were learned for N experts now select among fewer. The trained parameters are under a
thousandth of the weights, so experts need neither gradients nor optimizer state, and the artifact keeps its shape.

Loss: KL(p ‖ p') per next token, where p is the full model's prediction and p' the smaller one's. The full model's final
hidden states are computed once per sequence and cached; its logits are recomputed from them in chunks.

Shape suffixes: S sequences, L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.methods.diep import full_hidden_states
from compress.options.training import RecoverOptions, TrainingOptions
from compress.plans.apply import planned_decoder
from compress.plans.plan import Plan
from compress.training.divergences import Predictions, forward_kl, weighted_divergence
from compress.training.training import Batch, Trainer
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder, head_of
from engine.decoder.parameters import parameters_on_disk
from engine.families.tensor_shapes import router_tensors
from engine.passes.activations import Activations
from engine.passes.memory_budget import UNLIMITED, MemoryBudget

SAVE_EVERY_STEPS = 25
WARM_UP_STEPS = 10
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def recover(
    plan: Plan,
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    options: RecoverOptions,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    state_path: Path | None = None,
    resume: bool = False,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    made: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Train the result of `plan`; return the trained tensors by name, float32, for `apply(…, replaced=…)`.

    `made`: tensors of the result that take the place of the plan's.

    `state_path`: where the state is saved during training; `resume` continues from it to the same result.
    """
    teacher = Decoder(checkpoint.config, checkpoint.weights(dtype, device))
    with full_hidden_states(teacher, tokens_SL) as full:
        del teacher
        checkpoint.release()
        decoder = planned_decoder(plan, checkpoint, dtype, device, replaced=made)
        decoder.checkpoint_activations = True
        trainer = recovery(decoder, tokens_SL, full, options)
        return trainer.run(state_path=state_path, resume=resume, progress=progress)


def trained_parameters(decoder: Decoder) -> dict[str, nn.Parameter]:
    """Return routers and norms, by their names on disk."""
    norms = ["model.norm", *(f"model.layers.{i}.{norm}" for i in range(len(decoder.layers)) for norm in LAYER_NORMS)]
    routers = [name for index in decoder.config.moe_layers for name in router_tensors(decoder.config, index)]
    wanted = {f"{norm}.{part}" for norm in norms for part in ("weight", "bias")}.union(routers)
    return {name: parameter for name, parameter in parameters_on_disk(decoder).items() if name in wanted}


class PredictionLoss:
    """KL(p ‖ p') per token, where p is the full model's prediction and p' the decoder's."""

    def __init__(self, decoder: Decoder, tokens_SL: Tensor, full: Activations) -> None:
        """Create the loss. full: F(x), the full model's hidden states of every sequence."""
        self.decoder, self.tokens_SL, self.full = decoder, tokens_SL, full

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Return the group's part of the mean over the step's tokens."""
        device = self.decoder.embedding_VD.device
        target = self.full.select(batch.group_G.tolist()).to(device)
        hidden = self.decoder.hidden_states(self.tokens_SL[batch.group_G].to(device))
        head = head_of(self.decoder)
        full, own = (Predictions(states.flatten(0, 1), *head) for states in (target, hidden))
        divergence = weighted_divergence(forward_kl, full, own)
        return {"divergence": divergence / (len(batch.rows_B) * self.tokens_SL.shape[1])}


def recovery(
    decoder: Decoder,
    tokens_SL: Tensor,
    full: Activations,
    options: RecoverOptions,
    budget: MemoryBudget = UNLIMITED,
) -> Trainer:
    """Return the training of a decoder's routers and norms."""
    length = tokens_SL.shape[1]
    training = TrainingOptions(
        options.steps,
        options.learning_rate,
        options.batch_size,
        group_size=budget.sequences_per_batch(length),
        warm_up_steps=WARM_UP_STEPS,
        seed=options.seed,
        save_every=SAVE_EVERY_STEPS,
    )
    loss = PredictionLoss(decoder, tokens_SL, full)
    return Trainer(trained_parameters(decoder), loss, training, len(tokens_SL), length)
