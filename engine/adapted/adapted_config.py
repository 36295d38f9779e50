"""The numbers of a model that transformers runs, as a DecoderConfig: its sizes and its MoE layers.

No decoder is built from this config. Methods, budgets, plans and figures read the MoE layers; estimates of memory read the
sizes of attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from engine.adapted.expert_layers import ExpertLayer, FoundLayers
from engine.errors import UnsupportedError
from engine.families.architecture import Architecture
from engine.families.config import DecoderConfig
from engine.families.experts import ExpertNames, Experts, transposed_stacks
from engine.families.layer_config import LayerConfig, MoeConfig, Multipliers
from engine.families.router import TopK
from engine.families.values import positive

_BIASES = ExpertNames(stacks=transposed_stacks(biases=True))
_REASON = "transformers runs its decoder here"
_GROUPS = (("n_group", "topk_group"),)
"""Config keys of the number of groups of experts, and of the groups that a token's experts come from."""
_WITHOUT_GROUPS = "greedy"
"""The topk_method of routers that take the best of all experts."""
_UNKNOWN_LENGTH = 1 << 20
"""Number of positions of a model whose config sets no maximum."""


def text_path(config: Any) -> tuple[str, ...]:
    """Return the keys that lead from a config of transformers to that of the language model within it."""
    text = config.get_text_config(decoder=True)
    if text is config:
        return ()
    for key in config.sub_configs:
        own = getattr(config, key, None)
        if own is text:
            return (key,)
        if own is not None and (path := text_path(own)) and own.get_text_config(decoder=True) is text:
            return (key, *path)
    raise UnsupportedError(
        f"the language model's own config within that of a model of the family {config.model_type} is not found"
    )


def adapted_config(config: Any, model_class: str, found: FoundLayers) -> DecoderConfig:
    """Return the numbers of a model.

    config: of transformers. found: its MoE layers. Raises UnsupportedError for a config without a size that is needed.
    """
    text = config.get_text_config(decoder=True)
    values = SimpleNamespace(**text.to_dict())  # of the whole model, where layers have their own
    heads, sizes = getattr(values, "num_attention_heads", 1), {layer.hidden_size for layer in found.experts}
    if len(sizes) > 1:
        raise UnsupportedError(
            f"the experts of a model of the family {config.model_type} take inputs of "
            f"{sorted(sizes)} numbers, not of one size"
        )
    experts = {layer.index: layer for layer in found.experts}
    length = getattr(values, "max_position_embeddings", None)
    return DecoderConfig(
        architecture=Architecture(
            config.model_type,
            model_class,
            router=RouterOfTransformers(least=least_experts(text, found.experts)),
            experts=StackedInMemory(names=_BIASES) if found.experts[0].has_biases else StackedInMemory(),
            not_dense=_REASON,
            not_onnx=_REASON,
        ),
        vocabulary_size=positive(values, "vocab_size"),
        hidden_size=max(sizes),
        attention_heads=heads,
        key_value_heads=heads,
        head_dimension=-(-positive(values, "hidden_size") // heads),
        rotary_dimension=0,
        rotary_pairs=False,
        latent=None,
        qk_norm="none",
        norm_epsilon=0.0,
        qkv_bias=False,
        output_bias=False,
        head_bias=False,
        clip_qkv=None,
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        max_positions=length if isinstance(length, int) and length > 1 else _UNKNOWN_LENGTH,
        prediction_layers=0,
        layers=tuple(_layer(text, experts.get(index)) for index in range(found.count)),
        multipliers=Multipliers(),
        temperature=None,
        has_sinks=False,
        output_gate=False,
        layer_norm=False,
        zero_centered=False,
        rope_mscales=False,
        dense_positions=None,
        transformers_config=text,
    )


def _layer(text: Any, experts: ExpertLayer | None) -> LayerConfig:
    if experts is None:
        return LayerConfig(window=None, moe=None, dense_width=0)
    groups, per_token = groups_of(text)
    if experts.count % groups:
        raise UnsupportedError(f"config.json: the {experts.count} experts of a layer are not {groups} groups of one size")
    each = experts.count // groups
    moe = MoeConfig(
        experts=experts.count,
        experts_per_token=experts.per_token,
        expert_width=experts.width,
        normalise_top_k=False,
        groups=tuple(expert // each for expert in range(experts.count)) if groups > 1 else (),
        groups_per_token=per_token,
    )
    return LayerConfig(window=None, moe=moe, dense_width=0)


def groups_of(text: Any) -> tuple[int, int]:
    """Return the number of groups of experts, and how many of them a token's experts come from; (1, 1) without groups.

    Some configs name groups that their router does not use, because `topk_method` is greedy.
    """
    if getattr(text, "topk_method", None) == _WITHOUT_GROUPS:
        return 1, 1
    for count, per_token in _GROUPS:
        found = getattr(text, count, None), getattr(text, per_token, None)
        if all(type(number) is int and number >= 1 for number in found):
            return found  # type: ignore[return-value]
    return 1, 1


def least_experts(text: Any, layers: tuple[ExpertLayer, ...]) -> int:
    """Return the smallest number of experts for which the model's own router works.

    A router takes k experts of each token, from the token's best groups. Routers with groups judge each group by its two
    best experts, also if all experts are in one group.
    """
    per_token = max(layer.per_token for layer in layers)
    is_greedy = getattr(text, "topk_method", None) == _WITHOUT_GROUPS
    if is_greedy or not any(hasattr(text, key) for key, _ in _GROUPS):
        return per_token
    groups, used = groups_of(text)
    return groups * max(2, -(-per_token // used))


@dataclass(frozen=True)
class StackedInMemory(Experts):
    """Experts that transformers stacks layer by layer."""

    even_widths = True


@dataclass(frozen=True)
class RouterOfTransformers(TopK):
    """A router that only transformers runs."""

    even_groups = True
    least: int = 1  # type: ignore[misc]
