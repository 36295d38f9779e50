"""Families with sparse attention: dense up to the number of positions that an indexer selects, refused beyond it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FURTHER_FAMILIES, INDEXER, SIZES, save_reference, save_tensors
from family_matrix import TOKENS, loaded, logits_of, worst
from safetensors.torch import load_file
from serving_for_tests import scheduler_for
from test_quantized_weight import quantised
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from compress.plans.apply import apply
from compress.plans.plan import pruning_plan
from compress.rounding.activation_scales import activation_scales
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.errors import CheckpointError, CompressError, OptionError, UnsupportedError
from engine.families.plain_config import PlainConfig
from engine.families.resolve import decoder_config
from engine.families.tensor_shapes import expected_tensors
from engine.generation.generate import Engine
from engine.kernels.stored.scheme import Scheme

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
SELECTED = 8
EACH = pytest.mark.parametrize("family", ["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)])


@torch.no_grad()
@EACH
def test_longer_texts_are_refused_as_transformers_then_attends_to_some_positions(family: str, tmp_path: Path) -> None:
    model = save_reference(family, tmp_path, index_topk=SELECTED)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    short = TOKENS[:, :SELECTED]
    assert worst(decoder(short), logits_of(model, short)) <= 1e-4
    unlimited = decoder_config({**checkpoint.raw_config, "index_topk": 16})
    dense = Decoder(unlimited, checkpoint.source(torch.float32))(TOKENS)
    assert worst(dense[:, :SELECTED], logits_of(model)[:, :SELECTED]) <= 1e-4 < 1e-3 < worst(dense, logits_of(model))
    with pytest.raises(UnsupportedError, match=r"has 9 tokens, and a .* attends to 8 positions that an indexer selects"):
        decoder(TOKENS[:, :9])
    cache = KeyValueCache(checkpoint.config, 2, 16, torch.float32)
    real = torch.ones(2, 12, dtype=torch.bool)
    real[:, :4] = False
    padded = decoder(TOKENS[:, :12], real, cache)
    assert worst(padded[:, 4:], decoder(TOKENS[:, 4:12])) <= 1e-4, "padding counts as no position"
    with pytest.raises(UnsupportedError, match="has 9 tokens"):
        decoder(TOKENS[:, 12:13], torch.cat((real, real[:, -1:]), 1), cache)


def test_generate_and_serve_name_the_limit(tmp_path: Path) -> None:
    save_reference("deepseek_v32", tmp_path, index_topk=24, vocab_size=VOCABULARY)
    add_tokenizer(tmp_path)
    engine = Engine.open(tmp_path, device="cpu")
    with pytest.raises(OptionError, match=r"24 positions \(beyond them its attention is sparse"):
        engine.generate("abc", max_new_tokens=30)
    with pytest.raises(OptionError, match=r"the model has 24 \(beyond them its attention is sparse"):
        scheduler_for(engine, kv_cache_bytes=1 << 20, max_batch_size=2, max_model_length=25)


@EACH
def test_results_keep_the_indexer_as_it_was(family: str, tmp_path: Path) -> None:
    """A pruned model has its tensors byte by byte, and a quantized one does not round them."""
    rounded = quantised(family, tmp_path, 4)
    full = Checkpoint(tmp_path / "full")
    (tmp_path / "pruned").mkdir()
    apply(pruning_plan({layer: [0, 3, 4, 7] for layer in full.config.moe_layers}), full, tmp_path / "pruned")
    before, *after = (load_file(tmp_path / name / "model.safetensors") for name in ("full", "pruned", "quantised"))
    names = [name for name in before if ".indexer." in name]
    assert len(names) == 5 * sum(layer.indexer is not None for layer in full.config.layers) > 0
    assert all(torch.equal(before[name], tensors[name]) for name in names for tensors in after)
    matrices = {name.removesuffix(".weight") for name in names if before[name].dim() == 2}
    assert matrices <= set(rounded.raw_config["quantization_config"]["ignore"])


@torch.no_grad()
def test_scales_by_activations_leave_the_selection_as_it_is(tmp_path: Path) -> None:
    """transformers selects the same positions after the norm before attention was divided by the scales."""
    model = save_reference("deepseek_v32", tmp_path / "full", index_topk=SELECTED)
    checkpoint = Checkpoint(tmp_path / "full")
    tokens = TOKENS[:, :SELECTED]
    found = activation_scales(checkpoint, tokens, Scheme(4, 4), experts_only=False, dtype=torch.float32)
    folded = {name: found.rescaled(name, checkpoint.tensor(name)) for name in checkpoint.shapes}
    changed = "model.layers.1.self_attn.indexer.wk.weight"
    assert not torch.equal(folded[changed], checkpoint.tensor(changed))
    (tmp_path / "folded").mkdir()
    shutil.copy(tmp_path / "full" / "config.json", tmp_path / "folded")
    save_tensors(folded, checkpoint, tmp_path / "folded")
    assert worst(logits_of(loaded(Checkpoint(tmp_path / "folded"), plain=True)), logits_of(model)) <= 1e-4


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk is 0"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v32", {"layer_types": ["indexed_attention", "full_attention", "indexed_attention"]}, "layer_types"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "indexer_types has 'shared' for layer 0"),
        ("glm_moe_dsa", {"indexer_types": ["full", "full", "half"]}, "indexer_types has 'half' for layer 2"),
    ],
    ids=str,
)
def test_configs_that_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressError, match=message):
        decoder_config({"model_type": family} | SIZES | FURTHER_FAMILIES[family] | changes)


@pytest.mark.parametrize(("family", "billions", "indexers"), [("deepseek_v32", 671.9, 61), ("glm_moe_dsa", 743.9, 78)])
def test_sizes_of_the_published_models(family: str, billions: float, indexers: int) -> None:
    """The defaults of transformers' configs are the sizes of DeepSeek V3.2 and GLM-5."""
    published = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 1}
    config = decoder_config({"model_type": family, "ep_size": 1} | published)
    assert isinstance(config.transformers_config, PlainConfig), "transformers is not imported for it"
    assert sum(layer.indexer is not None for layer in config.layers) == indexers and config.prediction_layers == 1
    assert config.moe_layers == tuple(range(3, len(config.layers))) and config.max_positions == 2048
    assert round(sum(map(math.prod, expected_tensors(config).values())) / 1e9, 1) == billions


def test_every_family_with_an_indexer_is_here() -> None:
    assert {family for family, sizes in FURTHER_FAMILIES.items() if INDEXER.keys() <= sizes.keys()} == set(FAMILIES)
    with pytest.raises(CheckpointError, match="index_head_dim is 0"):
        decoder_config({"model_type": FAMILIES[0]} | SIZES | FURTHER_FAMILIES[FAMILIES[0]] | {"index_head_dim": 0})
