"""Short convolutions against transformers' module, and the names that their family has on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from safetensors.torch import load_file, save_file
from test_quantized_weight import quantised
from torch import Tensor
from transformers import DynamicCache

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.attention import Positions
from engine.decoder.kv_cache import KeyValueCache, state_bytes
from engine.decoder.model import Decoder
from engine.errors import CheckpointError
from engine.families.table import ARCHITECTURES
from engine.families.tensor_names import name_on_disk

LENGTH, LAYER = 19, 2
ANYWHERE = Positions(torch.empty(0), torch.empty(0), False, {})


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(name="both", scope="module")
def ours_and_theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Checkpoint]:
    """Return a transformers model in float64, and its checkpoint."""
    path: Path = tmp_path_factory.mktemp("model")
    return save_reference("lfm2_moe", path).double(), Checkpoint(path)


@torch.no_grad()
def test_a_layer_whole_in_pieces_and_padded(both: tuple[Any, Checkpoint]) -> None:
    """One position at a time follows a prefix. The states are equal too."""
    model, checkpoint = both
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float64))
    theirs, ours = model.model.layers[LAYER].conv, decoder.layers[LAYER].attention
    x = normal(2, LENGTH, 32)
    expected = theirs(x)
    assert float((ours(x, ANYWHERE) - expected).abs().max()) < 1e-12 < 1e-2 < float(expected.abs().max())
    cache, reference = KeyValueCache(decoder.config, 2, LENGTH, torch.float64), DynamicCache(config=model.config)
    for piece in x.split((LENGTH - 8, 1, 4, 1, 1, 1), dim=1):
        found, wanted = ours(piece, ANYWHERE, cache), theirs(piece, past_key_values=reference)
        assert float((found - wanted).abs().max()) < 1e-12
    (last,) = cache.state(LAYER)
    assert float((last.mT - reference.get_conv_state(LAYER)[..., -2:]).abs().max()) < 1e-12
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, :7] = False
    padded = ours(x, ANYWHERE._replace(is_padded=True, real_BL=real))
    assert float((padded - theirs(x, attention_mask=real))[real].abs().max()) < 1e-12
    assert float((padded[1:, 7:] - ours(x[1:, 7:], ANYWHERE)).abs().max()) < 1e-12, "padding leaves no trace"


def test_a_state_is_the_last_inputs_of_the_convolution(both: tuple[Any, Checkpoint]) -> None:
    """The bytes are counted by hand: two layers, two positions of 32 channels in float32."""
    config = both[1].config
    assert config.caching_layers == (1,) and state_bytes(config, torch.bfloat16) == 2 * 2 * 32 * 4


def test_names_on_disk(both: tuple[Any, Checkpoint], tmp_path: Path) -> None:
    """Errors show the names on disk, and so does the list of the weights that stay unquantized."""
    row = ARCHITECTURES["lfm2_moe"]
    on_disk = {
        "model.norm.weight": "model.embedding_norm.weight",
        "model.layers.12.input_layernorm.weight": "model.layers.12.operator_norm.weight",
        "model.layers.0.mlp.up_proj.weight": "model.layers.0.feed_forward.w3.weight",
        "model.layers.3.feed_forward.gate.weight": "model.layers.3.feed_forward.gate.weight",
        "model.embed_tokens.weight": "model.embed_tokens.weight",
    }
    assert {name: name_on_disk(row, name) for name in on_disk} == on_disk
    rounded = quantised("lfm2_moe", tmp_path, 4, experts_only=True)
    stored = load_file(tmp_path / "quantised" / "model.safetensors")
    kept = {f"{name}.weight" for name in rounded.raw_config["quantization_config"]["ignore"]} - {"lm_head.weight"}
    assert "model.layers.1.self_attn.out_proj.weight" in kept <= stored.keys()
    assert "model.layers.0.feed_forward.w1.weight" in kept
    tensors = load_file(both[1].directory / "model.safetensors")
    del tensors["model.layers.1.operator_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((both[1].directory / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.operator_norm\.weight is missing"):
        Checkpoint(tmp_path)
