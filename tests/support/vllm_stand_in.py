"""The part of vLLM that engine/checkpoint/vllm_plugin.py relies on: its registry, and a model built layer by layer.

Names and the order of construction are those of vLLM 0.32. Its layers have shapes only.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

STAGE: list[int | None] = [None, None]
"""First and last layer (exclusive) of this process's pipeline stage."""


def make_layers(number: int, layer_fn: Any, prefix: str) -> tuple[int, int, nn.ModuleList]:
    start, end, _ = slice(*STAGE).indices(number)
    layers = [layer_fn(prefix=f"{prefix}.{index}") if start <= index < end else nn.Identity() for index in range(number)]
    return start, end, nn.ModuleList(layers)


class MoeBlock(nn.Module):
    """Router [N, D], gate and up [N, 2I, D], down [N, D, I] of N experts."""

    def __init__(self, experts: int, width: int, config: Any) -> None:
        super().__init__()
        if config.num_experts_per_tok > experts:
            raise ValueError("top-k above the number of experts")
        self.top_k, self.experts = config.num_experts_per_tok, experts
        self.gate = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.w13 = nn.Parameter(torch.empty(experts, 2 * width, config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(experts, config.hidden_size, width))


class Layer(nn.Module):
    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        index, self.moe = int(prefix.split(".")[-1]), None
        if hasattr(config, "decoder_sparse_step"):
            sparse = index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0
        else:
            sparse = True
        if sparse:
            # Qwen3MoeConfig accepts both names
            experts = config.num_local_experts if config.model_type == "mixtral" else config.num_experts
            self.moe = MoeBlock(experts, getattr(config, "moe_intermediate_size", config.intermediate_size), config)


class ForCausalLM(nn.Module):
    """The class that all names below refer to."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.start, self.end, self.layers = make_layers(
            config.num_hidden_layers, lambda prefix: Layer(config, prefix), prefix=f"{prefix}model.layers"
        )

    @property
    def moe(self) -> dict[int, MoeBlock]:
        """Return the MoE blocks of this stage, by layer."""
        layers = {index: self.layers[index] for index in range(self.start, self.end)}
        return {index: layer.moe for index, layer in layers.items() if layer.moe is not None}


class MixtralForCausalLM(ForCausalLM):
    pass


class Qwen2MoeForCausalLM(ForCausalLM):
    pass


class Qwen3MoeForCausalLM(ForCausalLM):
    pass


class OlmoeForCausalLM(ForCausalLM):
    pass


class Entry:
    """A class of the registry that is imported on demand."""

    def __init__(self, module_name: str, class_name: str) -> None:
        self.module_name, self.class_name = module_name, class_name

    def load_model_cls(self) -> Any:
        return getattr(importlib.import_module(self.module_name), self.class_name)


class ModelRegistry:
    """A stand-in for vllm.ModelRegistry, new for each test."""

    def __init__(self) -> None:
        names = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "LlamaForCausalLM")
        self.models = {name: Entry(__name__, name) for name in names}

    def register_model(self, model_arch: str, model_cls: str) -> None:
        module_name, class_name = model_cls.split(":")
        self.models[model_arch] = Entry(module_name, class_name)
