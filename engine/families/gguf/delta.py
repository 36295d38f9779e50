"""The gated delta rule in GGUF files (Qwen3-Next, Qwen3.5): its sizes as metadata, and the places of its tensors.

llama.cpp has heads of values as large as those of keys, and full attention in every n-th layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import CheckpointError, UnsupportedError
from engine.families.attention import FULL, LINEAR
from engine.families.config import DecoderConfig
from engine.families.gguf.forms import AS_IT_IS, Form, HeadsInTurns, PartByPart, Places, Rate
from engine.families.gguf.metadata import Facts
from engine.families.gguf.parts import PARTIAL_ROTATION, Part, rotated_dimensions
from engine.families.layer_config import GatedDeltaConfig, SplitGatedDeltaConfig
from engine.files.json_file import shown

_INTERVAL, _USUAL_INTERVAL = "full_attention_interval", 4
_SECTIONS, _USUAL_SECTIONS = "rope.dimension_sections", [11, 11, 10]
_QUERIES_KEYS_VALUES, _GATE, _TOGETHER = "attn_qkv.weight", "attn_gate.weight", "ssm_in.weight"


def _read_delta(facts: Facts) -> dict[str, Any]:
    """Return the sizes, and the kind of each layer."""
    size, heads, interval = (
        facts.size("ssm.state_size"),
        facts.size("ssm.time_step_rank"),
        facts.size(_INTERVAL, _USUAL_INTERVAL),
    )
    facts.size("ssm.inner_size")
    facts.only("ssm.inner_size", heads * size)
    if not interval:
        raise CheckpointError(f"metadata: {facts.architecture}.{_INTERVAL} is 0; it must be at least 1")
    return {
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_num_key_heads": facts.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_conv_kernel_dim": facts.size("ssm.conv_kernel"),
        "layer_types": [LINEAR if (layer + 1) % interval else FULL for layer in facts.listed],
    }


def _write_delta(config: DecoderConfig) -> dict[str, Any]:
    sizes = next(iter(config.linear_layers.values()), None)
    if not isinstance(sizes, GatedDeltaConfig):
        raise UnsupportedError(
            "it has no layer with the gated delta rule, without which llama.cpp does not read this family"
        )
    if sizes.value_dimension != sizes.key_dimension:
        raise UnsupportedError(
            f"its linear heads have {sizes.key_dimension} dimensions of keys and {sizes.value_dimension} of values, and "
            "llama.cpp has as many of both"
        )
    return {
        "ssm.state_size": sizes.key_dimension,
        "ssm.group_count": sizes.key_heads,
        "ssm.time_step_rank": sizes.heads,
        "ssm.inner_size": sizes.heads * sizes.value_dimension,
        "ssm.conv_kernel": sizes.kernel,
        _INTERVAL: config.caching_layers[0] + 1,
    }


def _read_sections(facts: Facts) -> dict[str, Any]:
    """Return the rotation, whose dimensions are divided among the coordinates of images; texts have one coordinate."""
    found = facts.sizes(_SECTIONS)
    own = found[:3] if found[3:] == [0] else found  # files have a fourth number, and some lack it
    checked = _sections(own, rotated_dimensions(facts) // 2, f"metadata: {facts.architecture}.{_SECTIONS}")
    sections = {"mrope_section": checked, "mrope_interleaved": True}
    return {"rope_parameters": PARTIAL_ROTATION.read(facts)["rope_parameters"] | sections}


def _write_sections(config: DecoderConfig) -> dict[str, Any]:
    """Return the rotation, and its sections."""
    found = config.transformers_config.rope_parameters.get("mrope_section", _USUAL_SECTIONS)
    sections = _sections(found, config.rotary_dimension // 2, "its mrope_section")
    return {**PARTIAL_ROTATION.write(config), _SECTIONS: [*sections, 0]}


def _sections(found: Any, pairs: int, name: str) -> list[int]:
    """Return how many pairs of dimensions each of three coordinates rotates, in turns: the first pair, the fourth, ….

    Raises UnsupportedError for anything else, and where they leave pairs out, which llama.cpp does not rotate.
    """
    if not isinstance(found, list) or len(found) != 3 or any(type(each) is not int or each < 0 for each in found):
        raise UnsupportedError(f"{name} is {shown(found)}; only three numbers of pairs of dimensions are read and written")
    if any(len(range(first, pairs, 3)) > own for first, own in enumerate(found)):
        raise UnsupportedError(
            f"{name} {shown(found)} leaves out some of {pairs} rotated pairs, which llama.cpp would not rotate"
        )
    return found


def delta_places(config: DecoderConfig, layer: int, has: Callable[[str], bool]) -> Places:
    """Return the places of a layer's tensors of the gated delta rule. has: whether the file has a tensor in the block."""
    sizes = config.layers[layer].linear
    if not isinstance(sizes, GatedDeltaConfig):
        return {}
    found = _split_places(sizes) if isinstance(sizes, SplitGatedDeltaConfig) else _joined_places(sizes, has(_TOGETHER))
    return {f"{sizes.module}.{name}": place for name, place in found.items()}


def _joined_places(sizes: GatedDeltaConfig, is_together: bool) -> Places:
    """Return the places of Qwen3-Next. is_together: whether the file has the projections as the model has them."""
    values = sizes.heads * sizes.value_dimension
    own = values // sizes.key_heads
    parts = PartByPart(sizes.key_heads, (sizes.key_dimension, sizes.key_dimension, own, own))
    split = (_QUERIES_KEYS_VALUES, _GATE), Form(rows=parts, parts=(sizes.channels, values))
    return {
        "in_proj_qkvz.weight": ((_TOGETHER,), None) if is_together else split,
        "in_proj_ba.weight": (("ssm_ba.weight",), None),
        **_common_places(),
    }


def _split_places(sizes: GatedDeltaConfig) -> Places:
    """Return the places of Qwen3.5, whose heads of values are in the order in which llama.cpp repeats heads of keys."""
    shared, size, before = sizes.heads // sizes.key_heads, sizes.value_dimension, 2 * sizes.key_heads * sizes.key_dimension
    if shared == 1:
        return _projections() | _common_places()
    values, heads = (HeadsInTurns(0, sizes.key_heads, shared, rows) for rows in (size, 1))
    last = HeadsInTurns(before, sizes.key_heads, shared, size)
    return _projections(Form(rows=last), Form(rows=values), Form(rows=heads)) | _common_places(
        Form(rows=last), Form(rows=heads), Form(columns=values)
    )


def _projections(mixed: Form | None = None, gate: Form | None = None, numbers: Form | None = None) -> dict[str, Any]:
    return {
        "in_proj_qkv.weight": ((_QUERIES_KEYS_VALUES,), mixed),
        "in_proj_z.weight": ((_GATE,), gate),
        "in_proj_b.weight": (("ssm_beta.weight",), numbers),
        "in_proj_a.weight": (("ssm_alpha.weight",), numbers),
    }


def _common_places(
    filters: Form = AS_IT_IS, numbers: Form | None = None, output: Form | None = None
) -> dict[str, tuple[tuple[str, ...], Form | None]]:
    return {
        "conv1d.weight": (("ssm_conv1d.weight",), filters),
        "dt_bias": (("ssm_dt.bias",), numbers),
        "A_log": (("ssm_a",), Form(rows=numbers.rows if numbers else None, values=Rate())),
        "norm.weight": (("ssm_norm.weight",), None),
        "out_proj.weight": (("ssm_out.weight",), output),
    }


DELTA = Part(_read_delta, _write_delta)
SECTIONS = Part(_read_sections, _write_sections)
