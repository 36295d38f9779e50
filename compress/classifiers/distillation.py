"""Training loss of a student classifier: a recipe's loss of a batch, with the teacher's part in it (MoE-KD §4, §5.2).

Shape suffixes: N examples, B batch, K experts, C classes, D student features, E teacher features.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.labelled import Labelled
from compress.classifiers.accuracy import Inputs, groups, on
from compress.classifiers.augmentation import training_examples
from compress.classifiers.moe_kd import (
    ClassMeans,
    class_probabilities,
    e_step,
    elbo,
    feature_distance,
    kd,
    prototype_projector,
    srrl,
)
from compress.classifiers.recipes import Ablation, Augmentation, ClassifierTeaching
from compress.training.training import Batch
from engine.transformers_models.classifier import Classifier, Split
from engine.transformers_models.classifier_inputs import Examples, ImageInputs
from engine.transformers_models.mixture_head import Experts, Gate, log_experts, projector

CACHED_NUMBERS = 1 << 24
"""The most numbers of a teacher's logits over the training set that are cached, where they repeat in each epoch."""


class Mixture(nn.Module):
    """Gate and prototypes during training; SRRL has the gate alone."""

    def __init__(self, gate: Gate, means_KE: Tensor | None, features: int, learned: bool) -> None:
        """Create the mixture. means_KE: μ, or None for no experts. learned: e_k are own parameters instead of Ψ(μ_k)."""
        super().__init__()
        self.gate, self.psi, self.embeddings_KD = gate, None, None
        self.register_buffer("means_KE", means_KE)
        if means_KE is not None and learned:
            self.embeddings_KD = nn.Parameter(torch.randn(len(means_KE), features) * features**-0.5)
        elif means_KE is not None:
            self.psi = prototype_projector(means_KE.shape[1], features)

    def prototypes(self) -> Tensor:
        """e_k = Ψ(μ_k), [K, D]."""
        if self.embeddings_KD is not None:
            return self.embeddings_KD
        assert self.psi is not None
        made_KD: Tensor = self.psi(self.means_KE)
        return made_KD


@dataclass
class TeacherPass:
    """Results of one pass of the teacher over the training set."""

    means_KE: Tensor | None
    """μ, for recipe moe-kd."""
    shares_K: Tensor
    """Mean of the teacher's P^T(k|x) over the training set."""
    logits_NK: Tensor | None
    """Logits, where each epoch needs them and they do not change."""
    features_NE: Tensor | None = None
    """Features z^T, where each epoch needs them and they do not change."""


