"""Calibration statistics and their file, which every method reads: safetensors with a JSON header.

Shape suffixes: N routed experts of the layer, M of the MoE layer before it, K the model's top-k, D hidden, C tokens whose
experts are listed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.decoder.routing import NO_EXPERT
from engine.errors import DataError
from engine.families.config import DecoderConfig
from engine.files.json_file import shown
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state

SCHEMA_VERSION = 3
CHOSEN_TOKENS = 16_384
"""The experts of so many tokens are listed, at most: 256 kB for each layer of a model that chooses 8 for a token."""


@dataclass
class LayerStatistics:
    """Statistics of one MoE layer. Sums run over calibration tokens; "routed" means that the router selected the expert."""

    tokens: Tensor
    """[] number of tokens."""
    tokens_routed: Tensor
    """[N] number of tokens routed to each expert."""
    probability_sum: Tensor
    """[N] router probability, as `routing.probabilities` defines it, summed over all tokens."""
    routed_probability_sum: Tensor
    """[N] router probability summed over routed tokens."""
    weight_sum: Tensor
    """[N] routing weight that the model multiplies the output by, summed over routed tokens."""
    weighted_norm_sum: Tensor
    """[N] Σ weight · ‖FFN_i(x)‖₂ over routed tokens (REAP)."""
    norm_sum: Tensor
    """[N] Σ ‖FFN_i(x)‖₂ over routed tokens."""
    squared_norm_sum: Tensor
    """[N] Σ ‖FFN_i(x)‖₂² over routed tokens."""
    output_sum: Tensor
    """[N, D] Σ FFN_i(x) over routed tokens."""
    output_mean: Tensor
    """[N, D] mean of FFN_i(x) over a sample of tokens on which every expert runs, whether routed or not."""
    weighted_output_mean: Tensor
    """[N, D] mean of p_i(x)·FFN_i(x) over the same sample, where p is the router's probability."""
    router_gram: Tensor
    """[N, N] Σ z_i·z_j over all tokens, where z are the router's logits, not centered."""
    weight_ratio_median: Tensor
    """[K-1] median over tokens of w_{e_j} / w_{e_0}, j = 1..K-1 (γ1)."""
    linear_cka: Tensor
    """[N, N] linear CKA of expert outputs on the sample."""
    rbf_cka: Tensor
    """[N, N] RBF CKA of expert outputs on the sample."""
    rbf_cka_before: Tensor
    """[N, M] RBF CKA of expert outputs with those of the M experts of the MoE layer before; [N, 0] in the first layer.
    """
    unselected_probability_share: Tensor
    """[] share of the router probability on experts that are not selected (figure 1 of Every Expert Matters)."""
    input_norm_quantile: Tensor | None = None
    """[1] quantile over tokens of ‖x‖₁, the 1-norm of the router's input: one token in 50 is above it (MC-MoE protects
    these). None in statistics of an earlier version.
    """
    chosen: Tensor | None = None
    """[C, K] experts of the first C tokens of the text, in its order, as int16; −1 where a token has fewer than K. It
    says which experts are used together and after each other (calibrate/chosen.py). None in earlier versions' statistics.
    """


@dataclass
class Statistics:
    """Statistics of every MoE layer by decoder layer index, with the identity of the model and the text."""

    layers: dict[int, LayerStatistics]
    header: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write the file. An existing file is replaced only when the new one is complete."""
        tensors = {
            f"layers.{index}.{field.name}": getattr(layer, field.name).contiguous()
            for index, layer in self.layers.items()
            for field in fields(LayerStatistics)
            if getattr(layer, field.name) is not None
        }
        header = json.dumps({"schema_version": SCHEMA_VERSION} | self.header)
        write_state(path, tensors, {"statistics": header}, "statistics")


def usage_shares(layer: LayerStatistics) -> Tensor:
    """Each expert's share of the tokens routed in its layer, [N] (Cruz Salinas et al., fig. 4); equal where none are
    routed.
    """
    routed_N = layer.tokens_routed.double()
    return routed_N / routed_N.sum() if bool(routed_N.any()) else torch.full_like(routed_N, 1.0 / len(routed_N))


def effective_experts(layer: LayerStatistics) -> float:
    """Effective number of experts: exp of the entropy of usage shares; N for uniform usage, 1 where one expert gets all."""
    return float(torch.special.entr(usage_shares(layer)).sum().exp())


def load_statistics(path: Path, config: DecoderConfig) -> Statistics:
    """Read a statistics file. Raises DataError for a file of another model or an invalid file."""
    with SafetensorsFile(path) as file:
        try:
            header = json.loads(file.metadata.get("statistics", ""))
            version = header["schema_version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: not a statistics file; make one with `compress calibrate`") from error
        if version != SCHEMA_VERSION:
            raise DataError(
                f"{path}: statistics of schema {shown(version)}, this version reads {SCHEMA_VERSION}; calibrate again"
            )
        check_digest(file, may_lack=True)
        layers = {index: _read_layer(file, index, config, path) for index in config.moe_layers}
    return Statistics(layers, header)


def load_layer(path: Path, index: int, config: DecoderConfig) -> LayerStatistics:
    """Read one layer of a file that may lack the others."""
    with SafetensorsFile(path) as file:
        check_digest(file)
        return _read_layer(file, index, config, path)


def _read_layer(file: SafetensorsFile, index: int, config: DecoderConfig, path: Path) -> LayerStatistics:
    moe = config.layers[index].moe
    assert moe is not None
    experts, per_token = moe.experts, moe.experts_per_token
    before = [layer for layer in config.moe_layers if layer < index]
    shapes: Mapping[str, tuple[int, ...]] = {
        "tokens": (),
        "unselected_probability_share": (),
        "output_sum": (experts, config.hidden_size),
        "output_mean": (experts, config.hidden_size),
        "weighted_output_mean": (experts, config.hidden_size),
        "router_gram": (experts, experts),
        "weight_ratio_median": (per_token - 1,),
        "linear_cka": (experts, experts),
        "rbf_cka": (experts, experts),
        "rbf_cka_before": (experts, config.experts_by_layer[before[-1]] if before else 0),
        "input_norm_quantile": (1,),
    }
    values = {}
    for field in fields(LayerStatistics):
        name = f"layers.{index}.{field.name}"
        shape = shapes.get(field.name, (experts,))
        if name not in file.entries and field.default is None:  # earlier versions did not collect it
            continue
        if field.name == "chosen" and name in file.entries:
            shape = (*file.entries[name].shape[:1], per_token)
        if name not in file.entries or file.entries[name].shape != shape:
            raise DataError(f"{path}: {name} is missing or of another shape; these statistics are of another model")
        values[field.name] = file.tensor(name).clone()
        if not bool(torch.isfinite(values[field.name]).all()):
            raise DataError(f"{path}: {name} holds NaN or infinity; calibrate again")
    chosen_CK = values.get("chosen")
    if chosen_CK is not None and not bool(((chosen_CK >= NO_EXPERT) & (chosen_CK < experts)).all()):
        raise DataError(f"{path}: layers.{index}.chosen names experts that the layer does not have; calibrate again")
    return LayerStatistics(**values)
