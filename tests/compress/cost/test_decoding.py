"""Predictions of decoding within a limit of memory: sizes and times by hand, the disk, and the command."""

import json
import os
from dataclasses import replace

import pytest
import torch
from artifacts_for_tests import CALIBRATION, make_workplace
from click.testing import CliRunner
from random_model import shape
from test_run_plan import TINY

import cli
from calibrate.statistics import load_statistics
from compress.cost import decoding as module
from compress.cost import disk as disk_module
from compress.cost.counts import Passes
from compress.cost.decoding import DecodingBytes, Machine, decoding_bytes, predicted_decoding, random_choices, slots_within
from compress.cost.disk import DiskSpeed, measured_disk
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import OptionError
from engine.families.resolve import decoder_config

PASSES = Passes(decoder_config(TINY), 2, 2.0)
"""One layer of three experts of 60 weights, top-1; 128 other weights, 28 of them embeddings; 308 weights in all."""
MACHINE = Machine(1000, 4000.0, DiskSpeed(600.0, "by hand"))


def invoke(*arguments):
    return CliRunner().invoke(cli.main, ["plan-run", *map(str, arguments)])


def test_sizes_by_hand():
    # a position has a key and a value of one head of two dimensions, in two bytes
    assert decoding_bytes(PASSES, 10, torch.bfloat16) == DecodingBytes(120, 256, 2 * (128 - 24 + 60), 10 * 2 * 2 * 2)
    tied = Passes(decoder_config(TINY | {"tie_word_embeddings": True}), 2, 2.0)
    assert decoding_bytes(tied, 0, torch.bfloat16) == DecodingBytes(120, 2 * 100, 2 * (100 + 60), 0)


def test_bytes_of_a_token_are_those_of_the_benchmark():
    """benchmarks/results/decode.json has the bytes that a token of this model reads."""
    sizes = decoding_bytes(Passes(decoder_config(shape()), 2, 2.0), 0, torch.bfloat16)
    assert sizes.token == 854_396_928 and sizes.slot == 3 * 1024 * 3584 * 2


def test_slots_by_hand():
    sizes, config = decoding_bytes(PASSES, 10, torch.bfloat16), PASSES.config
    fixed = 1000 + 256 + 80
    assert [slots_within(fixed + more, 1000, sizes, config) for more in (120, 359, 360, 10**6)] == [1, 2, 3, 3]
    with pytest.raises(OptionError, match=r"memory-limit is 0.00GB, and decoding needs 0.01GB at least.*for 1 experts"):
        slots_within(fixed + 119, 1000, sizes, config)


def test_speeds_by_hand(monkeypatch):
    monkeypatch.setattr(module, "DECODE_EFFICIENCY", 0.5)
    chosen = {0: torch.tensor([[0], [1], [0], [1], [0], [2], [0], [1]], dtype=torch.int16)}
    # the second half uses 0, 2, 0 and 1: 2 takes the slot of 1, and 1 that of 2, so that two of four uses read 120 bytes
    found = predicted_decoding(PASSES, torch.bfloat16, MACHINE, 1000 + 256 + 80 + 240, 10, chosen)
    assert (found["slots"], found["experts"], found["tokens_simulated"]) == (2, 3, 8)
    assert found["compute_seconds_per_token"] == pytest.approx(0.164)
    for name in ("lru", "worth", "best"):
        policy = found["policies"][name]
        assert (policy["hit_rate"], policy["read_bytes_per_token"]) == (0.5, 60.0)
        assert policy["read_seconds_per_token"] == pytest.approx(0.1)
        assert policy["tokens_per_second"] == pytest.approx(1 / 0.264)
        assert policy["tokens_per_second_reading_ahead"] == pytest.approx(1 / 0.164)
    assert found["tokens_per_second"] == found["policies"]["worth"]["tokens_per_second"]


def test_nothing_is_read_where_all_experts_fit():
    found = predicted_decoding(PASSES, torch.bfloat16, MACHINE, 10**6, 10, None)
    assert found["slots"] == 3 and found["routing"].startswith("random")
    assert {each["hit_rate"] for each in found["policies"].values()} == {1.0}
    assert found["tokens_per_second"] == found["tokens_per_second_all_in_memory"]


