"""Every formula of MoE-KD on three classes against loops over numbers; the bound's properties; SRRL as a special case."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.classifiers.distillation import BatchOutputs, Mixture, srrl_terms
from compress.classifiers.moe_kd import (
    KD_WEIGHT,
    ClassMeans,
    class_probabilities,
    e_step,
    elbo,
    kd,
    log_likelihood,
    prototype_projector,
    srrl,
)
from compress.classifiers.recipes import CLASSIFIER_RECIPES, Ablation, Augmentation, ClassifierTeaching
from engine.errors import DataError
from engine.transformers_models.classifier import Split
from engine.transformers_models.mixture_head import (
    Experts,
    Gate,
    MixtureHead,
    log_experts,
    log_mixture,
    log_product,
    projector,
)

B, K, D, E = 5, 3, 4, 6
"""Number of examples, of classes and experts, and of features of student and teacher."""


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


def dot(left: Tensor, right: Tensor) -> float:
    return sum(float(a) * float(b) for a, b in zip(left, right, strict=True))


class Case:
    """A student, a gate and prototypes, and the paper's probabilities computed by hand."""

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        self.z_BD, self.w_CD, self.e_KD = (draw(n, D, seed=seed + i, scale=scale) for i, n in enumerate((B, K, K)))
        self.gate_BK = draw(B, K, seed=seed + 7, scale=scale)
        self.labels = [0, 2, 1, 2, 0]
        self.log_gate_BK = F.log_softmax(self.gate_BK, dim=-1)
        self.scores_BC, self.experts = self.z_BD @ self.w_CD.T, Experts.of(self.e_KD @ self.w_CD.T)
        self.log_experts_BK = log_experts(self.scores_BC, self.experts, torch.tensor(self.labels))

    def gate(self, b: int) -> list[float]:
        return softmax([float(score) for score in self.gate_BK[b]])

    def expert(self, b: int, k: int) -> list[float]:
        """Return softmax_y[Wᵀ(z + e_k)] (eq. 6)."""
        return softmax([dot(self.w_CD[y], self.z_BD[b] + self.e_KD[k]) for y in range(K)])

    def mixture(self, b: int, y: int) -> float:
        return sum(self.expert(b, k)[y] * self.gate(b)[k] for k in range(K))


def test_experts_and_mixture_are_those_of_the_paper() -> None:
    case = Case()
    whole_BC = log_mixture(case.log_gate_BK, case.scores_BC, case.experts)
    for b, label in enumerate(case.labels):
        assert case.log_experts_BK[b].exp().tolist() == pytest.approx([case.expert(b, k)[label] for k in range(K)])
        assert whole_BC[b].exp().tolist() == pytest.approx([case.mixture(b, y) for y in range(K)])
    assert log_likelihood(case.log_gate_BK, case.log_experts_BK).tolist() == pytest.approx(
        [math.log(case.mixture(b, y)) for b, y in enumerate(case.labels)]
    )


def test_products_of_exponentials_are_right_where_they_overflow_and_have_the_right_gradient() -> None:
    scores_BC, biases_KC = draw(4, 3, seed=1, scale=100.0), draw(5, 3, seed=2, scale=100.0)
    scores_BC[0, 0], biases_KC[1] = 3000.0, biases_KC[1] + 5000.0
    log_gate_BK = F.log_softmax(draw(4, 5, seed=3, scale=50.0), dim=-1)
    for each in (scores_BC, biases_KC, log_gate_BK):
        each.requires_grad_(True)
    naive_BKC = F.log_softmax(scores_BC[:, None] + biases_KC[None], dim=-1)
    experts, labels_B = Experts.of(biases_KC), torch.tensor([0, 1, 2, 0])
    for naive, made in (
        (naive_BKC[torch.arange(4), :, labels_B], log_experts(scores_BC, experts, labels_B)),
        (torch.logsumexp(log_gate_BK[:, :, None] + naive_BKC, dim=1), log_mixture(log_gate_BK, scores_BC, experts)),
    ):
        assert torch.allclose(made, naive, atol=1e-9)
        weights = draw(*naive.shape, seed=4)
        inputs = (scores_BC, biases_KC, log_gate_BK)
        wanted = torch.autograd.grad((naive * weights).sum(), inputs, retain_graph=True, allow_unused=True)
        found = torch.autograd.grad((made * weights).sum(), inputs, retain_graph=True, allow_unused=True)
        for own, other in zip(found, wanted, strict=True):
            assert (own is None and other is None) or torch.allclose(own, other, atol=1e-9)
    assert torch.isfinite(log_product(torch.tensor([[0.0, -2000.0]]), torch.tensor([[0.0], [1.0]]).double())).all()


