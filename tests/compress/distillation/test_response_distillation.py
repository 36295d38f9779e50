"""The loss of every recipe and its gradients against the formula in float64; the router's gradients by finite
differences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import MOE_FAMILIES, save_reference
from torch import Tensor

from calibrate.instructions import Example
from compress.distillation.recipes import RECIPES
from compress.distillation.response_distillation import ResponseLoss, Responses, ResponseTeacher
from compress.distillation.responses import batch_of
from compress.distillation.router_report import old_routers, router_drift, router_report
from compress.distillation.student_aware_routing import RouterLoss, load_balance, router_parameters, squared_variation
from compress.distillation.writer import Writer
from compress.options.distill import KnowledgeAugmentation
from compress.run.clock import Clock
from compress.training.divergences import DIVERGENCES
from compress.training.layer_distillation import feed_forwards, outputs_of
from compress.training.training import Batch
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder, routed_by
from engine.decoder.routing import AllExperts, TopK

EXAMPLES = [
    Example([5, 6], [7, 8, 9]),
    Example([10], [11]),
    Example([12, 13, 14], [15, 16, 17, 18, 2]),
    Example([3], [4, 5]),
]
ROWS = torch.tensor([2, 0, 1])
EVERY = pytest.mark.parametrize("family", MOE_FAMILIES)


def models(path: Path, family: str = "mixtral", dtype: torch.dtype = torch.float64) -> tuple[Decoder, Decoder]:
    """Return (teacher, student). The student is a dense model with the same vocabulary."""
    save_reference(family, path / "teacher")
    save_reference("llama", path / "student")
    both = [Checkpoint(path / name) for name in ("teacher", "student")]
    teacher, student = (Decoder(each.config, each.source(dtype)) for each in both)
    for decoder in (teacher, student):
        for parameter in decoder.parameters():
            parameter.data = parameter.data.clone()
    return teacher, student


def batch(group: Tensor, rows: Tensor = ROWS, seed: int = 0, turn: int = 0) -> Batch:
    return Batch(turn, rows, group, torch.Generator().manual_seed(seed), turn)


def naive(student: Decoder, of_token: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    """Return the mean over sequences of the mean over response tokens, each sequence alone and without padding."""
    total = torch.zeros((), dtype=torch.float64)
    for row in ROWS.tolist():
        example = EXAMPLES[row]
        logits = student(torch.tensor([example.prompt + example.response]))[0]
        places = range(len(example.prompt) - 1, len(example.prompt) + len(example.response) - 1)
        total = total + sum(of_token(row, place, logits[place]) for place in places) / len(example.response)
    return total / len(ROWS)


def teacher_predictions(teacher: Decoder, row: int, place: int) -> Tensor:
    example = EXAMPLES[row]
    return teacher(torch.tensor([example.prompt + example.response]))[0, place].log_softmax(-1)


def compared(loss: ResponseLoss, student: Decoder, expected: Callable[[], Tensor]) -> None:
    """Compare the loss and its gradients in every parameter, over two groups that make up the step."""
    parameters = list(student.parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
    terms = [sum(loss(batch(group)).values()) for group in ROWS.split(2)]
    value = expected()
    assert float(sum(terms).detach()) == pytest.approx(float(value.detach()), rel=1e-6)
    ours = torch.autograd.grad(sum(terms), parameters)
    for own, plain in zip(ours, torch.autograd.grad(value, parameters), strict=True):
        assert torch.allclose(own, plain, rtol=1e-5, atol=1e-8)


def test_without_a_divergence_it_is_cross_entropy_of_the_response(tmp_path: Path) -> None:
    _, student = models(tmp_path)
    loss = ResponseLoss(student, None, Responses(EXAMPLES, Clock()), RECIPES["sft"])

    def plain() -> Tensor:
        def of_token(row: int, place: int, logits: Tensor) -> Tensor:
            tokens = EXAMPLES[row].prompt + EXAMPLES[row].response
            return F.cross_entropy(logits, torch.tensor(tokens[place + 1]))

        return naive(student, of_token)

    compared(loss, student, plain)


@EVERY
@pytest.mark.parametrize("recipe", ["kd", "gkd", "all"])
def test_divergences_of_response_tokens(family: str, recipe: str, tmp_path: Path) -> None:
    """The teacher uses its own gate or all experts. The responses are the data's, as if the student had written them."""
    teacher, student = models(tmp_path, family)
    row = RECIPES[recipe]
    gated = ResponseTeacher(teacher, row, KnowledgeAugmentation(), Clock())
    loss = ResponseLoss(student, gated, Responses(EXAMPLES, Clock()), row)
    gates = [AllExperts() if row.uses_all_experts else block.routing for block in teacher.moe_blocks]

    def plain() -> Tensor:
        def of_token(row_: int, place: int, logits: Tensor) -> Tensor:
            with torch.no_grad(), routed_by(teacher, gates):
                target = teacher_predictions(teacher, row_, place)
            own = logits.log_softmax(-1)
            one, other = (target, own) if recipe == "kd" else (own, target)
            return (one.exp() * (one - other)).sum()

        return naive(student, of_token)

    compared(loss, student, plain)


