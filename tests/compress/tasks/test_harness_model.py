"""Tasks on our engine: by hand, as the harness's own model gives them, with skipping, of exports, of any family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import make_pruned, make_workplace, run
from packages_for_tests import needs_lm_eval

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.model import Decoder, own_routings
from engine.decoder.skip_tables import load_skip_tables, skipping_routings
from engine.errors import OptionError
from engine.generation.generate import Engine

pytestmark = needs_lm_eval
PAIRS = [
    ("the quick", " brown fox"),
    ("the quick", " dog"),
    ("over a ", "lazy dog"),
    ("the", "n"),
    ("the", "m"),
    ("", "experts look away"),
    ("the quick brown fox jumps over a lazy dog " * 4, "while experts look"),
]
TEXTS = ["the lazy dog", "", "experts look away while the quick brown fox jumps over a lazy dog " * 6]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with `model`, and `pruned`, which differs by layer and has tables for skipping."""
    path = tmp_path_factory.mktemp("tasks")
    make_workplace(path, max_position_embeddings=128)
    make_pruned(path)
    return path


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


def model_of(path: Path, **options: Any) -> Any:
    from compress.tasks.harness_model import HarnessModel

    return HarnessModel(Engine.open(path, dtype="float32", **options))


def by_hand(
    path: Path,
    threshold: float = 0.0,
    pairs: list[tuple[str, str]] = PAIRS,
    dtype: torch.dtype = torch.float32,
) -> list[tuple[float, bool]]:
    """Return log-likelihood and greediness of pairs: one forward pass for each, token by token in the sum."""
    checkpoint = Checkpoint(path)
    decoder, tokenizer = Decoder(checkpoint.config, checkpoint.source(dtype)), load_tokenizer(checkpoint)
    own = own_routings(checkpoint.config, checkpoint.source(dtype))
    tables = load_skip_tables(path, checkpoint.config) if threshold else None
    for block, routing in zip(
        decoder.moe_blocks, skipping_routings(checkpoint.config, tables, threshold, own=own), strict=True
    ):
        block.routing = routing
    found = []
    for context, continuation in pairs:
        while context and context[-1].isspace():
            context, continuation = context[:-1], context[-1] + continuation
        start = tokenizer.encode(context) if context else [tokenizer.bos_token_id or tokenizer.eos_token_id]
        whole = tokenizer.encode(context + continuation) if context else start + tokenizer.encode(continuation)
        answer = whole[len(start) :]
        assert whole[: len(start)] == start, "no token has characters of both"
        read = whole[-129:]
        with torch.inference_mode():
            logs_LV = decoder(torch.tensor([read[:-1]]))[0].float().log_softmax(-1)
        last = logs_LV[-len(answer) :]
        total = sum(float(last[place, token]) for place, token in enumerate(answer))
        found.append((total, last.argmax(-1).tolist() == answer))
    return found


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_log_likelihoods_equal_a_loop_by_hand(place: Path, threshold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.tasks.harness_model.TOKENS_PER_BATCH", 40)  # several batches, some with padding
    model = model_of(place / "pruned", skip_threshold=threshold)
    found = model.loglikelihood(instances("loglikelihood", PAIRS))
    for (value, greedy), (expected, expected_greedy) in zip(found, by_hand(place / "pruned", threshold), strict=True):
        assert value == pytest.approx(expected, abs=1e-4) and greedy == expected_greedy
    unskipped = [value for value, _ in by_hand(place / "pruned")]
    assert (pytest.approx(unskipped, abs=1e-3) == [value for value, _ in found]) == (threshold == 0.0)


def test_equal_inputs_are_read_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = model_of(place / "model"), []
    forward = model._forward
    monkeypatch.setattr(model, "_forward", lambda batch: seen.extend(batch) or forward(batch))
    model.loglikelihood(instances("loglikelihood", [("the", letter) for letter in "abcdefgh"]))
    assert len(seen) == 1


def test_the_harness_has_the_same_numbers_of_its_own_model(place: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    ours, theirs = model_of(place / "model"), HFLM(pretrained=str(place / "model"), device="cpu", dtype="float32")
    for kind, arguments in (("loglikelihood", PAIRS), ("loglikelihood_rolling", [(text,) for text in TEXTS])):
        made, expected = (getattr(model, kind)(instances(kind, arguments)) for model in (ours, theirs))
        assert torch.allclose(torch.tensor(made), torch.tensor(expected), rtol=0, atol=1e-3), kind
    wanted = [(text, {"until": ["x", "o"], "max_gen_toks": 12, "do_sample": False}) for text in ("the quick", "over", "a")]
    made, expected = (model.generate_until(instances("generate_until", wanted)) for model in (ours, theirs))
    assert [text.strip() for text in made] == [text.strip() for text in expected]


def test_a_sampled_continuation_ends_at_its_limit(place: Path) -> None:
    options = {"until": [], "max_gen_toks": 5, "do_sample": True, "temperature": 0.8}
    (text,) = model_of(place / "model").generate_until(instances("generate_until", [("the quick", options)]))
    assert text
    with pytest.raises(OptionError, match="asks for 200 new tokens; the model has 128"):
        model_of(place / "model").generate_until(instances("generate_until", [("the", options | {"max_gen_toks": 200})]))


def test_an_export_is_evaluated_as_its_checkpoint(place: Path) -> None:
    run("export", str(place / "model"), "--format", "onnx", "-o", str(place / "onnx"))
    made, expected = (
        [value for value, _ in model_of(place / name).loglikelihood(instances("loglikelihood", PAIRS))]
        for name in ("onnx", "model")
    )
    assert made == pytest.approx(expected, abs=1e-3)
    texts = [
        model_of(place / name).generate_until(instances("generate_until", [("the quick", {"max_gen_toks": 6})]))
        for name in ("onnx", "model")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", ["deepseek", "llama_moe"])
def test_a_family_without_a_class_in_transformers_is_evaluated(family: str, tmp_path: Path) -> None:
    make_workplace(tmp_path, family, max_position_embeddings=128)
    found = model_of(tmp_path / "model").loglikelihood(instances("loglikelihood", PAIRS))
    for (value, greedy), (expected, expected_greedy) in zip(found, by_hand(tmp_path / "model"), strict=True):
        assert value == pytest.approx(expected, abs=1e-4) and greedy == expected_greedy


def test_the_command_skips_in_perplexity(place: Path) -> None:
    asked = [
        "evaluate",
        str(place / "pruned"),
        "--data",
        str(place / "text.txt"),
        "--samples",
        "4",
        "--sequence-length",
        "32",
    ]
    skipped, whole = run(*asked, "--skip-threshold", "1"), run(*asked)
    assert skipped["value"] != whole["value"] and whole["experts_skipped_share"] == 0.0
    assert 0 < skipped["experts_skipped_share"] < 1 and skipped["skip_threshold"] == 1.0
