"""LLaMA-MoE v1 written out from its formulas, token by token in float64, slow and simple; and tiny checkpoints of it.

The file uses nothing of the package. For a token x after its norm, with N experts of which K are used and factor c:

    z = W2 · tanh(W1 · x)        w_i = c · exp(z_i) / Σ_{j in top-K} exp(z_j)        y = Σ_{i in top-K} w_i · FFN_i(x)

FFN_i(x) = down_i · (silu(gate_i · x) ⊙ (up_i · x)). All else is the dense decoder that such models are made from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

THETA = 10000.0
SETTINGS: dict[str, Any] = {
    "model_type": "llama_moe",
    "architectures": ["LlamaMoEForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_llama_moe_hf.LlamaMoEForCausalLM"},
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "num_experts": 6,
    "num_selects": 2,
    "size_experts": None,
    "gate_type": "TopKBalancedNoisyGate",
    "gate_network": "mlp",
    "gate_use_softmax": True,
    "gate_use_balance": True,
    "gate_balance_loss_weight": 0.01,
    "gate_add_noise": True,
    "gate_noise_epsilon": 0.01,
    "calculator_type": "UniversalCalculator",
    "multiply_gate_scores": True,
    "score_scale_factor": 3.0,
    "add_weight_norm": False,
    "drop_tokens": True,
    "dropped_padding": "zero",
    "capacity_factor": 1.25,
}


def sizes_of(config: Mapping[str, Any], layer: int) -> list[int]:
    """Return the number of hidden units of each expert of a layer."""
    experts = config["num_experts"]
    listed = config["size_experts"]
    return [config["intermediate_size"] // experts] * experts if listed is None else listed[layer]


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor on disk."""
    hidden, experts = config["hidden_size"], config["num_experts"]
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (keys, hidden) for name in "kv"}
        shapes[f"{at}.mlp.gate.gate_network.0.weight"] = (experts, hidden)
        shapes[f"{at}.mlp.gate.gate_network.2.weight"] = (experts, experts)
        if config["gate_add_noise"]:
            shapes[f"{at}.mlp.gate.weight_noise.weight"] = (experts, hidden)
        for expert, size in enumerate(sizes_of(config, layer)):
            shapes[f"{at}.mlp.calculator.experts.weight_gate.{expert}"] = (size, hidden)
            shapes[f"{at}.mlp.calculator.experts.weight_up.{expert}"] = (size, hidden)
            shapes[f"{at}.mlp.calculator.experts.weight_down.{expert}"] = (hidden, size)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    return shapes


def random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Return weights that are large enough that differences show in the logits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes_of(config).items():
        spread = 1.0 if "network.2" in name else 0.5 if "gate.gate_network" in name or "weight_noise" in name else 0.15
        drawn = torch.randn(shape, generator=generator)
        tensors[name] = drawn * spread if len(shape) > 1 else 1.0 + 0.1 * drawn
    return tensors


@dataclass
class Config:
    """The values of config.json."""

    values: dict[str, Any]

    def save_pretrained(self, path: Path) -> None:
        """Write config.json."""
        (path / "config.json").write_text(json.dumps(self.values))


