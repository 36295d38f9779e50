"""What a student classifier is trained on: a recipe's loss of a batch, with the teacher's side of it (MoE-KD §4, §5.2).

Shape suffixes: N examples, B batch, K experts, C classes, D student features, E teacher features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.labelled import Labelled
from compress.classifiers.accuracy import Inputs, groups, on
from compress.classifiers.moe_kd import ClassMeans, class_probabilities, e_step, elbo, kd, prototype_projector, srrl
from compress.training.training import Batch
from engine.transformers_models.classifier import Classifier, Split
from engine.transformers_models.classifier_inputs import Examples
from engine.transformers_models.mixture_head import Experts, Gate, log_experts, projector

CLASSIFIER_RECIPES = ("sft", "kd", "srrl", "moe-kd")
ABLATIONS = {
    "i": "a uniform gate",
    "ii": "the gate's classifier learned from scratch",
    "iii": "the experts' prototypes learned from scratch",
    "iv": "class means over hard assignments",
    "v": "the teacher's prediction in place of the E-step",
}
"""Of MoE-KD's table 4, each one change to the whole."""
AUGMENTATIONS = ("none", "crop", "crop-flip")
PADDING = 4
"""Pixels around an image before it is cropped at random (§5.1)."""
CACHED_NUMBERS = 1 << 24
"""Of a teacher's logits over the training set, that are kept where each epoch would see the same."""


@dataclass(frozen=True)
class Recipe:
    """How the student is taught."""

    name: str
    temperature: float
    ablation: str | None = None
    augment: str = "none"

    @property
    def has_gate(self) -> bool:
        """Whether G is trained."""
        return self.name in ("srrl", "moe-kd")

    @property
    def asks_teacher(self) -> bool:
        """Whether its predictions are in the loss; the whole MoE-KD has them in the prototypes alone."""
        return self.name in ("kd", "srrl") or self.ablation == "v"


class Mixture(nn.Module):
    """Gate and prototypes while they are trained; SRRL has the gate alone."""

    def __init__(self, gate: Gate, means_KE: Tensor | None, features: int, learned: bool) -> None:
        """means_KE: μ; None for no experts. learned: e_k are parameters of their own and not Ψ(μ_k)."""
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
class Taught:
    """What one pass of the teacher over the training set gave."""

    means_KE: Tensor | None
    """μ, of recipe moe-kd."""
    shares_K: Tensor
    """Of the training set that each class has in it."""
    logits_NK: Tensor | None
    """Where they are asked for again in each epoch, and do not change."""