def test_e_step_is_bayes_theorem_without_gradient() -> None:
    case = Case(seed=3)
    log_gate_BK = case.log_gate_BK.clone().requires_grad_(True)
    posterior_BK = e_step(log_gate_BK, case.log_experts_BK)
    assert not posterior_BK.requires_grad
    for b, label in enumerate(case.labels):
        joint = [case.gate(b)[k] * case.expert(b, k)[label] for k in range(K)]
        assert posterior_BK[b].exp().tolist() == pytest.approx([own / sum(joint) for own in joint])


def bound(case: Case, log_posterior_BK: Tensor) -> Tensor:
    expected_B, divergence_B = elbo(log_posterior_BK, case.log_gate_BK, case.log_experts_BK)
    return expected_B - divergence_B


def test_the_bound_is_eq_9_term_by_term() -> None:
    case = Case(seed=5)
    posterior_BK = F.softmax(draw(B, K, seed=40), dim=-1)
    expected_B, divergence_B = elbo(posterior_BK.log(), case.log_gate_BK, case.log_experts_BK)
    for b, label in enumerate(case.labels):
        own = posterior_BK[b].tolist()
        assert float(expected_B[b]) == pytest.approx(sum(own[k] * math.log(case.expert(b, k)[label]) for k in range(K)))
        assert float(divergence_B[b]) == pytest.approx(sum(own[k] * math.log(own[k] / case.gate(b)[k]) for k in range(K)))


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_never_exceeds_the_log_likelihood_and_equals_it_right_after_the_e_step(seed: int) -> None:
    case = Case(seed=10 * seed, scale=1.0 + seed / 4)
    likelihood_B = log_likelihood(case.log_gate_BK, case.log_experts_BK)
    after_B = bound(case, e_step(case.log_gate_BK, case.log_experts_BK))
    assert torch.allclose(after_B, likelihood_B, atol=1e-10)
    for other in range(5):
        log_posterior_BK = F.log_softmax(draw(B, K, seed=1000 + other, scale=3.0), dim=-1)
        gap_B = likelihood_B - bound(case, log_posterior_BK)
        true_BK = e_step(case.log_gate_BK, case.log_experts_BK)
        kl_B = F.kl_div(true_BK, log_posterior_BK, log_target=True, reduction="none").sum(dim=-1)
        assert (gap_B > 0).all() and torch.allclose(gap_B, kl_B, atol=1e-10)  # eq. 9: the gap is KL(P̂ ‖ posterior)


def test_a_gradient_step_from_the_e_step_is_one_on_the_log_likelihood() -> None:
    case = Case(seed=77)
    gate_BK = case.gate_BK.clone().requires_grad_(True)
    w_CD = case.w_CD.clone().requires_grad_(True)
    log_gate_BK = F.log_softmax(gate_BK, dim=-1)
    log_experts_BK = log_experts(case.z_BD @ w_CD.T, Experts.of(case.e_KD @ w_CD.T), torch.tensor(case.labels))
    expected_B, divergence_B = elbo(e_step(log_gate_BK, log_experts_BK), log_gate_BK, log_experts_BK)
    found = torch.autograd.grad((expected_B - divergence_B).sum(), (gate_BK, w_CD), retain_graph=True)
    wanted = torch.autograd.grad(log_likelihood(log_gate_BK, log_experts_BK).sum(), (gate_BK, w_CD))
    assert all(torch.allclose(own, other, atol=1e-12) for own, other in zip(found, wanted, strict=True))


