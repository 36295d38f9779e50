"""The training loop against a plain AdamW written out here. An interrupted and resumed training is bit-identical."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compress.options.training import DenseTrainingOptions, TrainingOptions
from compress.training.training import Batch, Trainer, batch_rows, rate_at
from engine.errors import DataError, OptionError, TrainingError
from engine.files.safetensors_file import SafetensorsFile

DATA = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
TARGET = DATA @ torch.tensor([1.0, -2.0, 0.5, 0.0])
OPTIONS = TrainingOptions(
    steps=12, learning_rate=0.05, batch_size=4, group_size=3, warm_up_steps=3, clip_norm=0.5, weight_decay=0.01, save_every=3
)


class Regression:
    """(w·x + b + noise − y)², the mean over a step's rows: the loss of a model with four weights."""

    def __init__(self, dtype: torch.dtype = torch.float32, noise: float = 0.0) -> None:
        self.w, self.b = nn.Parameter(torch.zeros(4, dtype=dtype)), nn.Parameter(torch.zeros(1, dtype=dtype))
        self.noise = noise

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {"w": self.w, "b": self.b}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        x = DATA[batch.group_G].to(self.w.dtype)
        drawn = self.noise * torch.randn(len(x), generator=batch.generator)
        errors = x @ self.w + self.b + drawn - TARGET[batch.group_G]
        return {"square": errors.float().square().sum() / len(batch.rows_B), "ridge": 0.0 * self.w.float().sum()}


def trainer(loss: Regression, options: TrainingOptions = OPTIONS) -> Trainer:
    return Trainer(loss.parameters, loss, options, len(DATA), 1)


def plain_adamw(options: TrainingOptions) -> tuple[Tensor, list[float]]:
    """Return the training's result in float64 from the textbook: w and b in one vector, the gradient by hand."""
    x, theta = torch.cat([DATA, torch.ones(len(DATA), 1)], 1).double(), torch.zeros(5, dtype=torch.float64)
    m, v, losses = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64), []
    for step in range(options.steps):
        rows = batch_rows(len(DATA), options.batch_size, step, options.seed)
        errors = x[rows] @ theta - TARGET[rows].double()
        losses.append(float(errors.square().mean()))
        gradient = 2 * x[rows].T @ errors / len(rows)
        gradient *= min(1.0, options.clip_norm / float(gradient.norm()))
        rise = min(1.0, (step + 1) / options.warm_up_steps)
        rate = options.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        theta = theta * (1 - rate * options.weight_decay)
        theta = theta - rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    return theta, losses


def test_it_is_adamw_with_clipping_and_a_cosine_whatever_the_size_of_groups() -> None:
    expected, losses = plain_adamw(OPTIONS)
    own = trainer(Regression())
    trained = own.run()
    assert torch.allclose(torch.cat([trained["w"], trained["b"]]).double(), expected, atol=1e-5)
    assert [step["loss"] for step in own.history] == pytest.approx(losses, rel=1e-4)
    assert own.history[0]["square"] == own.history[0]["loss"] and own.history[0]["ridge"] == 0.0


