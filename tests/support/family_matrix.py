"""The results that each family supports. Each cell is the largest difference of a logit from the reference implementation.

The reference is transformers: its own class on the same weights, on a plain result, through the modeling code of a
non-uniform result, or with hooks. For a family that transformers lacks, the reference is a naive model (naive_*.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from conftest import FAMILIES, FURTHER_FAMILIES, NAIVE, enough, save_reference
from onnx_for_tests import differences, exported
from torch import Tensor

from compress.plans.apply import apply
from compress.plans.plan import (
    SHARED_EXPERT,
    Part,
    Plan,
    PlannedExpert,
    Source,
    concatenation_plan,
    kept_expert,
    pruning_plan,
)
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.stacks import stored_tensors
from engine.decoder.block_pool import BlockTable
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder, own_routings, routed_by
from engine.decoder.paged_cache import PagedBatch, PagedCache, position_bytes
from engine.decoder.routing import NO_EXPERT, Masked
from engine.decoder.skip_tables import SkipTables, skipping_routings
from engine.families.tensor_names import expert_tensor, ffn_parts, router_module

ROWS = {
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_moe_text": "Qwen3.5-MoE, Qwen3.6-MoE (text)",
    "olmoe": "OLMoE ³",
    "llama_moe": "LLaMA-MoE v1 ¹",
    "deepseek": "DeepSeek-MoE (V1) ¹",
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3, R1",
    "kimi_k2": "Kimi K2 ²",
    "deepseek_v32": "DeepSeek V3.2 ⁴",
    "glm_moe_dsa": "GLM-5 ⁴",
    "glm4_moe": "GLM-4-MoE",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "granitemoe": "Granite-MoE",
    "granitemoeshared": "Granite-MoE, shared expert",
    "phimoe": "Phi-3.5-MoE",
    "ernie4_5_moe": "ERNIE-4.5-MoE",
    "minimax": "MiniMax-Text-01, M1 ³",
    "minimax_m2": "MiniMax-M2 ³",
    "gpt_oss": "GPT-OSS ³",
    "llama4_text": "Llama 4 (text)",
    "lfm2_moe": "LFM2-MoE",
    "gemma4_text": "Gemma 4 MoE (text)",
    "nemotron_h": "Nemotron-H, Nemotron 3",
}
REFUSED = {
    ("phimoe", "dense"): "it has no dense sibling, and its router takes two experts",
    ("qwen3_next", "ONNX"): "its gated delta rule keeps a state, for which our graphs have no input",
    ("qwen3_5_moe_text", "ONNX"): "its gated delta rule keeps a state, for which our graphs have no input",
    ("lfm2_moe", "ONNX"): "its short convolutions keep a state, for which our graphs have no input",
    ("nemotron_h", "ONNX"): "its Mamba-2 layers keep a state, for which our graphs have no input",
    ("minimax", "ONNX"): "its lightning attention keeps a state, for which our graphs have no input",
    ("llama4_text", "dense"): "the inputs of its experts are scaled by the router, token by token",
    ("llama4_text", "ONNX"): "its chunked attention and experts whose inputs the router scales have no form in our graphs",
    ("gemma4_text", "dense"): "its experts and the FFN beside them have norms of their own, which one FFN has not",
    ("gemma4_text", "ONNX"): "its heads differ between layers and its experts have norms of their own",
}
"""Cells that have no number, with the message of the refusal."""
NOTES = (
    "¹ Not in transformers; compared with a naive implementation (`tests/support/naive_*.py`). ² Results are\n"
    "written as DeepSeek V3. ³ Dense means one expert in each layer.\n"
    "⁴ Up to `index_topk` positions; longer texts are refused."
)
TOKENS = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))


def refusals() -> str:
    """Return the refusals with their reasons, as sentences."""
    rows = ((ROWS[family].rstrip(" ¹²³⁴"), column, reason) for (family, column), reason in REFUSED.items())
    return "\n".join(f"Refused: {title}, {column}: {reason}." for title, column, reason in rows)


@dataclass
class Made:
    """A tiny model of a family and the results made from it."""

    family: str
    path: Path
    changes: dict[str, Any] = field(default_factory=dict)
    reference: Any = field(init=False)
    checkpoint: Checkpoint = field(init=False)

    def __post_init__(self) -> None:
        self.reference = save_reference(self.family, self.path / "full", **self.changes)
        self.checkpoint = Checkpoint(self.path / "full")

    @cached_property
    def logits(self) -> Tensor:
        """Return the logits of the reference."""
        return logits_of(self.reference)

    @property
    def is_naive(self) -> bool:
        return self.family in NAIVE

    @property
    def layers(self) -> tuple[int, ...]:
        return self.checkpoint.config.moe_layers

    def moe(self, layer: int) -> Any:
        return self.checkpoint.config.layers[layer].moe

    def result(self, name: str, plan: Plan) -> Checkpoint:
        """Apply the plan and return the result."""
        directory = self.path / name
        directory.mkdir()
        apply(plan, self.checkpoint, directory)
        return Checkpoint(directory)


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    found: Tensor = model(tokens).logits
    return found


@torch.no_grad()
def own_logits(checkpoint: Checkpoint) -> Tensor:
    return decoder_of(checkpoint)(TOKENS)


def decoder_of(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(checkpoint.config, checkpoint.source(dtype))


def loaded(checkpoint: Checkpoint, plain: bool) -> Any:
    """Load a checkpoint in transformers, with every tensor accounted for. plain: without this project's code."""
    from transformers import AutoModelForCausalLM

    assert plain == ("auto_map" not in checkpoint.raw_config)
    auto: Any = AutoModelForCausalLM
    model, info = auto.from_pretrained(
        checkpoint.directory, trust_remote_code=not plain, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    return model.eval()


def worst(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape and bool((one - other).isfinite().all())
    return float((one - other).abs().max())


# The model itself


def full(made: Made) -> float:
    """Compare the model when it reads text at once, when it decodes step by step after a prefix, and in a padded batch."""
    decoder, length = decoder_of(made.checkpoint), TOKENS.shape[1]
    files = made.checkpoint.files
    derived = made.checkpoint.derived
    names = {name: entry.shape for file in files for name, entry in file.entries.items() if name not in derived}
    assert {name: stored.shape for name, stored in stored_tensors(decoder.config).items()} == names, "as they are published"
    with torch.no_grad():
        cache = KeyValueCache(decoder.config, 2, length, torch.float32)
        steps = [decoder(TOKENS[:, :7], cache=cache)]
        steps += [decoder(TOKENS[:, i : i + 1], cache=cache) for i in range(7, length)]
        real = torch.ones(2, length, dtype=torch.bool)
        real[1, :5] = False
        padded = TOKENS.masked_fill(~real, 0)
        positions = (real.long().cumsum(-1) - 1).clamp_min(0)
        expected = made.reference(padded, attention_mask=real.long(), position_ids=positions).logits
        cache = KeyValueCache(decoder.config, 2, length, torch.float32)
        together = [decoder(padded[:, :7], real[:, :7], cache)]
        together += [decoder(padded[:, i : i + 1], real[:, : i + 1], cache) for i in range(7, length)]
        return max(
            worst(decoder(TOKENS), made.logits),
            worst(torch.cat(steps, 1), made.logits),
            worst(torch.cat(together, 1)[real], expected[real]),
        )


def serving(made: Made) -> float:
    """Compare through the paged cache: prompts of different lengths in pieces, then one token of each together."""
    decoder, config = decoder_of(made.checkpoint), made.checkpoint.config
    cache = PagedCache(config, position_bytes(config, torch.float32) * 64, torch.float32, block_size=4)
    prompts, tables, last = [9, 12], [BlockTable(), BlockTable()], []
    with torch.inference_mode():
        for start in range(0, 12, 5):  # in turns, so that no sequence has contiguous blocks
            for row, (table, prompt) in enumerate(zip(tables, prompts, strict=True)):
                if start < (end := min(start + 5, prompt)):
                    cache.pool.extend(table, end)
                    decoder.hidden_states(
                        TOKENS[row : row + 1, start:end], None, PagedBatch(cache, [table], [end - start], [0])
                    )
                    cache.pool.fill(table, TOKENS[row].tolist(), end)
        for step in range(4):
            for table in tables:
                cache.pool.extend(table, table.length + 1)
            places = [prompt + step for prompt in prompts]
            new = torch.stack([TOKENS[row, place : place + 1] for row, place in enumerate(places)])
            found = decoder.last_logits(new, None, PagedBatch(cache, tables, None, [0, 0]))
            last.append(worst(found, torch.stack([made.logits[row, place] for row, place in enumerate(places)])))
            for row, table in enumerate(tables):
                cache.pool.fill(table, TOKENS[row].tolist(), table.length + 1)
    return max(last)


def skipping(made: Made) -> float:
    """Compare with the reference, which applies the skipping rule to one token at a time."""
    generator = torch.Generator().manual_seed(0)
    moes = [made.moe(layer) for layer in made.layers]
    tables = SkipTables(
        tuple(torch.rand(moe.experts_per_token - 1, generator=generator) for moe in moes),
        tuple(0.5 + torch.rand(moe.experts, moe.experts, generator=generator) for moe in moes),
    )
    source = made.checkpoint.source(torch.float32)
    routings = skipping_routings(made.checkpoint.config, tables, 1.5, own=own_routings(made.checkpoint.config, source))
    skipped = []

    def rule(layer: int, experts: list[int], weights: list[float]) -> list[float]:
        place = made.layers.index(layer)
        left = [weights[0]]
        for rank, (expert, weight) in enumerate(zip(experts[1:], weights[1:], strict=True)):
            gamma = float(tables.gamma1_J[place][rank] * tables.gamma2_NN[place][experts[0], expert])
            left.append(0.0 if weight < 1.5 * gamma * weights[0] else weight)
        skipped.append(left.count(0.0))
        renormalised = sum(weights) / sum(left) if made.moe(layer).restores_sum else 1.0
        return [renormalised * weight for weight in left]

    decoder = decoder_of(made.checkpoint)
    with torch.no_grad(), routed_by(decoder, routings), skipped_by(made, rule):
        difference = worst(decoder(TOKENS), logits_of(made.reference))
    assert 0 < sum(skipped) < len(skipped) * (moes[0].experts_per_token - 1), "some are skipped, and not all"
    return difference


@contextmanager
def skipped_by(made: Made, rule: Callable[[int, list[int], list[float]], list[float]]) -> Iterator[None]:
    """Make the reference's routers return the weights that a rule leaves."""
    if made.is_naive:
        made.reference.skip = rule
        yield
        made.reference.skip = None
        return

    def hook(layer: int) -> Any:
        def changed(gate: Any, inputs: Any, outputs: Any) -> Any:
            if len(outputs) == 2:  # the experts' inputs are scaled, and all chosen experts weigh one
                scales, logits = outputs
                experts = logits.topk(gate.top_k, dim=-1).indices
                left = [rule(layer, own, [1.0] * len(own)) for own in experts.tolist()]
                return scales * torch.zeros_like(scales).scatter(1, experts, torch.tensor(left)), logits
            logits, weights, experts = outputs
            weights, order = weights.sort(dim=-1, descending=True)
            experts = experts.gather(-1, order)
            left = [rule(layer, own, each) for own, each in zip(experts.tolist(), weights.tolist(), strict=True)]
            return logits, torch.tensor(left), experts

        return changed

    path = router_module(made.checkpoint.config.architecture)
    gates = {layer: made.reference.model.layers[layer].get_submodule(path) for layer in made.layers}
    handles = [gate.register_forward_hook(hook(layer)) for layer, gate in gates.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def onnx(made: Made) -> float:
    """Compare both forms of the graph."""
    found = []
    for form in ("moe", "portable"):
        graph = exported(made.checkpoint, made.path / f"onnx-{form}", portable=form == "portable")
        found += [worst(graph(TOKENS), made.logits), *differences(made.checkpoint, graph).values()]
    return max(found)


# Results made from the model


def pruned_uniform(made: Made) -> float:
    """Compare a plain checkpoint. Removing experts equals masking them."""
    kept = {layer: evenly(made.moe(layer)) for layer in made.layers}
    return _pruned(made, "uniform", kept, plain=True)


def pruned_non_uniform(made: Made) -> float:
    """Compare layers of different counts, groups of unequal sizes, an empty group, and a single expert."""
    experts = made.moe(made.layers[0]).experts
    several = [0, 1, 2, 3, 6, 7] if experts == 12 else [0, 2, 5]
    kept = enough(made.family, {layer: several if layer == made.layers[0] else [4] for layer in made.layers})
    return _pruned(made, "non-uniform", kept, plain=made.is_naive)


def evenly(moe: Any) -> list[int]:
    """Return two thirds of the experts, of each group if there are any."""
    return [expert for expert in range(moe.experts) if expert % 3 != 1]


def _pruned(made: Made, name: str, kept: dict[int, list[int]], plain: bool) -> float:
    result = made.result(name, pruning_plan(kept))
    source, decoder = made.checkpoint.source(torch.float32), decoder_of(made.checkpoint)
    own = own_routings(made.checkpoint.config, source)
    masks = [torch.isin(torch.arange(made.moe(layer).experts), torch.tensor(kept[layer])) for layer in made.layers]
    with torch.no_grad(), routed_by(decoder, [Masked(rule, mask) for rule, mask in zip(own, masks, strict=True)]):
        masked = worst(decoder(TOKENS), own_logits(result))
    assert worst(own_logits(result), made.logits) > 1e-2, "it is another function than the full model's"
    if not made.is_naive:
        return max(masked, worst(own_logits(result), logits_of(loaded(result, plain))))
    made.reference.kept = kept
    expected = logits_of(made.reference)
    made.reference.kept = {}
    return max(masked, worst(own_logits(result), expected))


def merged(made: Made) -> float:
    """Merge two experts of each layer, with permuted hidden units. The others of `evenly` stay."""
    moe = made.moe(made.layers[0])
    order = tuple(reversed(range(moe.expert_width)))
    first, *others = evenly(moe)
    mixed = PlannedExpert((Part((Source(first, 0.75), Source(1, 0.25, order))),), (Source(first),))
    plan = Plan({layer: (mixed, *map(kept_expert, others)) for layer in made.layers})
    result = made.result("merged", plan)
    row = made.checkpoint.config.architecture
    for projection in ffn_parts(row):
        one, other = (made.checkpoint.tensor(expert_tensor(row, made.layers[0], e, projection)) for e in (first, 1))
        naive = 0.75 * one + 0.25 * other.flip(1 if projection == 2 else 0)
        assert torch.allclose(result.tensor(expert_tensor(row, made.layers[0], 0, projection)), naive, atol=1e-6)
    return _loaded_difference(made, result)


def dense(made: Made) -> float:
    """Make two experts and the shared one a single FFN, and compare in transformers. Dense layers keep their function."""
    shared = [(SHARED_EXPERT, 0.5)] if made.moe(made.layers[0]).shared_width else []
    result = made.result("dense", concatenation_plan({layer: [(1, 0.75), (4, 0.5), *shared] for layer in made.layers}))
    decoder, before = decoder_of(result), decoder_of(made.checkpoint)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    differences = [worst(own_logits(result), logits_of(loaded(result, plain=True)))]
    with torch.no_grad():
        for layer, (own, old) in enumerate(zip(decoder.layers, before.layers, strict=True)):
            block = old.feed_forward
            if block is None:
                continue
            if layer not in made.layers:
                expected = block(x)
            else:
                expected = 0.75 * block.experts[1](x) + 0.5 * block.experts[4](x)
                expected = expected + 0.5 * block.shared(x) if shared else expected
            differences.append(worst(own.feed_forward(x), expected))
    return max(differences)


def _loaded_difference(made: Made, result: Checkpoint) -> float:
    """Return the difference to transformers, or to the naive model of the result's weights."""
    if not made.is_naive:
        return worst(own_logits(result), logits_of(loaded(result, plain=True)))
    tensors = {name: result.tensor(name).clone() for name in result.shapes}
    model = NAIVE[made.family](type(made.reference.config)(made.reference.config.values | result.raw_config), tensors)
    return worst(own_logits(result), logits_of(model))


COLUMNS: dict[str, Callable[[Made], float]] = {
    "as it is": full,
    "pruned, uniform": pruned_uniform,
    "pruned, non-uniform": pruned_non_uniform,
    "merged": merged,
    "dense": dense,
    "skipping": skipping,
    "ONNX": onnx,
    "serving": serving,
}
assert set(ROWS) <= set(FAMILIES | FURTHER_FAMILIES) and NO_EXPERT == -1
