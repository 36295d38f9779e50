"""A teacher's predictions on disk: the training equals one without the cache, or a naive one on the K + 1 outcomes."""

from __future__ import annotations

import json
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import listing
from click.testing import CliRunner
from test_distill import PAIRS, SMALL, TEXT, refused, run, workplace
from test_processes import two_processes
from test_response_distillation import EXAMPLES, batch, models
from tokenizers_for_tests import VOCABULARY
from torch import Tensor

import cli
import compress.distill
import compress.distillation.teacher_cache
import compress.training.training
import engine.passes.streaming
from compress.distillation.response_distillation import predictions
from compress.distillation.responses import batch_of
from compress.distillation.teacher_cache import TokenFiles, cached_teacher
from compress.run.clock import Clock
from compress.training.divergences import DIVERGENCES, Predictions, largest_predictions, outcomes, weighted_divergence
from engine.decoder.model import Decoder
from engine.errors import DataError, OutputError
from engine.files.safetensors_file import SafetensorsFile

__all__ = ["workplace"]  # a fixture
BOTH = ["--teacher", "model", "--student", "student"]
EVERY = pytest.mark.parametrize("name", DIVERGENCES)
FORMS = pytest.mark.parametrize("count", [None, 7], ids=["exact", "largest"])


# The K most probable tokens


def random_predictions(seed: int, dtype: torch.dtype = torch.float64) -> Predictions:
    """Return predictions for 11 places and 13 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return Predictions(*(torch.randn(rows, 8, generator=generator, dtype=dtype, requires_grad=True) for rows in (11, 13)))


def naive(name: str, p: Tensor, q: Tensor) -> Tensor:
    """Return the divergence by its definition, from probabilities."""

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one / other).log()).sum()

    return {
        "forward-kl": lambda: kl(p, q),
        "reverse-kl": lambda: kl(q, p),
        "skew-forward-kl": lambda: kl(p, 0.1 * p + 0.9 * q),
        "skew-reverse-kl": lambda: kl(q, 0.1 * q + 0.9 * p),
        "jensen-shannon": lambda: 0.5 * kl(p, (p + q) / 2) + 0.5 * kl(q, (p + q) / 2),
    }[name]()


@EVERY
@pytest.mark.parametrize("count", [1, 4, 12])
def test_outcomes_are_compared_as_by_a_naive_implementation(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and student gradients are compared, weighted, at a temperature and over several chunks; the teacher has none."""
    monkeypatch.setattr(engine.passes.streaming, "MOST_CHUNK_TOKENS", 4)
    teacher, student = random_predictions(0), random_predictions(1)
    weights = torch.rand(11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    kept = largest_predictions(teacher, count, 1.5)
    loss = weighted_divergence(DIVERGENCES[name], kept, student, weights, temperature=1.5)
    plain = torch.zeros((), dtype=torch.float64)
    for place_, weight in enumerate(weights):
        p, q = ((made.hidden_TD[place_] @ made.head_VD.T / 1.5).softmax(-1) for made in (teacher, student))
        largest = p.detach().argsort(descending=True)[:count]
        both = [torch.cat([each[largest], (1.0 - each[largest].sum())[None]]) for each in (p.detach(), q)]
        plain = plain + weight * naive(name, *both)
    assert torch.isclose(loss, plain, rtol=1e-9)
    inputs = (student.hidden_TD, student.head_VD)
    for ours, expected in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(plain, inputs), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-7, atol=1e-10)
    assert not kept.logs_TC.requires_grad


@EVERY
def test_more_tokens_come_nearer_to_the_full_divergence_from_below(name: str) -> None:
    """At all tokens but one the divergence is the full one, because "all others" is then that one token."""
    teacher, student = random_predictions(0), random_predictions(1)
    full = float(weighted_divergence(DIVERGENCES[name], teacher, student).detach())
    values = [
        float(weighted_divergence(DIVERGENCES[name], largest_predictions(teacher, count, 1.0), student).detach())
        for count in range(1, 13)
    ]
    assert values == sorted(values) and 0 < values[0] < 0.9 * full and values[-1] == pytest.approx(full, rel=1e-9)


