"""The tables from which the compiled step reads the weights of all layers, and which layers it knows.

Shape suffixes: D hidden, E head dimension, H heads, P columns of queries, keys, values and gates.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.decoder.attention import Attention
from engine.decoder.experts import Expert, MoeBlock, table_rows
from engine.decoder.latent_attention import LatentAttention
from engine.decoder.recurrence import Recurrence
from engine.families.layer_config import Chunk
from engine.kernels.linear import addresses, expert_form, kernel_form, places_of
from engine.kernels.stored.quantized_weight import Weight


@dataclass
class Tables:
    """Tables from which the kernels read all layers; see `compiled.step_record`."""

    own: Any
    """The steps' copy of the table of kernels, `compiled.own_table`."""
    layers: Any
    """Records of `step.layers.LAYER`, with addresses in the others."""
    experts: Any
    shared: Any
    attention: Any
    """Records of `attention.grouped.ATTENTION`, one for each layer; those of layers with another attention are empty."""
    latent: Any
    """Those of `attention.latent.LATENT`."""
    recurrences: dict[int, Any]
    """Records of the layers with a state, by layer; see `compiled.recurrent_record`."""
    kept: list[Any]
    """Further objects whose addresses the tables hold."""


def _mixes(kernels: Any, layer: Any) -> int:
    """Return what computes the attention of this layer."""
    if isinstance(layer.attention, Recurrence):
        knows, kind = layer.attention.is_known(kernels), kernels.RECURS
    elif isinstance(layer.attention, LatentAttention):
        knows, kind = _attends_to_latents(kernels, layer.attention), kernels.LATENT
    else:
        knows, kind = _attends(kernels, layer), kernels.ATTENDS
    own: int = kind if knows else kernels.OUTSIDE
    return own


def _attends(kernels: Any, layer: Any) -> bool:
    """Return whether the kernels compute the attention of this layer."""
    attention = layer.attention
    if not isinstance(attention, Attention) or attention.unit_norm or attention.clip is not None:
        return False
    if attention.pairs and attention.qk_norm != "none":  # norms come before pairs are moved apart
        return False
    matrices = [attention.query, attention.key, attention.output, *([] if attention.value is None else [attention.value])]
    extras = [extra for extra in _attention_extras(attention) if extra is not None]
    are_plain = not extras or kernel_form(kernels, extras) == kernels.PLAIN
    return are_plain and expert_form(kernels, matrices) is not None


def _attends_to_latents(kernels: Any, attention: LatentAttention) -> bool:
    """Return whether the kernels compute this latent attention."""
    matrices = [attention.query_up, attention.latent_down, attention.output]
    matrices += [] if attention.query_down is None else [attention.query_down]
    vectors = [attention.query_down_bias, attention.query_norm, attention.latent_down_bias, attention.latent_norm]
    plain = [each for each in (*vectors, attention.output_bias, attention.latent_up) if each is not None]
    return kernel_form(kernels, plain) == kernels.PLAIN and expert_form(kernels, matrices) is not None


def serves_layer(kernels: Any, layer: Any) -> bool:
    """Return whether the kernels support all parts of this layer, but for attention and the choice of experts."""
    ffn = layer.feed_forward
    if layer.residuals is not None or (layer.output_norms is not None and layer.zero_centered):
        return False
    if layer.attention_norm_bias is not None or layer.feed_forward_norm_bias is not None:
        return False
    plain = [layer.attention_norm, layer.feed_forward_norm, *(layer.output_norms or ()), layer.scalar_1]
    experts: list[list[Weight]] = []
    if isinstance(ffn, MoeBlock):
        if ffn.scales_inputs:
            return False
        plain += [ffn.shared_gate_1D, *(() if ffn.own_norms is None else ffn.own_norms.weights)]
        routed = _routed_experts(ffn)
        plain += [bias for expert in routed for bias in expert.projections[3:] if isinstance(bias, Tensor)]
        experts.append(_matrices(routed))
    alone = _alone(ffn)
    if alone is not None and alone.gate_F is not None:
        return False
    experts += [] if alone is None else [_matrices([alone])]
    given = [weight for weight in plain if weight is not None]
    return kernel_form(kernels, given) == kernels.PLAIN and all(expert_form(kernels, each) for each in experts)


def _attention_extras(attention: Attention) -> list[Tensor | None]:
    """Return the biases of query, key, value and output, and the norms of query and key."""
    biases = [attention.query_bias, attention.key_bias, attention.value_bias, attention.output_bias]
    return [*biases, attention.query_norm, attention.key_norm]


