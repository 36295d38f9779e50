"""Tiny random models of every family of the installed transformers whose experts share an interface, from its config class.

A tiny config is the family's default config with small sizes; what a family asks for besides is in CHANGES. `masked` gives
the reference for removed experts: the whole model, whose routers cannot choose them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from adapted_references import random_units, text_gradients, without_units
from diep_references import gradients_of_steps, gradients_of_whole_model
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compress.methods.gate_gradients import gate_gradients
from compress.plans.apply import apply
from compress.plans.plan import pruning_plan
from compress.plans.selection import moe_configs
from compress.plans.unit_selection import units_plan
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_gradients import AdaptedLayerwiseDecoder
from engine.adapted.adapted_pass import adapted_pass
from engine.adapted.expert_layers import replaced_forwards
from engine.adapted.interface_families import Family, interface_families
from engine.adapted.layer_sizes import BLOCKS_KEY
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import UnsupportedError
from engine.passes.memory_budget import MemoryBudget
from engine.transformers_models.transformers_model import quiet_transformers

LAYERS, EXPERTS, VOCABULARY = 4, 8, 96
SIZES: tuple[tuple[str, int], ...] = (
    ("num_hidden_layers|n_layer|num_layers", LAYERS),
    ("depth|num_decoder_layers|encoder_layers|num_stages", 2),
    ("vocab_size|vocab_size_per_layer_input", VOCABULARY),
    ("num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_moe_experts|n_experts", EXPERTS),
    ("num_experts_per_tok(en)?|experts_per_token|moe_topk|moe_k|top_k_experts|moe_top_k|moe_router_topk|topk|top_k", 2),
    ("n_shared_experts|num_shared_experts|moe_num_shared_experts|num_shared_expert", 1),
    ("n_group|num_expert_group|moe_n_group", 2),
    ("topk_group|first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (".*(intermediate_size|intermediate_dim|ffn_dim|ffn_hidden_size|expert_dim)(_mlp)?", 16),
    (".*lora_rank", 16),
    ("qk_rope_head_dim|qk_nope_head_dim", 4),
    ("qk_head_dim|v_head_dim|(index|indexer)_head_dim|indexer_dim|index_topk", 8),
    ("index_n_heads|index_num_heads|indexer_num_heads", 2),
    ("(linear_|global_|swa_)?(key_|value_|v_)?head_dim|linear_(key|value)_head_dim", 8),
    ("linear_num_key_heads|(swa_)?num_(global_)?key_value_heads|n_kv_heads", 2),
    ("linear_num_value_heads|(swa_)?num_attention_heads|n_heads|num_heads|encoder_attention_heads", 4),
    ("hidden_size|d_model|embed_dim|moe_latent_size|moe_hidden_size|router_hidden_size|out_hidden_size|output_dim", 32),
    ("hidden_size_per_layer_input", 8),
    ("max_position_embeddings", 64),
    ("sliding_window.*|attention_chunk_size|local_window.*", 8),
    ("mamba_num_heads|mamba_n_heads|mamba_dt_rank", 4),
    ("mamba_head_dim|mamba_d_head", 16),
    ("ssm_state_size|mamba_d_state|chunk_size|mamba_chunk_size", 8),
    ("n_groups|mamba_n_groups", 1),
    ("mamba_expand|expand", 2),
    (".*(nextn|mtp).*(layers|modules)", 0),
    ("image_size|img_size", 28),
    ("patch_size", 14),
)
"""Patterns of config keys, with the size of a tiny model."""
_GEMMA = {"num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 16}
_SPARSE = ["dense", "sparse", "sparse", "sparse"]
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_ocr2": {"num_experts_per_tok": 2, "mlp_layer_types": _SPARSE},
    "diffusion_gemma": _GEMMA,
    "ernie4_5_vl_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "gemma4_text": _GEMMA | {"enable_moe_block": True},
    "glm4v_moe": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "deepseek_v2": {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    "glm5_next": {"num_key_value_heads": 4, "index_topk": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": EXPERTS, "moe_topk": 2, "eod_token_id": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "num_hidden_layers": LAYERS + 1,
        "moe_latent_size": 48,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Entries of the language model's config that a family needs besides."""
