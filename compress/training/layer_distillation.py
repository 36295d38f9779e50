"""Layer distillation (Cruz Salinas et al. §3.1): L = λ_sup·CE + λ_L·Σ_l MSE(LN(y_l^T), LN(y_l^S)) + λ_p·KL(p^T ‖ p^S).

y_l^T is the output of the teacher's MoE block l on the teacher's own hidden states, and y_l^S the output of the student's
FFN on the student's; both come from a forward pass over the same tokens. The teacher is not trained.

The last term, towards the teacher's next-token predictions p^T, is an addition of this project; the paper has λ_p = 0.

Shape suffixes: S sequences, B sequences of a batch, L positions, T tokens, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.options.training import LossWeights
from compress.training.divergences import LargestPredictions, Predictions, forward_kl, weighted_divergence
from compress.training.losses import layer_distance, next_token_loss
from compress.training.training import Batch
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder, DecoderLayer, Outer, embedded, head_of, positions_for
from engine.families.rotary_embedding import Rotary


@dataclass(frozen=True)
class Taught:
    """Outputs of a teacher for a batch."""

    blocks: dict[int, Tensor]
    """y_l^T, [T, D], by decoder layer."""
    predictions: Predictions | LargestPredictions | None
    """The teacher's predictions, where they are needed."""


class Teacher:
    """A model whose MoE blocks' outputs are recorded. Its weights are memory-mapped, and converted where necessary."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        offload: bool = False,
        predicts: bool = False,
    ) -> None:
        """Load the teacher.

        offload: load each layer for each batch and release it, so that one layer is in memory at a time.

        predicts: compute the predictions too, for which the teacher runs to its end.
        """
        self.checkpoint, self.offload, self.predicts = checkpoint, offload, predicts
        config, self._weights, plain = checkpoint.config, checkpoint.weights(dtype, device), checkpoint.source(dtype, device)
        self._embedding_VD = plain("model.embed_tokens.weight")
        if predicts:
            self._outer = Outer(config, plain)
        self._rotary = Rotary(config)
        # Layers behind the last MoE block are needed only for predictions.
        self._count = len(config.layers) if predicts else 1 + max(config.moe_layers)
        self._layers = {} if offload else {index: self._load(index) for index in range(self._count)}

    def _load(self, index: int) -> DecoderLayer:
        return DecoderLayer(self.checkpoint.config, index, self._weights)

    @torch.no_grad()
    def teach(self, tokens_BL: Tensor) -> Taught:
        """Run the teacher on a batch."""
        config = self.checkpoint.config
        x_BLD = embedded(config, tokens_BL, self._embedding_VD)
        positions = positions_for(config, self._rotary, tokens_BL, None, 0, x_BLD.dtype)
        outputs: dict[int, Tensor] = {}
        for index in range(self._count):
            layer = self._layers[index] if index in self._layers else self._load(index)
            watched = {} if layer.feed_forward is None or index not in config.moe_layers else {index: layer.feed_forward}
            with outputs_of(watched) as seen:
                x_BLD = layer(x_BLD, positions)
            outputs |= seen
            if self.offload:
                del layer, watched
                self.checkpoint.release()
        if not self.predicts:
            return Taught(outputs, None)
        hidden_TD = self._outer.hidden_states(x_BLD).flatten(0, 1)
        return Taught(outputs, Predictions(hidden_TD, *head_of(self._outer)))


def feed_forwards(decoder: Decoder) -> dict[int, nn.Module]:
    """Return the feed-forward block of each layer that has one, an MoE block or a dense FFN."""
    blocks = ((index, layer.feed_forward) for index, layer in enumerate(decoder.layers))
    return {index: block for index, block in blocks if isinstance(block, nn.Module)}


@contextmanager
def outputs_of(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Record the output of each module in the forward passes inside `with`, except recomputations for gradients."""
    seen: dict[int, Tensor] = {}

    def keep(index: int) -> Callable[..., None]:
        return lambda module, inputs, output: seen.__setitem__(index, output)

    handles = [module.register_forward_hook(keep(index)) for index, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class DistillationLoss:
    """The loss of a student as its terms; without a teacher, the loss of plain fine-tuning."""

    def __init__(self, student: Decoder, teacher: Teacher | None, tokens_SL: Tensor, weights: LossWeights) -> None:
        self.student, self.teacher, self.tokens_SL, self.weights = student, teacher, tokens_SL, weights

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Return the group's part of the means over the step.

        The means are of cross-entropy per prediction, of squared distance per element, and of divergence per token.
        """
        tokens_BL = self.tokens_SL[batch.group_G].to(self.student.embedding_VD.device)
        sequences, (_, length) = len(batch.rows_B), tokens_BL.shape
        taught = self.teacher.teach(tokens_BL) if self.teacher is not None else Taught({}, None)
        targets = taught.blocks if self.weights.layer else {}
        own = feed_forwards(self.student)
        with outputs_of({index: own[index] for index in targets}) as outputs:
            hidden_BLD = self.student.hidden_states(tokens_BL)
        terms = {}
        if self.weights.supervised:
            head_VD, bias_V, cap = head_of(self.student)
            entropy = next_token_loss(hidden_BLD, head_VD, tokens_BL, bias_V, cap)
            terms["supervised"] = self.weights.supervised * entropy / (sequences * (length - 1))
        if targets:
            distances = torch.stack([layer_distance(targets[index], outputs[index]) for index in targets])
            terms["layers"] = self.weights.layer * distances.sum() * len(batch.group_G) / sequences
        if taught.predictions is not None:
            made = Predictions(hidden_BLD.flatten(0, 1), *head_of(self.student))
            divergence = weighted_divergence(forward_kl, taught.predictions, made)
            terms["predictions"] = self.weights.prediction * divergence / (sequences * length)
        return terms


@torch.no_grad()
def decoder_perplexity(decoder: Decoder, tokens_SL: Tensor, group_size: int) -> float:
    """Return the perplexity of a decoder in memory, `group_size` sequences at a time."""
    total = 0.0
    for tokens_BL in tokens_SL.to(decoder.embedding_VD.device).split(group_size):
        hidden_BLD = decoder.hidden_states(tokens_BL)
        head_VD, bias_V, cap = head_of(decoder)
        total += float(next_token_loss(hidden_BLD, head_VD, tokens_BL, bias_V, cap))
    return math.exp(min(total / (tokens_SL.numel() - len(tokens_SL)), 700.0)) if math.isfinite(total) else math.nan
