"""Skip tables on disk, and the routings made from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from safetensors.torch import save_file
from torch import Tensor

from calibrate.collect import collect
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.checkpoint.skip_table_file import FILE_NAME, SKIP_RULES
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder, own_routing, own_routings, routed_by
from engine.decoder.routing import NO_EXPERT, Routing, TopK, select
from engine.decoder.skip_tables import SkipTables, load_skip_tables, skipping_routings
from engine.errors import CheckpointError, OptionError, OutputError
from engine.families.config import DecoderConfig


def tables_of_ones(config: DecoderConfig) -> SkipTables:
    layers = [layer.moe for layer in config.layers if layer.moe is not None]
    return SkipTables(
        tuple(torch.ones(moe.experts_per_token - 1) for moe in layers),
        tuple(torch.ones(moe.experts, moe.experts) for moe in layers),
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_reference("mixtral", tmp_path)
    return Checkpoint(tmp_path)


@pytest.mark.parametrize("has_importance", [False, True])
def test_saved_tables_load_as_they_were(checkpoint: Checkpoint, has_importance: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tables = SkipTables(
        tuple(torch.rand(1, generator=generator) for _ in range(3)),
        tuple(torch.rand(6, 6, generator=generator) for _ in range(3)),
    )
    assert load_skip_tables(checkpoint.directory, checkpoint.config) is None
    if has_importance:
        tables = replace(tables, importance_1=tuple(torch.rand(1, generator=generator) for _ in range(3)))
    tables.save(checkpoint.directory / FILE_NAME)
    loaded = load_skip_tables(checkpoint.directory, checkpoint.config)
    assert loaded is not None
    for layer in range(3):
        assert torch.equal(loaded.gamma1_J[layer], tables.gamma1_J[layer])
        assert torch.equal(loaded.gamma2_NN[layer], tables.gamma2_NN[layer])
    assert loaded.importance_1 == tables.importance_1


def routings_of(config: DecoderConfig, tables: SkipTables | None, threshold: float, **options: Any) -> list[Routing]:
    own = [own_routing(layer.moe) for layer in config.layers if layer.moe is not None]
    return skipping_routings(config, tables, threshold, own=own, **options)


def test_a_layer_with_one_expert_left_has_empty_ranks(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path, num_local_experts=1, num_experts_per_tok=1)
    config = Checkpoint(tmp_path).config
    tables_of_ones(config).save(tmp_path / FILE_NAME)
    tables = SkipTables.load(tmp_path / FILE_NAME, config)
    assert [tuple(gamma1.shape) for gamma1 in tables.gamma1_J] == [(0,)] * 3
    experts, _ = routings_of(config, tables, 1.0)[0](torch.zeros(2, 1))
    assert experts.tolist() == [[0], [0]]


def test_the_place_must_be_writable(checkpoint: Checkpoint) -> None:
    with pytest.raises(OutputError, match="skip tables"):
        tables_of_ones(checkpoint.config).save(checkpoint.directory / "nowhere" / FILE_NAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_layers.1.gamma1": torch.ones(2)}, r"moe_layers.1.gamma1 is torch.float32 \[2\]"),
        ({"moe_layers.2.gamma2": torch.ones(5, 5)}, r"moe_layers.2.gamma2 is torch.float32 \[5, 5\]"),
        ({"moe_layers.0.gamma1": torch.ones(1, dtype=torch.float64)}, "float64"),
        ({"moe_layers.0.gamma2": torch.full((6, 6), torch.nan)}, "NaN"),
        ({"moe_layers.3.gamma1": torch.ones(1)}, "moe_layers.3.gamma1 is not expected"),
        ({"moe_layers.1.gamma2": None}, "moe_layers.1.gamma2 is missing"),
        ({"moe_layers.0.importance": torch.ones(1)}, "moe_layers.1.importance is missing"),
        ({f"moe_layers.{layer}.importance": torch.ones(()) for layer in range(3)}, r"importance is torch.float32 \[\]"),
        ({f"moe_layers.{layer}.importance": torch.full((1,), torch.inf) for layer in range(3)}, "importance holds NaN or"),
    ],
)
def test_tables_of_another_model_are_refused(
    checkpoint: Checkpoint, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors: dict[str, torch.Tensor | None] = {}
    for layer in range(3):
        tensors |= {f"moe_layers.{layer}.gamma1": torch.ones(1), f"moe_layers.{layer}.gamma2": torch.ones(6, 6)}
    tensors |= change
    path = checkpoint.directory / FILE_NAME
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(CheckpointError, match=message):
        SkipTables.load(path, checkpoint.config)


def test_a_damaged_file_is_refused(checkpoint: Checkpoint) -> None:
    path = checkpoint.directory / FILE_NAME
    tables_of_ones(checkpoint.config).save(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=FILE_NAME):
        SkipTables.load(path, checkpoint.config)


def test_threshold_zero_gives_the_own_rules(checkpoint: Checkpoint) -> None:
    for tables in (None, tables_of_ones(checkpoint.config)):
        routings = routings_of(checkpoint.config, tables, 0.0)
        assert routings == [TopK(2, True)] * 3


def test_an_expert_is_skipped_below_the_threshold(checkpoint: Checkpoint) -> None:
    # Two experts with weights 3/4 and 1/4: their ratio 1/3 is skipped from threshold 1/3 on.
    logits = torch.tensor([3.0, 1.0, 0.0, 0.0, 0.0, 0.0]).log().clamp_min(-30)[None]
    tables = tables_of_ones(checkpoint.config)
    experts, weights = routings_of(checkpoint.config, tables, 0.3)[0](logits)
    assert experts.tolist() == [[0, 1]]
    assert torch.allclose(weights, torch.tensor([[0.75, 0.25]]))
    experts, weights = routings_of(checkpoint.config, tables, 0.4)[0](logits)
    assert experts.tolist() == [[0, NO_EXPERT]]
    assert weights.tolist() == [[1.0, 0.0]]
    experts, _ = routings_of(checkpoint.config, tables, 0.4, minimum_experts=2)[0](logits)
    assert experts.tolist() == [[0, 1]]


def test_the_rule_of_naee_compares_weights_alone(checkpoint: Checkpoint) -> None:
    """γ2 = 1 for every pair of experts, so a token's second expert goes where w_1 < S · γ1_1 · w_0."""
    own = own_routings(checkpoint.config, checkpoint.source(torch.float32))
    tables = SkipTables((torch.full((1,), 0.8),) * len(own), tuple(torch.zeros(6, 6) for _ in own))
    logits_TN = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    diep, naee = (skipping_routings(checkpoint.config, tables, 1.0, own=own, rule=rule)[0] for rule in ("diep", "naee"))
    plain = own[0](logits_TN)
    expected_T = plain.weights[:, 1] < 0.8 * plain.weights[:, 0]
    assert 0 < int(expected_T.sum()) < 40
    assert torch.equal(naee(logits_TN).experts[:, 1] == NO_EXPERT, expected_T)
    assert not (diep(logits_TN).experts == NO_EXPERT).any(), "similarities of zero skip nothing"
    with pytest.raises(OptionError, match="skip rule 'moe' is not known; choose diep, naee or mc-moe"):
        skipping_routings(checkpoint.config, tables, 1.0, own=own, rule="moe")


