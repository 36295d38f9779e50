"""A model whose experts come and go computes what it computes in memory, to the bit, and the limit is kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import reference_model, save_reference
from float_models_for_tests import save_compressed_float8, save_float8, save_mxfp4, save_nvfp4
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.decoder.routing import SparseMixer
from engine.decoder.step.callbacks import BeforeExperts, _array
from engine.errors import CheckpointError, OptionError, UnsupportedError
from engine.expert_cache import cache as cache_module
from engine.expert_cache import places
from engine.expert_cache.attach import check_limited, open_limited
from engine.expert_cache.cache import ExpertCache
from engine.expert_cache.figures import LayerFigures, report
from engine.expert_cache.places import bytes_of, largest_layer_bytes
from engine.generation import generate
from engine.generation.generate import Engine
from engine.kernels.expert_places import DISTANCES
from engine.kernels.kernel_choice import DECODING, TORCH, block_types_multiplied
from engine.kernels.linear import as_bfloat16

MANY_LAYERS = ("mixtral", "qwen2_moe", "olmoe", "granitemoe")
"""Families whose tiny models have more experts than fit beside those of one layer."""
TOKENS = torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _tiny_experts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of tiny models are smaller than what is always kept."""
    monkeypatch.setattr(places, "SMALL_BYTES", 64)


def limited(
    path: Path, dtype: torch.dtype = torch.float32, layers: float = 1.0, **options: Any
) -> tuple[Decoder, ExpertCache]:
    """Return a decoder with room for the experts of so many layers, whatever the process itself takes."""
    checkpoint = Checkpoint(path)
    blocks = block_types_multiplied(dtype, torch.device("cpu"))
    weights = checkpoint.weights(dtype, "cpu", blocks)
    options = {"resident": lambda: 0, **options}
    decoder, cache = open_limited(checkpoint, weights, 1 << 40, dtype=dtype, **options)
    cache.limit = cache._headroom + int(layers * page_bytes(cache))
    return decoder, cache


def page_bytes(cache: ExpertCache) -> int:
    """Return the bytes of the pages of the largest layer, each expert counted alone."""
    return largest_layer_bytes(cache._places) + 4096 * 2 * max(map(len, cache._places.values())) * 8


def logits(decoder: Decoder) -> Tensor:
    """Return the logits of a text, twice: the second time other experts are in memory."""
    with torch.inference_mode():
        decoder(TOKENS)
        return decoder(TOKENS.flip(1))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe", "granitemoe", "deepseek_v2", "lfm2_moe", "nemotron_h"])
def test_a_family_computes_the_same(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path / "model")
    decoder, cache = limited(tmp_path / "model")
    free = Decoder(Checkpoint(tmp_path / "model").config, Checkpoint(tmp_path / "model").source(torch.float32))
    assert torch.equal(logits(decoder), logits(free))
    figures = cache.figures.values()
    assert all(each.hits + each.late + each.read == each.uses for each in figures)
    have_come_back = sum(each.read_bytes for each in figures) > cache.expert_bytes
    assert have_come_back or family not in MANY_LAYERS
    assert cache.held_bytes <= cache.capacity
    cache.close()


FORMS: dict[str, Callable[[Path], None]] = {
    "mxfp4": save_mxfp4,
    "nvfp4": save_nvfp4,
    "fp8 of rows": partial(save_float8, "qwen3_moe", scales="rows"),
    "fp8 of powers": partial(save_float8, "deepseek_v3", scales="powers"),
    "fp8 of channels": partial(save_compressed_float8, strategy="channel"),
}
"""Packed floats, which are read as they are stored; some of their scales are converted."""


