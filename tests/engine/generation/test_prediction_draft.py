"""Drafts of a model's own layers for multi-token prediction: the text is the model's, and the layer is the paper's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import reference_model, save_reference
from predicting_models import save_predicting
from safetensors.torch import load_file, save_file
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from torch import Tensor

import cli
from engine.decoder.kv_cache import KeyValueCache
from engine.errors import CheckpointError, OptionError
from engine.generation.generate import Engine
from engine.generation.options import SamplingOptions
from engine.generation.prediction_draft import PredictionReader, open_prediction

PROMPT = "def read(path):"
FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2")


@pytest.fixture(scope="module", params=FAMILIES)
def predicting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save_predicting(request.param, tmp_path_factory.mktemp(request.param) / "model").directory


@torch.no_grad()
def test_the_layer_is_transformers_layer_on_the_paper_s_input(predicting: tuple[str, Path]) -> None:
    """Transformers' own decoder of one layer, given h' of equation 21, has the logits."""
    family, path = predicting
    stored, opened = load_file(path / "model.safetensors"), Engine.open(path)
    (last, layers), config = (number(opened, 1), number(opened, 0)), opened.checkpoint.config
    one = reference_model(family, 0, vocab_size=VOCABULARY).eval()
    tensors = {name.replace(f".{layers}.", f".{last}.", 1): t for name, t in stored.items() if f"layers.{layers}." in name}
    one.load_state_dict(_in_memory(one, tensors, last), strict=False)
    one.model.layers = one.model.layers[last:]
    one.model.layers[0].self_attn.layer_idx = 0
    one.config.num_hidden_layers = 1
    own = {
        name: stored[f"model.layers.{layers}.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    }
    one.model.norm.weight.copy_(own["shared_head.norm"])
    one.lm_head.weight.copy_(stored["lm_head.weight"])

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_epsilon) * weight

    tokens = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(1))
    states = opened.decoder.hidden_states(tokens)
    following = stored["model.embed_tokens.weight"][tokens[0, 1:]].clone()
    following[0] = 0.0
    inputs = torch.cat([normed(following, own["enorm"]), normed(states[0, :-1], own["hnorm"])], -1) @ own["eh_proj"].T
    expected = one(inputs_embeds=inputs[None], use_cache=False).logits[0, -1]

    layer = open_prediction(opened.checkpoint, torch.float32, torch.device("cpu"))
    reader = PredictionReader(opened.decoder, layer, 32, torch.float32)
    for piece in states[:, :-1].split([4, 5, 2], dim=1):
        reader.watch(piece)
    found = reader.read(tokens[0].tolist())[0]
    assert (found - expected).abs().max() <= 1e-4 and found.abs().max() > 0.1


def number(opened: Engine, before: int) -> int:
    return len(opened.checkpoint.config.layers) - before


def _in_memory(model: Any, tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """Return tensors of a layer as transformers has them: experts stacked."""
    experts = [name for name in model.state_dict() if f"layers.{layer}." in name and name.endswith("gate_up_proj")]
    if not experts:
        return tensors
    block = experts[0].removesuffix("gate_up_proj")
    parts = ("w1", "w3", "w2") if any(".w1." in name for name in tensors) else ("gate_proj", "up_proj", "down_proj")
    stored = block.replace(".mlp.", ".block_sparse_moe.") if parts[0] == "w1" else block
    count = model.state_dict()[experts[0]].shape[0]
    gate, up, down = (torch.stack([tensors[f"{stored}{e}.{part}.weight"] for e in range(count)]) for part in parts)
    others = {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in tensors.items()}
    return others | {f"{block}gate_up_proj": torch.cat([gate, up], 1), f"{block}down_proj": down}


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_the_text_is_that_of_the_model(predicting: tuple[str, Path], draft_tokens: int) -> None:
    _, path = predicting
    alone, drafted = Engine.open(path), Engine.open(path, draft="mtp", draft_tokens=draft_tokens)
    assert drafted.generate(PROMPT, max_new_tokens=24) == alone.generate(PROMPT, max_new_tokens=24)
    report = drafted.report()
    assert report.draft_acceptance_rate is not None and report.weights_bytes > alone.report().weights_bytes
    sampled = SamplingOptions(temperature=1.0, seed=3)
    twice = [drafted.generate(PROMPT, max_new_tokens=12, sampling=sampled) for _ in range(2)]
    assert twice[0] == twice[1] and drafted.decoder.watch is None


@pytest.mark.parametrize("reads", ["the next token", "the state"])
def test_a_layer_that_knows_the_next_token_is_always_right(reads: str, tmp_path: Path) -> None:
    """With layers that add nothing, a model's next token follows from the last token alone: the token of the draft."""
    path = save_predicting("glm4_moe", tmp_path / "model").directory
    tensors = load_file(path / "model.safetensors")
    hidden = tensors["model.norm.weight"].shape[0]
    eye, nothing = torch.eye(hidden), torch.zeros(hidden, hidden)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith(("norm.weight",)):
            tensor.fill_(1.0)
        elif name.endswith("eh_proj.weight"):
            tensor.copy_(torch.cat([eye, nothing] if reads == "the next token" else [nothing, eye], dim=1))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    opened = Engine.open(path, draft="mtp")
    opened.generate(PROMPT, max_new_tokens=40)
    rate = opened.report().draft_acceptance_rate
    assert rate == 1.0 if reads == "the next token" else rate is not None and rate < 0.5


