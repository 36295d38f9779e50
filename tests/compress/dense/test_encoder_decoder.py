"""`compress densify` of an encoder-decoder: exact if experts are alike, independent of padding, resumable, and refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from artifacts_for_tests import kill_while_it_trains, listing, refused, run
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from torch import Tensor, nn

import cli
from calibrate.pairs import DEFAULT_LENGTH, PADDING, SPLITS, STDLIB, Pairs, split_of, text_pairs, tokenised
from compress.dense.dense_plan import choose
from compress.dense.encoder_decoder import (
    check_nothing_is_lost,
    dense_student,
    folded,
    layer_errors,
    part_weights,
    planned,
    saved_tensors,
    usage,
    widened,
)
from compress.dense.encoder_decoder_training import PairLoss, measure
from compress.options.densify import SELECTIONS
from compress.options.training import LossWeights
from compress.training.training import Batch
from engine.checkpoint.kinds import is_encoder_decoder
from engine.checkpoint.tokenizer import load_tokenizer_of
from engine.errors import DataError, OptionError, UnsupportedError
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint

ROOT = Path(__file__).resolve().parents[3]
SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 4,
    "num_heads": 4,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 2,
    "num_experts": 4,
    "expert_capacity": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
SPARSE = ["encoder.1", "decoder.1", "decoder.3"]
EVERY = ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2", "decoder.3"]
DENSIFY = ["densify", "model", "--data", "pairs.jsonl", "--samples", "8", "--evaluation-samples", "4", "-o", "out"]
TRAIN = [*DENSIFY, "--distill-steps", "6", "--finetune-steps", "4", "--batch-size", "4", "--validation-samples", "4"]
TRAIN += ["--validate-every", "3", "--save-every", "2", "--learning-rate", "0.01"]
KEYS = (
    "artifact method sparsity experts_before experts_after experts_per_layer parameters_before parameters_after "
    "bytes_before bytes_after perplexity_before perplexity_after token_accuracy_before token_accuracy_after seconds "
    "perplexity_before_stderr perplexity_after_stderr token_accuracy_before_stderr token_accuracy_after_stderr "
    "peak_memory_bytes ffns selected_experts block_error_per_layer"
)


def make_model(path: Path, seed: int = 0, **changes: Any) -> None:
    """Write a tiny random mixture with weights large enough that differences show, and a byte-level tokenizer."""
    from transformers import AutoModelForSeq2SeqLM, SwitchTransformersConfig

    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(SwitchTransformersConfig(**(SIZES | changes)))
    model.save_pretrained(path)
    add_tokenizer(path)


def change_tensors(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def all_alike(tensors: dict[str, Tensor]) -> None:
    """Make every expert equal to the first of its layer, and the router score all of them equally."""
    for name in [name for name in tensors if ".expert_" in name]:
        head, tail = name.split(".expert_")
        tensors[name] = tensors[f"{head}.expert_0.{tail.split('.', 1)[1]}"].clone()
    for name in [name for name in tensors if ".router." in name]:
        tensors[name].zero_()


def make_pairs(path: Path, count: int = 200) -> None:
    chosen = random.Random(0)
    rows = []
    for number in range(count):
        words = " ".join(chosen.choices(["the", "quick", "brown", "fox", "a", "lazy", "dog"], k=chosen.randint(1, 4)))
        rows.append({"source": f"{number} {words}", "target": words.upper()})
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(name="place")
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_model(tmp_path / "model")
    make_pairs(tmp_path / "pairs.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(place: Path) -> tuple[EncoderDecoderCheckpoint, nn.Module, Pairs]:
    checkpoint = EncoderDecoderCheckpoint(place / "model")
    texts = text_pairs(str(place / "pairs.jsonl"))
    pairs = tokenised(texts, "training", 12, load_tokenizer_of(place / "model", VOCABULARY), 32, 2, "pairs.jsonl")
    return checkpoint, checkpoint.load(torch.float32), pairs


@torch.no_grad()
def transformers_logits(model: nn.Module, pairs: Pairs) -> Tensor:
    """Return the logits of real target positions, with labels shifted by transformers itself."""
    labels = pairs.target_PM.masked_fill(pairs.target_PM == PADDING, -100)
    source = pairs.source_PS.clamp_min(0)
    outputs = model(input_ids=source, attention_mask=(pairs.source_PS != PADDING).long(), labels=labels)
    return outputs.logits[pairs.target_PM != PADDING]


# The result


@pytest.mark.parametrize("options", [["--ffns", "1"], ["--ffns", "2"], ["--ffns", "2", "--select", "average"]])
def test_experts_that_are_alike_become_dense_without_a_difference(place: Path, options: list[str]) -> None:
    from transformers import AutoModelForSeq2SeqLM, T5ForConditionalGeneration

    change_tensors(place / "model", all_alike)
    figures = run(*DENSIFY, *options)
    dense = T5ForConditionalGeneration.from_pretrained(place / "out").eval()
    _, _, pairs = opened(place)
    full = AutoModelForSeq2SeqLM.from_pretrained(place / "model").eval()
    assert float((transformers_logits(dense, pairs) - transformers_logits(full, pairs)).abs().max()) <= 1e-5
    assert figures["perplexity_after"] == pytest.approx(figures["perplexity_before"], rel=1e-5)
    assert [figures[f"perplexity_ratio{end}"] for end in ("", "_low", "_high")] == pytest.approx([1.0] * 3, rel=1e-5)
    assert figures["token_accuracy_after"] == figures["token_accuracy_before"]
    assert max(figures["block_error_per_layer"]) < 1e-5 and max(figures["router_weight_error_per_layer"]) < 1e-5
    assert figures["router_weight_per_layer"] == pytest.approx([0.25] * 3)


def test_figures_files_and_what_people_are_told(place: Path) -> None:
    figures = run(*DENSIFY, "--ffns", "2", "--plan-output", "plan.json")
    assert set(KEYS.split()) <= set(figures)
    assert list(figures["selected_experts"]) == SPARSE == figures["layers"]
    assert {len(experts) for experts in figures["selected_experts"].values()} == {2}
    assert (figures["experts_before"], figures["experts_after"], figures["experts_per_layer"]) == (12, 0, [])
    config = json.loads((place / "out" / "config.json").read_text())
    assert (config["model_type"], config["d_ff"], config["architectures"]) == ("t5", 48, ["T5ForConditionalGeneration"])
    assert not [key for key in config if "expert" in key or "router" in key or "sparse" in key]
    inspected = run("inspect", "out", "--checksums")
    assert (inspected["architecture"], inspected["layers"], inspected["experts_per_layer"]) == ("t5", 6, [])
    assert inspected["provenance"]["figures"] == figures and inspected["parameters"] == figures["parameters_after"]
    assert json.loads((place / "plan.json").read_text()) == inspected["provenance"]["plan"]
    source = run("inspect", "model")
    assert (source["experts_per_layer"], source["parameters"]) == ([4, 4, 4], figures["parameters_before"])
    assert source["active_parameters"] == source["parameters"] - 3 * 3 * 2 * 24 * 32
    card = (place / "out" / "README.md").read_text()
    assert "AutoModelForSeq2SeqLM" in card and "| decoder.3 |" in card and "zero units" in card
    assert not list(place.glob(".*")), "nothing temporary is left"
    said = CliRunner().invoke(cli.main, [*DENSIFY, "--overwrite"], catch_exceptions=False).stdout
    assert "an ordinary t5" in said and "mean router probability alone" in said and "token accuracy" in said
    assert "matplotlib" not in said


@pytest.mark.parametrize("select", SELECTIONS)
def test_the_result_is_the_mixture_s_weights(place: Path, select: str) -> None:
    """Dense layers are padded with zeros, sparse layers are the sum of the FFNs, and all other weights are unchanged."""
    checkpoint, teacher, pairs = opened(place)
    seen = usage(teacher, checkpoint, pairs)
    plan = planned(choose(select, seen.statistics, 2), seen.statistics, teacher, checkpoint)
    student = dense_student(plan, teacher, checkpoint, torch.float32)
    made = saved_tensors(dict(student.named_parameters()), checkpoint)
    own = load_file(place / "model" / "model.safetensors")
    for name, tensor in own.items():
        if ".mlp." not in name:
            assert torch.equal(made[name], tensor), name
    for layer in ("encoder.block.0.layer.1", "decoder.block.2.layer.2"):
        wide_in, wide_out = (made[f"{layer}.DenseReluDense.{side}.weight"] for side in ("wi", "wo"))
        assert torch.equal(wide_in[:24], own[f"{layer}.mlp.wi.weight"]) and not wide_in[24:].any()
        assert torch.equal(wide_out[:, :24], own[f"{layer}.mlp.wo.weight"]) and not wide_out[:, 24:].any()
    x_TD = torch.randn(7, 32)
    for index, name in enumerate(SPARSE):
        stack, layer = name.split(".")
        prefix = f"{stack}.block.{layer}.layer.{1 if stack == 'encoder' else 2}.DenseReluDense"
        total = torch.zeros(7, 32)
        for part in plan.layers[index][0].parts:
            in_FD, out_DF = part_weights(teacher, checkpoint, name, part)
            total += part.scale * (x_TD @ in_FD.T).relu() @ out_DF.T
        one = (x_TD @ made[f"{prefix}.wi.weight"].T).relu() @ made[f"{prefix}.wo.weight"].T
        assert float((one - total).abs().max()) <= 1e-6 * max(1.0, float(total.abs().max()))
        assert float((student.get_submodule(prefix)(x_TD) - total).abs().max()) <= 1e-6 * max(1.0, float(total.abs().max()))


def test_fold_and_zeros_by_hand() -> None:
    in_FD, out_DF = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
    both = folded([(in_FD, out_DF), (-in_FD, out_DF + 1)], torch.tensor([0.5, 2.0]))
    assert both[0].tolist() == [[1.0, 2.0], [-1.0, -2.0]] and both[1].tolist() == [[1.5, 8.0], [2.0, 10.0]]
    assert [side.tolist() for side in widened(in_FD, out_DF, 2)] == [[[1.0, 2.0], [0.0, 0.0]], [[3.0, 0.0], [4.0, 0.0]]]


# Router statistics


def test_usage_by_hand_without_padding_and_with_dropped_tokens(tmp_path: Path) -> None:
    make_model(tmp_path / "model", expert_capacity=3)
    make_pairs(tmp_path / "pairs.jsonl")
    checkpoint, teacher, pairs = opened(tmp_path)
    assert (pairs.source_PS == PADDING).any() and (pairs.target_PM == PADDING).any()
    found = usage(teacher, checkpoint, pairs)
    inputs: dict[str, list[Tensor]] = {name: [] for name in SPARSE}
    outputs: dict[str, list[Tensor]] = {name: [] for name in SPARSE}
    for name in SPARSE:

        def keep(module: Any, given: Any, output: Any, name: str = name) -> None:
            inputs[name].append(given[0][0])
            outputs[name].append(output[0])

        teacher.get_submodule(checkpoint.block(name)).register_forward_hook(keep)
    for row in range(len(pairs)):  # rows one by one need no padding
        one = pairs.take(slice(row, row + 1))
        transformers_logits(teacher, one)
    for index, name in enumerate(SPARSE):
        router = teacher.get_submodule(f"{checkpoint.block(name)}.router.classifier")
        counts, weights, norms, chances, dropped, tokens = [0] * 4, [0.0] * 4, [0.0] * 4, [0.0] * 4, 0, 0
        for x_LD, y_LD in zip(inputs[name], outputs[name], strict=True):
            left = [3] * 4
            for x_D, y_D in zip(x_LD, y_LD, strict=True):
                chance = router(x_D).softmax(-1).tolist()
                best = max(range(4), key=chance.__getitem__)
                chances = [total + own for total, own in zip(chances, chance, strict=True)]
                tokens, left[best] = tokens + 1, left[best] - 1
                if left[best] < 0:
                    dropped += 1
                    assert not y_D.any(), "a dropped token gets nothing from the block"
                    continue
                counts[best], weights[best] = counts[best] + 1, weights[best] + chance[best]
                norms[best] += float(y_D.norm())
        own = found.statistics.layers[index]
        assert (int(own.tokens), own.tokens_routed.tolist()) == (tokens, counts)
        assert own.probability_sum.tolist() == pytest.approx(chances, rel=1e-5)
        assert own.weight_sum.tolist() == pytest.approx(weights, rel=1e-5)
        assert own.weighted_norm_sum.tolist() == pytest.approx(norms, rel=1e-4)
        assert found.dropped_shares[index] == pytest.approx(dropped / tokens)
    assert sum(found.dropped_shares) > 0
    plan = planned(choose("usage", found.statistics, 1), found.statistics, teacher, checkpoint)
    errors = layer_errors(dense_student(plan, teacher, checkpoint, torch.float32), teacher, checkpoint, found, pairs)
    assert all(0 < error.whole < 10 and 0 < error.weight < 10 for error in errors), "dropped tokens are in no mean"


# Loss and measurement


@pytest.mark.parametrize(("which", "distilled"), [("all", EVERY), ("sparse", SPARSE)])
def test_the_loss_and_the_measure_leave_padding_out(place: Path, which: str, distilled: list[str]) -> None:
    checkpoint, teacher, pairs = opened(place)
    seen = usage(teacher, checkpoint, pairs)
    plan = planned(choose("usage", seen.statistics, 2), seen.statistics, teacher, checkpoint)
    student = dense_student(plan, teacher, checkpoint, torch.float32)
    loss = PairLoss(student, teacher, checkpoint, pairs, LossWeights(0.7, 0.3, 0.5), which)
    rows = torch.tensor([0, 3, 5, 7, 8])
    groups = [loss(Batch(0, rows, group, torch.Generator())) for group in rows.split(2)]
    found = {name: float(sum(terms[name] for terms in groups)) for name in ("supervised", "layers", "predictions")}
    blocks = {name: (teacher.get_submodule(checkpoint.block(name)), _dense_block(student, name)) for name in distilled}
    kept: dict[tuple[str, int], list[Tensor]] = {(name, side): [] for name in distilled for side in (0, 1)}
    for name, both in blocks.items():
        for side, block in enumerate(both):
            block.register_forward_hook(lambda module, given, output, key=(name, side): kept[key].append(output[0]))
    entropy, divergence, right, tokens = 0.0, 0.0, 0, 0
    each: list[tuple[float, int, int]] = []
    for row in rows.tolist():  # rows one by one need no padding
        one = pairs.take(slice(row, row + 1))
        taught = transformers_logits(teacher, one).log_softmax(-1)
        logits = transformers_logits(student, one)
        target = one.target_PM[0]
        entropy += float(F.cross_entropy(logits, target, reduction="sum"))
        divergence += float((taught.exp() * (taught - logits.log_softmax(-1))).sum())
        right, tokens = right + int((logits.argmax(-1) == target).sum()), tokens + len(target)
        each.append((entropy, right, tokens))
    layers = 0.0
    for name in distilled:
        sides = [F.layer_norm(torch.cat(kept[name, side]), (32,)) for side in (0, 1)]
        layers += float((sides[0] - sides[1]).square().mean())
    assert found["supervised"] == pytest.approx(0.7 * entropy / tokens, rel=1e-5)
    assert found["layers"] == pytest.approx(0.3 * layers, rel=1e-5)
    assert found["predictions"] == pytest.approx(0.5 * divergence / tokens, rel=1e-4)
    measured = measure(student, pairs.take(rows), checkpoint.config)
    assert measured.token_accuracy == right / tokens
    assert measured.perplexity == pytest.approx(float(torch.tensor(entropy / tokens).exp()), rel=1e-5)
    by_pair = (measured.summed_P, measured.right_P, measured.tokens_P)
    for found_P, expected_P in zip(by_pair, zip(*each, strict=True), strict=True):
        assert found_P.cumsum(0).tolist() == pytest.approx(expected_P, rel=1e-5)
    drawn = torch.randint(5, (20_000, 5), generator=torch.Generator().manual_seed(3))
    shares = measured.right_P[drawn].sum(1) / measured.tokens_P[drawn].sum(1)
    assert measured.token_accuracy_error == pytest.approx(float(shares.std()), rel=0.06)
    plain = PairLoss(student, None, checkpoint, pairs, LossWeights(1.0, 0.0, 0.0))
    assert set(plain(Batch(0, rows, rows, torch.Generator()))) == {"supervised"}


def _dense_block(student: nn.Module, name: str) -> nn.Module:
    stack, layer = name.split(".")
    return student.get_submodule(f"{stack}.block.{layer}.layer.{1 if stack == 'encoder' else 2}.DenseReluDense")


def test_training_is_recorded_and_what_is_written_is_what_was_trained(place: Path) -> None:
    figures = run(*TRAIN, "--ffns", "2")
    assert [part["steps"] for part in figures["training"].values()] == [6, 4]
    assert figures["perplexity_after"] < 0.9 * run(*DENSIFY[:-1], "plain", "--ffns", "2")["perplexity_after"]
    assert [len(row) for row in figures["scales_per_layer"]] == [2, 2, 2]
    tensors = load_file(place / "out" / "model.safetensors")
    assert not tensors["encoder.block.0.layer.1.DenseReluDense.wi.weight"][24:].any(), "zeros stay zeros"
    assert "Kept is the state of step" in (place / "out" / "README.md").read_text()


@pytest.mark.usefixtures("pictures")
def test_the_papers_figures_are_drawn(place: Path) -> None:
    """Figure 3 is the token accuracy of validations beside the mixture's, figure 4 the usage of experts in both stacks."""
    figures = run(*TRAIN, "--lambda-prediction", "1")
    checkpoint, teacher, _ = opened(place)
    curves = {name: part["validation_token_accuracy"] for name, part in figures["training"].items()}
    assert [[step for step, _ in pairs] for pairs in curves.values()] == [[0, 3, 6], [0, 3, 4]]
    tokenizer, texts = load_tokenizer_of(place / "model", VOCABULARY), text_pairs("pairs.jsonl")
    pairs = tokenised(texts, "validation", 4, tokenizer, DEFAULT_LENGTH, 2, "pairs.jsonl")
    assert figures["mixture_validation_token_accuracy"] == measure(teacher, pairs, checkpoint.config).token_accuracy
    kept = EncoderDecoderCheckpoint(place / "out")
    written = measure(kept.load(torch.float32), pairs, kept.config).token_accuracy
    assert written == dict(map(tuple, curves["finetune"]))[figures["training"]["finetune"]["best_step"]]
    card = (place / "out" / "README.md").read_text()
    for name in ("usage_histogram", "training_distill", "training_finetune", "token_accuracy"):
        assert (place / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG") and f"({name}.png)" in card


def test_every_layer_is_distilled_unless_only_sparse_ones_are_asked_for(place: Path) -> None:
    """Dense layers start as the mixture's, but their inputs are not the mixture's, so they add to the loss."""
    own = ["--lambda-prediction", "0", "--distill-steps", "2", "--finetune-steps", "0"]
    losses = [
        run(*TRAIN, "--overwrite", *own, *layers)["training"]["distill"]["layers_first"]
        for layers in ([], ["--distill-layers", "all"], ["--distill-layers", "sparse"])
    ]
    assert losses[0] == losses[1] > losses[2] > 0


def result(place: Path) -> dict[str, str]:
    told = ("compression.json", "README.md")
    return {name: content for name, (_, content) in listing(place / "out").items() if name not in told}


@pytest.mark.slow
def test_killed_and_resumed_it_ends_in_the_same_weights(place: Path) -> None:
    command = [*TRAIN, "--ffns", "2", "--threads", "1", "--distill-steps", "24"]
    run(*command)
    expected = result(place)
    (place / "out").rename(place / "whole")
    kill_while_it_trains(place, command)
    resumed = run(*command, "--resume")
    assert result(place) == expected
    assert resumed["training"]["distill"]["steps"] == 24
    assert not list(place.glob(".*")), "nothing temporary is left"
    assert run(*command, "--resume") == resumed, "what is there already is not made again"


def test_half_precision_is_trained_and_stored_as_it_was(place: Path) -> None:
    change_tensors(place / "model", lambda own: own.update({name: own[name].bfloat16() for name in own}))
    change_config(place / "model", dtype="bfloat16")
    run(*TRAIN)
    assert {tensor.dtype for tensor in load_file(place / "out" / "model.safetensors").values()} == {torch.bfloat16}


# Pairs


def test_pairs_of_all_kinds_and_their_splits(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows: list[dict[str, str]] = [{"instruction": f"say {number}", "input": "loud", "output": "yes"} for number in range(99)]
    rows += [{"instruction": "say it", "output": "no"}, {"source": "a\u2028b", "target": "ß"}]
    path.write_text("\n\n".join([*map(json.dumps, rows), json.dumps(rows[0])]), encoding="utf-8-sig")
    splits = text_pairs(str(path))
    every = [pair for split in SPLITS for pair in splits[split]]
    assert len(every) == len(set(every)) == 101, "a pair is in one split, once"
    assert ("say 7\nloud", "yes") in every and ("say it", "no") in every and ("a\u2028b", "ß") in every
    assert all(split_of(pair[0]) == split for split in SPLITS for pair in splits[split])
    assert text_pairs(str(path), 1)["training"] != splits["training"] and text_pairs(str(path)) == splits


def test_pairs_are_cut_ended_and_padded(place: Path) -> None:
    tokenizer = load_tokenizer_of(place / "model", VOCABULARY)
    pairs = tokenised({"training": [("abcdef", "a"), ("ab", "abc")]}, "training", 9, tokenizer, 4, 2, "x")
    a, b, c = tokenizer("abc", add_special_tokens=False)["input_ids"]
    assert pairs.source_PS.tolist() == [[a, b, c, 2], [a, b, 2, PADDING]] and pairs.cut == 1
    assert pairs.target_PM.tolist() == [[a, 2, PADDING, PADDING], [a, b, c, 2]] and pairs.tokens == 13
    assert pairs.take(slice(0, 1)).target_PM.tolist() == [[a, 2]]


def test_the_made_up_task() -> None:
    splits = text_pairs(STDLIB)
    sources = [{pair[0] for pair in splits[split]} for split in SPLITS]
    assert all(len(one) > 1000 and not one & other for one in sources for other in sources if one is not other)
    assert ("self assertequal n got", "self.assertEqual(n, got)") in [pair for own in splits.values() for pair in own]


# Bad input


def test_bad_options_are_refused(place: Path) -> None:
    (place / "bad.jsonl").write_text('{"source": "a", "target": "b"}\n{"source": "a"}\n')
    (place / "empty.jsonl").write_text("\n")
    (place / "one.jsonl").write_text('{"source": "a", "target": "b"}\n')
    for options, fragments in (
        (["--ffns", "5"], ("layer encoder.1 has 4 experts", "lower --ffns")),
        (["--ffns", "0"], ("ffns is 0",)),
        (["--data", "bad.jsonl"], ("bad.jsonl, line 2", "`target`")),
        (["--data", "empty.jsonl"], ("empty.jsonl", "holds no pair")),
        (["--data", "one.jsonl"], ("one.jsonl", "part has no pair")),
        (["--data", "nowhere.jsonl"], ("nowhere.jsonl", "is no file of pairs")),
        (["--samples", "0"], ("samples must be at least 1",)),
        (["--sequence-length", "1"], ("at most 1 tokens",)),
        (["--statistics", "one.jsonl"], ("--statistics",)),
        (["--offload-teacher"], ("--offload-teacher",)),
        (["--distill-steps", "3", "--learning-rate", "-1"], ("learning rate",)),
        (["-o", "model"], ("model", "exists already")),
    ):
        refused(place, [*DENSIFY, *options], *fragments)
    refused(place, ["densify", "model", "-o", "out"], "needs pairs", "--data")


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"tie_word_embeddings": False}, ("no place for lm_head.weight",)),
        ({"dense_act_fn": "gated-gelu"}, ("dense_act_fn='gated-gelu'",)),
        ({"is_gated_act": True}, ("is_gated_act",)),
        ({"feed_forward_proj": "gelu"}, ("feed_forward_proj='gelu'",)),
        ({"decoder_start_token_id": None}, ("no decoder_start_token_id",)),
        ({"num_experts": 5}, ("layer encoder.1 has 4 experts and config.json says 5",)),
        ({"d_ff": 25}, ("has shape [24, 32] and config.json says [25, 32]",)),
        ({"num_heads": 3}, ("SelfAttention", "another shape")),
        ({"d_model": "x"}, ("config.json cannot be read",)),
        ({"auto_map": {"AutoModel": "x.Y"}}, ("auto_map",)),
    ],
)
def test_configs_that_cannot_be_honoured_are_refused(
    place: Path, changes: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    change_config(place / "model", **changes)
    refused(place, DENSIFY, *fragments)


def test_damaged_checkpoints_are_refused(place: Path) -> None:
    path = place / "model"
    whole = (path / "model.safetensors").read_bytes()
    extra = "decoder.block.0.layer.2.mlp.extra"
    norm, expert = "decoder.block.1.layer.2.layer_norm.weight", "decoder.block.1.layer.2.mlp.experts.expert_2.wo.weight"
    for change, fragment in (
        (lambda own: own.update({extra: torch.zeros(2)}), f"tensor {extra} is not part of this"),
        (lambda own: own.pop(norm), f"tensor {norm} is missing"),
        (lambda own: own.pop(expert), f"tensor {expert} is missing"),
        (lambda own: own[norm].fill_(float("nan")), f"tensor {norm} holds NaN"),
    ):
        change_tensors(path, change)
        refused(place, DENSIFY, fragment)
        refused(place, ["inspect", "model"], fragment)
        (path / "model.safetensors").write_bytes(whole)
    (path / "tokenizer.json").unlink()
    refused(place, DENSIFY, "has no tokenizer")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(place, DENSIFY, "safetensors")


def test_a_dense_one_is_refused_and_so_is_every_other_command(place: Path) -> None:
    run(*DENSIFY)
    refused(place, ["densify", "out", "--data", "pairs.jsonl", "-o", "again"], "not a mixture of experts (t5)")
    for command in (
        ["generate", "model", "-p", "the"],
        ["prune", "model", "--sparsity", "0.5"],
        ["merge", "out", "--experts", "2"],
        ["evaluate", "out"],
        ["compare", "model", "out"],
    ):
        refused(place, command, "is an encoder-decoder, which this command does not take")
    refused(place, ["bench", "out"], "is an encoder-decoder")
    assert is_encoder_decoder(place / "out")


def test_a_tensor_that_would_be_lost_or_is_lacking_is_named(place: Path) -> None:
    checkpoint, teacher, _ = opened(place)
    check_nothing_is_lost(teacher, checkpoint)
    teacher.adapter = nn.Linear(2, 2, bias=False)
    with pytest.raises(UnsupportedError, match=r"a t5 has no place for adapter\.weight"):
        check_nothing_is_lost(teacher, checkpoint)
    del teacher.adapter, teacher.decoder.final_layer_norm
    with pytest.raises(UnsupportedError, match=r"a t5 needs decoder\.final_layer_norm\.weight"):
        check_nothing_is_lost(teacher, checkpoint)


def test_errors_of_counts_are_named() -> None:
    with pytest.raises(OptionError, match="0 pairs"):
        tokenised({"training": []}, "training", 0, None, 8, 2, "x")
    with pytest.raises(DataError, match="training part has no pair"):
        tokenised({"training": []}, "training", 1, None, 8, 2, "x")
