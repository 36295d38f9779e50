"""Estimates of a run's cost: counts by hand and by torch's own counter, and the command on config.json alone."""

import json
import math
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from float_models_for_tests import compressed
from random_model import random_tensor, shape
from torch.utils.flop_counter import FlopCounterMode

import cli
from calibrate.collect import held_bytes
from calibrate.options import CalibrationOptions
from compress.cost.counts import OperationCounts, Passes
from compress.cost.devices import Device
from compress.methods import methods_of
from compress.methods.naee import compared_subsets, subset_counts
from compress.options.plan_run import RunOptions
from compress.run_plan import planned_model, planned_phases, smaller
from engine.checkpoint.pack_quantized import config_of
from engine.decoder.model import Decoder
from engine.families.resolve import decoder_config
from engine.families.tensor_shapes import expected_tensors
from engine.kernels.stored.scheme import WHOLE_ROW, Scheme

TINY = shape(hidden=512, layers=1, experts=3, top_k=1, width=5) | {
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 7,
    "head_dim": 2,
}
"""Sizes of one layer: norms 8, queries and output 16 each, keys and values 8 each, router 12, three experts of 60."""
DENSE = {key: value for key, value in TINY.items() if "experts" not in key} | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
}
HALF = {torch.bfloat16: 1000.0, torch.float32: 100.0, torch.float64: 10.0}
DEVICE = Device("fake", HALF, 400.0, 10**6, "none", product_efficiency=0.5, bandwidth_efficiency=0.25)


@pytest.fixture
def passes() -> Passes:
    return Passes(decoder_config(TINY), 2, 2.0)


def test_a_layer_by_hand(passes):
    assert passes.layer_weights(0) == 8 + 48 + 12 + 180
    assert passes.weights == 248 + 2 * 7 * 4 + 4
    # With sequences of 3, a position attends to 2 on average, and its two heads multiply by 2 + 2 dimensions there.
    assert passes.token_flops(0, 3) == 2 * (48 + 12 + 60) + 2 * 2 * (2 + 2) * 2 == 272
    assert passes.token_flops(0, 3, slots=3) == 2 * (48 + 12 + 180) + 32
    # 30·4 + 10·4 + 6·5, 10 for each of 4 + 2·2 dimensions of heads, 6 for each of 2·2 scores, 2 bytes each
    assert passes.layer_moved(0, 3) == 2 * (120 + 40 + 30 + 80 + 24)
    forward = passes.forward(6, 3)
    assert (forward.flops, forward.moved_bytes) == (6 * 272, 6 * 588)
    assert forward.weight_bytes == 2 * 248 and forward.calls == 60 + 3 * 12
    assert passes.streamed(6, 3).read_bytes == 2 * passes.weights
    assert passes.gradient(6, 3).flops == 3 * forward.flops and passes.gradient(6, 3).moved_bytes == 4 * forward.moved_bytes
    assert passes.head(6, products=2).flops == 2 * (2 * 7 * 4) * 6
    assert passes.sampling(6).draws == 42


def test_windows_by_hand(passes):
    config = passes.config
    windowed = replace(config, layers=(replace(config.layers[0], window=2),))
    assert Passes(windowed, 2, 2.0).keys(0, 3) == pytest.approx((1 + 2 + 2) / 3)
    assert passes.keys(0, 3) == (1 + 2 + 3) / 3


def test_statistics_by_hand(passes):
    work = passes.statistics(6, 3)
    assert work.flops == 6 * 272 + 6 * 3 * 2 * 60  # every expert on the sample of all six tokens
    # Two kinds of Gram matrices [3, 6, 6] of 4 dimensions, and a comparison of all pairs.
    assert work.double_flops == 2 * (2 * 3 * 36 * 4) + 2 * (2 * 3 * 3 * 36)
    assert work.single_flops == 0  # no layer before


def test_subsets_by_hand(passes):
    assert compared_subsets(8, 4, 10_000) == math.comb(8, 4)
    assert compared_subsets(8, 4, 69) == 8 + 7 + 6 + 5
    assert compared_subsets(4, 4, 10_000) == 0
    work = subset_counts(passes, 6, 3, {0: 5})
    assert work.flops == 6 * 272 + 6 * 3 * 2 * 60
    assert work.single_flops == 2 * 6 * 3 * 3 * (4 + 5)  # inner products of 4 dimensions, then 5 subsets


def test_products_are_those_that_torch_counts():
    config = decoder_config(TINY | {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 3})
    shapes, generator = expected_tensors(config), torch.Generator().manual_seed(0)
    tensors = {name: random_tensor(size, generator).float() for name, size in shapes.items()}
    decoder, tokens = Decoder(config, tensors.__getitem__), torch.randint(7, (2, 5), generator=generator)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        decoder.logits(decoder.hidden_states(tokens))
    counted = sum(flops for kind, flops in counter.get_flop_counts()["Global"].items() if "attention" not in str(kind))
    passes = Passes(config, 4, 4.0)
    scores = 2 * 2 * (2 + 2) * 3 * 10 * 2  # both layers' scores, which the counter counts as attention
    assert passes.forward(10, 5).flops + passes.head(10).flops - scores == counted


def test_seconds_by_hand():
    work = OperationCounts(flops=1000, single_flops=50, double_flops=10, weight_bytes=400, moved_bytes=100)
    assert work.seconds(DEVICE, torch.bfloat16) == pytest.approx(1000 / 500 + 50 / 50 + 10 / 5 + 100 / 100)
    assert OperationCounts(flops=1, weight_bytes=800).seconds(DEVICE, torch.bfloat16) == 2.0  # bound by reading the weights
    assert (work + work).all_flops == (work * 2).all_flops == 2120