@torch.no_grad()
def ask(
    teacher: Classifier,
    recipe: Recipe,
    examples: Labelled,
    inputs: Inputs,
    device: torch.device | str,
    bar: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Taught:
    """Run the teacher over all examples, batch by batch."""
    means, kept = ClassMeans(hard=recipe.ablation == "iv"), []
    keeps = recipe.asks_teacher and recipe.augment == "none" and len(examples) * teacher.head.out_features <= CACHED_NUMBERS
    for given in groups(examples, inputs, device, bar):
        split = teacher.split(**given)
        means.add(class_probabilities(split.logits_BC.float(), recipe.temperature), split.features_BD)
        kept += [split.logits_BC.float()] if keeps else []
    means_KE = means.means() if recipe.name == "moe-kd" else None
    return Taught(means_KE, means.shares(), torch.cat(kept) if keeps else None)


def mixture_for(
    recipe: Recipe, student: Classifier, teacher: Classifier, means_KE: Tensor | None, gated: Tensor, seed: int
) -> Mixture:
    """Gate and prototypes before the first step. gated: what the gate's projector is going to take, of any examples."""
    experts, width = teacher.head.out_features, teacher.head.in_features
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if recipe.ablation == "i":
            gate = Gate(None, None, experts)
        else:
            classifier = nn.Linear(width, experts)
            if recipe.ablation != "ii":
                classifier.weight = nn.Parameter(teacher.head.weight.detach().float().cpu().clone(), requires_grad=False)
                bias = teacher.head.bias
                own = torch.zeros(experts) if bias is None else bias.detach().float().cpu().clone()
                classifier.bias = nn.Parameter(own, requires_grad=False)
            gate = Gate(projector(gated.shape[1], width, gated.dim() == 4), classifier, experts)
        means_KE = None if means_KE is None else means_KE.cpu()
        return Mixture(gate, means_KE, student.head.in_features, learned=recipe.ablation == "iii")


@dataclass
class Side:
    """A model, and what makes its inputs."""

    model: Classifier
    inputs: Inputs


@dataclass
class DistillationLoss:
    """A recipe's loss of a batch; its terms add up to it."""

    recipe: Recipe
    student: Side
    teacher: Side | None
    mixture: Mixture | None
    taught: Taught | None
    examples: Labelled
    labels_N: Tensor
    device: torch.device | str = "cpu"

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        rows_B, count = batch.group_G, len(batch.rows_B)
        torch.manual_seed(int(torch.randint(2**62, (), generator=batch.generator)))  # of dropout
        examples = self.examples.read(rows_B.tolist())
        if isinstance(examples, Tensor):
            examples = augmented(examples, self.recipe.augment, batch.generator)
        split = self.student.model.split(**on(self.student.inputs, examples, self.device))
        teacher_BK = self._teacher(rows_B, examples) if self.recipe.asks_teacher else None
        terms = self._terms(split, self.labels_N[rows_B].to(self.device), teacher_BK)
        return {name: term_B.sum() / count for name, term_B in terms.items()}

    def _terms(self, split: Split, labels_B: Tensor, teacher_BK: Tensor | None) -> dict[str, Tensor]:
        """Of each example, [B]. teacher_BK: its logits, where the recipe asks for them."""
        scores_BC, temperature = split.logits_BC.float(), self.recipe.temperature
        if self.recipe.name == "sft":
            return {"labels": F.cross_entropy(scores_BC, labels_B, reduction="none")}
        if self.recipe.name == "kd":
            assert teacher_BK is not None
            labels_loss_B, divergence_B = kd(scores_BC, labels_B, teacher_BK, temperature)
            return {"labels": labels_loss_B, "teacher": divergence_B}
        assert self.mixture is not None
        log_gate_BK = self.mixture.gate(split.gated.float())
        if self.recipe.name == "srrl":
            assert teacher_BK is not None
            likelihood_B, divergence_B = srrl(scores_BC, labels_B, class_probabilities(teacher_BK, temperature), log_gate_BK)
            return {"labels": -likelihood_B, "gate": divergence_B}
        experts = Experts.of(self.mixture.prototypes() @ self.student.model.head.weight.float().T)
        log_experts_BK = log_experts(scores_BC, experts, labels_B)
        if teacher_BK is None:
            log_posterior_BK = e_step(log_gate_BK, log_experts_BK)
        else:  # ablation (v)
            log_posterior_BK = F.log_softmax(teacher_BK / temperature, dim=-1)
        expected_B, divergence_B = elbo(log_posterior_BK, log_gate_BK, log_experts_BK)
        return {"experts": -expected_B, "gate": divergence_B}

    @torch.no_grad()
    def _teacher(self, rows_B: Tensor, examples: Examples) -> Tensor:
        """The teacher's logits, [B, K]."""
        assert self.teacher is not None and self.taught is not None
        if self.taught.logits_NK is not None:
            return self.taught.logits_NK[rows_B.to(self.taught.logits_NK.device)]
        return self.teacher.model.split(**on(self.teacher.inputs, examples, self.device)).logits_BC.float()


def augmented(images_BCHW: Tensor, how: str, generator: torch.Generator) -> Tensor:
    """Each image padded and cropped to its size at random, and with `crop-flip` mirrored half of the time (§5.1)."""
    if how == "none":
        return images_BCHW
    count, _, height, width = images_BCHW.shape
    padded = F.pad(images_BCHW, (PADDING,) * 4)
    tops, lefts = (torch.randint(2 * PADDING + 1, (count,), generator=generator).tolist() for _ in range(2))
    mirrored = torch.rand(count, generator=generator).lt(0.5).tolist() if how == "crop-flip" else [False] * count
    made = []
    for image, top, left, flips in zip(padded, tops, lefts, mirrored, strict=True):
        cut = image[:, top : top + height, left : left + width]
        made.append(cut.flip(-1) if flips else cut)
    return torch.stack(made)