def test_the_rule_of_mc_moe_equals_a_loop_over_tokens(checkpoint: Checkpoint) -> None:
    """A token skips by NAEE's rule unless the 1-norm of the router's input is above the layer's quantile."""
    own = own_routings(checkpoint.config, checkpoint.source(torch.float32))
    generator = torch.Generator().manual_seed(0)
    x_TD, logits_TN = torch.randn(60, 32, generator=generator), torch.randn(60, 6, generator=generator)
    # γ2 of zero would skip nothing by the rule of DiEP.
    tables = SkipTables((torch.full((1,), 0.8),) * 3, (torch.zeros(6, 6),) * 3, (torch.full((1,), 26.0),) * 3)
    rule = skipping_routings(checkpoint.config, tables, 1.0, own=own, rule="mc-moe")[0]
    found, seen = select(rule, x_TD, logits_TN), set()
    for token, (experts, weights) in enumerate(zip(*own[0](logits_TN), strict=True)):
        is_small = float(weights[1]) < 0.8 * float(weights[0])
        is_important = sum(abs(value) for value in x_TD[token].tolist()) > 26.0
        seen.add((is_small, is_important))
        is_skipped = is_small and not is_important
        assert found.experts[token].tolist() == [int(experts[0]), NO_EXPERT if is_skipped else int(experts[1])]
        expected = torch.tensor([1.0, 0.0]) if is_skipped else weights
        assert torch.allclose(found.weights[token], expected)
    assert len(seen) == 4, "small and large weights of important and other tokens"


@pytest.mark.parametrize(("quantile", "skips"), [(0.0, False), (1e9, True)])
def test_protected_tokens_keep_all_experts(checkpoint: Checkpoint, quantile: float, skips: bool) -> None:
    tables = replace(tables_of_ones(checkpoint.config), importance_1=(torch.full((1,), quantile),) * 3)
    own = own_routings(checkpoint.config, checkpoint.source(torch.float32))
    rules = skipping_routings(checkpoint.config, tables, 1.0, own=own, rule="mc-moe")
    x_TD, logits_TN = torch.ones(4, 32), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    found, plain = select(rules[0], x_TD, logits_TN), own[0](logits_TN)
    assert torch.equal(found.weights, plain.weights) == (not skips)
    assert torch.equal(found.experts == NO_EXPERT, torch.tensor([[False, skips]] * 4))