@EVERY
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_layers_are_matched_at_every_token(family: str, recompute: bool, tmp_path: Path) -> None:
    """The loss is cross-entropy plus the squared distance between normalized outputs of all blocks."""
    teacher, student = models(tmp_path, family)
    student.checkpoint_activations = recompute
    row = RECIPES["layer-mse"]
    gated = ResponseTeacher(teacher, row, KnowledgeAugmentation(), Clock())
    loss = ResponseLoss(student, gated, Responses(EXAMPLES, Clock()), row)

    def blocks(decoder: Decoder, tokens: list[int]) -> list[Tensor]:
        with outputs_of(feed_forwards(decoder)) as outputs:
            decoder(torch.tensor([tokens]))
        return [F.layer_norm(output, output.shape[-1:]) for output in outputs.values()]

    def plain() -> Tensor:
        distance = torch.zeros((), dtype=torch.float64)
        for place in ROWS.tolist():
            tokens = EXAMPLES[place].prompt + EXAMPLES[place].response
            with torch.no_grad():
                targets = blocks(teacher, tokens)
            pairs = zip(targets, blocks(student, tokens), strict=True)
            distance = distance + sum((own - target).square().mean() for target, own in pairs)

        def of_token(row: int, place: int, logits: Tensor) -> Tensor:
            return F.cross_entropy(logits, torch.tensor((EXAMPLES[row].prompt + EXAMPLES[row].response)[place + 1]))

        return naive(student, of_token) + distance / len(ROWS)

    compared(loss, student, plain)


def test_sampled_gates_are_drawn_anew_for_each_forward_and_from_its_generator(tmp_path: Path) -> None:
    teacher, student = models(tmp_path)
    gated = ResponseTeacher(teacher, RECIPES["ka"], KnowledgeAugmentation(probability=1.0), Clock())
    loss = ResponseLoss(student, gated, Responses(EXAMPLES, Clock()), RECIPES["gkd"])
    values = [float(loss(batch(ROWS, seed=seed))["divergence"]) for seed in (0, 1, 0)]
    assert values[0] == values[2] != values[1]
    largest = ResponseTeacher(teacher, RECIPES["ka"], KnowledgeAugmentation(probability=0.0), Clock())
    without_draws = ResponseLoss(student, largest, Responses(EXAMPLES, Clock()), RECIPES["gkd"])
    five = [TopK(5, normalise=True) for _ in teacher.moe_blocks]  # the N−1 largest of six, with softmax over those
    with routed_by(teacher, five):
        own = ResponseTeacher(teacher, RECIPES["gkd"], KnowledgeAugmentation(), Clock())
        expected = float(ResponseLoss(student, own, Responses(EXAMPLES, Clock()), RECIPES["gkd"])(batch(ROWS))["divergence"])
    assert float(without_draws(batch(ROWS))["divergence"]) == pytest.approx(expected, rel=1e-6)