def test_outcomes_by_hand() -> None:
    """The outcomes of (1/2, 1/8, 1/4, 1/8) are the two largest and 1/4 for the others. Another model uses these tokens."""
    p = torch.tensor([[0.5, 0.125, 0.25, 0.125]], dtype=torch.float64).log()
    kept = largest_predictions(Predictions(p, torch.eye(4, dtype=torch.float64)), 2, 1.0)
    assert kept.tokens_TK.tolist() == [[0, 2]]
    assert kept.logs_TC.exp().tolist()[0] == pytest.approx([0.5, 0.25, 0.25])
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert kept.outcomes(q, slice(0, 1)).exp().tolist()[0] == pytest.approx([0.1, 0.3, 0.6])


def test_what_is_left_for_others_keeps_its_digits() -> None:
    """One token has all but e⁻³⁰ of the probability. In float32, one minus its probability is zero."""
    logs = torch.tensor([[30.0, 0.0, -1.0, -40.0]]).log_softmax(-1)
    expected = math.log(1.0 + math.exp(-1.0) + math.exp(-40.0)) - math.log(math.exp(30.0) + 1.0 + math.exp(-1.0))
    assert float(outcomes(logs, torch.tensor([[0]]))[0, 1]) == pytest.approx(expected, rel=1e-6)
    assert 1.0 - float(logs[0, 0].exp()) == 0.0


# Files


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sequences_come_back_in_any_order(
    count: int | None, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is bit-identical to the teacher's prediction alone, from files of one or two sequences each."""
    teacher, _ = models(tmp_path, dtype=dtype)
    token_bytes = 32 * dtype.itemsize if count is None else 8 * 7 + 4
    monkeypatch.setattr(
        compress.distillation.teacher_cache, "SHARD_BYTES", 5 * token_bytes
    )  # responses have 3, 1, 5 and 2 tokens
    common = {"group_size": 1, "count": count, "temperature": 2.0}
    cached = cached_teacher(teacher, EXAMPLES, tmp_path, Clock(), **common)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in files] == [f"teacher-0000{number}.safetensors" for number in range(3)]
    sizes = [sum(entry.nbytes for entry in SafetensorsFile(path).entries.values()) for path in files]
    assert sizes == [4 * token_bytes, 5 * token_bytes, 2 * token_bytes]
    rows = torch.tensor([3, 0, 2, 0])
    with torch.no_grad():
        alone = [predictions(teacher, batch_of([EXAMPLES[row]])) for row in rows.tolist()]
    made = cached.teach(batch(rows), batch_of([EXAMPLES[row] for row in rows.tolist()])).predictions
    if count is None:
        assert isinstance(made, Predictions) and made.head_VD is teacher.head_VD and made.hidden_TD.dtype == dtype
        assert torch.equal(made.hidden_TD, torch.cat([each.hidden_TD for each in alone]))
    else:
        kept = [largest_predictions(each, count, 2.0) for each in alone]
        assert torch.equal(made.tokens_TK, torch.cat([each.tokens_TK for each in kept]).int())
        assert torch.equal(made.logs_TC, torch.cat([each.logs_TC for each in kept]))


