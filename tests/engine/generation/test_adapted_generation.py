"""Families that transformers runs: generation equals transformers' own, alone, in a batch, streamed and sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import others_slow
from tiny_families import TOKENS_SL, by_name, difference, logits_of, save_tiny
from tiny_generation import measured_running
from tokenizers_for_tests import VOCABULARY, add_tokenizer

import cli
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_decoder import AdaptedDecoder
from engine.adapted.interface_families import interface_families
from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.generation.options import SamplingOptions
from engine.generation.sampling import sample

FAMILIES = others_slow(
    ("exaone_moe", "nemotron_h", "kimi_linear", "qwen3_vl_moe", "zaya"), "exaone_moe", "nemotron_h", "kimi_linear"
)
"""Sliding windows, Mamba with experts without gate, linear attention, and others."""
PROMPTS = ["def read(path):", "x", "größer als €5: ", "class A(object):"]


def _saved(path: Path, family: str) -> Any:
    model = save_tiny(by_name(family), path, vocab_size=VOCABULARY)
    add_tokenizer(path)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    """Return a model of transformers and the engine of its directory."""
    path = tmp_path_factory.mktemp(request.param)
    return _saved(path, request.param), Engine.open(path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exaone_moe")
    _saved(path, "exaone_moe")
    return path


def _reference(model: Any, engine: Engine, prompt: str, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greedy tokens of transformers' own generation [L], and their logits [L, V]."""
    ids = torch.tensor([engine.encode(prompt)])
    asked = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True, **asked
    )
    return made.sequences[0, ids.shape[1] :], torch.cat(made.logits)


def test_greedy_equals_transformers_alone_and_in_a_batch(made: tuple[Any, Engine]) -> None:
    model, engine = made
    engine.end_tokens = frozenset()
    together = engine.generate(PROMPTS, max_new_tokens=12)
    for prompt, got in zip(PROMPTS, together, strict=True):
        tokens_L, _ = _reference(model, engine, prompt, 12)
        assert list(got.token_ids) == tokens_L.tolist()
        assert engine.generate(prompt, max_new_tokens=12) == [got]
    assert engine.report().kv_cache_bytes > 0


def test_logits_equal_transformers_step_by_step(made: tuple[Any, Engine]) -> None:
    model, engine = made
    ids_1L = torch.tensor([engine.encode(PROMPTS[0])])
    tokens_L, logits_LV = _reference(model, engine, PROMPTS[0], 12)
    cache = engine.new_cache(1, 0)
    found = [engine.prefill(ids_1L, None, cache)]
    found += [engine.step(token_1, None, cache) for token_1 in tokens_L[:-1].split(1)]
    assert difference(torch.cat(found), logits_LV) < 1e-4
    with torch.inference_mode():
        assert difference(engine.decoder(TOKENS_SL), logits_of(model)) < 1e-4
        cache = engine.new_cache(len(TOKENS_SL), 0)
        pieces = [engine.prefill(piece, None, cache) for piece in TOKENS_SL.split(6, dim=1)]  # several tokens after others
        assert difference(pieces[-1], logits_of(model)[:, -1]) < 1e-4


def test_sampling_draws_from_transformers_logits(made: tuple[Any, Engine]) -> None:
    model, engine = made
    engine.end_tokens = frozenset()
    options = SamplingOptions(temperature=0.8, top_p=0.9, top_k=20, seed=3)
    (got,) = engine.generate(PROMPTS[0], max_new_tokens=6, sampling=options)
    tokens, generator = engine.encode(PROMPTS[0]), options.generator()
    begin = len(tokens)
    for _ in range(6):
        with torch.no_grad():
            logits_1V = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[:, -1]
        tokens.append(int(sample(logits_1V, options, generator)))
    assert list(got.token_ids) == tokens[begin:]


