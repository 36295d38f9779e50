"""Decoding and prefill inside plain transformers: its own implementations of experts, and ours.

python benchmarks/experts_implementation.py [--rounds 5] [--layers N] [--shrink 1]

Each shape is a model of transformers with random bfloat16 weights, a small vocabulary and few layers, which stays loaded
while all implementations are timed in turn. Figures are medians over rounds; ratios are to the implementation of
transformers with the best median. Without experts, whose output is then zero, a model shows the most that any implementation
can reach. A round first compares the logits of all implementations. `batched_mm` copies the
weights for each pair of token and expert, so its prefill is left out where the copies would take more than 2 GB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
from results import markdown, save, times
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.transformers_experts import NAME

PROMPT, STEPS, CONTEXT = 512, 32, 16
VOCABULARY = 2048
PEERS = ("eager", "batched_mm", "grouped_mm")
WITHOUT = "no experts"
"""Name of an implementation that computes nothing."""
MAX_COPIES = 2 << 30
TOLERANCE = 0.05
"""Maximum difference of logits as a share of the largest one: the precision of bfloat16 over a few layers."""


class Shape(NamedTuple):
    """Sizes of one model. 64, 128 and 512 experts have the sizes of released models, and 8 experts half of theirs."""

    experts: int
    top_k: int
    width: int
    layers: int
    hidden: int = 2048


SHAPES = (Shape(8, 2, 7168, 2), Shape(64, 8, 1024, 2), Shape(128, 8, 768, 2), Shape(512, 10, 512, 1))


def random_model(shape: Shape) -> Any:
    """Return a model of transformers. The experts of a layer have their own memory with equal values."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.width,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 128,
        num_key_value_heads=max(1, shape.hidden // 512),
        head_dim=128,
        norm_topk_prob=True,
    )
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            own = torch.randn(weight.shape[-2:], generator=generator) / weight.shape[-1] ** 0.5
            weight.copy_(own.to(weight.dtype))
    return model


def prefill(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of the last position."""
    logits: Tensor = model(ids, logits_to_keep=1).logits
    return logits


def decode_seconds(model: Any, ids: Tensor) -> float:
    """Return the seconds of STEPS steps of one token each, after a context whose time does not count."""
    cache = model(ids[:, :CONTEXT]).past_key_values
    started = time.perf_counter()
    for step in range(CONTEXT, CONTEXT + STEPS):
        model(ids[:, step : step + 1], past_key_values=cache)
    return time.perf_counter() - started


def contenders(shape: Shape, test: str) -> tuple[str, ...]:
    """Return the implementations whose copies of weights fit."""
    copies = PROMPT * shape.top_k * 2 * shape.width * shape.hidden * 2
    return (*(name for name in PEERS if name != "batched_mm" or test == "decode" or copies <= MAX_COPIES), NAME, WITHOUT)


def check(model: Any, shape: Shape, ids: Tensor) -> float:
    """Return the largest difference of our logits to those of transformers, as a share of the largest logit."""
    found = {}
    for name in contenders(shape, "prefill")[:-1]:
        model.set_experts_implementation(name)
        found[name] = prefill(model, ids).float()
    largest = max(float(logits.abs().max()) for logits in found.values())
    difference = max(float((found[NAME] - found[name]).abs().max()) for name in found) / largest
    if difference > TOLERANCE:
        raise SystemExit(f"{shape}: our logits differ from those of transformers by {difference:.3f} of the largest one")
    return difference


@torch.inference_mode()
def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Return the tokens per second of each implementation in each round."""
    model, generator = random_model(shape), torch.Generator().manual_seed(1)
    said: dict[str, dict[str, list[float]]] = {
        test: {name: [] for name in (*PEERS, NAME, WITHOUT)} for test in ("decode", "prefill")
    }
    difference = 0.0
    for number in range(rounds + 1):
        ids = torch.randint(VOCABULARY, (1, PROMPT), generator=generator)
        if number == 0:  # also warms up
            difference = check(model, shape, ids)
        for test, own in said.items():
            for name in contenders(shape, test):
                model.set_experts_implementation(name)
                started = time.perf_counter()
                if test == "decode":
                    rate = STEPS / decode_seconds(model, ids)
                elif number:
                    prefill(model, ids)
                    rate = PROMPT / (time.perf_counter() - started)
                if number:
                    own[name].append(rate)
    parameters = sum(weight.numel() for weight in model.parameters())
    return shape._asdict() | {"parameters": parameters, "largest_difference": difference, "rates": said}


def best_peer(own: dict[str, list[float]]) -> str:
    """Return the implementation of transformers with the best median."""
    return max((name for name in PEERS if own[name]), key=lambda name: statistics.median(own[name]))


def table(figures: dict[str, Any]) -> str:
    """Return one row for each shape and test: tokens per second, and our ratio to the best of the others."""
    rows = []
    for shape in figures["shapes"]:
        for test, length in (("decode", figures["steps"]), ("prefill", figures["prompt"])):
            own = shape["rates"][test]
            medians = {name: statistics.median(rates) for name, rates in own.items() if rates}
            best = best_peer(own)
            cells = [f"{medians[name]:.1f}" if name in medians else "–" for name in (*PEERS, NAME)]
            most = times(medians[WITHOUT] / medians[best], own[WITHOUT], own[best])
            title = f"{shape['top_k']} of {shape['experts']} experts of width {shape['width']}, {test} {length}"
            rows.append([title, *cells, times(medians[NAME] / medians[best], own[NAME], own[best]), most])
    header = [
        "tokens per second, bf16, batch 1",
        *(f"`{name}`" for name in (*PEERS, NAME)),
        "ours to the best other",
        "no experts to it",
    ]
    return markdown(header, rows)


TABLES = {"experts_implementation": table}


def register_nothing() -> None:
    """Make `WITHOUT` known to transformers."""

    def nothing(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)

    ALL_EXPERTS_FUNCTIONS.register(WITHOUT, nothing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, help="layers of every shape")
    parser.add_argument("--shrink", type=int, default=1, help="divisor of hidden sizes and widths")
    arguments = parser.parse_args()
    register_nothing()
    measured = []
    for shape in SHAPES:
        sizes = {"hidden": shape.hidden // arguments.shrink, "width": shape.width // arguments.shrink}
        chosen = shape._replace(**sizes, layers=arguments.layers or shape.layers)
        measured.append(measure(chosen, arguments.rounds))
    save("experts_implementation", {"prompt": PROMPT, "steps": STEPS, "shapes": measured})


if __name__ == "__main__":
    main()