def test_responses_of_the_student_are_written_once_a_turn(tmp_path: Path) -> None:
    _, student = models(tmp_path, dtype=torch.float32)
    responses = Responses(EXAMPLES, Clock(), Writer(student), max_length=9)
    first = responses(batch(ROWS, seed=0, turn=0))
    again, next_turn = responses(batch(ROWS, seed=5, turn=0)), responses(batch(ROWS, seed=5, turn=1))
    assert torch.equal(first.tokens_BL, again.tokens_BL) and not torch.equal(first.tokens_BL, next_turn.tokens_BL)
    for row, place in enumerate(ROWS.tolist()):
        prompt = EXAMPLES[place].prompt
        assert first.tokens_BL[row, : len(prompt)].tolist() == prompt
    assert responses.clock.seconds["generation"] > 0


@EVERY
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_routers_loss_and_gradient(family: str, recompute: bool, tmp_path: Path) -> None:
    """The gradient goes through the teacher's experts to its routers. It equals the formula and finite differences."""
    teacher, student = models(tmp_path, family)
    teacher.checkpoint_activations = recompute
    routers = list(router_parameters(teacher).values())
    for router in routers:
        router.requires_grad_(True)
    loss = RouterLoss(teacher, student, Responses(EXAMPLES, Clock()), balance=0.5)

    def value() -> Tensor:
        return sum(loss(batch(ROWS)).values(), torch.zeros((), dtype=torch.float64))

    gates = [AllExperts() for _ in teacher.moe_blocks]

    def of_token(index: int, place: int, logits: Tensor) -> Tensor:
        with torch.no_grad(), routed_by(teacher, gates):
            p = teacher_predictions(teacher, index, place)
        return (p.exp() * (p - logits.log_softmax(-1))).sum().detach()

    terms = loss(batch(ROWS))
    assert float(terms["divergence"].detach()) == pytest.approx(float(naive(student, of_token).detach()), rel=1e-6)
    sum(terms.values()).backward()
    assert all(parameter.grad is None for parameter in student.parameters())
    assert {id(p) for p in teacher.parameters() if p.grad is not None} == {id(router) for router in routers}
    generator = torch.Generator().manual_seed(0)
    for router in routers:
        direction = torch.randn(router.shape, generator=generator, dtype=torch.float64)
        step, kept = 1e-6 * direction, router.data.clone()
        with torch.no_grad():
            router.data = kept + step
            above = float(value())
            router.data = kept - step
            below = float(value())
            router.data = kept
        assert float((router.grad * direction).sum()) == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-7)


def test_load_balance_by_hand() -> None:
    """There are three tokens, one of them padding, and two experts, of which the router takes the better one."""
    assert float(squared_variation(torch.tensor([1.0, 3.0]))) == pytest.approx(0.25)
    assert float(squared_variation(torch.tensor([2.0, 2.0]))) == 0.0
    logits = torch.tensor([[0.0, 1.0], [0.0, 3.0], [9.0, 0.0]])
    found = load_balance([TopK(1, normalise=True)], {0: logits}, torch.tensor([True, True, False]))
    first = [1 / (1 + 2.718281828459045**x) for x in (1.0, 3.0)]
    p = [sum(first), 2 - sum(first)]
    expected = 1.0 + ((p[0] - 1) ** 2 + (p[1] - 1) ** 2) / 2  # m = (0, 2): CV² = 1; the mean of P is 1
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_every_recipe_names_a_divergence_that_exists() -> None:
    assert {row.divergence for row in RECIPES.values()} - {None} <= set(DIVERGENCES)
    assert [name for name, row in RECIPES.items() if row.needs_experts] == ["all", "ka", "sar"]
    assert [name for name, row in RECIPES.items() if not row.needs_teacher] == ["sft"]
    assert batch_of(EXAMPLES).real_BL.sum(1).tolist() == [5, 2, 8, 3]