def phases(tmp_path, **options):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    calibration = CalibrationOptions(samples=4, sequence_length=3, evaluation_samples=2)
    model = planned_model(tmp_path / "config.json")
    given = RunOptions(model=str(tmp_path), calibration=calibration, **options)
    return {phase.name: phase for phase in planned_phases(given, model, calibration, torch.bfloat16, DEVICE)}


def test_phases_of_a_search(tmp_path, passes):
    found = phases(tmp_path, method="diep", sparsity=0.4)
    assert found["perplexity before"].work.flops == 6 * 272 + 6 * 56
    assert found["gate gradients"].work.flops == 12 * (3 * 272 + 3 * 56)  # one product of the head belongs to the sampling
    assert found["searching (10 epochs)"].work.flops == 10 * 12 * (3 * 272 + 2 * 56)
    kept = Passes(smaller(passes.config, 0.4, "expert"), 2, 2.0)  # one of three experts is removed, with its router row
    assert kept.weights == passes.weights - 64
    assert found["writing"].work.written_bytes == 2 * kept.weights
    # All weights, the activations that the layer keeps for its backward pass, and three logits of 7: one batch of 12 tokens.
    memory = 2 * passes.weights + passes.gradient_bytes(12, 3) + 2 * 12 * 4
    assert found["searching (10 epochs)"].memory_bytes == memory


def test_the_whole_model_is_only_held_where_gradients_are_needed(tmp_path, passes):
    streamed = phases(tmp_path, method="frequency")["calibrating"]
    assert streamed.memory_bytes < 2 * passes.weights + passes.gradient_bytes(12, 3)
    held = phases(tmp_path, method="taylor")["gate gradients"]
    assert held.memory_bytes == 2 * passes.weights + passes.gradient_bytes(12, 3)
    # One layer of 248, hidden states of 12 tokens, and the larger of a batch's forward and of the similarities.
    assert streamed.memory_bytes == 2 * 248 + 2 * 12 * 4 + max(passes.batch_bytes(12, 3), held_bytes(passes.config, 12))


def invoke(*arguments):
    return CliRunner().invoke(cli.main, ["plan-run", *map(str, arguments)])


@pytest.mark.parametrize("method", methods_of("prune"))
def test_every_method_is_planned_from_the_config_alone(tmp_path, method):
    (tmp_path / "config.json").write_text(json.dumps(shape()))
    done = invoke(tmp_path, "--device", "h200", "--method", method, "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["device"] == "h200" and figures["tokens"] == 128 * 2048 and figures["parameters"] == 1_516_930_048
    for total, part in (("seconds", "seconds"), ("flops", "flops"), ("bytes_moved", "bytes_moved")):
        assert figures[total] == pytest.approx(sum(row[part] for row in figures["phases"]))
    assert figures["fits"] and figures["peak_memory_bytes"] > max(row["memory_bytes"] for row in figures["phases"])


def test_this_processor_is_measured(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    done = invoke(tmp_path, "--samples", 2, "--sequence-length", 8)
    assert done.exit_code == 0 and "whole run, peak" in done.stdout and "measured on the spot" in done.stdout


def test_of_a_hub_id_config_json_alone_is_downloaded(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    (tmp_path / "config.json").write_text(json.dumps(shape()))

    def download(model, name, revision):
        asked.append((model, name, revision))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    for model in ("someone/model", "someone/model@refs/pr/3"):
        assert invoke(model, "--device", "a800").exit_code == 0
    assert asked == [("someone/model", "config.json", None), ("someone/model", "config.json", "refs/pr/3")]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--sparsity", "1.5"], 1, "sparsity is 1.5"),
        (["--samples", "0"], 1, "samples must be at least 1"),
        (["--sequence-length", "999999"], 1, "sequence length is 999999"),
        (["--device", "abacus"], 2, "abacus"),
        (["--method", "luck"], 2, "luck"),
    ],
)
def test_bad_options(tmp_path, arguments, code, said):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    done = invoke(tmp_path, *arguments)
    assert (done.exit_code, said in done.stderr) == (code, True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "model config is missing"),
        ("{", "config.json"),
        (json.dumps({"model_type": "abacus"}), "'abacus' is not supported"),
        (json.dumps(DENSE), "has no experts to spare"),
    ],
)
def test_bad_configs(tmp_path, content, said):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    done = invoke(tmp_path, "--device", "h200")
    assert done.exit_code == 1 and said in done.stderr and str(tmp_path) in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_such_directory():
    assert "no such directory" in invoke("./nowhere").stderr


def test_bytes_of_packed_floats(tmp_path):
    """A byte for a number of FP8, half of one for others, which have a byte of scale for each 32 or 16."""
    eights = compressed("float-quantized", num_bits=8, strategy="channel")
    fours = compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16)
    entries = {2.0: None, 1.0: {"quant_method": "fp8", "weight_block_size": [128, 128]}, 17 / 32: {"quant_method": "mxfp4"}}
    for expected, entry in (*entries.items(), (1.0, eights), (9 / 16, fours)):
        (tmp_path / "config.json").write_text(json.dumps(TINY | ({} if entry is None else {"quantization_config": entry})))
        assert planned_model(tmp_path / "config.json").bytes_per_weight == expected


@pytest.mark.parametrize(("bits", "group_size", "expected"), [(4, 32, 9 / 16), (2, 64, 9 / 32), (8, WHOLE_ROW, 1.0)])
def test_bytes_of_low_bit_weights(tmp_path, bits, group_size, expected):
    config = TINY | {"quantization_config": config_of(Scheme(bits, group_size), [])}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert planned_model(tmp_path / "config.json").bytes_per_weight == expected
