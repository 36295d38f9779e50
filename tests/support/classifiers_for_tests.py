"""Tiny random classifiers of several families, and examples for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers_for_tests import VOCABULARY, add_tokenizer

TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IMAGES: dict[str, dict[str, Any]] = {
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"},
    "mobilenet_v2": {"depth_multiplier": 0.1, "min_depth": 4, "finegrained_output": False, "image_size": 16},
    "convnext": {"hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "image_size": 16},
    "vit": TRANSFORMER | {"image_size": 16, "patch_size": 8},
}
TEXTS: dict[str, dict[str, Any]] = {"bert": TRANSFORMER | {"max_position_embeddings": 40}}
FAMILIES = IMAGES | TEXTS
SIZE, CLASSES = 16, 3


def classifier(family: str, path: Path, seed: int = 0, classes: int = CLASSES, **changes: Any) -> Any:
    """Save and return a transformers model with random weights, large enough that differences show in the logits."""
    from transformers import CONFIG_MAPPING, AutoModelForImageClassification, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    own = {"num_channels": 1} if family in IMAGES else {}
    if family in TEXTS:
        own = {"vocab_size": VOCABULARY, "pad_token_id": 0}
        add_tokenizer(path)
    config = CONFIG_MAPPING[family](num_labels=classes, **(own | FAMILIES[family] | changes))
    auto = AutoModelForImageClassification if family in IMAGES else AutoModelForSequenceClassification
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3 if "classifier" in name else 1.5 / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "running_var" in name:
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return model


def shades(path: Path, count: int = 60, size: int = SIZE) -> Path:
    """Write an .npz of noisy images whose class is their brightness. A few steps suffice to learn it."""
    generator = np.random.default_rng(0)
    labels = np.arange(count) % CLASSES
    images = generator.integers(0, 100, (count, size, size), dtype=np.uint8) + (70 * labels).astype(np.uint8)[:, None, None]
    np.savez(path, images=images, labels=labels)
    return path


def sentences(path: Path, count: int = 60) -> Path:
    """Write a .jsonl of texts whose class is a word in them."""
    words = ("alpha", "beta", "gamma")
    rows = [
        {"text": f"{number} {words[number % 3]} and {number * 7}", "label": words[number % 3]} for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
