"""A family as GGUF files describe it: a config.json is made of metadata, and metadata of a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.families.config import DecoderConfig
from engine.families.gguf.forms import Places
from engine.families.gguf.metadata import ARCHITECTURE, Facts
from engine.families.gguf.parts import SIZES, Part

_HARMLESS = ("vocab_size", "tensor_data_layout", "attention.causal", "nextn_predict_layers")
"""Keys that are checked elsewhere or say nothing."""
SOFTMAX, SIGMOID = 1, 2
"""Functions of router logits (`expert_gating_func`)."""
_GATING = "expert_gating_func"
_FLOATS = frozenset(
    [
        "attention.clamp_kqv",
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "attention.scale",
        "embedding_scale",
        "expert_weights_scale",
        "final_logit_softcapping",
        "logit_scale",
        "residual_scale",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scaling.factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
    ]
)
"""Keys whose numbers are float32, also if config.json has whole numbers. llama.cpp refuses other types."""


@dataclass(frozen=True)
class GgufFamily:
    """How GGUF files of one architecture describe models of one family."""

    architecture: str
    """Value of `general.architecture`."""
    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    """Metadata keys, without the architecture's name, by the entry of config.json that they have; all are required."""
    optional: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Keys that a file may lack, with the entry's value in that case."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Entries that such files never have, because the architecture implies them."""
    sizes: Part = SIZES
    """Sizes of the model, and of layers where these differ."""
    made: tuple[Part, ...] = ()
    """Parts that are made from several keys, or from the tensors."""
    gating: int | None = SOFTMAX
    """The function of router logits that the family has; None for a dense family."""
    normalizes: bool | None = None
    """Whether the weights of the chosen experts sum to 1; None if the family's config.json says it."""
    permutes: bool = False
    """Whether the rows of each head of queries and keys are stored in pairs of what is rotated together."""
    feed_forward_norm: str = "ffn_norm"
    """Name of the norm after attention."""
    output_norm: str = "output_norm"
    """Name of the norm after the last layer."""
    constants: Callable[[DecoderConfig], Mapping[str, tuple[float, ...]]] = lambda config: {}
    """Returns the numbers of tensors that say what a config.json says, by their names in files."""
    further: Callable[[DecoderConfig, int, Callable[[str], bool]], Places] = lambda config, layer, has: {}
    """Returns the places of a layer's further tensors. The last argument says whether the file has a tensor in its block."""
    says: Mapping[str, str] = field(default_factory=dict)
    """Whole keys by which files of this family are told from others of the architecture; llama.cpp ignores them."""
    read_as: str | None = None
    """The family that such files are read as, which computes the same; None for this one."""
    only_if: Callable[[Facts], bool] = lambda facts: True
    """Whether a file of this architecture is of this family. The first row that fits is taken."""

    def config(self, facts: Facts) -> dict[str, Any]:
        """Return the content of config.json. Raises CheckpointError and UnsupportedError naming the key."""
        made: dict[str, Any] = {"model_type": self.model_type}
        for part in (self.sizes, *self.made):
            made |= part.read(facts)
        made |= {entry: facts.value(key) for entry, key in self.keys.items()}
        made |= {entry: facts.value(key, default) for entry, (key, default) in self.optional.items()}
        made |= self.fixed
        facts.only("attention.causal", True)
        if self.gating is None:
            facts.only("expert_count", 0)
        facts.only(_GATING, 0, self.gating)
        if self.normalizes is not None:
            facts.only("expert_weights_norm", self.normalizes)
        facts.refuse_unread(_HARMLESS)
        return made

    def metadata(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the hyperparameters of a model as metadata. Raises UnsupportedError for what no key can say.

        A config that the keys cannot say gives metadata of another config; the caller compares the two.
        """
        keys = dict(self.keys) | {entry: key for entry, (key, _) in self.optional.items()}
        found = {key: getattr(config.transformers_config, entry, None) for entry, key in keys.items()}
        for part in (self.sizes, *self.made):
            found |= part.write(config)
        if self.gating == SIGMOID:
            found[_GATING] = SIGMOID
        stored = {key: float(value) if key in _FLOATS else value for key, value in found.items() if value is not None}
        own = {f"{self.architecture}.{key}": value for key, value in stored.items()}
        return {ARCHITECTURE: self.architecture, **self.says, **own}