class Stop:
    """A progress bar that interrupts the training before a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, steps: range) -> object:
        for step in steps:
            if step == self.at:
                raise KeyboardInterrupt
            yield step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [2, 3, 8, 11])
def test_interrupted_and_resumed_it_ends_in_the_same_bits(tmp_path: Path, dtype: torch.dtype, at: int) -> None:
    def validated(loss: Regression) -> dict[str, object]:
        return {"validate": lambda: float((loss.w.float() - 0.3).norm())}

    options = TrainingOptions(**(vars(OPTIONS) | {"validate_every": 4}))
    whole, path = Regression(dtype, 0.1), tmp_path / "state.safetensors"
    expected = trainer(whole, options)
    result = expected.run(**validated(whole))
    stopped = Regression(dtype, 0.1)
    with pytest.raises(KeyboardInterrupt):
        trainer(stopped, options).run(state_path=path, progress=Stop(at), **validated(stopped))
    assert path.exists() == (at > 3)
    again = Regression(dtype, 0.1)
    resumed = trainer(again, options)
    torch.manual_seed(at)  # nothing depends on the global generator
    assert all(
        torch.equal(result[name], own) for name, own in resumed.run(state_path=path, resume=True, **validated(again)).items()
    )
    assert resumed.history == expected.history and resumed.validations == expected.validations
    done = trainer(Regression(dtype, 0.1), options)
    assert all(torch.equal(result[name], own) for name, own in done.run(state_path=path, resume=True).items())


def test_the_best_state_is_kept() -> None:
    loss = Regression()
    own = trainer(loss, TrainingOptions(**(vars(OPTIONS) | {"validate_every": 2})))
    measured = iter([5.0, 3.0, 4.0, 2.0, 2.5, 7.0, 6.0])
    states: list[Tensor] = []

    def validate() -> float:
        states.append(loss.w.detach().clone())
        return next(measured)

    trained = own.run(validate=validate)
    assert own.validations == list(zip(range(0, 13, 2), [5.0, 3.0, 4.0, 2.0, 2.5, 7.0, 6.0], strict=True))
    assert torch.equal(trained["w"], states[3]) and torch.equal(loss.w, states[3]) and not torch.equal(states[3], states[6])


def test_a_loss_that_is_no_number_stops_with_the_last_good_state_kept(tmp_path: Path) -> None:
    class Breaks(Regression):
        def __call__(self, batch: Batch) -> dict[str, Tensor]:
            terms = super().__call__(batch)
            return terms | {"square": terms["square"] * (math.nan if batch.step == 8 else 1.0)}

    path = tmp_path / "state.safetensors"
    with pytest.raises(TrainingError, match=r"step 8: the loss is nan; the last good state is in .*state\.safetensors"):
        trainer(Breaks()).run(state_path=path)
    with SafetensorsFile(path) as file:
        assert json.loads(file.metadata["training"])["step"] == 6
        assert bool(file.tensor("w").isfinite().all())
    with pytest.raises(TrainingError, match="no step before it was saved"):
        trainer(Breaks()).run()


def test_a_gradient_or_a_measure_that_is_no_number_stops_too() -> None:
    class Steep(Regression):
        def __call__(self, batch: Batch) -> dict[str, Tensor]:
            return super().__call__(batch) | {"root": self.w.float().square().sum().sqrt()}  # 0/0 at 0

    with pytest.raises(TrainingError, match="step 0: the gradient's length is nan"):
        trainer(Steep()).run()
    measured, own = iter([1.0, math.nan]), trainer(Regression(), TrainingOptions(2, 0.1, validate_every=2))
    with pytest.raises(TrainingError, match="step 2: the measure of validation is nan"):
        own.run(validate=lambda: next(measured))


def test_the_state_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    own = trainer(Regression())
    own.save(path, own.state(3))
    other = Regression()
    with pytest.raises(DataError, match="not the state of this training"):
        Trainer({"another": other.w}, other, OPTIONS, len(DATA), 1).load(path)


def test_a_second_training_goes_on_in_the_order_of_the_first() -> None:
    seen: list[int] = []

    class Notes(Regression):
        def __call__(self, batch: Batch) -> dict[str, Tensor]:
            seen.extend(batch.group_G.tolist())
            return super().__call__(batch)

    loss = Notes()
    trainer(loss, TrainingOptions(2, 0.1, batch_size=5)).run()
    trainer(loss, TrainingOptions(2, 0.1, batch_size=5, earlier_steps=2)).run()
    assert seen == torch.cat([batch_rows(10, 5, step, 0) for step in range(4)]).tolist()


def test_batches_are_epochs_of_every_sequence() -> None:
    rows = torch.cat([batch_rows(10, 5, step, seed=3) for step in (4, 5)])
    assert sorted(rows.tolist()) == list(range(10))
    assert not torch.equal(batch_rows(10, 5, 0, seed=3), batch_rows(10, 5, 2, seed=3))
    assert len(batch_rows(3, 16, 5, seed=0)) == 3


def test_the_rate_rises_and_falls() -> None:
    rates = [rate_at(step, TrainingOptions(200, 1.0)) for step in range(200)]
    assert rates[0] < 0.11 and max(rates) > 0.98 and rates[-1] < 1e-3


def test_schedules_by_hand() -> None:
    def rates(schedule: str, steps: int, warm_up_steps: int) -> list[float]:
        options = TrainingOptions(steps, 1.0, warm_up_steps=warm_up_steps, schedule=schedule)
        return [round(rate_at(step, options), 6) for step in range(steps)]

    assert rates("linear", 6, 2) == [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates("linear", 3, 4) == [0.25, 0.5, 0.75], "a training shorter than its warm-up only rises"
    assert rates("constant", 4, 2) == [0.5, 1.0, 1.0, 1.0]


def test_options_name_the_schedule_and_its_warm_up() -> None:
    given = DenseTrainingOptions(distill_steps=300, finetune_steps=100, schedule="linear", warm_up_steps=40)
    parts = [given.part(each, 16, 64) for each in given.parts.values()]
    assert [(part.schedule, part.warm_up_steps) for part in parts] == [("linear", 40)] * 2
    usual = DenseTrainingOptions(distill_steps=300)
    assert usual.part(usual.parts["distill"], 16, 64).warm_up_steps == 15, "5 % of the steps"


@pytest.mark.parametrize(
    "changes",
    [{"steps": -1}, {"learning_rate": math.nan}, {"batch_size": 0}, {"clip_norm": 0.0}],
)
def test_options_that_cannot_be_used(changes: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        TrainingOptions(**(vars(OPTIONS) | changes)).check()


class Follower:
    """A loss whose target is moved by another training, and the other's loss, which follows this parameter."""

    def __init__(self) -> None:
        self.x, self.target = (torch.nn.Parameter(torch.tensor([value])) for value in (0.0, 1.0))
        self.seen: list[list[int]] = []

    def own(self, batch: Batch) -> dict[str, Tensor]:
        self.seen.append(batch.rows_B.tolist())
        return {"distance": (self.x - self.target.detach()).square().sum()}

    def others(self, batch: Batch) -> dict[str, Tensor]:
        assert batch.step >= 0
        return {"distance": (self.target - 0.5 * self.x.detach()).square().sum()}


