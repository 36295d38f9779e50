"""Shares of experts that are in memory when they are used, by the policy of the cache, on the routing of the demo model.

python benchmarks/expert_policies.py [--samples 32]

The first half of the tokens fills the cache. Beside the demo model's routing there is one that uses all experts alike.
"""

from __future__ import annotations

import argparse
from typing import Any

from results import markdown, save

from calibrate.chosen import chosen_of, token_steps
from calibrate.collect import collect
from calibrate.text import token_batches
from compress.cost.decoding import random_choices
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.tokenizer import load_tokenizer
from engine.expert_cache.policies import BEST, POLICIES, Hindsight, Policy, Step, simulate

SHARES = (0.25, 0.5, 0.75)
LENGTH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=32)
    samples = parser.parse_args().samples
    checkpoint = Checkpoint(resolve("demo"))
    text = {"samples": samples, "sequence_length": LENGTH, "seed": 0}
    tokens_SL = token_batches("stdlib", load_tokenizer(checkpoint), **text, split="report")
    chosen = chosen_of(collect(checkpoint, tokens_SL, dtype=checkpoint.model_dtype), "demo")
    routings = {"demo": chosen, "even": random_choices(checkpoint.config, tokens_SL.numel(), 0)}
    experts = sum(checkpoint.config.experts_by_layer.values())
    rows = []
    for name, own in routings.items():
        trace = list(token_steps(own))
        for share in SHARES:
            rows.append(
                {"routing": name, "slots": int(share * experts), "hit_rates": hit_rates(trace, int(share * experts))}
            )
    save("expert_policies", {"rows": rows, "experts": experts, "tokens": tokens_SL.numel()})


def hit_rates(trace: list[Step], slots: int) -> dict[str, float]:
    """Return the share of uses in the second half of a trace that are in memory, by policy."""
    half = len(trace) // 2

    def rate(policies: tuple[Policy, Policy]) -> float:
        whole, first = (simulate(part, slots, own) for part, own in zip((trace, trace[:half]), policies, strict=True))
        hits, misses = whole.hits - first.hits, whole.misses - first.misses
        return hits / (hits + misses)

    found = {name: rate((policy(), policy())) for name, policy in POLICIES.items()}
    return found | {BEST: rate((Hindsight(trace), Hindsight(trace[:half])))}


def table(figures: dict[str, Any]) -> str:
    """Return a row for each routing and number of slots."""
    header = [f"slots of {figures['experts']} experts", "routing", *figures["rows"][0]["hit_rates"]]
    rows = [
        [str(row["slots"]), row["routing"], *(f"{rate:.1%}" for rate in row["hit_rates"].values())]
        for row in figures["rows"]
    ]
    return markdown(header, rows)


def in_text(figures: dict[str, Any]) -> dict[str, str]:
    """Return the shares on the demo model's routing by policy and slots."""
    rows = [row for row in figures["rows"] if row["routing"] == "demo"]
    return {f"demo_{name}_{row['slots']}": f"{rate:.1%}" for row in rows for name, rate in row["hit_rates"].items()}


TABLES = {"expert_policies": table}
IN_TEXT = {"expert_policies": in_text}

if __name__ == "__main__":
    main()