def _alone(ffn: MoeBlock | Expert | None) -> Expert | None:
    """Return the expert for every token: the shared expert, or a dense layer's FFN."""
    return ffn.shared if isinstance(ffn, MoeBlock) else ffn


def tables_of(kernels: Any, layers: Any) -> Tables:
    """Return the tables of supported layers, without the routings."""
    table = np.zeros(len(layers), kernels.LAYER)
    routed = [_routed_experts(layer.feed_forward) for layer in layers]
    alone = [_alone(layer.feed_forward) for layer in layers]
    made = [
        [table_rows(kernels, own, _expert_form(kernels, own)) for own in every if own]
        for every in (routed, [[one] for one in alone if one is not None])
    ]
    experts, shared = (kernels.expert_table(itertools.chain(*(rows for rows, _ in every))) for every in made)
    of_layers = [0 if layer.attention_norm is None else _mixes(kernels, layer) for layer in layers]
    counts = {kind: len(layers) if kind in of_layers else 0 for kind in (kernels.ATTENDS, kernels.LATENT)}
    copy = kernels.own_table()
    attention, latent = (kernels.attention_records(count, kind, copy) for kind, count in counts.items())
    recurrences: dict[int, Any] = {}
    kept: list[Any] = [kept for every in made for _, kept in every]
    next_expert, next_shared = int(experts.ctypes.data), int(shared.ctypes.data)
    for number, (row, layer, own, one) in enumerate(zip(table, layers, routed, alone, strict=True)):
        if layer.attention_norm is not None:
            row["attention_norm"] = layer.attention_norm.data_ptr()
            row["mixes"] = of_layers[number]
        if layer.feed_forward_norm is not None:
            row["ffn_norm"], row["feeds"] = layer.feed_forward_norm.data_ptr(), 1
        if layer.output_norms is not None:
            row["attention_output_norm"], row["ffn_output_norm"] = (norm.data_ptr() for norm in layer.output_norms)
        row["factor"] = _address(layer.scalar_1)
        if row["mixes"] == kernels.ATTENDS:
            kept.append(_fill_attention(kernels, row, attention[number : number + 1], layer.attention))
        if row["mixes"] == kernels.LATENT:
            kept.append(_fill_latent(kernels, row, latent[number : number + 1], layer.attention))
        if row["mixes"] == kernels.RECURS:
            recurrences[number], parts = _fill_recurrence(kernels, row, layer.attention)
            recurrences[number]["kernels"] = copy.ctypes.data
            kept.append(parts)
        if isinstance(layer.feed_forward, MoeBlock):
            _fill_experts(kernels, row, layer.feed_forward, own)
            row["experts"] = next_expert
            next_expert += len(own) * experts.itemsize
        if one is not None:
            row["shared"], row["shared_form"] = next_shared, kernels.form_address(_expert_form(kernels, [one]))
            row["shared_alpha"], row["shared_limit"] = _activation(kernels, one)
            next_shared += shared.itemsize
    return Tables(copy, table, experts, shared, attention, latent, recurrences, kept)


def _fill_attention(kernels: Any, row: Any, record: Any, attention: Attention) -> list[Any]:
    """Write the projections of a layer, and what is the same at every position, into its records.

    record: array of one ATTENTION. Returns objects that must live as long as the records.
    """
    parts = ("query", "key", "output") if attention.value is None else ("query", "key", "value", "output")
    matrices: list[Weight] = [getattr(attention, part) for part in parts]
    kept = _fill_matrices(kernels, row, parts, matrices)
    extras = (*(f"{part}_bias" for part in ("query", "key", "value", "output")), "query_norm", "key_norm")
    for name, extra in zip(extras, _attention_extras(attention), strict=True):
        row[name] = _address(extra)
    row["head_norms"] = {"none": kernels.NO_NORM, "head": kernels.HEAD_NORM, "full": kernels.WHOLE_NORM}[attention.qk_norm]
    sources_P, ones_E = attention.sources_P, torch.ones(attention.head_dimension, dtype=torch.bfloat16)
    row["columns"] = sum(matrix.shape[0] for matrix in matrices[:-1])
    row["parts"] = row["columns"] if sources_P is None else len(sources_P)
    row["sources"], row["is_gated"] = _address(sources_P), int(attention.has_gate)
    row["value_norm"] = ones_E.data_ptr() if attention.value_norm else 0
    sinks_H = None if attention.sinks is None else attention.sinks.detach().float().contiguous()
    record["heads"], record["groups"], record["size"] = attention.query_heads, attention.key_heads, attention.head_dimension
    record["window"] = -attention.window.size if isinstance(attention.window, Chunk) else attention.window or 0
    record["sinks"], record["scale"] = _address(sinks_H), attention.scale
    row["attention"] = record.ctypes.data
    return [kept, sources_P, ones_E, sinks_H]