def test_states_of_refused_tokens_are_forgotten(predicting: tuple[str, Path]) -> None:
    """After rounds in which some tokens were refused, a draft is that of a reader that sees the whole text at once."""
    _, path = predicting
    opened = Engine.open(path)
    layer = open_prediction(opened.checkpoint, torch.float32, torch.device("cpu"))
    tokens = torch.randint(3, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(2))[0].tolist()
    reader = PredictionReader(opened.decoder, layer, 40, torch.float32)
    cache = KeyValueCache(opened.checkpoint.config, 1, 40, torch.float32)

    def reads(text: list[int]) -> None:
        reader.watch(opened.decoder.hidden_states(torch.tensor([text[cache.length :]]), None, cache))

    reads(tokens[:6])
    known = 7
    for accepted in (0, 2, 3, 1, 0):
        drafted = [*tokens[:known], *([5] * 3)]
        drafted[known : known + accepted] = tokens[known : known + accepted]
        for count in range(3):
            reader.read(drafted[: known + count])
        reads(drafted)
        cache.length = known + accepted
        reader.keep(known + accepted)
        known += accepted + 1
    fresh = PredictionReader(opened.decoder, layer, 40, torch.float32)
    fresh.watch(opened.decoder.hidden_states(torch.tensor([tokens[: known - 1]])))
    expected = fresh.read(tokens[:known])
    assert (reader.read(tokens[:known]) - expected).abs().max() <= 1e-4
    assert reader.cache.length == fresh.cache.length == known - 1


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    save_reference("glm4_moe", tmp_path / "none", vocab_size=VOCABULARY)
    add_tokenizer(tmp_path / "none")
    with pytest.raises(OptionError, match="has no layers for multi-token prediction"):
        Engine.open(tmp_path / "none", draft="mtp")
    save_reference("qwen3_next", tmp_path / "states", vocab_size=VOCABULARY)
    with pytest.raises(OptionError, match="layers with a state cannot undo tokens"):
        Engine.open(tmp_path / "states", draft="mtp")
    path = save_predicting("glm4_moe", tmp_path / "model", {"eh_proj": torch.ones(2, 4)}).directory
    with pytest.raises(CheckpointError, match=r"eh_proj\.weight of the layer for multi-token prediction has shape \[2, 4\]"):
        Engine.open(path, draft="mtp")
    with pytest.raises(OptionError, match="one prompt at a time"):
        Engine.open(save_predicting("glm4_moe", tmp_path / "two").directory, draft="mtp").generate(["a", "b"])


def test_the_command_reports_the_draft(tmp_path: Path) -> None:
    path = save_predicting("glm4_moe", tmp_path / "model").directory
    arguments = ["generate", str(path), "--prompt", PROMPT, "-n", "8", "--json"]
    drafted, alone = (CliRunner().invoke(cli.main, [*arguments, *more]) for more in (["--draft", "mtp"], []))
    assert drafted.exit_code == alone.exit_code == 0, drafted.output
    figures, own = json.loads(drafted.stdout), json.loads(alone.stdout)
    assert figures["text"] == own["text"] and figures["draft_acceptance_rate"] is not None
