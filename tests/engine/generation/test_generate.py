"""Generation equals transformers', alone and in a batch; stops, streaming, skipping, reports and refusals."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, others_slow, save_reference
from tokenizers_for_tests import VOCABULARY, add_tokenizer

import engine as package
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.decoder.routing import Selection
from engine.decoder.skip_tables import SkipTables
from engine.errors import CheckpointError, OptionError
from engine.generation.generate import Engine, Generation, torch_products
from engine.generation.options import SamplingOptions
from engine.generation.text_stream import Characters, StopString, TextStream

PROMPTS = ["def read(path):", "x", "größer als €5: "]


def save_model(path: Path, family: str = "mixtral", **changes: Any) -> Any:
    model = save_reference(family, path, vocab_size=VOCABULARY, **changes)
    add_tokenizer(path)
    return model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return path


@pytest.fixture
def engine(directory: Path) -> Engine:
    return Engine.open(directory, device="cpu")


def tables(experts: int = 6, layers: int = 3) -> SkipTables:
    return SkipTables((torch.ones(1),) * layers, (torch.ones(experts, experts),) * layers)


@pytest.mark.parametrize("family", others_slow(FAMILIES, "mixtral", "gpt_oss", "granitemoe", "llama_moe", "qwen2"))
def test_greedy_equals_transformers_alone_and_in_a_batch(family: str, tmp_path: Path) -> None:
    reference = save_model(tmp_path, family)
    engine = Engine.open(tmp_path, device="cpu")
    together = engine.generate(PROMPTS, max_new_tokens=20)
    for prompt, got in zip(PROMPTS, together, strict=True):
        assert engine.generate(prompt, max_new_tokens=20) == [got]
        ids = torch.tensor([engine.encode(prompt)])
        mask = torch.ones_like(ids)
        expected = reference.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
        assert list(got.token_ids) == expected.tolist()
        assert got.text == engine.tokenizer.decode(expected, skip_special_tokens=True)


def test_one_result_carries_its_counts(engine: Engine) -> None:
    (result,) = engine.generate("hello", max_new_tokens=3)
    assert isinstance(result, Generation)
    assert (result.prompt_tokens, result.generated_tokens, len(result.token_ids)) == (5, 3, 3)
    assert result.finish_reason == "length"
    assert engine.generate([]) == []


def test_the_end_token_ends_one_sequence_and_not_the_others(engine: Engine) -> None:
    plain = engine.generate(PROMPTS, max_new_tokens=20)
    ending = plain[0].token_ids[4]
    engine.end_tokens = frozenset({ending})
    for before, after in zip(plain, engine.generate(PROMPTS, max_new_tokens=20), strict=True):
        cut = before.token_ids.index(ending) + 1 if ending in before.token_ids else 20
        assert after.token_ids == before.token_ids[:cut]
        assert after.finish_reason == ("stop" if ending in before.token_ids else "length")
        text = engine.tokenizer.decode(list(after.token_ids))
        assert after.text == (text[:-1] if after.finish_reason == "stop" else text)


def test_generation_stops_early_when_all_are_done(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = engine.generate("x", max_new_tokens=5)[0].token_ids
    engine.end_tokens = frozenset({first[1]})
    steps: list[int] = []
    own = engine.step
    monkeypatch.setattr(engine, "step", lambda *arguments: steps.append(1) or own(*arguments))
    engine.generate("x", max_new_tokens=50)
    assert len(steps) == first.index(first[1])


def test_end_tokens_come_from_the_generation_config_first(directory: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    (copy / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert Engine.open(copy).end_tokens == {7, 9}
    (copy / "generation_config.json").unlink()
    assert Engine.open(copy).end_tokens == {2}
    (copy / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(CheckpointError, match="eos_token_id is 'two'"):
        Engine.open(copy).generate("x", max_new_tokens=2)


def test_a_stop_string_cuts_the_text(engine: Engine) -> None:
    whole = engine.generate("def read(path):", max_new_tokens=20)[0]
    stop = whole.text[6:9]
    result = engine.generate("def read(path):", max_new_tokens=20, stop=[stop, "never found"])[0]
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.finish_reason == "stop"
    assert result.generated_tokens < whole.generated_tokens
    assert engine.generate("def read(path):", max_new_tokens=20, stop=stop) == [result]


def test_streaming_joins_to_the_same_text(engine: Engine) -> None:
    for prompt in PROMPTS:
        whole = engine.generate(prompt, max_new_tokens=30)[0]
        assert "".join(engine.stream(prompt, max_new_tokens=30)) == whole.text
        stop = whole.text[8:11]
        cut = engine.generate(prompt, max_new_tokens=30, stop=stop)[0]
        pieces = list(engine.stream(prompt, max_new_tokens=30, stop=stop))
        assert "".join(pieces) == cut.text
        assert all(pieces)


def test_streaming_leaves_no_mode_behind(engine: Engine) -> None:
    for _ in engine.stream("x", max_new_tokens=3):
        assert not torch.is_inference_mode_enabled()
        assert torch._C._get_mkldnn_enabled()


def characters(context: list[int]) -> Characters:
    """Return a reader of characters over single bytes."""
    return Characters(context, lambda ids: bytes(ids).decode(errors="replace"))


def test_only_whole_characters_are_given_out() -> None:
    reader = characters(list(b"ab"))
    assert [reader.add(byte) for byte in "é€x".encode()] == ["", "é", "", "", "€", "x"]
    assert reader.rest() == ""
    assert reader.add(0xE2) == ""
    assert reader.rest() == "\ufffd"


def test_bytes_that_are_no_text_do_not_stop_what_follows() -> None:
    reader = characters([])
    assert [reader.add(byte) for byte in b"\xc3A\x80B"] == ["", "\ufffdA", "", "\ufffdB"]


def naive_begun(text: str, stop: str) -> int:
    return max((length for length in range(1, len(stop)) if text.endswith(stop[:length])), default=0)


@pytest.mark.parametrize("stop", ["a", "aa", "ab", "aab", "abab", "aabaa", "abcab", "abacabab"])
def test_a_stop_string_is_found_where_a_plain_search_finds_it(stop: str) -> None:
    chosen = random.Random(stop)
    for _ in range(200):
        text = "".join(chosen.choice("aabc") for _ in range(20))
        looking, read = StopString(stop), 0
        while read < len(text):
            piece = text[read : read + chosen.randint(0, 4)]
            found = looking.find(piece)
            whole = text[: read + len(piece)]
            if stop in whole:
                assert found is not None and read + found == whole.find(stop)
                break
            assert found is None and looking.begun == naive_begun(whole, stop)
            read += len(piece)


def test_of_several_stop_strings_the_first_in_the_text_is_named() -> None:
    stream = TextStream([], 10, frozenset(), ("d", "bc", "b"), lambda ids: "".join(map(chr, ids)))
    for character in "abcd":
        if not stream.finish_reason:
            stream.append(ord(character))
    assert (stream.text, stream.stop_string) == ("a", "b")
    other = TextStream([], 2, frozenset(), ("d",), lambda ids: "".join(map(chr, ids)))
    for character in "ab":
        other.append(ord(character))
    assert (other.finish_reason, other.stop_string) == ("length", "")


def test_a_long_stop_string_costs_no_more_than_the_text() -> None:
    """A search that compares every prefix of the string with the text would take hours for this one."""
    looking = StopString("z" * 1_000_000)
    assert all(looking.find("z" * 10 + "y") is None and looking.begun == 0 for _ in range(1_000))


def test_sampling_repeats_with_its_seed(engine: Engine) -> None:
    def text(seed: int) -> str:
        return engine.generate("x", max_new_tokens=20, sampling=SamplingOptions(temperature=1.0, seed=seed))[0].text

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_an_empty_prompt_begins_with_the_begin_token(engine: Engine, directory: Path, tmp_path: Path) -> None:
    assert engine.encode("") == [1]
    assert engine.generate("", max_new_tokens=2)[0].prompt_tokens == 1
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    add_tokenizer(copy, bos=False)
    with pytest.raises(OptionError, match="prompt is empty"):
        Engine.open(copy).generate("")


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("x" * 120, {"max_new_tokens": 9}, "120 tokens and 9 new ones make 129, and the model has 128 positions"),
        ("x", {"max_new_tokens": 0}, "new tokens is 0"),
        ("x", {"stop": [""]}, "stop string is empty"),
        ("\udc80", {}, "UTF-8"),
    ],
)
def test_what_does_not_fit_is_refused(engine: Engine, prompt: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        engine.generate(prompt, **options)
    with pytest.raises(OptionError, match=message):
        engine.stream(prompt, **options)


def test_all_positions_can_be_used(engine: Engine) -> None:
    engine.end_tokens = frozenset()
    assert engine.generate("x" * 120, max_new_tokens=8)[0].generated_tokens == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device 'tpu'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"threads": 0}, "threads is 0"),
        ({"skip_threshold": -1.0}, "skip threshold"),
        ({"skip_threshold": 1.0}, "compress prune"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Engine.open(directory, **options)


def test_cuda_is_refused_where_there_is_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="cuda"):
        Engine.open(directory, device="cuda")
    assert Engine.open(directory).device.type == "cpu"


def test_overflow_is_named(directory: Path) -> None:
    engine = Engine.open(directory)
    engine.decoder.norm.data = torch.full_like(engine.decoder.norm, torch.inf)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        engine.generate("x", max_new_tokens=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_generates(directory: Path, dtype: str) -> None:
    engine = Engine.open(directory, dtype=dtype, device="cpu")
    assert engine.dtype == getattr(torch, dtype)
    assert engine.generate("x", max_new_tokens=4)[0].generated_tokens == 4
    assert engine.weights_bytes * 2 == Engine.open(directory, dtype="float32").weights_bytes


def test_decode_kernels_switch_for_one_row_in_half_precision_only() -> None:
    cpu = torch.device("cpu")
    for rows, dtype, enabled in ((1, torch.bfloat16, False), (2, torch.bfloat16, True), (1, torch.float32, True)):
        with torch_products(rows, dtype, cpu):
            assert torch._C._get_mkldnn_enabled() is enabled
        assert torch._C._get_mkldnn_enabled()
    with pytest.raises(KeyError), torch_products(1, torch.float16, cpu):
        raise KeyError
    assert torch._C._get_mkldnn_enabled()


def test_the_report_accounts_for_the_run(engine: Engine) -> None:
    with pytest.raises(OptionError, match="nothing was generated"):
        engine.report()
    results = engine.generate(PROMPTS, max_new_tokens=6)
    report = engine.report()
    assert report.prompt_tokens == sum(result.prompt_tokens for result in results)
    assert report.generated_tokens == sum(result.generated_tokens for result in results)
    assert 0 < report.time_to_first_token_seconds < 60
    assert report.prefill_tokens_per_second is not None
    assert report.prefill_tokens_per_second > 0
    assert report.tokens_per_second is not None
    assert report.tokens_per_second > 0
    assert report.weights_bytes == engine.checkpoint.bytes
    longest = max(result.prompt_tokens for result in results)
    per_position = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, fp32
    assert report.kv_cache_bytes == 3 * (longest + 5) * per_position
    assert report.peak_memory_bytes > report.weights_bytes
    assert report.experts_skipped_share == 0.0
    assert report.experts_skipped_share_per_layer == [0.0, 0.0, 0.0]
    assert report.experts_read == (report.prompt_tokens + report.generated_tokens - 3) * 3 * 2
    engine.generate("x", max_new_tokens=1)
    assert engine.report().tokens_per_second is None


def test_a_dense_model_reports_no_experts(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    engine = Engine.open(tmp_path)
    engine.generate("x", max_new_tokens=2)
    assert engine.report().experts_skipped_share_per_layer == []
    assert engine.report().experts_read == 0


def test_threshold_zero_is_no_skipping_to_the_bit(directory: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    tables().save(copy / FILE_NAME)
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        plain = Engine.open(directory).decoder(tokens)
        zero = Engine.open(copy, skip_threshold=0.0)
        assert zero.skip_counter is None
        assert torch.equal(plain, zero.decoder(tokens))


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_bytes_that_a_token_reads_are_those_of_its_experts(directory: Path, tmp_path: Path, threshold: float) -> None:
    """The expected bytes are counted from each token's routing and from the sizes of the stored tensors."""
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    tables().save(copy / FILE_NAME)
    engine = Engine.open(copy, skip_threshold=threshold)
    chosen: list[int] = []

    class Watched:
        def __init__(self, base: Any) -> None:
            self.base = base

        def __call__(self, logits_TN: torch.Tensor) -> Selection:
            selection: Selection = self.base(logits_TN)
            chosen.append(int((selection.experts >= 0).sum()))
            return selection

    for block in engine.decoder.moe_blocks:
        block.routing = Watched(block.routing)
    engine.generate("some text to be read", max_new_tokens=8)
    report, checkpoint = engine.report(), engine.checkpoint
    sizes = {name: checkpoint.tensor(name).nbytes for name in checkpoint.shapes}
    of_one_expert = sum(size for name, size in sizes.items() if ".experts.0." in name) / 3
    common = sum(size for name, size in sizes.items() if ".experts." not in name and "embed_tokens" not in name)
    tokens = report.prompt_tokens + report.generated_tokens - 1
    expected = common + checkpoint.config.hidden_size * 4 + sum(chosen) / tokens * of_one_expert
    assert report.weights_read_bytes_per_token == pytest.approx(expected, rel=1e-6)
    assert sum(chosen) == report.experts_read
    assert (sum(chosen) == 6 * tokens) == (threshold == 0.0)