@EVERY
def test_what_routers_did_not_choose_and_how_far_they_moved(family: str, tmp_path: Path) -> None:
    """The expected values are computed token by token, without padding, from each block's input."""
    teacher, _ = models(tmp_path, family)
    old = old_routers(teacher)
    still = router_report(teacher, old, EXAMPLES, 3)
    assert max(still.moved.values()) == pytest.approx(0.0, abs=1e-9)
    for block in teacher.moe_blocks:
        block.router_ND.data += 0.1 * torch.randn(block.router_ND.shape, dtype=torch.float64)
    found = router_report(teacher, old, EXAMPLES, 3)
    inputs: dict[int, list[Tensor]] = {index: [] for index in teacher.config.moe_layers}
    for index, block in zip(teacher.config.moe_layers, teacher.moe_blocks, strict=True):
        block.register_forward_pre_hook(lambda module, given, index=index: inputs[index].append(given[0]))
    for example in EXAMPLES:
        teacher(torch.tensor([example.prompt + example.response]))
    for index, block in zip(teacher.config.moe_layers, teacher.moe_blocks, strict=True):
        x_TD = torch.cat(inputs[index])
        bias = 0.0 if block.logit_bias_N is None else block.logit_bias_N
        p, q = ((x_TD @ router.T + bias).softmax(-1) for router in (old[index].tensors[0], block.router_ND))
        per_token = teacher.config.experts_per_token
        assert found.moved[index] == pytest.approx(float((p * (p / q).log()).sum(1).mean()), rel=1e-4)
        left = 1 - p.sort(descending=True).values[:, :per_token].sum(1)
        assert found.unselected[index] == pytest.approx(float(left.mean()), rel=1e-4)


@EVERY
def test_drift_of_routers_is_that_of_later_layers_too_because_their_inputs_change(family: str, tmp_path: Path) -> None:
    """The expected values are those of two complete teachers, token by token, without padding."""
    teacher, _ = models(tmp_path, family)
    old, gates = old_routers(teacher), [AllExperts() for _ in teacher.moe_blocks]
    still = router_drift(teacher, old, EXAMPLES, 3, gates)
    assert set(still.mean.values()) == set(still.largest.values()) == {0.0}

    def probabilities_of(teacher: Decoder) -> dict[int, Tensor]:
        inputs: dict[int, list[Tensor]] = {index: [] for index in teacher.config.moe_layers}
        blocks = list(zip(teacher.config.moe_layers, teacher.moe_blocks, strict=True))
        hooks = [
            block.register_forward_pre_hook(lambda module, given, index=index: inputs[index].append(given[0]))
            for index, block in blocks
        ]
        with routed_by(teacher, gates):
            for example in EXAMPLES:
                teacher(torch.tensor([example.prompt + example.response]))
        for hook in hooks:
            hook.remove()
        biases = {index: 0.0 if block.logit_bias_N is None else block.logit_bias_N for index, block in blocks}
        return {index: (torch.cat(inputs[index]) @ block.router_ND.T + biases[index]).softmax(-1) for index, block in blocks}

    before = probabilities_of(teacher)
    first, *later = teacher.moe_blocks
    first.router_ND.data += 0.1 * torch.randn(first.router_ND.shape, dtype=torch.float64)
    changed = first.router_ND.data.clone()
    after = probabilities_of(teacher)
    found, same_inputs = router_drift(teacher, old, EXAMPLES, 3, gates), router_report(teacher, old, EXAMPLES, 3)
    assert torch.equal(first.router_ND.data, changed) and later
    for index in teacher.config.moe_layers:
        divergence_T = (before[index] * (before[index] / after[index]).log()).sum(1)
        assert found.mean[index] == pytest.approx(float(divergence_T.mean()), rel=1e-4)
        assert found.largest[index] == pytest.approx(float(divergence_T.max()), rel=1e-4)
    assert all(same_inputs.moved[index] == pytest.approx(0.0, abs=1e-12) for index in teacher.config.moe_layers[1:])
    assert all(found.mean[index] > 1e-9 for index in teacher.config.moe_layers[1:])
