"""Tiny models of families that transformers runs, generated from and skipped: references, and columns of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tiny_families import TOKENS_SL, difference, logits_of, save_tiny
from torch import Tensor, nn

from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_decoder import AdaptedDecoder
from engine.adapted.expert_layers import replaced_forwards
from engine.adapted.interface_families import Family
from engine.decoder.model import routed_by
from engine.decoder.skip_tables import SkipTables, skipping_routings
from engine.errors import UnsupportedError
from engine.transformers_models.transformers_model import quiet_transformers

COLUMNS = ("generated", "skipping")
PROMPT, NEW = 12, 8
"""Numbers of tokens that are read and generated."""


@contextmanager
def skipped_by_hand(
    model: Any, checkpoint: AdaptedCheckpoint, tables: SkipTables, threshold: float, normalises: bool
) -> Iterator[list[int]]:
    """Skip experts in a model of transformers during the body; yield the numbers of slots and of skipped ones."""
    counts, functions = [0, 0], {}

    def run(module: nn.Module, gamma1_J: Tensor, gamma2_NN: Tensor, x_TD: Tensor, chosen: Tensor, given: Tensor) -> Tensor:
        rows = []
        for x_D, experts, weights in zip(x_TD, chosen.tolist(), given.tolist(), strict=True):
            slots = sorted(zip(weights, experts, strict=True), key=lambda slot: -slot[0])
            (first, best), kept = slots[0], slots[:1]
            for rank, (weight, expert) in enumerate(slots[1:]):
                if weight >= threshold * float(gamma1_J[rank]) * float(gamma2_NN[best, expert]) * first:
                    kept.append((weight, expert))
            scale = sum(weights) / sum(weight for weight, _ in kept) if normalises and len(kept) < len(slots) else 1.0
            counts[0], counts[1] = counts[0] + len(slots), counts[1] + len(slots) - len(kept)
            left, numbers = torch.tensor([[weight * scale for weight, _ in kept]]), torch.tensor([[e for _, e in kept]])
            rows.append(type(module).forward(module, x_D[None], numbers, left.to(x_D)))
        return torch.cat(rows)

    for place, layer in enumerate(checkpoint.found.experts):
        module = model.get_submodule(layer.experts)
        functions[module] = partial(run, module, tables.gamma1_J[place], tables.gamma2_NN[place])
    with replaced_forwards(functions):
        yield counts


def measured_running(family: Family, path: Path) -> dict[str, float]:
    """Return the largest difference of a logit in each column; infinity if other tokens were generated.

    Generation is compared with transformers' own, or with whole texts where that fails. Skipping is compared with its
    rule written out around transformers' modules.
    """
    model = save_tiny(family, path)
    try:
        checkpoint = AdaptedCheckpoint(path)
        decoder = AdaptedDecoder(checkpoint, torch.float32)
    except UnsupportedError:
        return dict.fromkeys(COLUMNS, float("nan"))
    with quiet_transformers(), torch.no_grad():
        return {COLUMNS[0]: _generated(model, decoder), COLUMNS[1]: _skipping(model, checkpoint, decoder)}


def _generated(model: Any, decoder: AdaptedDecoder) -> float:
    tokens_1L, cache, found = TOKENS_SL[:1, :PROMPT], decoder.new_cache(), []
    logits_1V = decoder.last_logits(tokens_1L, None, cache)
    for _ in range(NEW):
        found.append(logits_1V)
        tokens_1L = torch.cat([tokens_1L, logits_1V.argmax(-1, keepdim=True)], dim=1)
        logits_1V = decoder.last_logits(tokens_1L[:, -1:], None, cache)
    asked = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True}
    try:
        made = model.generate(TOKENS_SL[:1, :PROMPT], return_dict_in_generate=True, **asked)
        tokens, expected_LV = made.sequences, torch.cat(made.logits)
    except (ValueError, AttributeError):  # transformers' generation lacks an entry of the config, or a layer of attention
        expected_LV = model(input_ids=tokens_1L[:, :-1], use_cache=False).logits[0, PROMPT - 1 :]
        tokens = torch.cat([tokens_1L[:, :PROMPT], expected_LV.argmax(-1)[None]], dim=1)
    return difference(torch.cat(found), expected_LV) if torch.equal(tokens, tokens_1L) else float("inf")


def _skipping(model: Any, checkpoint: AdaptedCheckpoint, decoder: AdaptedDecoder) -> float:
    generator, layers = torch.Generator().manual_seed(0), checkpoint.found.experts
    tables = SkipTables(
        tuple(torch.full((layer.per_token - 1,), 0.95) for layer in layers),
        tuple(torch.rand(layer.count, layer.count, generator=generator) * 0.6 + 0.7 for layer in layers),
    )
    routings = skipping_routings(checkpoint.config, tables, 1.0, own=checkpoint.routings)
    with routed_by(decoder, routings):
        found = decoder(TOKENS_SL)
    with skipped_by_hand(model, checkpoint, tables, 1.0, _has_one_sum(model, checkpoint)):
        return difference(found, logits_of(model))


def _has_one_sum(model: Any, checkpoint: AdaptedCheckpoint) -> bool:
    """Return whether the weights of every token of the text have one sum in each layer."""
    sums: dict[str, Tensor] = {}

    def see(name: str, module: nn.Module, given: Any, made: Any) -> None:
        sums[name] = made[1].reshape(-1, made[1].shape[-1]).sum(-1)

    routers = [layer.router for layer in checkpoint.found.experts]
    handles = [model.get_submodule(name).register_forward_hook(partial(see, name)) for name in routers]
    logits_of(model)
    for handle in handles:
        handle.remove()
    return all(bool(torch.allclose(own, own[:1].expand_as(own), rtol=1e-4)) for own in sums.values())