@dataclass
class NaiveLlamaMoe:
    """The whole model. Its interface is the part of transformers' interface that the tests use."""

    config: Config
    tensors: dict[str, Tensor]
    kept: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Remaining experts by layer. The router logits of all others are −∞."""
    routed: list[tuple[int, Tensor, list[int], list[float], list[Tensor]]] = field(default_factory=list)
    """For each token in each layer: layer, router logits, experts, weights, and outputs of the experts before weighting."""
    skip: Callable[[int, list[int], list[float]], list[float]] | None = None
    """Function of the layer, a token's experts, best first, and their weights, which returns the weights after skipping."""

    def __post_init__(self) -> None:
        self.wide = {name: tensor.double() for name, tensor in self.tensors.items()}

    @classmethod
    def random(cls, seed: int = 0, **settings: Any) -> NaiveLlamaMoe:
        """Return a tiny model. settings: those of conftest's SIZES, and values that differ from SETTINGS."""
        config = SETTINGS | settings
        return cls(Config(config), random_tensors(config, seed))

    def save_pretrained(self, path: Path) -> None:
        """Write config and weights."""
        path.mkdir(exist_ok=True)
        save_file(self.tensors, path / "model.safetensors", metadata={"format": "pt"})
        self.config.save_pretrained(path)

    def __call__(
        self, tokens: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> SimpleNamespace:
        """Return `logits` [B, L, V] in float32."""
        real = torch.ones_like(tokens) if attention_mask is None else attention_mask
        positions = (real.cumsum(1) - 1).clamp_min(0) if position_ids is None else position_ids
        rows = []
        for row, there, at in zip(tokens.tolist(), real.bool().tolist(), positions.tolist(), strict=True):
            past = self.nothing_yet()
            rows.append(torch.stack([self.step(*each, past) for each in zip(row, at, there, strict=True)]))
        return SimpleNamespace(logits=torch.stack(rows).float())

    def generate(self, ids: Tensor, attention_mask: Tensor, max_new_tokens: int, do_sample: bool) -> Tensor:
        """Append the likeliest token at each step, until the end token."""
        assert len(ids) == 1 and bool(attention_mask.all()) and not do_sample
        row, past = ids[0].tolist(), self.nothing_yet()
        for position, token in enumerate(row):
            logits = self.step(token, position, True, past)
        for _ in range(max_new_tokens):
            row.append(int(logits.argmax()))
            if row[-1] == self.config.values["eos_token_id"]:
                break
            logits = self.step(row[-1], len(row) - 1, True, past)
        return torch.tensor([row])

    def nothing_yet(self) -> list[list[tuple[list[Tensor], list[Tensor], bool]]]:
        """Return an empty cache: keys, values and whether they belong to a real token, by layer and position."""
        return [[] for _ in range(self.config.values["num_hidden_layers"])]

    def weight(self, name: str) -> Tensor:
        return self.wide[name]

    def step(self, token: int, position: int, real: bool, past: list[list[Any]]) -> Tensor:
        """Return the logits [V] after one more token, which is added to `past`."""
        x = self.weight("model.embed_tokens.weight")[token]
        for layer in range(len(past)):
            at = f"model.layers.{layer}"
            x = x + self.attention(layer, self.norm(x, f"{at}.input_layernorm"), position, real, past[layer])
            x = x + self.experts(layer, self.norm(x, f"{at}.post_attention_layernorm"))
        return self.weight("lm_head.weight") @ self.norm(x, "model.norm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.weight(f"{name}.weight") * x / math.sqrt(float(x @ x) / len(x) + self.config.values["rms_norm_eps"])

    def attention(self, layer: int, x: Tensor, position: int, real: bool, past: list[Any]) -> Tensor:
        config, at = self.config.values, f"model.layers.{layer}.self_attn"
        size = config["hidden_size"] // config["num_attention_heads"]
        queries, keys, values = ((self.weight(f"{at}.{name}_proj.weight") @ x).split(size) for name in "qkv")
        past.append(([self.rotated(key, position) for key in keys], values, real))
        mixed = []
        for head, query in enumerate(queries):
            group = head // (len(queries) // len(keys))
            seen = [place for place, (_, _, is_real) in enumerate(past) if is_real or place == len(past) - 1]
            scores = [float(self.rotated(query, position) @ past[place][0][group]) / math.sqrt(size) for place in seen]
            shares = [math.exp(score - max(scores)) for score in scores]
            mixed.append(sum(s / sum(shares) * past[place][1][group] for s, place in zip(shares, seen, strict=True)))
        return self.weight(f"{at}.o_proj.weight") @ torch.cat(mixed)

    def rotated(self, x: Tensor, position: int) -> Tensor:
        scaling = self.config.values["rope_scaling"]
        at, half = position / (scaling["factor"] if scaling else 1.0), len(x) // 2
        values, result = x.tolist(), [0.0] * len(x)
        for i in range(half):
            angle = at * THETA ** (-2.0 * i / len(x))
            result[i] = values[i] * math.cos(angle) - values[i + half] * math.sin(angle)
            result[i + half] = values[i + half] * math.cos(angle) + values[i] * math.sin(angle)
        return torch.tensor(result, dtype=x.dtype)

    def experts(self, layer: int, x: Tensor) -> Tensor:
        config, at = self.config.values, f"model.layers.{layer}.mlp"
        hidden = torch.tanh(self.weight(f"{at}.gate.gate_network.0.weight") @ x)
        z = self.weight(f"{at}.gate.gate_network.2.weight") @ hidden
        there = self.kept.get(layer, range(len(z)))
        best = sorted(there, key=lambda i: -float(z[i]))[: config["num_selects"]]
        exponentials = [math.exp(float(z[i] - z[best[0]])) for i in best]
        scale = config["score_scale_factor"]
        factor = scale[layer] if isinstance(scale, list) else scale
        weights = [factor * exponential / sum(exponentials) for exponential in exponentials]
        weights = self.skip(layer, best, weights) if self.skip else weights
        outputs = [self.expert(layer, i, x) for i in best]
        self.routed.append((layer, z, best, weights, outputs))
        return sum((w * y for w, y in zip(weights, outputs, strict=True)), torch.zeros_like(x))

    def expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        gate, up, down = (
            self.weight(f"model.layers.{layer}.mlp.calculator.experts.weight_{name}.{expert}")
            for name in ("gate", "up", "down")
        )
        g = gate @ x
        return down @ (g / (1.0 + torch.exp(-g)) * (up @ x))
