"""Families of encoder-decoders. transformers runs these; here is what their weights and configs are called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderDecoder:
    """One family of encoder-decoders, as it is on disk."""

    model_type: str
    model_class: str
    feed_forward: str
    """Prefix of an FFN or MoE block; takes `stack` ("encoder" or "decoder"), `layer` and its `place` in the layer."""
    activation_key: str
    scaled_head_key: str
    """Key of the config's flag for hidden states that are divided by √hidden before the head."""
    dense_sibling: str | None = None
    """model_type of the family that the same weights form when each MoE block becomes one FFN; None for a dense family."""
    experts_key: str = ""
    width_key: str = "d_ff"
    embedding: str = "shared.weight"
    head: str = "lm_head.weight"
    """A tensor of its own only where embeddings are not tied."""

    def block(self, stack: str, layer: int) -> str:
        """Prefix of the FFN or MoE block; a decoder layer has attention to the encoder before it."""
        return self.feed_forward.format(stack=stack, layer=layer, place=STACKS.index(stack) + 1)


STACKS = ("encoder", "decoder")
EXPERT_OF_BLOCK = "experts.expert_{expert}"
ROUTER_OF_BLOCK = "router"
FFN_PROJECTIONS = ("wi.weight", "wo.weight")
"""[width, hidden] and [hidden, width] of an FFN or expert without a gate."""
GATED_PROJECTIONS = ("wi_0.weight", "wi_1.weight")
"""In place of the first where an FFN has a gate: what goes through the activation, and what that is multiplied by."""

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