def test_random_choices_are_even_and_bounded_in_time(monkeypatch):
    config = decoder_config(shape(layers=2, experts=4, top_k=2))
    chosen = random_choices(config, 4000, 0)
    assert all(sorted(set(row)) == sorted(row) for row in chosen[0][:50].tolist())
    assert all(abs(int((own == expert).sum()) - 2000) < 150 for own in chosen.values() for expert in range(4))
    monkeypatch.setattr(module, "MOST_STEPS", 100)
    found = predicted_decoding(Passes(config, 2, 2.0), torch.bfloat16, replace(MACHINE, base_bytes=0), 10**12, 10, chosen)
    assert found["tokens_simulated"] == 50


@pytest.mark.parametrize("direct", [True, False])
def test_the_disk_is_measured_on_whole_pages(tmp_path, monkeypatch, direct):
    opened, read, open_, preadv = [], [], os.open, os.preadv

    def opening(path, flags, *rest, **named):
        if str(path).startswith(str(tmp_path)):
            opened.append(bool(flags & os.O_DIRECT))
            if flags & os.O_DIRECT and not direct:
                raise OSError(22, "no direct reads")
            flags &= ~os.O_DIRECT  # the file system of the test may have none
        return open_(path, flags, *rest, **named)

    def reading(descriptor, buffers, place):
        read.append((len(buffers[0]), place))
        return preadv(descriptor, buffers, place)

    (tmp_path / "weights").write_bytes(bytes(5 * 8192 + 100))
    (tmp_path / "small").write_bytes(bytes(100))
    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "preadv", reading)
    found = measured_disk([tmp_path / "weights", tmp_path / "small"], 5000)
    assert sorted(read) == [(8192, place) for place in range(0, 5 * 8192, 8192)]
    assert found.bytes_per_second > 0 and ("direct reads" in found.source) == direct
    assert opened == ([True] if direct else [True, False])


def test_the_measurement_ends_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "TRIAL_SECONDS", 0.0)
    (tmp_path / "weights").write_bytes(bytes(100 * 4096))
    assert measured_disk([tmp_path / "weights"], 4096).bytes_per_second > 0


def test_a_model_without_files_needs_a_speed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    done = invoke(tmp_path, "--memory-limit", "8GB", "--sequence-length", 8)
    assert (done.exit_code, "--disk-speed 3GB" in done.stderr) == (1, True)
    done = invoke(tmp_path, "--memory-limit", "8GB", "--disk-speed", "3GB", "--sequence-length", 8, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["decoding"]
    assert found["disk_bytes_per_second"] == 3e9 and found["disk_source"] == "given" and found["memory_limit_bytes"] == 8e9


@pytest.mark.slow
def test_the_command_with_statistics(tmp_path, monkeypatch):
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    calibrated = CliRunner().invoke(cli.main, ["calibrate", "model", "-o", "statistics", *CALIBRATION])
    assert calibrated.exit_code == 0, calibrated.output
    arguments = ["model", "--memory-limit", "8GB", "--statistics", "statistics", "--sequence-length", 16]
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    assert "18 of 18 experts of 18.4 kB fit" in done.stdout and "worth" in done.stdout and "in hindsight" in done.stdout
    found = json.loads(invoke(*arguments, "--json").stdout)["decoding"]
    assert found["tokens_simulated"] == 64 and "calibration listed" in found["routing"]
    assert found["policy"] == "worth" and set(found["policies"]) == {"worth", "lru", "lfu", "best"}
    config = Checkpoint(tmp_path / "model").config
    statistics = load_statistics(tmp_path / "statistics", config)
    layers = {index: replace(layer, chosen=None) for index, layer in statistics.layers.items()}
    replace(statistics, layers=layers).save(tmp_path / "earlier")
    done = invoke("model", "--memory-limit", "8GB", "--statistics", "earlier", "--sequence-length", 16)
    assert (done.exit_code, "earlier: statistics of an earlier version" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory-limit", "1MB", "--disk-speed", "1GB"], "and decoding needs"),
        (["--statistics", "file"], "--statistics is for --memory-limit"),
        (["--disk-speed", "1GB"], "--disk-speed is for --memory-limit"),
        (["--memory-limit", "8GB", "--device", "h100"], "give --device cpu"),
    ],
)
def test_bad_options(tmp_path, arguments, said):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    done = invoke(tmp_path, "--sequence-length", 8, *arguments)
    assert (done.exit_code, said in done.stderr, done.stderr.count("\n")) == (1, True, 1)


def test_nothing_is_predicted_without_a_limit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert json.loads(invoke(tmp_path, "--device", "h200", "--json", "--sequence-length", 8).stdout)["decoding"] is None