def test_em_steps_never_lower_the_log_likelihood() -> None:
    """Eq. 15: an M-step that raises the bound of a fixed P̂ raises the likelihood too."""
    case = Case(seed=31)
    gate_BK = case.gate_BK.clone().requires_grad_(True)
    e_KD = case.e_KD.clone().requires_grad_(True)
    found = []
    for _ in range(30):
        log_gate_BK = F.log_softmax(gate_BK, dim=-1)
        log_experts_BK = log_experts(case.scores_BC, Experts.of(e_KD @ case.w_CD.T), torch.tensor(case.labels))
        found.append(float(log_likelihood(log_gate_BK, log_experts_BK).mean().detach()))
        expected_B, divergence_B = elbo(e_step(log_gate_BK, log_experts_BK), log_gate_BK, log_experts_BK)
        for value, step in zip(
            (gate_BK, e_KD), torch.autograd.grad((expected_B - divergence_B).mean(), (gate_BK, e_KD)), strict=True
        ):
            value.data += 0.1 * step
    assert all(after > before for before, after in pairwise(found))


def test_class_means_are_soft_over_batches_and_hard_where_asked() -> None:
    logits_NK, features_NE = draw(9, K, seed=4, scale=4.0), draw(9, E, seed=5)
    probabilities_NK = class_probabilities(logits_NK, 4.0)
    soft, hard = ClassMeans(), ClassMeans(hard=True)
    for part in (slice(0, 4), slice(4, 9)):
        soft.add(probabilities_NK[part], features_NE[part])
        hard.add(probabilities_NK[part], features_NE[part])
    weights = [softmax([float(score) / 4.0 for score in row]) for row in logits_NK]
    chosen = [max(range(K), key=lambda k: row[k]) for row in weights]
    for k in range(K):
        total = sum(row[k] for row in weights)
        mean = [sum(row[k] * float(z[e]) for row, z in zip(weights, features_NE, strict=True)) / total for e in range(E)]
        assert soft.means()[k].tolist() == pytest.approx(mean, rel=1e-5)
        assert float(soft.shares()[k]) == pytest.approx(total / 9)
        own = [features_NE[i] for i in range(9) if chosen[i] == k]
        assert hard.means()[k].tolist() == pytest.approx(torch.stack(own).mean(dim=0).tolist(), rel=1e-5)
    never = ClassMeans(hard=True)
    never.add(torch.tensor([[0.9, 0.1, 0.0]]), torch.ones(1, E))
    with pytest.raises(DataError, match="never says class 1"):
        never.means()


def test_srrl_is_the_bound_with_one_expert_for_all_and_the_teachers_prediction_for_the_posterior() -> None:
    case = Case(seed=9)
    collapsed_D = draw(D, seed=90)  # Assumption 1: Ψ(μ) = b for all μ
    scores_BC = (case.z_BD + collapsed_D) @ case.w_CD.T
    teacher_BK = class_probabilities(draw(B, K, seed=91, scale=3.0), 4.0)
    same_KC = (collapsed_D.expand(K, D)) @ case.w_CD.T
    log_experts_BK = log_experts(case.scores_BC, Experts.of(same_KC), torch.tensor(case.labels))
    wanted = elbo(teacher_BK.log(), case.log_gate_BK, log_experts_BK)
    found = srrl(scores_BC, torch.tensor(case.labels), teacher_BK, case.log_gate_BK)
    for own, other in zip(found, wanted, strict=True):
        assert torch.allclose(own, other, atol=1e-12)
    b, label = 1, case.labels[1]
    plain = math.log(softmax([float(score) for score in scores_BC[b]])[label])
    divergence = sum(p * math.log(p / q) for p, q in zip(teacher_BK[b].tolist(), case.gate(b), strict=True))
    assert [float(part[b]) for part in found] == pytest.approx([plain, divergence])


def test_srrls_feature_loss_is_the_mean_squared_distance_of_the_projected_features_to_the_teachers() -> None:
    """The loss takes G(z), the gate's projection, and z^T, the input of the teacher's head (Yang et al.)."""
    gate = Gate(projector(D, E, of_map=False), linear(E, K, seed=8), K)
    z_BD, teacher_BE, teacher_BK = draw(B, D, seed=1), draw(B, E, seed=2), draw(B, K, seed=3)
    student = Split(draw(B, K, seed=4), z_BD, None)
    teaching = ClassifierTeaching(CLASSIFIER_RECIPES["srrl"], 1.0, Ablation(""), Augmentation(), feature_weight=0.25)
    labels_B = torch.tensor([0, 2, 1, 2, 0])
    outputs = BatchOutputs(student, labels_B, Split(teacher_BK, teacher_BE, None), draw(K, D, seed=5), teaching)
    mixture = Mixture(gate.float(), None, D, learned=False)
    found = srrl_terms(replace(outputs, teacher=Split(teacher_BK.float(), teacher_BE.float(), None)), mixture)
    projected_BE = mixture.gate.projector(z_BD.float()).detach()
    for b in range(B):
        squares = [(float(projected_BE[b, e]) - float(teacher_BE[b, e])) ** 2 for e in range(E)]
        assert float(found["features"][b].detach()) == pytest.approx(0.25 * sum(squares) / E, rel=1e-5)
    assert torch.allclose(mixture.gate(z_BD.float()), mixture.gate.of_projected(projected_BE))
    plain = srrl_terms(replace(outputs, teaching=replace(teaching, feature_weight=0.0)), mixture)
    assert set(plain) == {"labels", "gate"} and torch.equal(plain["labels"], found["labels"])


