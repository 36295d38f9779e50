"""A checkpoint with random weights of a family that only transformers runs, for benchmarks of memory.

It is written tensor by tensor. The names in the files are those under which transformers saves such a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from random_model import random_tensor, write_tensors, write_tokenizer

from engine.adapted.expert_layers import skeleton
from engine.adapted.interface_families import classes_of

FAMILY = "flex_olmo"
"""A family of plain shape: softmax over all experts, no shared expert, every layer alike."""


def adapted_shape(hidden: int, layers: int, experts: int, width: int) -> dict[str, Any]:
    """Return the config.json of a model with two experts for each token."""
    return {
        "architectures": classes_of(FAMILY)[:1],
        "model_type": FAMILY,
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def write_random_adapted_model(directory: Path, config: dict[str, Any]) -> None:
    """Write config, weights ~ N(0, 1/fan-in) in bf16, and a tokenizer."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    directory.mkdir(parents=True)
    model_class = getattr(transformers, config["architectures"][0])
    model = skeleton(model_class, transformers.CONFIG_MAPPING[FAMILY](**config), torch.bfloat16)
    shapes = {name: tuple(each.shape) for name, each in revert_weight_conversion(model, model.state_dict()).items()}
    generator = torch.Generator().manual_seed(0)
    write_tensors(directory, config, shapes, lambda name: random_tensor(shapes[name], generator))
    write_tokenizer(directory, config["vocab_size"])