def together(loss: Follower, **changes: object) -> Trainer:
    options = TrainingOptions(**(vars(OPTIONS) | {"steps_per_batch": 2, "save_every": 4} | changes))
    first = Trainer({"target": loss.target}, loss.others, options, len(DATA), 1)
    return Trainer({"x": loss.x}, loss.own, options, len(DATA), 1, first)


def test_a_training_with_another_before_each_of_its_steps(tmp_path: Path) -> None:
    """Each of the two follows the other's current value. Both are resumed, and steps share their sequences."""
    loss = Follower()
    trainer_ = together(loss)
    trainer_.run()
    by_hand = Follower()
    own, others = (torch.optim.AdamW([p], lr=1.0, weight_decay=0.01) for p in (by_hand.x, by_hand.target))
    for step in range(OPTIONS.steps):
        rise = min(1.0, (step + 1) / OPTIONS.warm_up_steps)
        rate = OPTIONS.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * step / OPTIONS.steps))
        for optimiser, of, parameter in ((others, by_hand.others, by_hand.target), (own, by_hand.own, by_hand.x)):
            optimiser.param_groups[0]["lr"] = rate
            parameter.grad = None
            of(Batch(step, torch.zeros(1), torch.zeros(1), torch.Generator()))["distance"].backward()
            torch.nn.utils.clip_grad_norm_([parameter], OPTIONS.clip_norm)
            optimiser.step()
    assert loss.x.item() == pytest.approx(by_hand.x.item(), abs=1e-5)
    assert loss.target.item() == pytest.approx(by_hand.target.item(), abs=1e-5)
    first, second, third = (loss.seen[2 * step] for step in range(3))  # a step has two groups
    assert first == second != third
    again, path = Follower(), tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        together(again).run(state_path=path, progress=Stop(7))
    resumed = together(another := Follower())
    resumed.run(state_path=path, resume=True)
    assert torch.equal(another.x, loss.x) and torch.equal(another.target, loss.target)
    assert resumed.history == trainer_.history and resumed.first is not None and trainer_.first is not None
    assert resumed.first.history == trainer_.first.history
    with pytest.raises(OptionError, match="multiple"):
        TrainingOptions(**(vars(OPTIONS) | {"steps_per_batch": 2, "save_every": 3})).check()
