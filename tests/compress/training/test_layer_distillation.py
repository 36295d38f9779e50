"""Layer distillation against its formula in float64. The fold is exact, and the teacher is not changed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import DENSIFIED, FAMILIES, naive_ffn, save_reference
from torch import Tensor

from calibrate.collect import collect
from compress.dense.block_error import shared_gates
from compress.dense.dense_plan import choose, dense_plan
from compress.dense.dense_student import dense_student, folded, learned_scales, saved_tensors, student_parameters, sums
from compress.dense.dense_training import train_dense
from compress.options.training import DenseTrainingOptions, LossWeights
from compress.plans.apply import apply
from compress.plans.plan import Plan
from compress.training.layer_distillation import DistillationLoss, Teacher, decoder_perplexity
from compress.training.losses import layer_distance
from compress.training.training import Batch
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.decoder.parameters import parameters_on_disk
from engine.errors import OptionError
from engine.families.tensor_shapes import expected_tensors

TOKENS = torch.randint(3, 96, (6, 12), generator=torch.Generator().manual_seed(1))
OPTIONS = DenseTrainingOptions(6, 4, learning_rate=1e-2, batch_size=4, validate_every=3, save_every=2)
EVERY = pytest.mark.parametrize("family", DENSIFIED)


def prepared(family: str, path: Path, ffns: int = 2) -> tuple[Checkpoint, Plan]:
    save_reference(family, path)
    checkpoint = Checkpoint(path)
    statistics = collect(checkpoint, TOKENS, dtype=torch.float32)
    gates = shared_gates(checkpoint, TOKENS, dtype=torch.float32)
    return checkpoint, dense_plan(choose("usage", statistics, ffns), statistics, gates, checkpoint)


def batch(group: Tensor, rows: Tensor) -> Batch:
    return Batch(0, rows, group, torch.Generator())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_on_disk_is_a_parameter_of_the_decoder(family: str, tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": True} if family in ("llama", "qwen3_moe") else {}
    save_reference(family, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)
    found = parameters_on_disk(Decoder(checkpoint.config, checkpoint.source(torch.float32)))
    assert sorted(found) == sorted(expected_tensors(checkpoint.config))
    assert all(torch.equal(parameter, checkpoint.tensor(name)) for name, parameter in found.items())


@EVERY
@torch.no_grad()
def test_the_fold_is_exact(family: str, tmp_path: Path) -> None:
    """Separate experts, folded in memory, and folded on disk are one function, to 1e-6 in float32 for a layer."""
    checkpoint, plan = prepared(family, tmp_path / "full", 3)
    student = dense_student(plan, checkpoint, torch.float32)
    parameters = student_parameters(student)
    generator = torch.Generator().manual_seed(2)
    for parameter in parameters.values():  # as if it had been trained
        parameter.data = parameter + 0.02 * torch.randn(parameter.shape, generator=generator)
    x = torch.randn(30, 32, generator=generator)
    apply(plan, checkpoint, tmp_path / "dense", replaced=saved_tensors(parameters, plan, checkpoint))
    dense = Checkpoint(tmp_path / "dense")
    decoder = Decoder(dense.config, dense.source(torch.float32))
    for index, block in sums(student).items():
        weights, biases = ([ffn.projections[part] for ffn in block.ffns] for part in (slice(3), slice(3, None)))
        whole = folded(weights, block.a_K) + (folded(biases, block.a_K) if biases[0] else ())
        assert float((naive_ffn(whole, block.ffns[0].swiglu, x) - block(x)).abs().max()) <= 1e-6
        assert float((decoder.layers[index].feed_forward(x) - block(x)).abs().max()) <= 1e-6
        assert learned_scales(parameters, plan)[index] == block.a_K.tolist()
    assert float((decoder(TOKENS) - student(TOKENS)).abs().max()) <= 1e-5


@EVERY
@torch.no_grad()
def test_before_training_the_student_is_what_the_plan_writes(family: str, tmp_path: Path) -> None:
    checkpoint, plan = prepared(family, tmp_path / "full")
    apply(plan, checkpoint, tmp_path / "dense")
    dense = Checkpoint(tmp_path / "dense")
    written = Decoder(dense.config, dense.source(torch.float32))(TOKENS)
    assert float((dense_student(plan, checkpoint, torch.float32)(TOKENS) - written).abs().max()) <= 1e-5


def test_layer_distance_equals_the_formula_written_out() -> None:
    teacher, student = (torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))

    def normed(row: list[float]) -> list[float]:
        mean = sum(row) / len(row)
        variance = sum((value - mean) ** 2 for value in row) / len(row)
        return [(value - mean) / (variance + 1e-5) ** 0.5 for value in row]

    squares = [
        (a - b) ** 2
        for one, other in zip(teacher.double().tolist(), student.double().tolist(), strict=True)
        for a, b in zip(normed(one), normed(other), strict=True)
    ]
    assert float(layer_distance(teacher, student)) == pytest.approx(sum(squares) / len(squares), rel=1e-5)
    assert float(layer_distance(teacher, 3.0 * teacher)) == pytest.approx(0.0, abs=1e-4), "scale is no matter"


def block_io(decoder: Decoder, tokens: Tensor) -> dict[int, Tensor]:
    """Return the outputs of every feed-forward block."""
    seen: dict[int, Tensor] = {}
    handles = [
        layer.feed_forward.register_forward_hook(lambda _, i, output, index=index: seen.__setitem__(index, output))
        for index, layer in enumerate(decoder.layers)
    ]
    decoder(tokens)
    for handle in handles:
        handle.remove()
    return seen


@EVERY
@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_loss_and_its_gradients_equal_those_in_float64(
    family: str, offload: bool, recompute: bool, tmp_path: Path
) -> None:
    """The loss is summed over two groups to the means over the step. Gradients reach every a_i."""
    checkpoint, plan = prepared(family, tmp_path)
    student = dense_student(plan, checkpoint, torch.float32)
    student.checkpoint_activations = recompute
    parameters = student_parameters(student)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    teacher = Teacher(checkpoint, torch.float32, offload=offload, predicts=True)
    loss = DistillationLoss(student, teacher, TOKENS, LossWeights(0.7, 0.3, 0.5))
    rows, total = torch.tensor([5, 0, 2]), {"supervised": 0.0, "layers": 0.0, "predictions": 0.0}
    for group in rows.split(2):
        terms = loss(batch(group, rows))
        sum(terms.values()).backward()
        total = {name: value + terms[name].item() for name, value in total.items()}

    naive = dense_student(plan, checkpoint, torch.float64)
    naive_parameters = student_parameters(naive)
    for parameter in naive_parameters.values():
        parameter.requires_grad_(True)
    with torch.no_grad():
        full = Decoder(checkpoint.config, checkpoint.source(torch.float64))
        target, predicted = block_io(full, TOKENS[rows]), full(TOKENS[rows]).softmax(-1)
    outputs = block_io(naive, TOKENS[rows])
    normed = [
        F.layer_norm(target[index], (32,)) - F.layer_norm(outputs[index], (32,)) for index in checkpoint.config.moe_layers
    ]
    layers = sum(difference.square().mean() for difference in normed)
    logits = naive(TOKENS[rows])
    supervised = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[rows][:, 1:].flatten())
    divergences = (predicted * (predicted.log() - logits.log_softmax(-1))).sum(-1)
    assert total["supervised"] == pytest.approx(0.7 * supervised.item(), rel=1e-4)
    assert total["layers"] == pytest.approx(0.3 * layers.item(), rel=1e-4)
    assert total["predictions"] == pytest.approx(0.5 * divergences.mean().item(), rel=1e-4)
    (0.7 * supervised + 0.3 * layers + 0.5 * divergences.mean()).backward()
    for name, parameter in parameters.items():
        grad = naive_parameters[name].grad.double()
        assert torch.allclose(parameter.grad.double(), grad, rtol=1e-2, atol=1e-4 * float(grad.abs().max() + 1e-3)), name
        if name.endswith(".a"):
            assert bool((grad != 0).all())


def test_without_a_teacher_it_is_cross_entropy(tmp_path: Path) -> None:
    checkpoint, plan = prepared("mixtral", tmp_path)
    student = dense_student(plan, checkpoint, torch.float32)
    terms = DistillationLoss(student, None, TOKENS, LossWeights(1.0, 0.0, 0.0))(batch(torch.arange(6), torch.arange(6)))
    assert list(terms) == ["supervised"]
    assert decoder_perplexity(student, TOKENS, 4) == pytest.approx(terms["supervised"].exp().item(), rel=1e-5)


@EVERY
def test_training_comes_closer_and_leaves_the_teacher_as_it_is(family: str, tmp_path: Path) -> None:
    checkpoint, plan = prepared(family, tmp_path)
    before = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.shapes}
    options = DenseTrainingOptions(30, 0, 1.0, learning_rate=3e-3, batch_size=6, validate_every=10)
    made = train_dense(plan, checkpoint, TOKENS, TOKENS[:2], options, dtype=torch.float32)
    part = made.parts["distill"]
    assert part["layers_last"] < 0.9 * part["layers_first"] and part["supervised_last"] < 0.9 * part["supervised_first"]
    assert part["best_step"] > 0 and part["steps"] == 30
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())
    assert before == {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    scales = learned_scales(made.tensors, plan)
    assert all(
        abs(scale - planned.parts[place].scale) > 1e-4
        for layer, (planned,) in plan.layers.items()
        for place, scale in enumerate(scales[layer])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [("distill", 5), ("finetune", 0), ("finetune", 3)])
def test_interrupted_training_ends_in_the_same_bits(tmp_path: Path, dtype: torch.dtype, at: tuple[str, int]) -> None:
    checkpoint, plan = prepared("qwen2_moe", tmp_path / "model")
    whole = train_dense(plan, checkpoint, TOKENS, TOKENS[:2], OPTIONS, dtype=dtype)

    def stop(steps: range, what: str) -> object:
        for step in steps:
            if what.startswith(at[0]) and step == at[1]:
                raise KeyboardInterrupt
            yield step

    states = {"dtype": dtype, "directory": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        train_dense(plan, checkpoint, TOKENS, TOKENS[:2], OPTIONS, progress=stop, **states)
    resumed = train_dense(plan, checkpoint, TOKENS, TOKENS[:2], OPTIONS, resume=True, **states)
    assert all(torch.equal(tensor, resumed.tensors[name]) for name, tensor in whole.tensors.items())
    for name, part in whole.parts.items():
        for key in ("validation_perplexity", "loss_first", "loss_last", "best_step", "steps"):
            assert part[key] == resumed.parts[name][key]


@pytest.mark.parametrize(
    "given",
    [
        {"lambda_layer": -1.0},
        {"lambda_supervised": 0.0, "lambda_layer": 0.0, "lambda_prediction": 0.0},
        {"lambda_layer": float("nan")},
        {"learning_rate": 0.0},
        {"clip_norm": -1.0},
        {"micro_batch_size": 0},
        {"save_every": 0},
    ],
)
def test_options_that_cannot_be_used(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        DenseTrainingOptions(**given).check()
