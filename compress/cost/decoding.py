"""Tokens per second of a model whose experts do not all fit into memory, before it runs.

Weights that every token reads stay in memory, and the rest of the limit holds experts, in slots of equal size. The policy of
the expert cache (engine/expert_cache/policies.py) is simulated on the experts that calibration listed for each token, or on
random ones. A token takes the time in which memory delivers the weights that it uses, and that in which the disk delivers
the experts that are missing: one after the other, or, at best, at the same time.

Shape suffixes: C tokens, N experts of a layer, K experts of a token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.chosen import token_steps
from compress.cost.counts import Passes
from compress.cost.disk import DiskSpeed
from compress.report.figures import DecodingFigures, PolicyFigures
from engine.checkpoint.checkpoint import EMBEDDINGS
from engine.decoder.kv_cache import position_bytes, state_bytes
from engine.errors import OptionError
from engine.expert_cache.policies import DEFAULT, Simulated, Step, compared
from engine.families.config import DecoderConfig
from engine.families.tensor_shapes import expected_tensors, expert_shapes

MOST_STEPS = 100_000
"""Most steps of layers that are simulated: about two seconds for each policy."""
RANDOM_TOKENS = 2048
"""Tokens of a random routing."""
DECODE_EFFICIENCY = 0.73
"""Share of the memory's speed at which decoding reads weights. It depends on the memory: 0.44 (4 bits) to 0.65 (bfloat16)
where two threads read 49 to 53 GB/s (benchmarks/results/decode.json), and about 0.9 in bfloat16 where they read 31 GB/s.
"""


@dataclass(frozen=True)
class Machine:
    """The numbers of a machine that decoding depends on."""

    base_bytes: int
    """Bytes of the process before any weight."""
    memory_bytes_per_second: float
    disk: DiskSpeed


@dataclass(frozen=True)
class DecodingBytes:
    """Bytes of a model in decoding, with weights as they are stored."""

    slot: int
    """One expert, the largest."""
    resident: int
    """All weights but the routed experts."""
    token: int
    """The weights that one token uses."""
    kv_cache: int


def decoding_bytes(passes: Passes, length: int, dtype: torch.dtype) -> DecodingBytes:
    """Return these sizes. length: positions of the KV cache."""
    config, each = passes.config, passes.bytes_per_weight
    moes = {index: layer.moe for index, layer in enumerate(config.layers) if layer.moe is not None}
    weights = {
        (index, expert): sum(map(math.prod, expert_shapes(config, index, expert).values()))
        for index, moe in moes.items()
        for expert in range(moe.experts)
    }
    outside = passes.weights - sum(weights.values())
    used = sum(
        moe.experts_per_token * sum(weights[index, expert] for expert in range(moe.experts)) / moe.experts
        for index, moe in moes.items()
    )
    # of an embedding that is no head too, a token reads one row
    unread = 0 if config.tied_embeddings else math.prod(expected_tensors(config)[EMBEDDINGS]) - config.hidden_size
    return DecodingBytes(
        math.ceil(max(weights.values()) * each),
        math.ceil(outside * each),
        math.ceil((outside - unread + used) * each),
        position_bytes(config, dtype) * length + state_bytes(config, dtype),
    )


def random_choices(config: DecoderConfig, tokens: int, seed: int) -> dict[int, Tensor]:
    """Return experts of tokens by decoder layer, [C, K], drawn evenly: the routing that a cache helps least."""
    generator = torch.Generator().manual_seed(seed)
    return {
        index: torch.rand(tokens, layer.moe.experts, generator=generator).topk(layer.moe.experts_per_token).indices
        for index, layer in enumerate(config.layers)
        if layer.moe is not None
    }


def slots_within(limit: int, base_bytes: int, sizes: DecodingBytes, config: DecoderConfig) -> int:
    """Return the number of experts that a limit holds. Raises OptionError if it does not hold those of one token."""
    fixed = base_bytes + sizes.resident + sizes.kv_cache
    least = fixed + config.experts_per_token * sizes.slot
    if limit < least:
        raise OptionError(
            f"memory-limit is {limit / 1e9:.2f}GB, and decoding needs {math.ceil(least / 1e7) / 100:.2f}GB at least: "
            f"{base_bytes / 1e9:.2f} for the interpreter, {(sizes.resident + sizes.kv_cache) / 1e9:.2f} for what "
            f"every token reads, the rest for {config.experts_per_token} experts; give that much"
        )
    return min((limit - fixed) // sizes.slot, sum(config.experts_per_layer))


def predicted_decoding(
    passes: Passes,
    dtype: torch.dtype,
    machine: Machine,
    limit: int,
    length: int,
    chosen: Mapping[int, Tensor] | None,
    seed: int = 0,
) -> DecodingFigures:
    """Return the figures of decoding within a limit of memory.

    length: positions of the KV cache. chosen: experts of tokens by decoder layer; None for a random routing.
    """
    config = passes.config
    sizes = decoding_bytes(passes, length, dtype)
    slots = slots_within(limit, machine.base_bytes, sizes, config)
    routing = "random: every expert is as likely as the others"
    if chosen is None:
        chosen = random_choices(config, RANDOM_TOKENS, seed)
    else:
        routing = "the experts that calibration listed for its first tokens"
    layers = len(chosen)
    tokens = min([MOST_STEPS // layers, *map(len, chosen.values())])
    steps: list[Step] = [*itertools.islice(token_steps(dict(chosen)), tokens * layers)]
    counted = tokens - tokens // 2  # the first half fills the cache
    found = compared(steps, slots, uncounted=(tokens - counted) * layers)
    compute = sizes.token / (DECODE_EFFICIENCY * machine.memory_bytes_per_second)
    disk = machine.disk
    policies = {name: _policy_figures(each, counted, sizes.slot, compute, disk) for name, each in found.items()}
    return {
        "memory_limit_bytes": limit,
        "interpreter_bytes": machine.base_bytes,
        "resident_weights_bytes": sizes.resident,
        "kv_cache_bytes": sizes.kv_cache,
        "slot_bytes": sizes.slot,
        "slots": slots,
        "experts": sum(config.experts_per_layer),
        "routing": routing,
        "tokens_simulated": tokens,
        "disk_bytes_per_second": disk.bytes_per_second,
        "disk_source": disk.source,
        "memory_bytes_per_second": machine.memory_bytes_per_second,
        "weights_bytes_per_token": sizes.token,
        "compute_seconds_per_token": compute,
        "tokens_per_second_all_in_memory": 1.0 / compute,
        "policy": DEFAULT,
        **policies[DEFAULT],
        "policies": policies,
    }


def _policy_figures(simulated: Simulated, tokens: int, slot_bytes: int, compute: float, disk: DiskSpeed) -> PolicyFigures:
    read_bytes = simulated.misses / tokens * slot_bytes
    read = read_bytes / disk.bytes_per_second
    return {
        "hit_rate": simulated.hit_rate,
        "read_bytes_per_token": read_bytes,
        "read_seconds_per_token": read,
        "tokens_per_second": 1.0 / (compute + read),
        "tokens_per_second_reading_ahead": 1.0 / max(compute, read),
    }