def test_streams_stops_and_end_tokens(directory: Path) -> None:
    engine = Engine.open(directory)
    engine.end_tokens = frozenset()
    whole, other = engine.generate(PROMPTS[:2], max_new_tokens=16)
    assert "".join(engine.stream(PROMPTS[0], max_new_tokens=16)) == whole.text
    engine.end_tokens = frozenset({whole.token_ids[3]})
    cut = engine.generate(PROMPTS[:2], max_new_tokens=16)
    assert cut[0].token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[3]) + 1]
    assert cut[0].finish_reason == "stop"
    assert cut[1].token_ids[:4] == other.token_ids[:4]
    engine.end_tokens = frozenset()
    stop = next(letter for letter in whole.text if letter.isprintable())
    (stopped,) = engine.generate(PROMPTS[0], max_new_tokens=16, stop=stop)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    with pytest.raises(OptionError, match="has 64 positions"):
        engine.generate("x" * 60, max_new_tokens=16)


def test_the_command_reports_what_it_read(directory: Path) -> None:
    asked = ["generate", str(directory), "-p", "x", "-n", "4", "--temperature", "1", "--top-k", "5"]
    assert "4 tokens, " in CliRunner().invoke(cli.main, asked, catch_exceptions=False).stdout
    engine = Engine.open(directory)
    engine.generate("x", max_new_tokens=4)
    report, decoder = engine.report(), engine.decoder
    assert isinstance(decoder, AdaptedDecoder)
    assert report.weights_bytes == decoder.weights_bytes
    idle = sum(block.layer.count - block.layer.per_token for block in decoder.moe_blocks) * 3 * 16 * 32 * 4
    embedding = (VOCABULARY - 1) * 32 * 4
    assert report.weights_read_bytes_per_token == pytest.approx(report.weights_bytes - idle - embedding)
    assert report.experts_read == 2 * len(decoder.moe_blocks) * (report.prompt_tokens + 3)


def test_stacked_weights_stay_memory_mapped(tmp_path: Path) -> None:
    """Weights that are stored as transformers has them are not copied."""
    _saved(tmp_path, "qwen3_vl_moe")
    checkpoint = AdaptedCheckpoint(tmp_path)
    decoder = AdaptedDecoder(checkpoint, torch.float32)
    name = f"{checkpoint.found.experts[0].experts}.down_proj"
    assert checkpoint.names.targets[name] == name
    assert decoder.model.get_parameter(name).data_ptr() == checkpoint.stored_tensor(name).data_ptr()
    assert not any(parameter.is_meta for parameter in decoder.model.get_submodule(checkpoint.found.layers).parameters())


def test_bfloat16_experts_run_in_our_kernels(directory: Path) -> None:
    """The reference is transformers in bfloat16, which rounds after each step."""
    engine = Engine.open(directory, dtype="bfloat16")
    reference = Engine.open(directory).decoder
    with torch.inference_mode():
        found, expected = engine.decoder(TOKENS_SL), reference(TOKENS_SL)
    assert found.dtype == torch.bfloat16
    assert difference(found.float(), expected) < 0.05 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "exaone_moe runs through transformers here, on the CPU only; device is 'cuda'"),
        (
            {"kv_cache_dtype": "int8"},
            "transformers keeps the cache of a model of the family exaone_moe in the compute dtype",
        ),
        ({"draft": "own"}, "its cache cannot undo tokens, which drafting requires; leave out the draft"),
        ({"skip_threshold": 1.0}, "the checkpoint has no skip_tables.safetensors"),
        ({"backend": "onnx"}, "backend 'onnx' runs exported models only"),
        ({"dtype": "float8"}, "dtype 'float8' is not known"),
    ],
)
def test_what_transformers_does_not_do_is_refused(directory: Path, options: dict[str, Any], message: str) -> None:
    if "draft" in options:
        options = {"draft": directory}
    with pytest.raises(OptionError, match=message) as error:
        Engine.open(directory, **options)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("family", interface_families(), ids=lambda family: family.name)
def test_every_family(family: Any, tmp_path: Path) -> None:
    """Families that the adapter refuses have no figures."""
    if family.model_type:
        found = measured_running(family, tmp_path)
        assert all(value != value or value < 1e-4 for value in found.values()), found
