"""`compress distill` end to end: every recipe, on text and on prompts with responses, resumed, and in several processes."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from artifacts_for_tests import kill_while_it_trains, listing, make_workplace
from click.testing import CliRunner
from conftest import others_slow, save_reference
from packages_for_tests import needs_matplotlib
from safetensors.torch import load_file
from test_processes import two_processes
from tokenizers_for_tests import VOCABULARY, add_tokenizer

import cli
import compress.training.training
from calibrate.instructions import Example, ExampleMaker, instructions_of
from calibrate.options import Limits
from compress.classifiers.recipes import CLASSIFIER_RECIPES
from compress.distillation.recipes import RECIPES
from compress.distillation.responses import write_responses
from compress.distillation.rouge import best_score, rouge_l, scorer
from compress.distillation.writer import Writer
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.model import Decoder
from engine.generation.options import SamplingOptions

TEXT = ["--data", "text.txt", "--sequence-length", "16", "--samples", "4"]
PAIRS = ["--data", "pairs.jsonl", "--prompt-template", "{prompt}: ", "--max-length", "32", "--max-prompt-length", "20"]
SMALL = ["--batch-size", "4", "--validation-samples", "4", "--validate-every", "4", "--save-every", "2"]
SMALL += ["--evaluation-samples", "4", "--learning-rate", "0.01", "-o", "out"]
KEYS = "artifact recipe steps loss_first loss_last metric_name metric_before metric_after seconds peak_memory_bytes"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "experts", "look", "away"]


@pytest.fixture(name="place")
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a mixture `model`, a dense `student`, text and pairs."""
    make_workplace(tmp_path)
    save_reference("llama", tmp_path / "student", seed=1, vocab_size=VOCABULARY)
    add_tokenizer(tmp_path / "student")
    chosen = random.Random(0)
    rows = [
        {"instruction": " ".join(chosen.choices(WORDS, k=3)), "output": " ".join(chosen.choices(WORDS, k=3))}
        for _ in range(300)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.main, ["distill", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(cli.main, ["distill", *arguments], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    return result.output


def test_the_command_knows_every_recipe() -> None:
    recipe = next(each for each in cli.main.commands["distill"].params if each.name == "recipe")
    assert isinstance(recipe.type, click.Choice) and set(recipe.type.choices) == {*RECIPES, *CLASSIFIER_RECIPES}


@pytest.mark.parametrize(
    ("recipe", "data"),
    [
        *((recipe, PAIRS) for recipe in RECIPES),
        ("sft", TEXT),
        *(pytest.param(recipe, TEXT, marks=pytest.mark.slow) for recipe in RECIPES if recipe != "sft"),
    ],
    ids=lambda value: value if isinstance(value, str) else "text" if value is TEXT else "pairs",
)
def test_every_recipe(place: Path, recipe: str, data: list[str]) -> None:
    teacher = [] if recipe == "sft" else ["--teacher", "model"]
    figures = run(
        *teacher, "--student", "student", "--recipe", recipe, *data, *SMALL, "--steps", "8", "--router-learning-rate", "0.01"
    )
    assert set(KEYS.split()) <= set(figures)
    assert (figures["recipe"], figures["steps"], figures["metric_name"]) == (recipe, 8, "perplexity")
    if recipe == "sft":
        assert figures["metric_after"] < 0.8 * figures["metric_before"]
    assert all(figures[f"response_perplexity_{when}"] == figures[f"metric_{when}"] for when in ("before", "after"))
    low, ratio, high = (figures[f"response_perplexity_ratio{end}"] for end in ("_low", "", "_high"))
    assert ratio == pytest.approx(figures["response_perplexity_after"] / figures["response_perplexity_before"])
    assert low < ratio < high and figures["response_perplexity_after_stderr"] > 0
    assert ("generation" in figures["time_share"]) == RECIPES[recipe].student_writes
    assert sum(figures["time_share"].values()) == pytest.approx(1.0, abs=0.01)
    assert (figures["perplexity_after"] is None) == (data is PAIRS)
    moved, unselected = (figures[f"{name}_per_layer"] for name in ("router_divergence", "teacher_unselected_share"))
    assert (moved is not None and min(moved) > 0) == RECIPES[recipe].trains_router
    mean, largest = (figures[f"router_drift_{name}_per_layer"] for name in ("mean", "max"))
    assert (mean is not None and min(mean) > 0) == RECIPES[recipe].trains_router
    assert mean is None or all(most >= usual for usual, most in zip(mean, largest, strict=True))
    assert (unselected is None) == (recipe == "sft") and (recipe == "sft" or 0 < min(unselected) < max(unselected) < 1)
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(place / "out").config.model_type == "llama"
    assert "recipe" in (place / "out" / "README.md").read_text() and not list(place.glob(".*"))


def test_the_teacher_uses_another_number_of_experts(place: Path) -> None:
    """The student equals that of a teacher whose config has the number, and the teacher's own figure is that model's."""
    command = ["--student", "student", *PAIRS, *SMALL, "--steps", "4"]
    asked = run("--teacher", "model", "--teacher-experts", "1", *command)
    (place / "out").rename(place / "asked")
    shutil.copytree(place / "model", place / "one")
    config = json.loads((place / "one" / "config.json").read_text())
    assert config["num_experts_per_tok"] != 1
    (place / "one" / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    changed = run("--teacher", "one", *command)
    assert (place / "asked" / "model.safetensors").read_bytes() == (place / "out" / "model.safetensors").read_bytes()
    assert (asked["teacher_experts"], changed["teacher_experts"], changed["teacher_metric"]) == (1, None, None)
    own = run("--student", "one", "--recipe", "sft", *PAIRS, *SMALL, "--steps", "1", "--overwrite")["metric_before"]
    assert asked["teacher_metric"] == pytest.approx(own, rel=1e-6) and asked["divergence_last"] == changed["divergence_last"]


@needs_matplotlib
@pytest.mark.usefixtures("pictures")
def test_several_numbers_of_experts_make_a_sweep(place: Path) -> None:
    command = ["--teacher", "model", "--student", "student", *PAIRS, *SMALL, "--steps", "2", "--teacher-experts"]
    figures = run(*command, "1,3")
    summary = json.loads((place / "out" / "teacher_experts.json").read_text())
    assert [row["teacher_experts"] for row in summary["rows"]] == [1, 3] and summary["rows"] == figures["rows"]
    assert (place / "out" / "teacher_experts.png").is_file() and not list(place.glob(".*"))
    for row, own in zip(summary["rows"], figures["runs"], strict=True):
        assert row["artifact"] == f"out/k-{row['teacher_experts']}" and (place / row["artifact"] / "config.json").is_file()
        assert (row["student_metric"], row["teacher_metric"]) == (own["metric_after"], own["teacher_metric"])
    assert summary["rows"][0]["teacher_metric"] != summary["rows"][1]["teacher_metric"]
    again = run(*command, "1,3", "--resume")
    assert [each["seconds"] for each in again["runs"]] == [each["seconds"] for each in figures["runs"]]
    before = listing(place)
    assert "exists already" in refused(*command, "1,3")
    assert "twice" in refused(*command, "1,1", "-o", "other")
    assert "can use" in refused(*command, "1,99", "-o", "other")
    assert "leave out --teacher-experts" in refused(*command, "1,3", "--recipe", "all", "-o", "other")
    assert listing(place) == before


@needs_matplotlib
@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("recipe", ["sft", "sar"])
def test_training_and_routers_are_drawn(place: Path, recipe: str) -> None:
    teacher = [] if recipe == "sft" else ["--teacher", "model"]
    figures = run(*teacher, "--student", "student", "--recipe", recipe, *TEXT, *SMALL, "--steps", "4")
    assert figures["plots"] and all((place / "out" / name).is_file() for name in figures["plots"])
    assert ("routers.png" in figures["plots"]) == (recipe != "sft")
    assert ("router_drift.png" in figures["plots"]) == (recipe == "sar")


def test_a_pruned_mixture_comes_back_towards_the_full_one(place: Path) -> None:
    """All weights of the student are trained, experts and routers too. Its non-uniform shape does not change."""
    prune = ["prune", "model", "--plan", "plan.json", *TEXT, "--evaluation-samples", "4", "-o", "pruned"]
    assert CliRunner().invoke(cli.main, prune).exit_code == 0
    figures = run("--teacher", "model", "--student", "pruned", *TEXT, *SMALL, "--steps", "30", "--learning-rate", "0.001")
    assert figures["divergence_last"] < 0.5 * figures["divergence_first"]
    figures = run("--student", "pruned", "--recipe", "sft", *TEXT, *SMALL, "--steps", "10", "--overwrite")
    assert figures["metric_after"] < figures["metric_before"] and figures["experts_per_layer"] == [3, 5, 2]
    before, after = (load_file(place / name / "model.safetensors") for name in ("pruned", "out"))
    changed = {name for name in before if bool((before[name] != after[name]).any())}
    assert set(before) == set(after) and len(changed) > 0.8 * len(before), "an expert that no token uses stays"
    assert {name for name in before if "expert" not in name} <= changed


@pytest.mark.parametrize("recipe", others_slow(["kd", "ka", "sar"], "sar"))
def test_interrupted_and_resumed_it_ends_in_the_same_weights(
    place: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interruption may come between two steps on the same responses, because states are saved at the end of a turn."""
    command = ["--teacher", "model", "--student", "student", "--recipe", recipe, *PAIRS, *SMALL, "--steps", "10"]
    run(*command)
    expected = (place / "out" / "model.safetensors").read_bytes()
    (place / "out").rename(place / "whole")
    update, steps = compress.training.training.Trainer.update, []

    def interrupted(self: Any, step: int) -> None:
        if self.options.validate_every and step == 7:
            raise KeyboardInterrupt
        update(self, step)

    monkeypatch.setattr(compress.training.training.Trainer, "update", interrupted)
    stopped = CliRunner().invoke(cli.main, ["distill", *command])
    assert stopped.exit_code == 130, stopped.output
    assert (place / ".out.work" / "distill.safetensors").exists()
    monkeypatch.setattr(
        compress.training.training.Trainer, "update", lambda self, step: (steps.append(step), update(self, step))
    )
    run(*command, "--resume")
    assert steps[0] == 6, "it went on, and did not begin again"
    assert (place / "out" / "model.safetensors").read_bytes() == expected


@pytest.mark.slow
def test_killed_and_resumed_it_ends_in_the_same_weights(place: Path) -> None:
    command = ["--teacher", "model", "--student", "student", "--recipe", "sar", *PAIRS, *SMALL]
    command += ["--steps", "40", "--threads", "1"]
    run(*command)
    expected = (place / "out" / "model.safetensors").read_bytes()
    (place / "out").rename(place / "whole")
    kill_while_it_trains(place, ["distill", *command])
    resumed = run(*command, "--resume")
    assert (place / "out" / "model.safetensors").read_bytes() == expected and resumed["steps"] == 40
    assert not list(place.glob(".*")), "nothing temporary is left"


def test_another_divergence_than_the_recipes(place: Path) -> None:
    command = ["--teacher", "model", "--student", "student", *PAIRS, *SMALL, "--steps", "2", "--overwrite"]
    plain, named, other = (
        run(*command, *more) for more in ([], ["--divergence", "forward-kl"], ["--divergence", "jensen-shannon"])
    )
    assert plain["divergence_first"] == named["divergence_first"] and named["divergence"] == "forward-kl"
    assert 0 < other["divergence_first"] < 0.6931 and other["divergence"] == "jensen-shannon"


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(place: Path) -> None:
    """The student is a sharded mixture, and each process leaves other experts idle. The responses are the data's, because
    each process draws those of a student on its own."""
    save_reference("mixtral", place / "mixture", seed=2, vocab_size=VOCABULARY)
    add_tokenizer(place / "mixture")
    command = ["distill", "--teacher", "model", "--student", "mixture", *PAIRS, *SMALL, "--steps", "6"]
    command += ["--dtype", "float32", "--micro-batch-size", "2"]
    done = two_processes("-m", "cli", *command, "--batch-size", "2", "--shard", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    (place / "out").rename(place / "together")
    alone, together = run(*command[1:]), json.loads(done.stdout)
    for name in ("loss_first", "loss_last", "metric_after"):
        assert together[name] == pytest.approx(alone[name], rel=1e-5)
    one, other = (load_file(place / name / "model.safetensors") for name in ("together", "out"))
    assert all(torch.allclose(one[name], tensor, atol=1e-4) for name, tensor in other.items())
    assert done.stdout.count("artifact") == 1


def test_bad_input_is_refused_before_any_work(place: Path) -> None:
    before = listing(place)
    both = ["--teacher", "model", "--student", "student"]
    add_tokenizer_of_other_words(place / "other")
    save_reference("llama", place / "other", vocab_size=VOCABULARY)
    assert "different tokenizers" in refused("--teacher", "other", "--student", "student", *TEXT, *SMALL)
    assert "has no experts" in refused("--teacher", "student", "--student", "student", "--recipe", "sar", *TEXT, *SMALL)
    save_reference("llama", place / "other", vocab_size=VOCABULARY, num_hidden_layers=2)
    add_tokenizer(place / "other")
    layers = refused("--teacher", "model", "--student", "other", "--recipe", "layer-mse", *TEXT, *SMALL)
    assert "has 3 layers" in layers and "2 of" in layers
    assert "leave out --divergence" in refused(*both, "--recipe", "layer-mse", "--divergence", "forward-kl", *TEXT, *SMALL)
    assert "give --teacher" in refused("--student", "student", *TEXT, *SMALL)
    (place / "empty.jsonl").write_text(json.dumps({"instruction": "look", "output": " "}))
    assert "line 1: has no response" in refused(*both, *PAIRS, *SMALL, "--data", "empty.jsonl")
    long = refused(*both, *PAIRS[:-1], "2", *SMALL)
    assert "have prompts longer than 2 tokens" in long
    (place / "empty.jsonl").write_text(json.dumps({"instruction": "", "output": "look"}))
    assert "line 1: has no prompt" in refused(*both, *PAIRS, *SMALL, "--data", "empty.jsonl")
    assert "start them with torchrun" in refused(*both, *PAIRS, *SMALL, "--shard")
    assert "evaluation-samples" in refused(*both, *PAIRS, *SMALL, "--evaluation-samples", "-1")
    assert "--prompt-template" in refused(*both, *TEXT, *SMALL, "--prompt-template", "{prompt}")
    assert "no {prompt}" in refused(*both, *PAIRS, *SMALL, "--prompt-template", "say it")
    assert "max-prompt-length" in refused(*both, *PAIRS, *SMALL, "--max-length", "4096")
    assert "ka-probability" in refused(*both, *PAIRS, *SMALL, "--recipe", "ka", "--ka-probability", "2")
    for name in ("other", "empty.jsonl"):
        assert (place / name).exists()
    assert {
        name: own for name, own in listing(place).items() if name.split("/")[0] not in ("other", "empty.jsonl")
    } == before


def add_tokenizer_of_other_words(path: Path) -> None:
    """Write a tokenizer with the same number of tokens, two of which are swapped."""
    add_tokenizer(path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [word for word in vocabulary if len(word) == 1][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_prompts_that_are_too_long_are_counted(place: Path) -> None:
    rows = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    rows[:40] = [row | {"instruction": row["instruction"] + " over" * 40} for row in rows[:40]]
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    limits = ["--max-length", "100", "--max-prompt-length", "60"]
    figures = run("--student", "student", "--recipe", "sft", *PAIRS, *SMALL, *limits, "--steps", "2")
    assert figures["prompts_left_out"] == 40


def test_pruning_with_distillation_trains_all_weights_and_keeps_the_plan(place: Path) -> None:
    """The result equals pruning, and then distilling from the full model with the same options."""
    prune = ["prune", "model", "--plan", "plan.json", *TEXT, "--evaluation-samples", "4", "--json"]
    invoked = CliRunner().invoke(cli.main, [*prune, "--distill", "--distill-steps", "12", "-o", "both"])
    assert invoked.exit_code == 0, invoked.output
    figures = json.loads(invoked.stdout)
    part = figures["training"]["distill"]
    assert part["steps"] == 12 and part["divergence_last"] < part["divergence_first"]
    assert figures["experts_per_layer"] == [3, 5, 2] and figures["method"] == "plan"
    assert "`distill`: 12 steps" in (place / "both" / "README.md").read_text()
    assert CliRunner().invoke(cli.main, [*prune, "-o", "pruned"]).exit_code == 0
    after = ["--batch-size", "16", "--validation-samples", "64", "--steps", "12", "--evaluation-samples", "4"]
    run("--teacher", "model", "--student", "pruned", *TEXT, *after, "-o", "apart")
    together, apart = (load_file(place / name / "model.safetensors") for name in ("both", "apart"))
    assert all(torch.allclose(together[name], tensor, atol=1e-6) for name, tensor in apart.items())


def test_rouge_l_of_what_a_model_writes(place: Path) -> None:
    """The figure equals the rouge package's for each seed. A model that memorized the responses is near 1."""
    rows = [{"source": f"{word}{number}", "target": word} for word in WORDS for number in range(12)]
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["evaluate", "student", "--metric", "rouge-l", *PAIRS, "--seeds", "2", "--json"]
    before = json.loads(CliRunner().invoke(cli.main, command, catch_exceptions=False).stdout)
    assert len(before["values"]) == 2 and before["value"] == pytest.approx(sum(before["values"]) / 2)
    learnt = [*SMALL, "--steps", "60", "--batch-size", "16", "--select-by", "rouge-l", "--validate-every", "30"]
    figures = run("--student", "student", "--recipe", "sft", *PAIRS, *learnt)
    assert figures["metric_name"] == "rouge-l" and figures["metric_after"] > max(0.5, figures["metric_before"])
    after = CliRunner().invoke(cli.main, [*command[:1], "out", *command[2:], "--temperature", "0"], catch_exceptions=False)
    assert json.loads(after.stdout)["value"] > max(0.5, before["value"])
    assert "give --data FILE.jsonl with both" in refused(
        "--student", "student", "--recipe", "sft", *TEXT, *learnt, "-o", "other"
    )


def evaluate(*arguments: str, code: int = 0) -> Any:
    """Return the figures of `evaluate --metric rouge-l`, or its message where it is refused."""
    command = ["evaluate", "student", "--metric", "rouge-l", *PAIRS[2:], "--seeds", "1", *arguments]
    result = CliRunner().invoke(cli.main, [*command, *(["--json"] if code == 0 else [])], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code == 0 else result.output


def write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)))


def test_rouge_l_scores_the_rows_it_is_given(place: Path) -> None:
    """The whole file counts, with rows that occur twice and prompts that are too long; a split is a part of it."""
    rows = [{"instruction": f"{WORDS[number % len(WORDS)]} {number}", "output": "fox"} for number in range(37)]
    rows += [rows[0], {"instruction": "over " * 40, "output": "fox"}, {"instruction": "look", "output": ""}]
    write_rows(place / "pairs.jsonl", rows)
    data = ["--data", "pairs.jsonl"]
    every, tested = evaluate(*data, "--split", "all"), evaluate("--test", "pairs.jsonl")
    for figures in (every, tested):
        assert (figures["examples"], figures["rows"], figures["rows_left_out"], figures["prompts_cut"]) == (39, 39, 1, 1)
        assert (figures["split"], figures["data"]) == ("all", "pairs.jsonl")
    assert tested["values"] == every["values"]
    held_out, others = evaluate(*data), evaluate(*data, "--split", "calibration")
    assert held_out["split"] == "held-out" and 0 < held_out["examples"] < 15
    assert held_out["examples"] + others["examples"] == 38, "one row occurs twice, and a split has it once"
    assert evaluate(*data, "--split", "all", "--samples", "3")["examples"] == 3
    assert "--data is for a file that is split" in evaluate(*data, "--test", "pairs.jsonl", code=1)
    assert "--stemming is for rouge-l" in evaluate(*data, "--stemming", "--metric", "perplexity", code=1)
    assert "give --data FILE.jsonl or --test" in evaluate(code=1)


def test_held_out_examples_have_two_halves(place: Path) -> None:
    maker = ExampleMaker(load_tokenizer(Checkpoint(place / "student")), Limits(512, 256))
    parts = {
        split: {tuple(each.prompt) for each in instructions_of("pairs.jsonl", maker, split).examples}
        for split in ("selection", "report", "held-out", "calibration", "all")
    }
    assert parts["selection"] and parts["report"] and not parts["selection"] & parts["report"]
    assert parts["held-out"] == parts["selection"] | parts["report"]
    assert parts["all"] == parts["held-out"] | parts["calibration"] and not parts["held-out"] & parts["calibration"]


def test_rouge_l_takes_the_nearest_of_several_references(place: Path) -> None:
    checkpoint = Checkpoint(place / "student")
    decoder, tokenizer = Decoder(checkpoint.config, checkpoint.source(torch.float32)), load_tokenizer(checkpoint)
    prompt, greedy = tokenizer("the quick")["input_ids"], SamplingOptions()
    (written,) = write_responses(decoder, [prompt], 40, (), greedy, torch.Generator())
    own = tokenizer.decode(written.response, skip_special_tokens=True)
    assert re.search("[A-Za-z0-9]", own), "the response has a word"
    for references, value in ((("none",), 0.0), ((own,), 1.0), (("none", own), 1.0)):
        example = Example(prompt, written.response, references)
        assert rouge_l(Writer(decoder), tokenizer, [example], 40, frozenset(), sampling=greedy) == value
    row = {"instruction": "the quick", "output": ["none", own]}
    write_rows(place / "several.jsonl", [row, row | {"output": own}])
    figures = evaluate("--test", "several.jsonl", "--max-length", "40", "--temperature", "0")
    assert figures["references"] == 3 and figures["examples"] == 2


def test_rouge_l_by_stems() -> None:
    """MiniLLM compares stems: with them "running dogs" and "run dog" are equal, without them they share no word."""
    assert best_score(scorer(stemming=True), ["running dogs"], "run dog") == 1.0
    assert best_score(scorer(), ["running dogs"], "run dog") == 0.0


def test_files_for_training_validation_and_test(place: Path) -> None:
    """Each file is used whole, and only for its own purpose."""
    rows = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    write_rows(place / "train.jsonl", rows[:30])
    (place / "validation.json").write_text(
        json.dumps([{"question": r["instruction"], "answer": r["output"]} for r in rows[30:37]])
    )
    long = {"instruction": "over " * 40, "output": "fox"}
    write_rows(place / "test.jsonl", [*rows[40:50], rows[40], long, {"instruction": "look", "output": ""}])
    files = ["--train", "train.jsonl", "--validation", "validation.json", "--test", "test.jsonl"]
    common = ["--student", "student", "--recipe", "sft", *PAIRS[2:]]
    small = ["--batch-size", "4", "--validate-every", "4", "--epochs", "1", "--learning-rate", "0.01"]
    figures = run(*common, *files, *small, "--select-by", "rouge-l", "--stemming", "-o", "out")
    assert figures["steps"] == 8, "30 rows, 4 in a step"
    assert (figures["examples"], figures["prompts_cut"], figures["rows_left_out"]) == (12, 1, 1)
    assert figures["evaluation"] == "12 examples of test.jsonl" and figures["metric_name"] == "rouge-l"
    untested = run(*common, *files[:4], *small, "-o", "untested")
    assert (untested["examples"], untested["evaluation"]) == (7, "7 validation examples of validation.json")
    split = run(*common, *PAIRS[:2], *files[4:], *small, "-o", "split")
    assert (split["examples"], split["evaluation"]) == (12, "12 examples of test.jsonl")
    assert split["response_perplexity_before"] == pytest.approx(figures["response_perplexity_before"], rel=1e-6)
    for wrong, message in (
        (files[:2], "--train and --validation are both needed"),
        ([*files, *PAIRS[:2]], "leave it out"),
        ([*files, "--evaluation-samples", "4"], "all of --test is used"),
        ([*files[:4], "--validation-samples", "4"], "all of --validation is used"),
        (["--train", "text.txt", *files[2:]], "text.txt: is no file of prompts with responses"),
        ([*files, "--stemming"], "--stemming is for rouge-l"),
    ):
        assert message in refused(*common, *wrong, "-o", "other")


def test_rouge_l_by_hand() -> None:
    """The longest common subsequence of "the cat sat" and "the cat on the mat" is "the cat": P = 2/5, R = 2/3, F = 1/2."""
    assert scorer().score("the cat sat", "the cat on the mat")["rougeL"].fmeasure == pytest.approx(0.5)