@torch.no_grad()
def ask(
    teacher: Classifier,
    teaching: ClassifierTeaching,
    examples: Labelled,
    inputs: Inputs,
    device: torch.device | str,
    bar: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> TeacherPass:
    """Run the teacher over all examples, batch by batch."""
    means, kept = ClassMeans(hard=teaching.ablation.hard_means), list[Split]()
    same = teaching.augmentation == Augmentation()
    numbers = teacher.head.out_features + (teacher.head.in_features if teaching.asks_features else 0)
    keeps = teaching.asks_teacher and same and len(examples) * numbers <= CACHED_NUMBERS
    for given in groups(examples, inputs, device, bar):
        split = teacher.split(**given)
        means.add(class_probabilities(split.logits_BC.float(), teaching.temperature), split.features_BD)
        kept += [Split(split.logits_BC.float(), split.features_BD.float(), None)] if keeps else []
    means_KE = means.means() if teaching.recipe.has_prototypes else None
    logits_NK = torch.cat([split.logits_BC for split in kept]) if keeps else None
    features_NE = torch.cat([split.features_BD for split in kept]) if keeps and teaching.asks_features else None
    return TeacherPass(means_KE, means.shares(), logits_NK, features_NE)


def mixture_for(
    ablation: Ablation, student: Classifier, teacher: Classifier, means_KE: Tensor | None, gated: Tensor, seed: int
) -> Mixture:
    """Return gate and prototypes before the first step. gated: inputs of the gate's projector, for any examples."""
    experts, width = teacher.head.out_features, teacher.head.in_features
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ablation.uniform_gate:
            gate = Gate(None, None, experts)
        else:
            classifier = nn.Linear(width, experts)
            if not ablation.learns_gate_classifier:
                classifier.weight = nn.Parameter(teacher.head.weight.detach().float().cpu().clone(), requires_grad=False)
                bias = teacher.head.bias
                own = torch.zeros(experts) if bias is None else bias.detach().float().cpu().clone()
                classifier.bias = nn.Parameter(own, requires_grad=False)
            gate = Gate(projector(gated.shape[1], width, gated.dim() == 4), classifier, experts)
        means_KE = None if means_KE is None else means_KE.cpu()
        return Mixture(gate, means_KE, student.head.in_features, learned=ablation.learns_prototypes)


@dataclass
class Side:
    """A model, the preprocessing of its inputs, and the examples as that reads them."""

    model: Classifier
    inputs: Inputs
    training: Labelled
    """The training examples, as this model's preprocessing reads them."""
    held_out: Labelled


@dataclass
class ClassifierLoss:
    """The loss of a recipe for a batch, as terms that sum to it."""

    teaching: ClassifierTeaching
    student: Side
    teacher: Side | None
    mixture: Mixture | None
    taught: TeacherPass | None
    labels_N: Tensor
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        self._terms: Terms = pkgutil.resolve_name(self.teaching.recipe.terms)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        rows_B, count = batch.group_G, len(batch.rows_B)
        torch.manual_seed(int(torch.randint(2**62, (), generator=batch.generator)))  # seeds dropout
        own, inputs = self.student, self.student.inputs
        size = inputs.size if isinstance(inputs, ImageInputs) else None
        examples = training_examples(own.training, rows_B.tolist(), self.teaching.augmentation, size, batch.generator)
        outputs = BatchOutputs(
            own.model.split(**on(inputs, examples, self.device)),
            self.labels_N[rows_B].to(self.device),
            self._teacher(rows_B, examples) if self.teaching.asks_teacher else None,
            own.model.head.weight,
            self.teaching,
        )
        terms = self._terms(outputs, self.mixture)
        return {name: term_B.sum() / count for name, term_B in terms.items()}

    @torch.no_grad()
    def _teacher(self, rows_B: Tensor, examples: Examples) -> Split:
        """Return the teacher's logits and features, on its own view of an image, or on an augmented one."""
        assert self.teacher is not None and self.taught is not None
        if (logits_NK := self.taught.logits_NK) is not None:
            kept_B = rows_B.to(logits_NK.device)
            features_NE = self.taught.features_NE
            return Split(logits_NK[kept_B], logits_NK[:0] if features_NE is None else features_NE[kept_B], None)
        inputs = self.teacher.inputs
        if self.teaching.augmentation == Augmentation():
            examples = self.teacher.training.read(rows_B.tolist())
        elif isinstance(inputs, ImageInputs):
            inputs = inputs.of_crops
        split = self.teacher.model.split(**on(inputs, examples, self.device))
        return Split(split.logits_BC.float(), split.features_BD.float(), None)


@dataclass(frozen=True)
class BatchOutputs:
    """Outputs of a batch: the student's outputs, the classes, and the teacher's outputs."""

    student: Split
    labels_B: Tensor
    teacher: Split | None
    """The teacher's logits, where the loss needs them, and its features, where it needs those."""
    head_CD: Tensor
    """W, the weight of the student's head."""
    teaching: ClassifierTeaching

    @property
    def scores_BC(self) -> Tensor:
        """Return the student's logits in float32."""
        return self.student.logits_BC.float()


Terms = Callable[[BatchOutputs, Mixture | None], dict[str, Tensor]]
"""A function from a batch, and the mixture where the recipe trains one, to the terms of the loss, [B] each."""


def sft_terms(outputs: BatchOutputs, mixture: Mixture | None) -> dict[str, Tensor]:
    """Return the cross-entropy on the labels, [B]."""
    return {"labels": F.cross_entropy(outputs.scores_BC, outputs.labels_B, reduction="none")}


def kd_terms(outputs: BatchOutputs, mixture: Mixture | None) -> dict[str, Tensor]:
    """Return the cross-entropy and the divergence from the teacher's prediction, [B] each."""
    assert outputs.teacher is not None
    teacher_BC, temperature = outputs.teacher.logits_BC, outputs.teaching.temperature
    labels_loss_B, divergence_B = kd(outputs.scores_BC, outputs.labels_B, teacher_BC, temperature)
    return {"labels": labels_loss_B, "teacher": divergence_B}


def srrl_terms(outputs: BatchOutputs, mixture: Mixture | None) -> dict[str, Tensor]:
    """Return the terms of SRRL in MoE-KD's form (§4.4) and, unless its weight is 0, Yang et al.'s feature loss, [B] each."""
    assert mixture is not None and mixture.gate.projector is not None and outputs.teacher is not None
    teaching = outputs.teaching
    projected_BE = mixture.gate.projector(outputs.student.gated.float())
    teacher_BK = class_probabilities(outputs.teacher.logits_BC, teaching.temperature)
    log_gate_BK = mixture.gate.of_projected(projected_BE)
    likelihood_B, divergence_B = srrl(outputs.scores_BC, outputs.labels_B, teacher_BK, log_gate_BK)
    terms = {"labels": -likelihood_B, "gate": divergence_B}
    if teaching.asks_features:
        terms["features"] = teaching.feature_weight * feature_distance(projected_BE, outputs.teacher.features_BD)
    return terms


def moe_kd_terms(outputs: BatchOutputs, mixture: Mixture | None) -> dict[str, Tensor]:
    """Return the terms of MoE-KD's bound (§4), [B] each; with ablation (v) the posterior is the teacher's prediction."""
    assert mixture is not None
    log_gate_BK = mixture.gate(outputs.student.gated.float())
    experts = Experts.of(mixture.prototypes() @ outputs.head_CD.float().T)
    log_experts_BK = log_experts(outputs.scores_BC, experts, outputs.labels_B)
    if outputs.teacher is None:
        log_posterior_BK = e_step(log_gate_BK, log_experts_BK)
    else:
        log_posterior_BK = F.log_softmax(outputs.teacher.logits_BC / outputs.teaching.temperature, dim=-1)
    expected_B, divergence_B = elbo(log_posterior_BK, log_gate_BK, log_experts_BK)
    return {"experts": -expected_B, "gate": divergence_B}