@pytest.mark.parametrize("small", [64, 8192])
@pytest.mark.parametrize("form", FORMS)
def test_packed_floats_compute_the_same(form: str, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SMALL_BYTES", small)
    FORMS[form](tmp_path / "model")
    try:
        decoder, cache = limited(tmp_path / "model", torch.bfloat16)
    except UnsupportedError:
        assert small == 64, "scales that are larger than what stays in memory, and converted"
        return
    checkpoint = Checkpoint(tmp_path / "model")
    blocks = block_types_multiplied(torch.bfloat16, torch.device("cpu"))
    free = Decoder(checkpoint.config, checkpoint.weights(torch.bfloat16, "cpu", blocks))
    assert torch.equal(logits(decoder), logits(free))
    assert cache.expert_bytes > 0 or small == 8192
    cache.close()


@pytest.fixture(name="model", scope="module")
def decoding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoding") / "model"
    own = reference_model("qwen3_moe", hidden_size=64, moe_intermediate_size=64).to(torch.bfloat16)
    own.save_pretrained(path)
    return path


def engine_of(path: Path, **options: Any) -> tuple[Engine, ExpertCache]:
    decoder, cache = limited(path, torch.bfloat16, **options)
    engine = Engine(Checkpoint(path), decoder)
    engine.expert_cache = cache
    return engine, cache


def decoded(engine: Engine, steps: int = 12) -> Tensor:
    """Return the logits of a prompt's last position, and of the tokens after it, one by one."""
    kept = engine.new_cache(1, TOKENS.shape[1] + steps)
    found = [engine.prefill(TOKENS, None, kept)]
    for _ in range(steps):
        found.append(engine.step(found[-1].argmax(-1), None, kept))
    return torch.cat(found)


@pytest.mark.parametrize("reads_ahead", [True, False])
@pytest.mark.parametrize("policy", ["worth", "lru", "lfu"])
def test_compiled_decoding_computes_the_same(policy: str, reads_ahead: bool, model: Path) -> None:
    free = Engine.open(model)
    engine, cache = engine_of(model, policy=policy, reads_ahead=reads_ahead)
    assert torch.equal(decoded(engine), decoded(free))
    assert any(each.read for each in cache.figures.values())
    assert reads_ahead == any(each.read_ahead for each in cache.figures.values())
    cache.close()


CHOICES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64},
    "deepseek_v2 in groups": {"moe_intermediate_size": 64},
    "deepseek_v3": {"moe_intermediate_size": 64},
    "ernie4_5_moe": {"moe_intermediate_size": 64},
    "gemma4_text": {},
    "lfm2_moe": {"moe_intermediate_size": 64},
}
"""Families whose experts are chosen by a router in float32, in groups, by sigmoids, with a bias or after a norm."""


@pytest.mark.parametrize(
    ("name", "threshold"),
    [*((name, 0.0) for name in CHOICES), ("deepseek_v2", 0.2), ("deepseek_v3", 0.2), ("gemma4_text", 0.2)],
)
def test_a_compiled_step_chooses_the_same_within_a_limit(name: str, threshold: float, tmp_path: Path) -> None:
    """With a threshold, an expert that is absent may be left out."""
    own = reference_model(name.split()[0], hidden_size=64, **CHOICES[name])
    own.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    engine, cache = engine_of(tmp_path / "model", miss_threshold=threshold)
    found, step = decoded(engine), engine.decoder._step
    assert step._before is not None and step._calls == 0, "the step was one compiled call"
    assert any(each.read for each in cache.figures.values())
    assert bool(found.isfinite().all()) and (threshold > 0 or torch.equal(found, decoded(Engine.open(tmp_path / "model"))))
    cache.close()


def test_choices_outside_of_the_kernels_stay_within_a_limit(model: Path) -> None:
    """The compiled step calls back for them, and then asks for the experts that are absent."""
    engine, cache = engine_of(model)
    free = Engine.open(model)
    for each in (engine, free):
        for block in each.decoder.moe_blocks:
            block.routing = SparseMixer(2, 0.01)
    assert torch.equal(decoded(engine), decoded(free))
    step = engine.decoder._step
    assert step._before is not None and step._calls > 0, "the step was compiled, and called back"
    assert any(each.read for each in cache.figures.values())
    cache.close()


def test_observers_see_the_choices_within_a_limit(tmp_path: Path) -> None:
    """Those of routers in float32, which the step then calls back for."""
    reference_model("deepseek_v3", hidden_size=64, moe_intermediate_size=64).to(torch.bfloat16).save_pretrained(
        tmp_path / "model"
    )
    engine, cache = engine_of(tmp_path / "model")
    free, seen = Engine.open(tmp_path / "model"), dict[str, list[Tensor]](limited=[], free=[])
    for name, each in (("limited", engine), ("free", free)):
        for block in each.decoder.moe_blocks:
            block.observer = lambda x, logits, selection, own=seen[name]: own.extend((x.clone(), logits, *selection))
    assert torch.equal(decoded(engine), decoded(free))
    assert engine.decoder._step._before is not None
    assert len(seen["limited"]) == len(seen["free"]) > 0
    assert all(torch.equal(*both) for both in zip(seen["limited"], seen["free"], strict=True))
    cache.close()


