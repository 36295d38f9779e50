"""DeepSeekMoE (the first DeepSeek mixture) written out from its formulas, token by token in float64; tiny checkpoints of it.

The file uses nothing of the package. The first layers, and those whose number is no multiple of `moe_layer_freq`, have one
FFN. For a token x after its norm in any other layer, with N routed experts of which K are used, and the shared expert FFN_s:

    p = softmax(W · x)        y = FFN_s(x) + Σ_{i in top-K} w_i · FFN_i(x)

w_i is p_i, or its share of the sum over the K if `norm_topk_prob` is set. All else is as in naive_llama_moe.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from naive_llama_moe import Config, NaiveLlamaMoe
from torch import Tensor

SETTINGS: dict[str, Any] = {
    "model_type": "deepseek",
    "architectures": ["DeepseekForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"},
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def holds_experts(config: Mapping[str, Any], layer: int) -> bool:
    return bool(layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0)


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor on disk."""
    hidden = config["hidden_size"]
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}

    def ffn(name: str, width: int) -> dict[str, tuple[int, ...]]:
        sizes = ((width, hidden), (width, hidden), (hidden, width))
        return {f"{name}.{part}.weight": size for part, size in zip(PROJECTIONS, sizes, strict=True)}

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (keys, hidden) for name in "kv"}
        if not holds_experts(config, layer):
            shapes |= ffn(f"{at}.mlp", config["intermediate_size"])
            continue
        shapes[f"{at}.mlp.gate.weight"] = (config["n_routed_experts"], hidden)
        for expert in range(config["n_routed_experts"]):
            shapes |= ffn(f"{at}.mlp.experts.{expert}", config["moe_intermediate_size"])
        if config["n_shared_experts"]:
            shapes |= ffn(f"{at}.mlp.shared_experts", config["n_shared_experts"] * config["moe_intermediate_size"])
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    return shapes


class NaiveDeepseek(NaiveLlamaMoe):
    """The whole model. Its interface is the part of transformers' interface that the tests use."""

    @classmethod
    def random(cls, seed: int = 0, **settings: Any) -> NaiveDeepseek:
        """Return a tiny model. settings: those of conftest's SIZES, and values that differ from SETTINGS."""
        config, generator = SETTINGS | settings, torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in shapes_of(config).items():
            drawn = torch.randn(shape, generator=generator)
            spread = 0.5 if name.endswith("mlp.gate.weight") else 0.15
            tensors[name] = drawn * spread if len(shape) > 1 else 1.0 + 0.1 * drawn
        return cls(Config(config), tensors)

    def experts(self, layer: int, x: Tensor) -> Tensor:
        config, at = self.config.values, f"model.layers.{layer}.mlp"
        if not holds_experts(config, layer):
            return self.ffn(at, x)
        z = self.weight(f"{at}.gate.weight") @ x
        there = list(self.kept.get(layer, range(len(z))))
        exponentials = {i: math.exp(float(z[i]) - float(z.max())) for i in there}
        best = sorted(there, key=lambda i: -exponentials[i])[: config["num_experts_per_tok"]]
        whole = sum(exponentials[i] for i in (best if config["norm_topk_prob"] else there))
        weights = [exponentials[i] / whole for i in best]
        weights = self.skip(layer, best, weights) if self.skip else weights
        routed = (w * self.ffn(f"{at}.experts.{i}", x) for w, i in zip(weights, best, strict=True))
        y = sum(routed, torch.zeros_like(x))
        return y + self.ffn(f"{at}.shared_experts", x) if config["n_shared_experts"] else y

    def ffn(self, name: str, x: Tensor) -> Tensor:
        gate, up, down = (self.weight(f"{name}.{part}.weight") for part in PROJECTIONS)
        g = gate @ x
        return down @ (g / (1.0 + torch.exp(-g)) * (up @ x))
