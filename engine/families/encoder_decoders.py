"""Families of encoder-decoders, which transformers runs. This file has the names in their weights and configs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderDecoder:
    """One family of encoder-decoders: names of its tensors on disk and its config keys."""

    model_type: str
    model_class: str
    feed_forward: str
    """Prefix of an FFN or MoE block, a template of `stack` ("encoder" or "decoder"), `layer` and `place` in the layer."""
    activation_key: str
    scaled_head_key: str
    """Config key of the flag for dividing hidden states by √hidden before the head."""
    dense_sibling: str | None = None
    """model_type of the family that the same weights form when each MoE block becomes one FFN; None for a dense family."""
    experts_key: str = ""
    width_key: str = "d_ff"
    embedding: str = "shared.weight"
    head: str = "lm_head.weight"
    """Name of the head's tensor, which exists only if embeddings are not tied."""

    def block(self, stack: str, layer: int) -> str:
        """Return the prefix of the FFN or MoE block. In a decoder layer, attention to the encoder comes before it."""
        return self.feed_forward.format(stack=stack, layer=layer, place=STACKS.index(stack) + 1)


STACKS = ("encoder", "decoder")
EXPERT_OF_BLOCK = "experts.expert_{expert}"
ROUTER_OF_BLOCK = "router"
FFN_PROJECTIONS = ("wi.weight", "wo.weight")
"""Projections of an FFN or expert without a gate: [width, hidden] and [hidden, width]."""
GATED_PROJECTIONS = ("wi_0.weight", "wi_1.weight")
"""Projections that take the place of the first one if an FFN has a gate: the input of the activation, and its factor."""

ENCODER_DECODERS: dict[str, EncoderDecoder] = {
    row.model_type: row
    for row in (
        EncoderDecoder(
            model_type="switch_transformers",
            model_class="SwitchTransformersForConditionalGeneration",
            feed_forward="{stack}.block.{layer}.layer.{place}.mlp",
            activation_key="dense_act_fn",
            scaled_head_key="tie_word_embeddings",
            dense_sibling="t5",
            experts_key="num_experts",
        ),
        EncoderDecoder(
            model_type="t5",
            model_class="T5ForConditionalGeneration",
            feed_forward="{stack}.block.{layer}.layer.{place}.DenseReluDense",
            activation_key="feed_forward_proj",
            scaled_head_key="scale_decoder_outputs",
        ),
    )
}
