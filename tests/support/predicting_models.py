"""Tiny models with a layer for multi-token prediction, with all of its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from conftest import save_reference
from safetensors.torch import load_file, save_file
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint

AROUND = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
FORMS: dict[str, tuple[str | None, str, tuple[str, ...], str]] = {
    "deepseek_v3": ("num_nextn_predict_layers", "model.layers.3.", AROUND, "model.layers.3."),
    "glm4_moe": ("num_nextn_predict_layers", "model.layers.3.", AROUND, "model.layers.3."),
    "glm4_moe_lite": ("num_nextn_predict_layers", "model.layers.3.", AROUND, "model.layers.3."),
    "minimax_m2": ("num_mtp_modules", "model.layers.3.", AROUND, "model.layers.3."),
    "qwen3_next": (None, "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "mtp.layers.0."),
}
"""Config key of the number of layers for prediction; prefix and names of the tensors around the layer (norm of the
embedding, norm of the state, projection, last norm); and prefix of the layer's own tensors."""


def save_predicting(family: str, path: Path, own: Mapping[str, Tensor] | None = None) -> Checkpoint:
    """Save a model whose layer for prediction has the weights of its last layer with attention and experts plus noise.

    own: tensors around the layer in place of random ones, by name.
    """
    save_reference(family, path, vocab_size=VOCABULARY)
    add_tokenizer(path)
    config = Checkpoint(path).config
    last = max(set(config.moe_layers) - config.linear_layers.keys())
    key, around, names, prefix = FORMS[family]
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(3)
    added = {
        prefix + name.partition(f".{last}.")[2]: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
        if f"layers.{last}." in name
    }
    hidden = config.hidden_size
    for name in names:
        is_matrix = name == names[2]
        made = torch.randn(hidden, 2 * hidden if is_matrix else 1, generator=generator)
        made = made / hidden**0.5 if is_matrix else 1.0 + 0.1 * made[:, 0]
        added[f"{around}{name}.weight"] = (own or {}).get(name, made)
    save_file(tensors | added, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | ({} if key is None else {key: 1})))
    return Checkpoint(path)