def _fill_matrices(kernels: Any, row: Any, parts: Sequence[str], matrices: Sequence[Weight]) -> Any:
    """Write the matrices of attention and their form into a layer's record. Returns what must live as long as the record."""
    form = expert_form(kernels, matrices)
    assert form is not None, "only layers that the kernels know have tables"
    places, kept = places_of(kernels, matrices, form)
    for part, place in zip(parts, places, strict=True):
        row[part] = place
    row["form"] = kernels.form_address(form)
    return kept


def _fill_latent(kernels: Any, row: Any, record: Any, attention: LatentAttention) -> Any:
    """Write the projections of a layer, and what is the same at every position, into its records.

    Returns what must live as long as the records.
    """
    sizes, down = attention.sizes, attention.query_down
    parts = {"query": attention.query_up, "key": attention.latent_down, "output": attention.output}
    parts |= {} if down is None else {"value": down}
    kept = _fill_matrices(kernels, row, list(parts), list(parts.values()))
    row["columns"] = 0 if down is None else down.shape[0]
    row["query_bias"], row["key_bias"] = _address(attention.query_down_bias), _address(attention.latent_down_bias)
    row["query_norm"], row["key_norm"] = _address(attention.query_norm), _address(attention.latent_norm)
    row["output_bias"] = _address(attention.output_bias)
    record["heads"], record["plain"], record["rotated"] = attention.heads, sizes.plain_dimension, sizes.rotary_dimension
    record["rank"], record["value_size"] = sizes.key_value_rank, sizes.value_dimension
    record["up"], record["pairs"], record["scale"] = _address(attention.latent_up), int(attention.pairs), attention.scale
    row["attention"] = record.ctypes.data
    return kept


def _fill_recurrence(kernels: Any, row: Any, layer: Recurrence) -> tuple[Any, list[Any]]:
    """Write a layer with a state into its record. Returns the record of its kernel, and objects that must live as long."""
    record, table, kept = layer.table(kernels)
    form = kernel_form(kernels, [layer.output])
    assert form is not None, "only layers that the kernels know have tables"
    row["recurrent"], row["output"], row["form"] = table.ctypes.data, addresses(layer.output), kernels.form_address(form)
    return record, [table, *kept]


def _fill_experts(kernels: Any, row: Any, block: MoeBlock, experts: list[Expert]) -> None:
    """Write the router, and what the routed experts have in common, into the record of a layer."""
    row["router"], row["router_bias"] = addresses(block.router_ND), _address(block.logit_bias_N)
    row["shared_gate"] = _address(block.shared_gate_1D), 0
    row["expert_count"], row["expert_form"] = len(experts), kernels.form_address(_expert_form(kernels, experts))
    row["alpha"], row["limit"] = _activation(kernels, experts[0])
    if block.own_norms is not None:
        norms = block.own_norms
        row["shared_norm"], row["shared_output_norm"] = norms.shared_D.data_ptr(), norms.after_shared_D.data_ptr()
        row["routed_output_norm"], row["router_norm"] = norms.after_routed_D.data_ptr(), norms.router_D.data_ptr()


def _activation(kernels: Any, expert: Expert) -> tuple[float, float]:
    """Return α and limit of an expert, as in `experts.EXPERTS`."""
    if not expert.has_gate:
        return kernels.WITHOUT_GATE[0], kernels.WITHOUT_GATE[1]
    return (1.0, 0.0) if expert.swiglu is None else (expert.swiglu.alpha, expert.swiglu.limit)


def _routed_experts(ffn: MoeBlock | Expert | None) -> list[Expert]:
    return [expert for expert in ffn.experts if isinstance(expert, Expert)] if isinstance(ffn, MoeBlock) else []


def _matrices(experts: Sequence[Expert]) -> list[Weight]:
    return [weight for expert in experts for weight in expert.projections[:3]]


def _expert_form(kernels: Any, experts: Sequence[Expert]) -> tuple[int | str, int]:
    form = expert_form(kernels, _matrices(experts))
    assert form is not None, "only layers that the kernels serve have tables"
    return form


def _address(tensor: Weight | None) -> int:
    return 0 if tensor is None else addresses(tensor)[0]
