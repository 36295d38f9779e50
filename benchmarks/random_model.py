"""A checkpoint of a given shape with random weights, for benchmarks of speed and memory; written in bounded memory.

python benchmarks/random_model.py DIRECTORY                      1.5 B parameters, 8 experts top-2, bf16 (3 GB)
python benchmarks/random_model.py DIRECTORY --experts 16 --top-k 4 --width 1792
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.families.resolve import decoder_config
from engine.families.tensor_shapes import expected_tensors, names_on_disk
from engine.files.json_file import write_json
from engine.files.safetensors_writer import ShardWriter


def shape(hidden: int = 1024, layers: int = 16, experts: int = 8, top_k: int = 2, width: int = 3584) -> dict[str, Any]:
    """Return the config.json of the reference shape."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def write_random_model(directory: Path, config: dict[str, Any]) -> None:
    """Write config, weights, and the demo model's tokenizer extended to the vocabulary."""
    write_random_weights(directory, config)
    write_tokenizer(directory, config["vocab_size"])


def write_random_weights(directory: Path, config: dict[str, Any], *, alike: bool = False) -> int:
    """Write config and weights ~ N(0, 1/fan-in) in bf16. Returns the bytes of the weights.

    alike: whether tensors of one shape share their content, except for routers, which takes less time.
    """
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    own = decoder_config(config)
    on_disk = names_on_disk(own)
    shapes = {on_disk.get(name, name): size for name, size in expected_tensors(own).items()}
    made = {size: random_tensor(size, generator) for size in set(shapes.values())} if alike else {}

    def tensor(name: str) -> torch.Tensor:
        is_shared = alike and "gate.weight" not in name
        return made[shapes[name]] if is_shared else random_tensor(shapes[name], generator)

    return write_tensors(directory, config, shapes, tensor)


def write_tensors(
    directory: Path, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], tensor: Callable[[str], torch.Tensor]
) -> int:
    """Write config.json and tensors of these shapes in bf16, one after the other. Returns the bytes of the weights."""
    with ShardWriter(directory, {name: (torch.bfloat16, size) for name, size in shapes.items()}) as writer:
        for name in shapes:
            writer.add(name, tensor(name))
    write_json(directory / "config.json", config)
    return writer.total_size


def random_tensor(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of ones for norms, otherwise of normal values with variance 1/fan-in."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size, generator=generator) * size[-1] ** -0.5).bfloat16()


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Write the demo model's tokenizer with unused tokens up to the vocabulary's size."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_DIRECTORY)
    tokenizer.add_tokens([f"<unused{index}>" for index in range(vocabulary - len(tokenizer))])
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--overwrite", action="store_true")
    arguments = parser.parse_args()
    if arguments.overwrite:
        shutil.rmtree(arguments.directory, ignore_errors=True)
    write_random_model(
        arguments.directory,
        shape(layers=arguments.layers, experts=arguments.experts, top_k=arguments.top_k, width=arguments.width),
    )