def test_files_are_of_whole_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10 bytes a token and 50 a file, groups of 2 sequences have 3, 2, 9, 1 and 1 tokens."""
    monkeypatch.setattr(compress.distillation.teacher_cache, "SHARD_BYTES", 50)
    files = TokenFiles(tmp_path, [1, 2, 1, 1, 8, 1, 0, 1, 1], 2, 10)
    assert files.parts == [range(0, 4), range(4, 6), range(6, 9)]


def test_a_file_of_another_training_is_refused(tmp_path: Path) -> None:
    def made(rows: Any) -> Any:
        yield {"tokens": torch.zeros(sum(2 for _ in rows), 1)}

    TokenFiles(tmp_path, [2, 2], 2, 4).fill(made)
    with pytest.raises(DataError, match=r"teacher-00000.safetensors: is not .* leave out --resume"):
        TokenFiles(tmp_path, [2, 3], 2, 4).fill(made)


def test_without_the_space_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used._replace(free=10_000_000_000))
    files = TokenFiles(tmp_path, [10**9, 2 * 10**9], 1, 4)
    with pytest.raises(OutputError, match=r"take 12\.0 GB and 10\.0 GB are free"):
        files.fill(lambda rows: iter(()))
    assert not list(tmp_path.iterdir())


# The command


def test_the_exact_cache_trains_to_the_same_weights(place: Path) -> None:
    """Weights are bit-identical if each sequence has its own pass, else equal up to rounding. Router logits stay too."""
    common = [*BOTH, *PAIRS, *SMALL, "--steps", "8", "--dtype", "float32", "--overwrite"]
    for group, exact in (("1", True), ("4", False)):
        plain = run(*common, "--micro-batch-size", group)
        expected = (place / "out" / "model.safetensors").read_bytes()
        cached = run(*common, "--micro-batch-size", group, "--teacher-cache", "exact")
        assert ((place / "out" / "model.safetensors").read_bytes() == expected) or not exact
        for name in ("loss_first", "loss_last", "metric_after"):
            assert cached[name] == (plain[name] if exact else pytest.approx(plain[name], rel=1e-4))
        assert cached["teacher_unselected_share_per_layer"] == plain["teacher_unselected_share_per_layer"]
        assert cached["time_share"]["teacher"] > 0 and not list(place.glob(".*"))


@pytest.mark.parametrize("data", [TEXT, PAIRS], ids=["text", "pairs"])
def test_the_largest_predictions_train_too(place: Path, data: list[str]) -> None:
    """With all tokens but one the losses equal those without a cache. With two tokens they are below."""
    common = [*BOTH, *data, *SMALL, "--steps", "4", "--temperature", "2", "--divergence", "jensen-shannon", "--overwrite"]
    plain, most, two = (
        run(*common, *more) for more in ([], ["--teacher-cache", str(VOCABULARY - 1)], ["--teacher-cache", "2"])
    )
    for name in ("loss_first", "loss_last"):
        assert most[name] == pytest.approx(plain[name], rel=1e-4) and 0 < two[name] < 0.95 * plain[name]


@FORMS
def test_interrupted_passes_go_on_with_the_first_file_that_is_missing(
    place: Path,
    count: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an interruption in the training, the teacher is not run again, and the final weights are the same."""
    monkeypatch.setattr(compress.distillation.teacher_cache, "SHARD_BYTES", 20_000)
    command = [*BOTH, *PAIRS, *SMALL, "--steps", "6", "--micro-batch-size", "4"]
    command += ["--teacher-cache", str(count or "exact")]
    made, passes, stop_at = compress.distillation.teacher_cache.predictions, [], math.inf

    def counted(*arguments: Any) -> Predictions:
        if len(passes) == stop_at:
            raise KeyboardInterrupt
        passes.append(arguments)
        return made(*arguments)

    monkeypatch.setattr(compress.distillation.teacher_cache, "predictions", counted)
    run(*command)
    expected, whole = (place / "out" / "model.safetensors").read_bytes(), len(passes)
    (place / "out").rename(place / "whole")
    passes.clear()
    stop_at = whole // 2
    assert CliRunner().invoke(cli.main, ["distill", *command]).exit_code == 130
    finished = listing(place / ".out.work")
    shards = sum(name.startswith("teacher-") for name in finished)
    assert shards > 1 and not any(name.endswith(".partial") for name in finished)

    update = compress.training.training.Trainer.update

    def interrupted(self: Any, step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt
        update(self, step)

    passes.clear()
    stop_at = math.inf
    with monkeypatch.context() as patch:
        patch.setattr(compress.training.training.Trainer, "update", interrupted)
        assert CliRunner().invoke(cli.main, ["distill", *command, "--resume"]).exit_code == 130
    assert 0 < len(passes) < whole, "what was there was not made again"
    now = listing(place / ".out.work")
    assert {name: now[name] for name in finished if name.startswith("teacher-")} == {
        name: own for name, own in finished.items() if name.startswith("teacher-")
    }
    assert sum(name.startswith("teacher-") for name in now) > shards
    passes.clear()
    run(*command, "--resume")
    assert not passes and (place / "out" / "model.safetensors").read_bytes() == expected
    assert not list(place.glob(".*")), "nothing temporary is left"


def test_the_teacher_is_let_go_of_before_training(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher is released completely, or except for its head."""
    made, update, teachers, seen = compress.distill.cached_teacher, compress.training.training.Trainer.update, [], []

    def watched(decoder: Decoder, *arguments: Any, **options: Any) -> Any:
        teachers.extend([weakref.ref(decoder), weakref.ref(decoder.head_VD)])
        return made(decoder, *arguments, **options)

    def updated(self: Any, step: int) -> None:
        seen.append([teacher() is None for teacher in teachers[-2:]])
        update(self, step)

    monkeypatch.setattr(compress.distill, "cached_teacher", watched)
    monkeypatch.setattr(compress.training.training.Trainer, "update", updated)
    for form in ("exact", "3"):
        run(*BOTH, *PAIRS, *SMALL, "--steps", "1", "--teacher-cache", form, "--overwrite")
    assert seen == [[True, False], [True, True]]


PROCESSES = """
import sys
from pathlib import Path
import cli, compress.distillation.teacher_cache
from engine.passes import processes

write = compress.distillation.teacher_cache.TokenFiles._write

def noted(self, number, pieces):
    Path(f"written-{processes.rank()}-{number}").touch()
    write(self, number, pieces)

compress.distillation.teacher_cache.SHARD_BYTES = 20_000
compress.distillation.teacher_cache.TokenFiles._write = noted
cli.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_several_processes_share_out_the_files(place: Path) -> None:
    (place / "script.py").write_text(PROCESSES)
    command = [*BOTH, *PAIRS, *SMALL, "--steps", "4", "--dtype", "float32", "--micro-batch-size", "2"]
    command += ["--teacher-cache", "exact"]
    done = two_processes("script.py", "distill", *command, "--batch-size", "2", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    (place / "out").rename(place / "together")
    alone, together = run(*command), json.loads(done.stdout)
    for name in ("loss_first", "loss_last", "metric_after"):
        assert together[name] == pytest.approx(alone[name], rel=1e-5)
    written = sorted(tuple(map(int, path.name.split("-")[1:])) for path in place.glob("written-*"))
    count = len(written)
    assert count > 2 and {(number % 2, number) for number in range(count)} == set(written), "each file once"


def test_bad_input_is_refused_before_any_work(place: Path) -> None:
    before = listing(place)
    for recipe in ("sft", "gkd", "all", "ka", "sar", "layer-mse"):
        assert "leave out --teacher-cache" in refused(*BOTH, *PAIRS, *SMALL, "--recipe", recipe, "--teacher-cache", "8")
    for wrong in ("0", "-1", "1.5", "all", "", "9999999999"):
        assert "must be exact, or a number from 1" in refused(*BOTH, *PAIRS, *SMALL, "--teacher-cache", wrong)
    few = refused(*BOTH, *PAIRS, *SMALL, "--teacher-cache", str(VOCABULARY))
    assert f"the models have {VOCABULARY} tokens" in few
    assert listing(place) == before
