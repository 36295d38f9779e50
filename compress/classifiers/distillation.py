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
from compress.classifiers.moe_kd import ClassMeans, class_probabilities, e_step, elbo, kd, prototype_projector, srrl
from compress.classifiers.recipes import Ablation, Augmentation, ClassifierTeaching
from compress.training.training import Batch
from engine.transformers_models.classifier import Classifier, Split
from engine.transformers_models.classifier_inputs import Examples
from engine.transformers_models.mixture_head import Experts, Gate, log_experts, projector

PADDING = 4
"""Pixels of padding around an image before a random crop (§5.1)."""
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
    """Share of each class in the training set."""
    logits_NK: Tensor | None
    """Logits, where each epoch needs them and they do not change."""


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
    means, kept = ClassMeans(hard=teaching.ablation.hard_means), []
    same = teaching.augmentation == Augmentation()
    keeps = teaching.asks_teacher and same and len(examples) * teacher.head.out_features <= CACHED_NUMBERS
    for given in groups(examples, inputs, device, bar):
        split = teacher.split(**given)
        means.add(class_probabilities(split.logits_BC.float(), teaching.temperature), split.features_BD)
        kept += [split.logits_BC.float()] if keeps else []
    means_KE = means.means() if teaching.recipe.has_prototypes else None
    return TeacherPass(means_KE, means.shares(), torch.cat(kept) if keeps else None)


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
    """A model and the preprocessing of its inputs."""

    model: Classifier
    inputs: Inputs


@dataclass
class ClassifierLoss:
    """The loss of a recipe for a batch, as terms that sum to it."""

    teaching: ClassifierTeaching
    student: Side
    teacher: Side | None
    mixture: Mixture | None
    taught: TeacherPass | None
    examples: Labelled
    labels_N: Tensor
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        self._terms: Terms = pkgutil.resolve_name(self.teaching.recipe.terms)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        rows_B, count = batch.group_G, len(batch.rows_B)
        torch.manual_seed(int(torch.randint(2**62, (), generator=batch.generator)))  # seeds dropout
        examples = self.examples.read(rows_B.tolist())
        if isinstance(examples, Tensor):
            examples = augmented(examples, self.teaching.augmentation, batch.generator)
        outputs = BatchOutputs(
            self.student.model.split(**on(self.student.inputs, examples, self.device)),
            self.labels_N[rows_B].to(self.device),
            self._teacher(rows_B, examples) if self.teaching.asks_teacher else None,
            self.student.model.head.weight,
            self.teaching.temperature,
        )
        terms = self._terms(outputs, self.mixture)
        return {name: term_B.sum() / count for name, term_B in terms.items()}

    @torch.no_grad()
    def _teacher(self, rows_B: Tensor, examples: Examples) -> Tensor:
        """Return the teacher's logits, [B, K]."""
        assert self.teacher is not None and self.taught is not None
        if self.taught.logits_NK is not None:
            return self.taught.logits_NK[rows_B.to(self.taught.logits_NK.device)]
        return self.teacher.model.split(**on(self.teacher.inputs, examples, self.device)).logits_BC.float()


@dataclass(frozen=True)
class BatchOutputs:
    """Outputs of a batch: the student's outputs, the classes, and the teacher's logits."""

    student: Split
    labels_B: Tensor
    teacher_BK: Tensor | None
    """The teacher's logits, where the loss needs them."""
    head_CD: Tensor
    """W, the weight of the student's head."""
    temperature: float

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
    assert outputs.teacher_BK is not None
    labels_loss_B, divergence_B = kd(outputs.scores_BC, outputs.labels_B, outputs.teacher_BK, outputs.temperature)
    return {"labels": labels_loss_B, "teacher": divergence_B}


def srrl_terms(outputs: BatchOutputs, mixture: Mixture | None) -> dict[str, Tensor]:
    """Return the terms of SRRL in MoE-KD's form (§4.4), [B] each."""
    assert mixture is not None and outputs.teacher_BK is not None
    log_gate_BK = mixture.gate(outputs.student.gated.float())
    teacher_BK = class_probabilities(outputs.teacher_BK, outputs.temperature)
    likelihood_B, divergence_B = srrl(outputs.scores_BC, outputs.labels_B, teacher_BK, log_gate_BK)
    return {"labels": -likelihood_B, "gate": divergence_B}


def moe_kd_terms(outputs: BatchOutputs, mixture: Mixture | None) -> dict[str, Tensor]:
    """Return the terms of MoE-KD's bound (§4), [B] each; with ablation (v) the posterior is the teacher's prediction."""
    assert mixture is not None
    log_gate_BK = mixture.gate(outputs.student.gated.float())
    experts = Experts.of(mixture.prototypes() @ outputs.head_CD.float().T)
    log_experts_BK = log_experts(outputs.scores_BC, experts, outputs.labels_B)
    if outputs.teacher_BK is None:
        log_posterior_BK = e_step(log_gate_BK, log_experts_BK)
    else:
        log_posterior_BK = F.log_softmax(outputs.teacher_BK / outputs.temperature, dim=-1)
    expected_B, divergence_B = elbo(log_posterior_BK, log_gate_BK, log_experts_BK)
    return {"experts": -expected_B, "gate": divergence_B}


def augmented(images_BCHW: Tensor, how: Augmentation, generator: torch.Generator) -> Tensor:
    """Return each image padded, cropped to its size at random and, if allowed, mirrored with probability 1/2 (§5.1)."""
    if not how.crops:
        return images_BCHW
    count, _, height, width = images_BCHW.shape
    padded = F.pad(images_BCHW, (PADDING,) * 4)
    tops, lefts = (torch.randint(2 * PADDING + 1, (count,), generator=generator).tolist() for _ in range(2))
    mirrored = torch.rand(count, generator=generator).lt(0.5).tolist() if how.flips else [False] * count
    made = []
    for image, top, left, flips in zip(padded, tops, lefts, mirrored, strict=True):
        cut = image[:, top : top + height, left : left + width]
        made.append(cut.flip(-1) if flips else cut)
    return torch.stack(made)
