"""Calibration statistics against a second, naive implementation that runs the whole decoder in float64."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields, replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MOE_FAMILIES, naive_ffn, save_reference
from torch import Tensor

import calibrate.collect
import engine.passes.activations
import engine.passes.streaming
from calibrate.collect import LayerCollector, collect
from calibrate.similarity import linear_cka, rbf_cka
from calibrate.skipping import relative_similarity, skip_tables
from calibrate.statistics import LayerStatistics, Statistics, load_statistics
from compress.training.losses import next_token_loss
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.model import Decoder, DecoderLayer
from engine.decoder.routing import TopK
from engine.errors import CheckpointError, DataError, OutputError
from engine.families.layer_config import MoeConfig
from engine.families.tensor_names import expert_parts, expert_tensor
from engine.families.tensor_shapes import router_tensors
from engine.passes.memory_budget import MemoryBudget
from engine.passes.streaming import stream_negative_log_likelihood

TOKENS = torch.randint(3, 96, (5, 13), generator=torch.Generator().manual_seed(7))
SUMS = (
    "tokens_routed",
    "probability_sum",
    "routed_probability_sum",
    "weight_sum",
    "weighted_norm_sum",
    "norm_sum",
    "squared_norm_sum",
)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in (*MOE_FAMILIES, "llama4_text")),
    ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [1], "num_experts_per_tok": 3}),
    ("olmoe", {"num_experts_per_tok": 1}),
]


@torch.no_grad()
def naive_statistics(checkpoint: Checkpoint, tokens: Tensor, sample: list[int]) -> dict[int, dict[str, Any]]:
    """Compute the statistics token by token and expert by expert, straight from the definitions."""
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float64))
    inputs: dict[int, Tensor] = {}
    for index in checkpoint.config.moe_layers:
        decoder.layers[index].feed_forward.register_forward_pre_hook(
            lambda _, arguments, index=index: inputs.__setitem__(index, arguments[0])
        )
    decoder(tokens)
    layers = {index: naive_layer(checkpoint, index, x, sample) for index, x in inputs.items()}
    for before, index in zip((None, *layers), layers, strict=False):
        samples = layers[index]["samples"]
        both = torch.cat((samples, samples[:0] if before is None else layers[before]["samples"]))
        layers[index]["rbf_cka_before"] = rbf_cka(both)[: len(samples), len(samples) :]
    return layers


def naive_weights(moe: MoeConfig, z: Tensor) -> dict[int, float]:
    """Return the weights of the experts that one token uses, largest first."""
    logits, left, weights = z.tolist(), [*range(moe.experts)], {}
    if moe.scales_inputs:
        return dict.fromkeys(sorted(left, key=lambda i: -logits[i])[: moe.experts_per_token], 1.0)
    if moe.mixer_jitter is None:
        chosen = sorted(left, key=lambda i: -logits[i])[: moe.experts_per_token]
        among = chosen if moe.normalise_top_k else left
        weights = {i: exp(logits[i]) / sum(exp(logits[j]) for j in among) for i in chosen}
    else:
        for _ in range(moe.experts_per_token):
            best = max(left, key=lambda i: logits[i])
            behind = {i: (logits[best] - logits[i]) / max(abs(logits[i]), logits[best]) for i in left}
            near = [i for i in left if behind[i] <= 2 * moe.mixer_jitter]
            weights[best] = 1.0 / sum(exp(logits[i] - logits[best]) for i in near)
            left.remove(best)
    return dict(sorted(weights.items(), key=lambda pair: -pair[1]))


def naive_layer(checkpoint: Checkpoint, index: int, x: Tensor, sample: list[int]) -> dict[str, Any]:
    row = checkpoint.config.architecture
    router, *bias = (checkpoint.tensor(name).double() for name in router_tensors(checkpoint.config, index))
    shift = bias[0] if bias else 0.0
    moe = checkpoint.config.layers[index].moe
    assert moe is not None

    def ffn(expert: int, token: Tensor, z: Tensor) -> Tensor:
        parts = [checkpoint.tensor(expert_tensor(row, index, expert, part)).double() for part in expert_parts(row)]
        return naive_ffn(parts, moe.swiglu, token * z[expert].sigmoid() if moe.scales_inputs else token)

    def shares(z: Tensor) -> Tensor:
        return z.sigmoid() / z.sigmoid().sum() if moe.scores == "sigmoid" else z.softmax(0)

    n, k = moe.experts, moe.experts_per_token
    per_expert = {name: [0.0] * n for name in SUMS}
    output = torch.zeros(n, x.shape[1], dtype=torch.float64)
    gram = torch.zeros(n, n, dtype=torch.float64)
    ratios: list[list[float]] = [[] for _ in range(k - 1)]
    unselected, norms, chosen = 0.0, [], []
    for token in x:
        norms.append(sum(abs(value) for value in token.tolist()))
        z = router @ token + shift
        gram += torch.outer(z, z)
        p = shares(z).tolist()
        weights = naive_weights(moe, z)
        first = max(weights.values())
        chosen.append(list(weights))
        unselected += (1.0 - sum(p[i] for i in weights)) / len(x)
        for i in range(n):
            per_expert["probability_sum"][i] += p[i]
        for rank, (i, w) in enumerate(weights.items()):
            y = ffn(i, token, z)
            norm = float(y.square().sum()) ** 0.5
            for name, value in {
                "tokens_routed": 1.0,
                "routed_probability_sum": p[i],
                "weight_sum": w,
                "weighted_norm_sum": w * norm,
                "norm_sum": norm,
                "squared_norm_sum": norm**2,
            }.items():
                per_expert[name][i] += value
            output[i] += y
            if rank:
                ratios[rank - 1].append(w / first)
    logits = {t: router @ x[t] + shift for t in sample}
    samples = torch.stack([torch.stack([ffn(i, x[t], logits[t]) for t in sample]) for i in range(n)])
    gates = [shares(z) for z in logits.values()]
    weighted = [sum(gates[at][i] * samples[i, at] for at in range(len(sample))) / len(sample) for i in range(n)]
    return per_expert | {
        "tokens": len(x),
        "output_mean": torch.stack([sum(samples[i]) / len(sample) for i in range(n)]),
        "weighted_output_mean": torch.stack(weighted),
        "router_gram": gram,
        "output_sum": output,
        "weight_ratio_median": [sorted(values)[(len(values) - 1) // 2] for values in ratios],
        "linear_cka": linear_cka(samples),
        "rbf_cka": rbf_cka(samples),
        "samples": samples,
        "unselected_probability_share": unselected,
        "chosen": chosen,
        "input_norm_quantile": [sorted(norms)[-1 - len(norms) // 50]],
    }


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=lambda value: value if isinstance(value, str) else None)
def test_every_field_equals_the_naive_implementation(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate.collect, "SIMILARITY_TOKENS", 20)
    save_reference(family, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)
    statistics = collect(checkpoint, TOKENS, dtype=torch.float32, seed=3)
    sample = torch.randperm(65, generator=torch.Generator().manual_seed(3))[:20].tolist()
    expected = naive_statistics(checkpoint, TOKENS, sorted(sample))
    assert tuple(statistics.layers) == tuple(expected) == checkpoint.config.moe_layers
    for index, layer in statistics.layers.items():
        for field in fields(LayerStatistics):
            got = getattr(layer, field.name).double()
            naive = torch.as_tensor(expected[index][field.name], dtype=torch.float64)
            assert got.shape == naive.shape, field.name
            assert torch.allclose(got, naive, rtol=1e-4, atol=1e-4), f"layer {index} {field.name}"
    assert statistics.header["tokens"] == 65 and statistics.header["sequence_length"] == 13


@pytest.fixture(name="olmoe")
def olmoe_checkpoint(tmp_path: Path) -> Checkpoint:
    save_reference("olmoe", tmp_path / "model")
    return Checkpoint(tmp_path / "model")


def assert_same(one: Statistics, other: Statistics, tolerance: float) -> None:
    assert one.header == other.header and one.layers.keys() == other.layers.keys()
    for index, layer in one.layers.items():
        for field in fields(LayerStatistics):
            a, b = getattr(layer, field.name), getattr(other.layers[index], field.name)
            assert a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance), field.name


@pytest.mark.parametrize("tokens_per_batch", [1, 26])
def test_does_not_depend_on_the_batch_size(olmoe: Checkpoint, tokens_per_batch: int) -> None:
    together = collect(olmoe, TOKENS, dtype=torch.float32)
    assert_same(collect(olmoe, TOKENS, dtype=torch.float32, budget=MemoryBudget(tokens_per_batch)), together, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_does_not_depend_on_where_hidden_states_are_kept(
    olmoe: Checkpoint, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = collect(olmoe, TOKENS, dtype=dtype, budget=MemoryBudget(26))
    files = []
    temporary_file = engine.passes.activations.tempfile.TemporaryFile

    def counted(**options: Any) -> Any:
        files.append(temporary_file(**options))
        return files[-1]

    monkeypatch.setattr(engine.passes.activations.tempfile, "TemporaryFile", counted)
    assert_same(collect(olmoe, TOKENS, dtype=dtype, budget=MemoryBudget(26, kept_bytes=0)), in_memory, 0.0)
    assert len(files) == 1 and files[0].closed


@pytest.mark.parametrize(
    ("family", "changes", "kept_bytes"),
    [
        *((family, {}, 1 << 20) for family in MOE_FAMILIES),
        ("mixtral", {}, 0),
        ("qwen3_moe", {"tie_word_embeddings": True}, 1 << 20),
    ],
)
def test_streamed_likelihood_equals_cross_entropy_of_full_logits(
    family: str, changes: dict[str, Any], kept_bytes: int, tmp_path: Path
) -> None:
    reference = save_reference(family, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)
    streamed_S = stream_negative_log_likelihood(
        checkpoint, TOKENS, dtype=torch.float32, budget=MemoryBudget(kept_bytes=kept_bytes)
    )
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    with torch.no_grad():
        own = float(next_token_loss(decoder.hidden_states(TOKENS), decoder.head_VD, TOKENS, decoder.head_bias_V))
        probabilities = reference(TOKENS).logits.double().log_softmax(-1)
    naive = [-sum(float(probabilities[s, i, TOKENS[s, i + 1]]) for i in range(12)) for s in range(5)]
    assert streamed_S.tolist() == pytest.approx(naive, rel=1e-4) and own == pytest.approx(sum(naive), rel=1e-4)


# The file


def test_no_layer_stays_in_memory(olmoe: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were dequantized are not released with the file's pages, and cycles of references would keep them."""
    made = list[weakref.ref[Any]]()

    def recorded(*given: Any) -> Any:
        assert all(block() is None for block in made)
        layer = DecoderLayer(*given)
        made.append(weakref.ref(layer.feed_forward))
        return layer

    monkeypatch.setattr(engine.passes.streaming, "DecoderLayer", recorded)
    gc.disable()
    try:
        collect(olmoe, TOKENS, dtype=torch.float32)
    finally:
        gc.enable()
    assert len(made) == len(olmoe.config.layers) and all(block() is None for block in made)


