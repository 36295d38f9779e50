"""A mixture made of a dense model computes that model when all experts are chosen; units that act together stay so."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from real_mixture import (
    RIDGE,
    balanced_clusters,
    copied_tensors,
    mixture_config,
    moments,
    refit,
    routers,
    split_tensors,
    weighted_units,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder, embedded
from engine.decoder.routing import Selection
from engine.errors import OptionError, UnsupportedError
from engine.families.resolve import decoder_config
from engine.families.tensor_shapes import expected_tensors
from engine.passes.streaming import layer_positions

EXPERTS, TOP_K, WIDTH = 4, 2, 24
TOKENS_SL = torch.randint(3, 60, (4, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def dense(tmp_path: Path) -> Checkpoint:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, **sizes)).save_pretrained(tmp_path)
    return Checkpoint(tmp_path)


def logits(dense: Checkpoint, raw: dict[str, object], blocks: dict[str, Tensor]) -> Tensor:
    """Return the logits of the mixture with these blocks, and with the dense model's other tensors."""
    config = decoder_config(raw)
    tensors = {name: blocks[name] if name in blocks else dense.tensor(name) for name in expected_tensors(config)}
    with torch.inference_mode():
        return Decoder(config, tensors.__getitem__)(TOKENS_SL)


def test_all_experts_of_a_split_network_are_the_dense_network(dense: Checkpoint) -> None:
    decoder = Decoder(dense.config, dense.source(torch.float32))
    found = moments(decoder, TOKENS_SL)
    clusters = {layer: balanced_clusters(own.together_FF, EXPERTS) for layer, own in found.items()}
    assert all(sorted(unit for units in each for unit in units) == list(range(WIDTH)) for each in clusters.values())
    made = routers(decoder, TOKENS_SL, found, clusters)
    assert all(router_ND.shape == (EXPERTS, 16) and router_ND.isfinite().all() for router_ND in made.values())
    raw = mixture_config(dense, EXPERTS, EXPERTS, WIDTH // EXPERTS)
    undecided = {layer: torch.zeros_like(router_ND) for layer, router_ND in made.items()}
    split = logits(dense, raw, dict(split_tensors(dense, decoder_config(raw), clusters, undecided)))
    with torch.inference_mode():
        assert (split - decoder(TOKENS_SL)).abs().max() < 1e-5


def test_the_refit_is_the_least_squares_solution_on_the_mixtures_own_states(dense: Checkpoint) -> None:
    """The first layer is compared with numpy's lstsq on rows for the ridge; every layer's error falls."""
    decoder = Decoder(dense.config, dense.source(torch.float32))
    found = moments(decoder, TOKENS_SL)
    clusters = {layer: balanced_clusters(own.together_FF, EXPERTS) for layer, own in found.items()}
    raw = mixture_config(dense, EXPERTS, TOP_K, WIDTH // EXPERTS)
    blocks = dict(split_tensors(dense, decoder_config(raw), clusters, routers(decoder, TOKENS_SL, found, clusters)))

    def mixture() -> Decoder:
        return Decoder(decoder_config(raw), lambda name: blocks[name].clone() if name in blocks else dense.tensor(name))

    before, after = mixture(), mixture()
    positions = layer_positions(dense, TOKENS_SL, torch.float32, "cpu")
    with torch.no_grad():
        x_SLD = embedded(dense.config, TOKENS_SL, decoder.embedding_VD)
        block = before.layers[0].feed_forward
        seen: list[tuple[Tensor, Selection]] = []
        block.observer = lambda x_TD, _, selection: seen.append((x_TD, selection))
        lacks_TD = (decoder.layers[0](x_SLD, positions) - before.layers[0](x_SLD, positions)).flatten(0, 1).double()
        a_TF = weighted_units(block, *seen[0]).double()
        ridge = RIDGE * a_TF.square().sum(dim=0).mean()
        rows = torch.cat([a_TF, ridge.sqrt() * torch.eye(WIDTH).double()])
        goal = torch.cat([lacks_TD, torch.zeros(WIDTH, lacks_TD.shape[1]).double()])
        wanted_FD = torch.from_numpy(numpy.linalg.lstsq(rows.numpy(), goal.numpy(), rcond=None)[0])
        (_, downs), *_ = list(refit(decoder, after, TOKENS_SL, positions))
    was_DF = torch.cat([expert.down_DF.data for expert in block.experts], dim=1)
    assert (torch.cat(downs, dim=1) - was_DF - wanted_FD.T).abs().max() < 1e-4 * was_DF.abs().max()
    with torch.inference_mode():
        full, errors = decoder.hidden_states(TOKENS_SL), []
        for each in (before, after):
            errors.append((each.hidden_states(TOKENS_SL) - full).square().mean())
    assert errors[1] < errors[0]


def test_copies_compute_the_dense_model(dense: Checkpoint) -> None:
    raw = mixture_config(dense, EXPERTS, TOP_K, WIDTH)
    copied = logits(dense, raw, dict(copied_tensors(dense, decoder_config(raw))))
    with torch.inference_mode():
        assert (copied - Decoder(dense.config, dense.source(torch.float32))(TOKENS_SL)).abs().max() < 1e-5


def test_units_that_are_active_together_share_an_expert() -> None:
    kind_F = torch.arange(WIDTH) % EXPERTS
    together_FF = (kind_F[:, None] == kind_F).float() * 50 + 5
    clusters = balanced_clusters(together_FF, EXPERTS)
    assert sorted(map(sorted, clusters)) == [list(range(first, WIDTH, EXPERTS)) for first in range(EXPERTS)]


def test_sizes_that_do_not_divide_and_other_families_are_refused(dense: Checkpoint) -> None:
    with pytest.raises(OptionError, match="24 hidden units cannot be divided among 5 experts"):
        balanced_clusters(torch.eye(WIDTH), 5)
    dense.raw_config["model_type"] = "gpt_neox"
    with pytest.raises(UnsupportedError, match="of the family gpt_neox; give one"):
        mixture_config(dense, EXPERTS, TOP_K, WIDTH)