def test_kd_is_the_weighted_mean_of_labels_and_softened_teacher() -> None:
    scores_BC, teacher_BC, labels = draw(B, K, seed=1), draw(B, K, seed=2, scale=5.0), [0, 1, 2, 0, 1]
    labels_B, divergence_B = kd(scores_BC, torch.tensor(labels), teacher_BC, 4.0)
    for b in range(B):
        student = softmax([float(score) for score in scores_BC[b]])
        p = softmax([float(score) / 4 for score in teacher_BC[b]])
        q = softmax([float(score) / 4 for score in scores_BC[b]])
        assert float(labels_B[b]) == pytest.approx(-(1 - KD_WEIGHT) * math.log(student[labels[b]]))
        soft = sum(own * math.log(own / other) for own, other in zip(p, q, strict=True))
        assert float(divergence_B[b]) == pytest.approx(KD_WEIGHT * 16 * soft)


def linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs).double()
    layer.weight.data, layer.bias.data = draw(outputs, inputs, seed=seed), draw(outputs, seed=seed + 1)
    return layer.requires_grad_(False)


def test_the_head_that_is_run_is_the_mixture_with_b_k_made_once() -> None:
    """The gate consists of 1×1, 3×3 and 1×1 convolutions, the mean and the teacher's classifier, computed by hand here."""
    case, teacher, head = Case(seed=21), linear(E, K, 60), linear(D, K, 70)
    map_BDHW = draw(B, D, 3, 3, seed=22)
    torch.manual_seed(0)
    bottleneck = projector(D, E, of_map=True).double().eval().requires_grad_(False)
    gate = Gate(bottleneck, teacher, K)
    own = MixtureHead(gate, case.e_KD.float(), head.float()).double()
    head = head.double()
    found_BC = own(map_BDHW, head(case.z_BD))
    first, norm, _, middle, other, _, last = (bottleneck[index] for index in range(7))
    x = F.relu(norm(F.conv2d(map_BDHW, first.weight)))
    x = F.relu(other(F.conv2d(x, middle.weight, padding=1)))
    assert x.shape == (B, E // 2, 3, 3)
    h_BE = F.conv2d(x, last.weight, last.bias).mean(dim=(2, 3))
    for b in range(B):
        pi = softmax([dot(teacher.weight[k], h_BE[b]) + float(teacher.bias[k]) for k in range(K)])
        mixed = [0.0] * K
        for k in range(K):
            expert = softmax([dot(head.weight[y], case.z_BD[b] + case.e_KD[k]) + float(head.bias[y]) for y in range(K)])
            mixed = [total + pi[k] * p for total, p in zip(mixed, expert, strict=True)]
        assert found_BC[b].exp().tolist() == pytest.approx(mixed, rel=1e-5)
    uniform = Gate(None, None, K)(map_BDHW)
    assert uniform.tolist() == [[pytest.approx(math.log(1 / K))] * K] * B


def test_projectors_have_the_layers_of_the_paper() -> None:
    psi = prototype_projector(E, D)
    mu_KE = torch.randn(K, E)
    by_hand = F.linear(F.relu(F.linear(mu_KE, psi[0].weight, psi[0].bias)), psi[2].weight, psi[2].bias)
    assert torch.equal(psi(mu_KE), by_hand) and psi(mu_KE).shape == (K, D)
    vector = projector(D, E, of_map=False)
    assert [layer.out_features for layer in vector if isinstance(layer, nn.Linear)] == [E // 2, E // 2, E]