def test_skipping_is_reported_per_layer(directory: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    tables().save(copy / FILE_NAME)
    # At threshold 2 every second expert is skipped, since its weight is never twice that of the first.
    engine = Engine.open(copy, skip_threshold=2.0)
    results = engine.generate(PROMPTS, max_new_tokens=5)
    report = engine.report()
    assert report.experts_skipped_share == 0.5
    assert report.experts_skipped_share_per_layer == [0.5, 0.5, 0.5]
    assert report.experts_read == (report.prompt_tokens + report.generated_tokens - 3) * 3
    assert [engine.generate(prompt, max_new_tokens=5)[0] for prompt in PROMPTS] == results
    some = Engine.open(copy, skip_threshold=0.5)
    some.generate(PROMPTS, max_new_tokens=5)
    assert 0 < some.report().experts_skipped_share < 0.5
    kept = Engine.open(copy, skip_threshold=2.0, skip_min_experts=2)
    assert kept.generate(PROMPTS, max_new_tokens=5) == Engine.open(directory).generate(PROMPTS, max_new_tokens=5)
    assert kept.report().experts_skipped_share == 0.0


def test_protected_tokens_skip_nothing_alone_and_in_a_batch(directory: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    tables().save(copy / FILE_NAME)
    with pytest.raises(OptionError, match="'mc-moe' needs the calibrated importance"):
        Engine.open(copy, skip_threshold=2.0, skip_rule="mc-moe")
    replace(tables(), importance_1=(torch.tensor([26.0]),) * 3).save(copy / FILE_NAME)
    engine = Engine.open(copy, skip_threshold=2.0, skip_rule="mc-moe")
    results = engine.generate(PROMPTS, max_new_tokens=5)
    assert 0.1 < engine.report().experts_skipped_share < 0.4, "half of the experts of tokens that are not protected"
    assert [engine.generate(prompt, max_new_tokens=5)[0] for prompt in PROMPTS] == results


def test_the_package_gives_its_engine_and_loads_nothing_before() -> None:
    script = "import sys, engine; assert 'torch' not in sys.modules; from engine import Engine; print(Engine.__module__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "engine.generation.generate\n"
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = package.Motor
