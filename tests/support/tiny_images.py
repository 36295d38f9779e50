"""Tiny random image-and-text models with processors of their own, pictures, and the inputs of a prompt made by hand.

The references share nothing with our reader of images but transformers' image processors: tokens are put together here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_families import save_random, tiny_config
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from torch import Tensor

from engine.adapted.interface_families import Family

TOKENS = {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>", "video_token": "<|video|>"}
"""Special tokens by the names that processors ask a tokenizer for. Their ids follow those of the bytes. Some models tell
images apart by what is between them."""
FURTHER = {"boa_token": "<boi>", "eoa_token": "<eoi>"}
IMAGE, BEGIN, END, VIDEO = range(259, 263)
LENGTH = 512
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<boi><img><eoi>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "<s>assistant:"
)
_PATCHES = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 784, "longest_edge": 6272},
}
_SOFT_TOKENS = {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3}
_GEMMA = {
    "vocab_size_per_layer_input": VOCABULARY,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
_SMALL_VISION = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 32, "patch_size": 4, "position_embedding_size": 64, "pooling_kernel_size": 3},
}


@dataclass(frozen=True)
class ImageFamily:
    """A family of image-and-text models whose processor works without torchvision."""

    model_type: str
    model_class: str
    processor: str
    preprocessor: Mapping[str, Any]
    """Content of preprocessor_config.json."""
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    encloses: bool = False
    """Whether the processor puts tokens around those of an image."""


def _rope(*sections: int, **further: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections], **further}}


FAMILIES = {
    each.model_type: each
    for each in (
        ImageFamily(
            *("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "Qwen3VLProcessor"),
            {"image_processor_type": "Qwen2VLImageProcessorFast", **_PATCHES},
            text=_rope(2, 1, 1),
            vision={"deepstack_visual_indexes": [0]},
        ),
        ImageFamily(
            *("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "Qwen3VLProcessor"),
            {"image_processor_type": "Qwen2VLImageProcessorFast", **_PATCHES},
            text={"head_dim": 16, **_rope(2, 1, 1, partial_rotary_factor=0.5)},
        ),
        ImageFamily(
            *("glm4v_moe", "Glm4vMoeForConditionalGeneration", "Glm4vProcessor"),
            {"image_processor_type": "Glm4vImageProcessor", **_PATCHES},
        ),
        ImageFamily(
            *("gemma4", "Gemma4ForConditionalGeneration", "Gemma4Processor"),
            {"image_processor_type": "Gemma4ImageProcessor", **_SOFT_TOKENS},
            text=_GEMMA,
            vision=_SMALL_VISION,
            encloses=True,
        ),
    )
}


def save_images(name: str, path: Path, *, template: str | None = TEMPLATE) -> Any:
    """Save a tiny model with its tokenizer and processor; return the model that transformers loads from there."""
    family = FAMILIES[name]
    config = tiny_config(name, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **family.text)
    if config.vision_config is None:
        config = type(config)(text_config=config.text_config, vision_config=dict(family.vision), audio_config=None)
    for key, value in family.vision.items():
        setattr(config.vision_config, key, value)
    for key in vars(config):
        known = {"image_token_id": IMAGE, "video_token_id": VIDEO, "boi_token_id": BEGIN, "eoi_token_id": END}
        if key in known:
            setattr(config, key, known[key])
    model = save_random(Family(name, name, family.model_class), config, path)
    add_tokenizer(path, **TOKENS, **FURTHER)
    (path / "preprocessor_config.json").write_text(json.dumps({**family.preprocessor, "processor_class": family.processor}))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return model


def picture(seed: int = 0, width: int = 56, height: int = 84) -> Image.Image:
    """Return a random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture as a file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(image: Image.Image) -> str:
    """Return a picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"


def reference_inputs(path: Path, text: str, images: Sequence[Image.Image]) -> dict[str, Tensor]:
    """Return the inputs of transformers' model for a text with a token for each image, put together by hand."""
    from transformers import AutoImageProcessor, AutoTokenizer

    family = FAMILIES[json.loads((path / "config.json").read_text())["model_type"]]
    processor = AutoImageProcessor.from_pretrained(path)
    made = dict(processor(images=list(images), return_tensors="pt"))
    if "image_grid_thw" in made:
        counts = [int(grid.prod()) // 4 for grid in made["image_grid_thw"]]
    else:
        counts = [int(count) for count in made.pop("num_soft_tokens_per_image")]
    tokenizer = AutoTokenizer.from_pretrained(path)
    pieces, ids = text.split("<img>"), list[int]()
    assert len(pieces) == len(images) + 1
    for piece, count in zip(pieces, [*counts, 0], strict=True):
        ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        if count:
            own = [IMAGE] * count
            ids += [BEGIN, *own, END] if family.encloses else own
    ids_1L = torch.tensor([ids])
    return {**made, "input_ids": ids_1L, "mm_token_type_ids": (ids_1L == IMAGE).long()}


def reference_tokens(model: Any, inputs: Mapping[str, Tensor], new: int) -> list[int]:
    """Return the greedy tokens of transformers' own generation."""
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = inputs["input_ids"]
    made = model.generate(**inputs, attention_mask=torch.ones_like(ids), **options)
    return list(made[0, ids.shape[1] :].tolist())


def asked(text: str, count: int) -> str:
    """Return what TEMPLATE makes of a question about images."""
    return f"<s>user:{'<boi><img><eoi>' * count}{text}<s>assistant:"