def test_a_request_for_experts_that_is_lost_to_an_interrupt_ends_the_step(model: Path) -> None:
    """Python drops an interrupt before the first line of a function that compiled code calls."""
    engine, cache = engine_of(model)
    expected = decoded(engine)
    before = engine.decoder._step._before
    assert before is not None
    before._require = lambda *given: None  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        decoded(engine)
    del before._require
    assert torch.equal(decoded(engine), expected)
    cache.close()


def test_a_gate_network_within_a_limit_goes_layer_by_layer(tmp_path: Path) -> None:
    """Its router's logits, by which experts are read ahead, are not computed by the kernels."""
    save_reference("llama_moe", tmp_path / "model")
    (stored,) = (tmp_path / "model").glob("*.safetensors")
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(stored).items()}, stored)
    engine, cache = engine_of(tmp_path / "model")
    assert torch.equal(decoded(engine), decoded(Engine.open(tmp_path / "model", dtype="bfloat16")))
    assert engine.decoder._step._before is None
    cache.close()


def test_a_compiled_step_asks_only_where_an_expert_is_absent(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all experts, later steps ask for nothing, and every use is counted all the same."""
    decoder, cache = limited(model, torch.bfloat16, layers=100.0)
    engine, asked = Engine(Checkpoint(model), decoder), list[int]()
    engine.expert_cache = cache
    require = ExpertCache.require

    def noted(self: ExpertCache, layer: int, *arguments: Any) -> None:
        asked.append(layer)
        require(self, layer, *arguments)

    config = engine.checkpoint.config
    kept = engine.new_cache(1, 64)
    engine.prefill(torch.arange(16)[None], None, kept)
    for layer in config.moe_layers:  # the rest
        cache.require(layer, np.arange(len(cache.places[layer]))[None], None)
    monkeypatch.setattr(ExpertCache, "require", noted)
    cache.count_anew()
    for token in range(5):
        engine.step(torch.tensor([token]), None, kept)
    slots = config.layers[config.moe_layers[0]].moe.experts_per_token
    assert not asked and [each.uses for each in cache.figures.values()] == [5 * slots] * len(config.moe_layers)
    assert all(each.hits == each.uses for each in cache.figures.values())
    assert all(cache._misses[layer] < 1 for layer in config.moe_layers)
    cache.close()


def test_kernels_predict_what_the_later_routers_would_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = reference_model("qwen3_moe", hidden_size=64, moe_intermediate_size=64, num_hidden_layers=5).to(torch.bfloat16)
    own.save_pretrained(tmp_path / "model")
    engine, cache = engine_of(tmp_path / "model")
    blocks = dict(zip(engine.checkpoint.config.moe_layers, engine.decoder.moe_blocks, strict=True))
    seen = set[int]()
    require = BeforeExperts._require

    def noted(self: BeforeExperts, layer: int, chosen: int, weights: int, x: int, *rest: int) -> None:
        tokens, slots, predicted = rest
        x_TD = as_bfloat16(_array(x, np.uint16, tokens, 64))
        predicted_KM = _array(predicted, np.int64, DISTANCES, slots)
        for distance, (later, numbers) in enumerate(zip(range(layer + 1, layer + 4), predicted_KM, strict=True), 1):
            if later < 5 and cache.awaits[later][0]:
                logits_TN = blocks[later].logits(x_TD, DECODING).float()
                expected = logits_TN.sort(dim=-1, descending=True, stable=True).indices[:, :slots]
                assert numbers.tolist() == expected.flatten().tolist()
                seen.add(distance)
            else:
                assert (numbers == -1).all()
        require(self, layer, chosen, weights, x, *rest)

    monkeypatch.setattr(BeforeExperts, "_require", noted)
    decoded(engine)
    assert seen == {1, 2, 3}
    cache.close()


def test_a_long_prompt_reads_each_expert_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for the experts of one layer. In two groups of pieces, each expert is read twice, not eight times."""
    monkeypatch.setattr(generate, "PREFILL_CHUNK", 8)
    monkeypatch.setattr(generate, "BY_LAYER_TOKENS", 32)
    prompt = torch.randint(3, 60, (1, 60), generator=torch.Generator().manual_seed(3))
    free = Engine.open(model)
    engine, cache = engine_of(model, reads_ahead=False)
    found = []
    for each in (free, engine):
        kept = each.new_cache(1, 70)
        found.append(torch.cat([each.prefill(prompt, None, kept), each.step(prompt[:, 0], None, kept)]))
        assert kept.length == 61
    assert torch.equal(*found)
    experts = {layer: len(numbers) for layer, numbers in cache._numbers.items()}
    for layer, figures in cache.figures.items():
        assert figures.read <= 2 * experts[layer] + figures.uses // 8, "and those of the step after it"
        assert figures.uses > 3 * experts[layer]
    cache.close()


@pytest.mark.parametrize("family", ["mixtral", "gemma4_text", "deepseek_v2", "lfm2_moe", "nemotron_h", "qwen3_next"])
def test_reading_by_layer_is_reading_in_pieces(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path / "model")
    decoder = Decoder(Checkpoint(tmp_path / "model").config, Checkpoint(tmp_path / "model").source(torch.float32, "cpu"))
    tokens = torch.randint(3, 60, (2, 29), generator=torch.Generator().manual_seed(5))
    caches = [KeyValueCache(decoder.config, 2, 40, torch.float32) for _ in range(2)]
    with torch.inference_mode():
        for piece in tokens.split(8, dim=1):
            expected = decoder.hidden_states(piece, None, caches[0])
        found = decoder.read_by_layer(tokens, caches[1], TORCH, 8)
        after = [decoder(tokens[:, :1], None, cache) for cache in caches]
    assert torch.equal(found, expected) and torch.equal(*after) and caches[1].length == 30


def test_a_file_that_shrinks_ends_the_run_with_an_error(model: Path, tmp_path: Path) -> None:
    """The error passes through the compiled step, and the process goes on."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    engine, cache = engine_of(copy)
    decoded(engine, 2)
    os.truncate(copy / "model.safetensors", 8192)
    with pytest.raises(CheckpointError, match="became shorter while in use"):
        decoded(engine, 12)
    cache.close()


def test_a_limit_that_holds_no_layer_is_refused(model: Path) -> None:
    checkpoint = Checkpoint(model)
    with pytest.raises(OptionError, match=r"this needs .*GB at least: .* for the experts of one layer"):
        open_limited(checkpoint, checkpoint.weights(torch.bfloat16), 1 << 20, dtype=torch.bfloat16)


def test_experts_that_are_converted_are_refused(model: Path) -> None:
    checkpoint = Checkpoint(model)
    with pytest.raises(UnsupportedError, match="experts are converted or rearranged"):
        open_limited(checkpoint, checkpoint.weights(torch.float32), 1 << 40, dtype=torch.float32)


def test_experts_that_are_rearranged_are_refused(tmp_path: Path) -> None:
    save_reference("gpt_oss", tmp_path / "model")
    with pytest.raises(UnsupportedError, match="converted or rearranged"):
        limited(tmp_path / "model")


def test_what_cannot_be_limited_is_refused(model: Path) -> None:
    checkpoint, cpu = Checkpoint(model), torch.device("cpu")
    with pytest.raises(OptionError, match="models on the CPU"):
        check_limited(checkpoint, torch.device("cuda"), predicts=False)
    with pytest.raises(OptionError, match="multi-token prediction"):
        check_limited(checkpoint, cpu, predicts=True)
    with pytest.raises(UnsupportedError, match="transformers runs this model"):
        check_limited(object(), cpu, predicts=False)
    with pytest.raises(OptionError, match="give --memory-limit too"):
        Engine.open(model, miss_threshold=0.1)
    with pytest.raises(OptionError, match="must be from 0 to 1"):
        Engine.open(model, memory_limit=1 << 40, miss_threshold=2)


@pytest.fixture(name="cache")
def small_cache(tmp_path: Path) -> Iterator[ExpertCache]:
    """A cache of three layers of six experts, with room for two layers."""
    save_reference("mixtral", tmp_path / "model")
    _, cache = limited(tmp_path / "model", layers=2.0, reads_ahead=False)
    yield cache
    cache.close()


def require(cache: ExpertCache, layer: int, chosen: Any, weights: Any = None, shares: Any = None) -> tuple[Any, Any]:
    chosen_TS = np.array(chosen, np.int64)
    weights_TS = np.ones(chosen_TS.shape, np.float32) if weights is None else np.array(weights, np.float32)
    cache.require(layer, chosen_TS, weights_TS, lambda: np.array(shares, np.float32))
    return chosen_TS, weights_TS


def expert_bytes(cache: ExpertCache, key: tuple[int, int]) -> bytes:
    """Return an expert's bytes as they are in memory."""
    return b"".join(memory.map[extent.begin : extent.end] for memory, extent in cache._places[key])


def arrive(cache: ExpertCache) -> None:
    """Wait until all experts on their way are in memory."""
    while not all(loading.is_done for loading in cache._loading.values()):
        pass
    cache._settle()


def test_figures_are_those_counted_by_hand(cache: ExpertCache) -> None:
    require(cache, 0, [[0, 1], [1, -1]])
    require(cache, 0, [[1, 2]])
    size = bytes_of(cache._places[0, 0])
    own = cache.figures[0]
    assert (own.uses, own.hits, own.read, own.late, own.read_bytes) == (4, 1, 3, 0, 3 * size)


def test_experts_read_ahead_count_as_predicted_and_wasted(cache: ExpertCache) -> None:
    cache.reads_ahead = True
    require(cache, 0, [[0]])
    cache.expect(1, [2, 3])
    arrive(cache)
    require(cache, 1, [[2, 4]])
    own = cache.figures[1]
    assert (own.read_ahead, own.wasted, own.hits, own.read) == (2, 1, 1, 1)
    assert cache._precision[1, 1] == pytest.approx(0.95 + 0.05 * 0.5)


def test_predictions_that_fail_end_reading_ahead(cache: ExpertCache) -> None:
    cache.reads_ahead = True
    for _ in range(20):
        cache.expect(1, [5])
        arrive(cache)
        require(cache, 1, [[0]])
        if (1, 5) in cache._resident:
            cache._drop((1, 5))
    assert cache._precision[1, 1] < cache_module.LEAST_PRECISION
    before = cache.figures[1].read_ahead
    cache.expect(1, [4])
    assert cache.figures[1].read_ahead == before


def test_experts_that_were_read_ahead_stay_for_their_layer(cache: ExpertCache) -> None:
    """Nothing has used them yet, so they are worth the least, and memory is full when another layer needs room."""
    cache.reads_ahead = True
    require(cache, 0, [[0, 1, 2, 3]])
    cache.expect(1, [2, 3], 2)
    arrive(cache)
    cache.limit -= cache.capacity - cache.held_bytes
    require(cache, 2, [[0, 1]])
    require(cache, 1, [[2, 3]])
    assert (cache.figures[1].hits, cache.figures[1].read, cache.figures[1].late) == (2, 0, 0)


def test_predictions_of_each_distance_are_judged_apart(cache: ExpertCache) -> None:
    cache.reads_ahead = True
    for _ in range(20):
        cache.expect(1, [5], 3)
        cache.expect(1, [0], 1)
        require(cache, 1, [[0]])
        arrive(cache)
        cache._drop((1, 0))
        if (1, 5) in cache._resident:
            cache._drop((1, 5))
    assert cache._precision[1, 3] < cache_module.LEAST_PRECISION < cache._precision[1, 1]


def test_an_expert_that_left_comes_back_once_its_pages_are_gone(cache: ExpertCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads the other expert moves them, and is kept waiting here."""
    require(cache, 0, [[0, 1, 2, 3]])
    require(cache, 0, [[0]])
    before = {number: expert_bytes(cache, (0, number)) for number in range(4)}
    cache.limit -= cache.capacity - cache.held_bytes
    moves, may_move = cache_module._take_pages, threading.Event()
    monkeypatch.setattr(cache_module, "_take_pages", lambda *given: may_move.wait(10) and moves(*given))
    cache.reads_ahead = True
    cache.expect(1, [0])
    (lender,) = cache._lenders
    assert lender not in cache._resident
    threading.Timer(0.1, may_move.set).start()
    require(cache, 0, [[lender[1]]])
    assert may_move.is_set() and expert_bytes(cache, lender) == before[lender[1]]
    arrive(cache)
    assert lender not in cache._lenders


def test_layers_that_wait_longer_for_an_expert_are_dearer(cache: ExpertCache, monkeypatch: pytest.MonkeyPatch) -> None:
    prices: list[tuple[int, float]] = []
    monkeypatch.setattr(cache._policy, "price", lambda *given: prices.append(given))
    times = iter([0.0, 0.04])
    monkeypatch.setattr(cache_module.time, "perf_counter", lambda: next(times))
    require(cache, 0, [[0, 1]])  # 40 ms for two experts
    cache.note(0, np.array([[0, 1]]))
    assert prices == [(0, pytest.approx(1 + 20))]
    cache.reads_ahead = True
    cache.expect(0, [2])
    arrive(cache)
    require(cache, 0, [[2]])
    assert prices[1:] == [(0, pytest.approx(1 + 20 / 2))]


def test_absent_experts_give_their_places_to_resident_ones(cache: ExpertCache) -> None:
    """Experts 0 and 1 are in memory, and the first token has chosen 0.

    Its expert 4 weighs 0.2, and 1, which has half of the probability, takes its place with 0.1. Nothing is free then for 3,
    which weighs 0.3. In the second token, 0 takes the place of 5, with 0.9 of its weight, and 1 in that of 3 costs too much.
    """
    require(cache, 0, [[0, 1]])
    cache.miss_threshold = 0.25
    weights = [[0.5, 0.2, 0.3], [0.5, 0.5, 0.0]]
    shares = [[0.4, 0.1, 0.0, 0.3, 0.2, 0.0], [0.27, 0.03, 0.0, 0.3, 0.1, 0.3]]
    chosen, weights = require(cache, 0, [[0, 4, 3], [5, 3, -1]], weights, shares)
    assert chosen.tolist() == [[0, 1, 3], [0, 3, -1]]
    assert weights[0].tolist() == pytest.approx([0.5 / 0.9, 0.1 / 0.9, 0.3 / 0.9])
    assert weights[1].tolist() == pytest.approx([0.45 / 0.95, 0.5 / 0.95, 0])
    assert (cache.figures[0].replaced, cache.figures[0].left_out) == (2, 0)


def test_without_a_resident_expert_places_stay_empty_but_for_one(cache: ExpertCache) -> None:
    """Nothing is in memory. The second token would lose all of its experts; the heaviest stays."""
    cache.miss_threshold = 0.6
    chosen, weights = require(cache, 0, [[3, 1, 2], [3, 4, -1]], [[0.7, 0.2, 0.1], [0.5, 0.5, 0]], np.full((2, 6), 1 / 6))
    assert chosen.tolist() == [[3, -1, -1], [-1, 4, -1]]
    assert weights.tolist() == [pytest.approx([1, 0, 0]), pytest.approx([0, 1, 0])]
    assert cache.figures[0].left_out == 3


def test_room_for_something_else_is_made_at_once(cache: ExpertCache) -> None:
    for layer in range(3):
        require(cache, layer, [[0, 1, 2, 3, 4, 5]])
    held = cache.held_bytes
    cache._measured = lambda: cache.held_bytes
    cache.reserve(held // 2)
    assert cache.held_bytes <= held // 2 + (cache.limit - cache._headroom - held)
    with pytest.raises(OptionError, match="for the experts of one layer"):
        cache.reserve(1 << 40)
    cache.begin_step()
    with pytest.raises(OptionError, match="left for experts, and layer 0 uses 6 at once"):
        require(cache, 0, [[0, 1, 2, 3, 4, 5]])


def test_totals_and_rates_of_two_layers() -> None:
    layers = [LayerFigures(0, uses=4, hits=1, read=3, read_bytes=300, waited_seconds=0.5), LayerFigures(3, uses=4, hits=4)]
    found = report(layers, tokens=2, seconds=2.0)
    assert found["expert_hit_rate"] == 5 / 8 and found["expert_hit_rate_per_layer"] == [0.25, 1.0]
    assert found["expert_bytes_read_per_token"] == 150 and found["waiting_for_experts_share"] == 0.25
    assert report([LayerFigures(0)], tokens=0, seconds=0.0)["expert_hit_rate"] is None