TOKENS_SL = torch.randint(3, 90, (3, 16), generator=torch.Generator().manual_seed(1))


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Return a tiny config of a family."""
    from transformers import CONFIG_MAPPING

    small = _small(CONFIG_MAPPING[model_type]())
    text = small["text_config"] if isinstance(small.get("text_config"), dict) else small
    if text.get("kv_lora_rank"):
        text["num_key_value_heads"] = text["num_attention_heads"]
        if "head_dim" in text:
            text["head_dim"] = text.get("qk_rope_head_dim", 4)
    text |= {**CHANGES.get(model_type, {}), **changes}
    return CONFIG_MAPPING[model_type](**small)


def _small(config: Any) -> dict[str, Any]:
    """Return the entries of a config whose values change."""
    from transformers import PreTrainedConfig

    found: dict[str, Any] = {}
    values = config.to_dict() | {key: value for key, value in vars(config).items() if not key.startswith("_")}
    for key, value in values.items():
        if isinstance(value, PreTrainedConfig):
            found[key] = _small(value)
        elif re.fullmatch(".*token_(id|ids|index)", key):
            found |= _entry(key, _tokens(value), value)
        elif isinstance(value, list) and len(value) > 8 and re.search("layer|pattern|ratio|type", key):
            kinds = list(dict.fromkeys(map(str, value)))
            if isinstance(value[0], str | int) and len(kinds) <= LAYERS:
                each = [next(one for one in value if str(one) == kind) for kind in kinds]
                found[key] = [*each, *value[len(value) - LAYERS + len(each) :]][:LAYERS]
        elif type(value) is int and value:
            size = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), value)
            found |= _entry(key, min(size, value) if re.search("group|shared|first_k", key) else size, value)
    return found


def _entry(key: str, small: Any, value: Any) -> dict[str, Any]:
    return {} if small == value else {key: small}


def _tokens(value: Any) -> Any:
    if isinstance(value, list):
        return [_tokens(each) for each in value]
    return min(value, VOCABULARY - 1) if isinstance(value, int) else value


def save_tiny(family: Family, path: Path, **changes: Any) -> Any:
    """Save a tiny random model of a family as transformers does; return the model that transformers loads from there."""
    return save_random(family, tiny_config(family.model_type, **changes), path)


def save_random(family: Family, config: Any, path: Path) -> Any:
    """Save a random model of a config; return the model that transformers loads from there."""
    import transformers

    model_class = getattr(transformers, family.model_class)
    torch.manual_seed(0)
    with quiet_transformers():
        model = model_class(config).eval()
        generator = torch.Generator().manual_seed(2)
        for name, tensor in model.named_parameters():
            if tensor.is_floating_point():
                scale = 0.3 / max(1, tensor.shape[-1] if tensor.dim() else 1) ** 0.5
                offset = 1.0 if tensor.dim() == 1 and "norm" in name and name.endswith("weight") else 0.0
                tensor.data = (torch.randn(tensor.shape, generator=generator) * scale + offset).to(tensor.dtype)
        model.save_pretrained(path)
        return loaded(family, path)


def remotely(path: Path) -> Any:
    """Return the model in a directory, as transformers loads it with the modeling file there.

    A process of transformers keeps the class of the first file for families without a class for text.
    """
    from transformers import AutoModelForCausalLM

    mapping: Any = AutoModelForCausalLM._model_mapping
    with quiet_transformers():
        try:
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=True).eval()
        finally:
            mapping._extra_content.clear()


def loaded(family: Family, path: Path) -> Any:
    """Return the model in a directory, as transformers loads it."""
    import transformers

    with quiet_transformers():
        return getattr(transformers, family.model_class).from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    """Return the logits of TOKENS_SL, [S, L, V]."""
    made: Tensor = model(input_ids=TOKENS_SL, use_cache=False).logits
    return made


def some_removed(checkpoint: AdaptedCheckpoint, *, is_ragged: bool = False) -> dict[int, list[int]]:
    """Return about five eighths of the experts of each layer, other ones in each, as many of each group.

    is_ragged: whether every second layer keeps the fewest that its router works with, or one expert of each group fewer.
    """
    kept, least = {}, checkpoint.config.architecture.least_experts
    for place, (layer, moe) in enumerate(moe_configs(checkpoint.config).items()):
        groups = max(moe.groups, default=0) + 1
        each, size = max(-(-5 // groups), -(-least // groups)), moe.experts // groups
        if is_ragged and place % 2 == 0:
            each = each - 1 if each > -(-least // groups) else min(each + 1, size)
        generator = torch.Generator().manual_seed(layer)
        chosen = [torch.randperm(size, generator=generator)[:each] + group * size for group in range(groups)]
        kept[layer] = sorted(int(expert) for own in chosen for expert in own)
    return kept


class _MaskedLogits(TorchFunctionMode):
    """Makes the router's first product with an entry for each expert −∞ for removed experts."""

    def __init__(self, removed: list[int], size: int) -> None:
        super().__init__()
        self.removed, self.size, self.is_done = removed, size, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        products = (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
        if not self.is_done and func in products and made.shape[-1] == self.size:
            self.is_done, made = True, made.index_fill(-1, torch.tensor(self.removed, dtype=torch.long), -torch.inf)
        return made


@contextmanager
def masked(model: Any, checkpoint: AdaptedCheckpoint, kept: Mapping[int, list[int]]) -> Iterator[None]:
    """Let no router of a model of transformers choose the experts that are not kept, during the body.

    Their logits are −∞, and so are their biases, which are added after a sigmoid.
    """
    functions, biases = {}, []
    for layer in checkpoint.found.experts:
        removed = [expert for expert in range(layer.count) if expert not in kept[layer.index]]
        place = f"{checkpoint.found.layers}.{layer.index}."
        axes = {name: axis for name, axis in checkpoint.count_key.axes.items() if name.startswith(place)}
        router = model.get_submodule(layer.router)
        size = layer.count + max(axis.further for axis in axes.values())
        functions[router] = partial(_routed, type(router).forward, router, removed, size)
        for name, axis in axes.items():
            own = name.rpartition(".")[2]
            if "bias" in own and not name.startswith(f"{layer.experts}.") and name != f"{layer.router}.bias":
                tensor = model.get_parameter_or_buffer(name)
                biases.append((tensor, tensor.data.clone()))
                tensor.data.index_fill_(axis.axis, torch.tensor(removed, dtype=torch.long), -torch.inf)
    try:
        with replaced_forwards(functions):
            yield
    finally:
        for tensor, before in biases:
            tensor.data.copy_(before)


def _routed(forward: Any, router: Any, removed: list[int], size: int, *given: Any, **options: Any) -> Any:
    with _MaskedLogits(removed, size) as mode:
        made = forward(router, *given, **options)
    assert mode.is_done, "the router's logits are no product of its input"
    return made


def by_name(name: str) -> Family:
    """Return a family of the installed transformers."""
    return next(family for family in interface_families() if family.name == name)


def through_layers(checkpoint: Checkpoint) -> Tensor:
    """Return the logits of TOKENS_SL from a pass that has one layer in memory at a time, in batches of one sequence."""
    assert isinstance(checkpoint, AdaptedCheckpoint)
    found: list[Tensor] = []
    adapted_pass(
        *(checkpoint, TOKENS_SL, lambda index, layer: None, lambda rows, logits_BLV: found.append(logits_BLV)),
        dtype=torch.float32,
        budget=MemoryBudget(tokens_per_batch=TOKENS_SL.shape[1]),
    )
    return torch.cat(found)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of a logit."""
    return float((found - expected).abs().max())


COLUMNS = (
    "layer by layer",
    "pruned, in transformers",
    "pruned, layer by layer",
    "pruned, non-uniform",
    "gate gradients",
    "DiEP",
    "DiEP, routed",
    "units removed",
    "units, by layer",
)
"""A pass layer by layer, a model without some experts as transformers runs it and layer by layer, one whose layers keep
different numbers of experts, in both ways, gate gradients, those of DiEP's scores (paper and gated, then routed), a
model whose experts have half of their hidden units, and one whose layers keep different numbers of experts and of units."""
Cell = float | str
"""The largest difference from the reference, or why there is none."""


def measured(family: Family, path: Path) -> dict[str, Cell] | str:
    """Return the cell of each column, or why the family is refused.

    References are whole models of transformers: with routers that cannot choose the removed experts, and with hidden units
    that are multiplied by zero. Gradients are compared with autograd, in shares of the largest one: of a layer for gates, of
    all for DiEP's scores.
    """
    if not family.model_type:
        return "none of its classes returns logits for text"
    model = save_tiny(family, path / "full")
    try:
        checkpoint = AdaptedCheckpoint(path / "full")
        found: dict[str, Cell] = {COLUMNS[0]: difference(through_layers(checkpoint), logits_of(model))}
        kept = some_removed(checkpoint)
        (path / "pruned").mkdir()
        apply(pruning_plan(kept), checkpoint, path / "pruned")
    except UnsupportedError as error:
        return _reason(error, path / "full")
    whole = logits_of(model)
    with masked(model, checkpoint, kept):
        reference = logits_of(model)
    assert difference(reference, whole) > 1e-3, "the model's logits do not depend on the removed experts"
    pruned = AdaptedCheckpoint(path / "pruned")
    found[COLUMNS[1]] = difference(logits_of(loaded(family, path / "pruned")), reference)
    found |= {COLUMNS[2]: difference(through_layers(pruned), reference)}
    return found | {
        COLUMNS[3]: ragged_difference(model, checkpoint, path / "ragged"),
        COLUMNS[4]: _of_gradients(model, checkpoint),
        COLUMNS[5]: _of_search(model, checkpoint, "paper", "gated"),
        COLUMNS[6]: _of_search(model, checkpoint, "routed"),
        COLUMNS[7]: _without_units(family, model, checkpoint, path),
        COLUMNS[8]: ragged_units_difference(model, checkpoint, path / "widths"),
    }


def _reason(error: Exception, directory: Path) -> str:
    return str(error).removeprefix(f"{directory}: ")


def ragged_difference(model: Any, checkpoint: AdaptedCheckpoint, path: Path) -> Cell:
    """Return the largest difference of a logit of a model whose layers keep different numbers of experts.

    The result is loaded by transformers with the modeling file of its directory, and through our adapter without it.
    """
    kept, whole = some_removed(checkpoint, is_ragged=True), logits_of(model)
    assert len({len(own) for own in kept.values()}) > 1, "the layers keep the same number of experts"
    path.mkdir()
    try:
        apply(pruning_plan(kept), checkpoint, path)
    except UnsupportedError as error:
        return _reason(error, checkpoint.directory)
    with masked(model, checkpoint, kept):
        reference = logits_of(model)
    assert difference(reference, whole) > 1e-3, "the model's logits do not depend on the removed experts"
    result = AdaptedCheckpoint(path)
    assert result.config.experts_by_layer == {layer: len(own) for layer, own in kept.items()}
    return max(difference(logits_of(remotely(path)), reference), difference(through_layers(result), reference))


def _of_gradients(model: Any, checkpoint: AdaptedCheckpoint) -> float:
    """Return the largest difference of a gate gradient from autograd over the whole model."""
    expected, _ = text_gradients(model, checkpoint, TOKENS_SL)
    own, _ = gate_gradients(AdaptedLayerwiseDecoder(checkpoint, torch.float32), TOKENS_SL, own_samples=False)
    return max(float((own[layer] - row).abs().max() / row.abs().max()) for layer, row in expected.items())


def _of_search(model: Any, checkpoint: AdaptedCheckpoint, *relaxations: str) -> Cell:
    """Return the largest difference of a gradient of DiEP's scores through these relaxed layers."""
    decoder, differences = AdaptedLayerwiseDecoder(checkpoint, torch.float32), []
    try:
        checkpoint.check_states()
        for relaxation in relaxations:
            _, own = gradients_of_steps(decoder, TOKENS_SL, relaxation, MemoryBudget())
            _, expected = gradients_of_whole_model(model, checkpoint, TOKENS_SL, relaxation)
            differences.append(difference(own, expected) / float(expected.abs().max()))
    except UnsupportedError as error:
        return _reason(error, checkpoint.directory)
    return max(differences)


def ragged_units(checkpoint: AdaptedCheckpoint, kept: Mapping[int, list[int]]) -> dict[int, list[list[int]]]:
    """Return the hidden units that stay: none of removed experts, and of the others as many as their layer keeps.

    The kernels of transformers take rows of multiples of 16 bytes.
    """
    found: dict[int, list[list[int]]] = {}
    for place, layer in enumerate(checkpoint.found.experts):
        units = random_units(checkpoint, layer.width - 4 * (place % 3))[layer.index]
        found[layer.index] = [own if expert in kept[layer.index] else [] for expert, own in enumerate(units)]
    return found


def ragged_units_difference(model: Any, checkpoint: AdaptedCheckpoint, path: Path) -> Cell:
    """Return what `ragged_difference` returns, where layers also keep different numbers of hidden units of their experts."""
    kept, whole = some_removed(checkpoint, is_ragged=True), logits_of(model)
    units = ragged_units(checkpoint, kept)
    path.mkdir()
    try:
        apply(units_plan(units, checkpoint.config.ffn_widths()), checkpoint, path)
    except UnsupportedError as error:
        return _reason(error, checkpoint.directory)
    with masked(model, checkpoint, kept), without_units(model, checkpoint, units):
        reference = logits_of(model)
    assert difference(reference, whole) > 1e-3, "the model's logits do not depend on what is removed"
    result = AdaptedCheckpoint(path)
    assert result.config.ffn_widths() == {layer: tuple(len(each) for each in own if each) for layer, own in units.items()}
    return max(difference(logits_of(remotely(path)), reference), difference(through_layers(result), reference))


def _without_units(family: Family, model: Any, checkpoint: AdaptedCheckpoint, path: Path) -> Cell:
    """Return the largest difference of a logit of a model whose experts have half of their hidden units."""
    kept, whole = random_units(checkpoint, checkpoint.found.experts[0].width // 2), logits_of(model)
    (path / "narrowed").mkdir()
    try:
        apply(units_plan(kept, checkpoint.config.ffn_widths()), checkpoint, path / "narrowed")
    except UnsupportedError as error:
        return _reason(error, checkpoint.directory)
    with without_units(model, checkpoint, kept):
        reference = logits_of(model)
    assert difference(reference, whole) > 1e-4, "the model's logits do not depend on the removed hidden units"
    narrowed = AdaptedCheckpoint(path / "narrowed")
    assert narrowed.found.experts[0].width == len(kept[checkpoint.found.experts[0].index][0])
    is_plain = BLOCKS_KEY not in narrowed.raw_config
    made = loaded(family, path / "narrowed") if is_plain else remotely(path / "narrowed")
    return max(difference(logits_of(made), reference), difference(through_layers(narrowed), reference))