def test_saved_statistics_load_the_same(olmoe: Checkpoint, tmp_path: Path) -> None:
    statistics = collect(olmoe, TOKENS, dtype=torch.float32, seed=5)
    path = tmp_path / "statistics.safetensors"
    path.write_bytes(b"an old file is replaced")
    statistics.save(path)
    loaded = load_statistics(path, olmoe.config)
    assert loaded.header == statistics.header | {"schema_version": 3}
    loaded.header = statistics.header
    assert_same(loaded, statistics, 0.0)
    assert {found.name for found in tmp_path.iterdir()} == {"model", path.name}, "nothing partial is left"


def test_where_statistics_cannot_be_written_nothing_is_left(olmoe: Checkpoint, tmp_path: Path) -> None:
    statistics = collect(olmoe, TOKENS[:1], dtype=torch.float32)
    with pytest.raises(OutputError, match="cannot write statistics"):
        statistics.save(tmp_path / "missing" / "statistics.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="cannot write statistics"):
        statistics.save(tmp_path / "folder")
    assert {found.name for found in tmp_path.iterdir()} == {"model", "folder"}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("olmoe", {"num_experts": 5}),
        ("olmoe", {"num_hidden_layers": 4}),
        ("olmoe", {"num_experts_per_tok": 3}),
        ("olmoe", {"hidden_size": 64}),
        ("qwen2_moe", {"mlp_only_layers": [0], "num_experts": 8}),
    ],
    ids=str,
)
def test_statistics_of_another_model_are_refused(
    olmoe: Checkpoint, family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "statistics.safetensors"
    collect(olmoe, TOKENS[:1], dtype=torch.float32).save(path)
    save_reference(family, tmp_path / "other", **changes)
    with pytest.raises(DataError, match="of another model"):
        load_statistics(path, Checkpoint(tmp_path / "other").config)


def test_damaged_statistics_are_refused(olmoe: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "statistics.safetensors"
    statistics = collect(olmoe, TOKENS[:1], dtype=torch.float32)
    with pytest.raises(CheckpointError, match="missing"):
        load_statistics(path, olmoe.config)
    with pytest.raises(DataError, match="not a statistics file"):
        load_statistics(tmp_path / "model" / "model.safetensors", olmoe.config)
    statistics.save(path)
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            load_statistics(path, olmoe.config)
    path.write_bytes(whole.replace(rb"\"schema_version\": 3", rb"\"schema_version\": 2"))
    with pytest.raises(DataError, match="schema 2"):
        load_statistics(path, olmoe.config)
    statistics.layers[2] = replace(statistics.layers[2], linear_cka=torch.full((6, 6), float("nan")))
    statistics.save(path)
    with pytest.raises(DataError, match=r"layers\.2\.linear_cka holds NaN"):
        load_statistics(path, olmoe.config)


# Skip tables


def test_relative_similarity_by_hand() -> None:
    cka = torch.tensor([[1.0, 0.2, 0.4], [0.2, 1.0, 0.6], [0.4, 0.6, 1.0]])
    by_hand = torch.tensor([[2.5, 0.5, 1.0], [0.5, 2.5, 1.5], [1.0, 1.5, 2.5]])  # over the mean of pairs, 0.4
    assert torch.allclose(relative_similarity(cka), by_hand)
    assert torch.equal(relative_similarity(torch.ones(1, 1)), torch.ones(1, 1)), "one expert has no pair"
    assert torch.equal(relative_similarity(torch.eye(3)), torch.ones(3, 3)), "no similarity, nothing to divide by"


def test_skip_tables_take_medians_and_similarities_in_the_order_of_the_layers(tmp_path: Path) -> None:
    save_reference("qwen2_moe", tmp_path, mlp_only_layers=[1], num_experts_per_tok=3)
    statistics = collect(Checkpoint(tmp_path), TOKENS, dtype=torch.float32)
    tables = skip_tables(Statistics(dict(reversed(statistics.layers.items())), {}))
    for gamma1, gamma2, index in zip(tables.gamma1_J, tables.gamma2_NN, (0, 2), strict=True):
        assert torch.equal(gamma1, statistics.layers[index].weight_ratio_median) and gamma1.shape == (2,)
        assert torch.equal(gamma2, relative_similarity(statistics.layers[index].linear_cka))
    assert tables.importance_1 is not None
    for importance, index in zip(tables.importance_1, (0, 2), strict=True):
        assert torch.equal(importance, statistics.layers[index].input_norm_quantile) and importance.shape == (1,)


def test_one_token_in_fifty_is_above_the_quantile_of_norms() -> None:
    """Norms are 1 to 120, in any order and in two batches; the two largest are above the quantile."""
    norms_T = 1.0 + torch.randperm(120, generator=torch.Generator().manual_seed(0))
    block = MoeBlock(torch.zeros(2, 3), [Expert(*torch.zeros(3, 3, 3)) for _ in range(2)], TopK(2, True))
    collector = LayerCollector(block, torch.arange(4))
    for part_T in norms_T.split(70):
        block(part_T[:, None] * torch.tensor([0.5, -0.25, 0.25]))
    quantile = collector.statistics()[0].input_norm_quantile
    assert quantile is not None and quantile.tolist() == [118.0]


def test_statistics_of_an_earlier_version_give_tables_without_importance(olmoe: Checkpoint, tmp_path: Path) -> None:
    statistics = collect(olmoe, TOKENS[:1], dtype=torch.float32)
    for index, layer in statistics.layers.items():
        statistics.layers[index] = replace(layer, input_norm_quantile=None)
    path = tmp_path / "statistics.safetensors"
    statistics.save(path)
    loaded = load_statistics(path, olmoe.config)
    assert all(layer.input_norm_quantile is None for layer in loaded.layers.values())
    assert skip_tables(loaded).importance_1 is None


def test_experts_are_listed_for_the_first_tokens(olmoe: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collect(olmoe, TOKENS, dtype=torch.float32)
    monkeypatch.setattr(calibrate.collect, "CHOSEN_TOKENS", 20)
    statistics = collect(olmoe, TOKENS, dtype=torch.float32, budget=MemoryBudget(tokens_per_batch=13))
    for index, layer in statistics.layers.items():
        first = whole.layers[index].chosen
        assert layer.chosen is not None and first is not None and len(first) == TOKENS.numel()
        assert torch.equal(layer.chosen, first[:20])
    path = tmp_path / "statistics.safetensors"
    statistics.save(path)
    loaded = load_statistics(path, olmoe.config).layers
    assert all(torch.equal(loaded[index].chosen, layer.chosen) for index, layer in statistics.layers.items())
    index, layer = next(iter(statistics.layers.items()))
    statistics.layers[index] = replace(layer, chosen=torch.full_like(layer.chosen, 99))
    statistics.save(path)
    with pytest.raises(DataError, match="names experts that the layer does not have"):
        load_statistics(path, olmoe.config)