@pytest.mark.parametrize("rule", SKIP_RULES)
def test_the_demo_model_has_the_tables_of_every_rule(rule: str) -> None:
    demo = Checkpoint(DEMO_DIRECTORY)
    tables, own = load_skip_tables(DEMO_DIRECTORY, demo.config), own_routings(demo.config, demo.source(torch.float32))
    assert len(skipping_routings(demo.config, tables, 1.0, own=own, rule=rule)) == len(demo.config.moe_layers)


def test_mc_moe_needs_the_importance_of_tokens(checkpoint: Checkpoint) -> None:
    tables_of_ones(checkpoint.config).save(checkpoint.directory / FILE_NAME)
    tables = load_skip_tables(checkpoint.directory, checkpoint.config)
    assert len(routings_of(checkpoint.config, tables, 1.0, rule="naee")) == 3
    with pytest.raises(OptionError, match=r"'mc-moe' needs .* importance of tokens.* calibrate again with `compress prune`"):
        routings_of(checkpoint.config, tables, 1.0, rule="mc-moe")
    assert routings_of(checkpoint.config, tables, 0.0, rule="mc-moe") == [TopK(2, True)] * 3


def test_mc_moe_gives_a_token_one_choice_in_decoding_and_in_prompts(tmp_path: Path) -> None:
    """One prompt, pieces of it, and single positions skip the experts of the same tokens, and give the same logits."""
    save_reference("mixtral", tmp_path, num_experts_per_tok=3)
    checkpoint, tokens_BL = Checkpoint(tmp_path), torch.randint(3, 96, (3, 24), generator=torch.Generator().manual_seed(1))
    statistics = collect(checkpoint, tokens_BL, dtype=torch.float32)
    layers = statistics.layers.values()
    tables = SkipTables(
        tuple(layer.weight_ratio_median for layer in layers),
        tuple(torch.ones(6, 6) for _ in layers),
        # Slightly below the quantile, which is the norm of one of these tokens to the last bit.
        tuple(0.97 * layer.input_norm_quantile for layer in layers if layer.input_norm_quantile is not None),
    )
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    rules = skipping_routings(
        checkpoint.config, tables, 1.0, own=[block.routing for block in decoder.moe_blocks], rule="mc-moe"
    )

    def run(length: int, rules: list[Routing]) -> tuple[Tensor, Tensor]:
        """Return the logits [B, L, V], and the number of experts of each token [layers, B, L]."""
        used: list[list[Tensor]] = [[] for _ in decoder.moe_blocks]
        for block, own in zip(decoder.moe_blocks, used, strict=True):
            block.observer = lambda x_TD, logits_TN, selection, own=own: own.append((selection.experts >= 0).sum(1))
        cache, found = KeyValueCache(checkpoint.config, 3, 24, torch.float32), []
        with torch.inference_mode(), routed_by(decoder, rules):
            for piece_BL in tokens_BL.split(length, dim=1):
                found.append(decoder(piece_BL, None, cache))
        return torch.cat(found, 1), torch.stack([torch.cat([part.view(3, -1) for part in own], 1) for own in used])

    logits, used = run(24, rules)
    unprotected = skipping_routings(checkpoint.config, tables, 1.0, own=[rule.base for rule in rules], rule="naee")
    for length in (1, 7):
        other_logits, other_used = run(length, rules)
        assert torch.equal(other_used, used) and torch.allclose(other_logits, logits, atol=1e-4)
    naee_used = run(24, unprotected)[1]
    assert (naee_used[0] < used[0]).any() and (used[0] < 3).any(), "some tokens are protected, and not all"


def test_bad_options_are_refused(checkpoint: Checkpoint) -> None:
    config, tables = checkpoint.config, tables_of_ones(checkpoint.config)
    for threshold in (-0.1, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="skip threshold"):
            routings_of(config, tables, threshold)
    with pytest.raises(OptionError, match="skip minimum"):
        routings_of(config, tables, 1.0, minimum_experts=0)
    with pytest.raises(OptionError, match="compress prune"):
        routings_of(config, None, 1.0)


def test_a_dense_model_has_nothing_to_skip(tmp_path: Path) -> None:
    save_reference("mistral", tmp_path)
    config = Checkpoint(tmp_path).config
    assert routings_of(config, None, 0.0) == []
    with pytest.raises(OptionError, match="dense"):
        routings_of(config, None, 1.0)
