"""Recipes of classifier distillation, with MoE-KD's ablations and image augmentations; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClassifierRecipe:
    """One row of CLASSIFIER_RECIPES."""

    terms: str
    """"module:NAME" of the function that returns the loss terms, whose module needs torch."""
    has_teacher: bool = True
    has_gate: bool = False
    """Whether a gate is trained beside the student."""
    has_prototypes: bool = False
    """Whether experts are trained behind the student's head, from the class means of the teacher's features."""
    asks_teacher: bool = False
    """Whether the teacher's predictions are in the loss."""
    asks_features: bool = False
    """Whether the teacher's features are in the loss, where their weight is above 0."""


CLASSIFIER_RECIPES = {
    "sft": ClassifierRecipe("compress.classifiers.distillation:sft_terms", has_teacher=False),
    "kd": ClassifierRecipe("compress.classifiers.distillation:kd_terms", asks_teacher=True),
    "srrl": ClassifierRecipe(
        "compress.classifiers.distillation:srrl_terms", has_gate=True, asks_teacher=True, asks_features=True
    ),
    "moe-kd": ClassifierRecipe("compress.classifiers.distillation:moe_kd_terms", has_gate=True, has_prototypes=True),
}


@dataclass(frozen=True)
class Ablation:
    """One row of ABLATIONS: a change to recipe moe-kd."""

    about: str
    uniform_gate: bool = False
    learns_gate_classifier: bool = False
    learns_prototypes: bool = False
    hard_means: bool = False
    """Whether an example counts only in the mean of the class that the teacher finds most probable."""
    teacher_is_posterior: bool = False


ABLATIONS = {
    "i": Ablation("a uniform gate", uniform_gate=True),
    "ii": Ablation("the gate's classifier learned from scratch", learns_gate_classifier=True),
    "iii": Ablation("the experts' prototypes learned from scratch", learns_prototypes=True),
    "iv": Ablation("class means over hard assignments", hard_means=True),
    "v": Ablation("the teacher's prediction in place of the E-step", teacher_is_posterior=True),
}
"""The ablations of MoE-KD's table 4."""


@dataclass(frozen=True)
class Augmentation:
    """One row of AUGMENTATIONS: random changes to training images."""

    crops: bool = False
    """Whether an image is padded and cropped to its size (CIFAR-100)."""
    resizes: bool = False
    """Whether a part of the image is cropped and resized to the model's size (ImageNet)."""
    flips: bool = False


AUGMENTATIONS = {
    "none": Augmentation(),
    "crop": Augmentation(crops=True),
    "crop-flip": Augmentation(crops=True, flips=True),
    "resized-crop-flip": Augmentation(resizes=True, flips=True),
}


@dataclass(frozen=True)
class ClassifierTeaching:
    """A recipe with its temperature and weight, at most one ablation, and the augmentation."""

    recipe: ClassifierRecipe
    temperature: float
    ablation: Ablation
    """The ablation; Ablation("") for none."""
    augmentation: Augmentation
    feature_weight: float = 1.0
    """Weight of the distance of features, for the recipe that has it."""

    @property
    def asks_teacher(self) -> bool:
        """Whether the teacher's predictions are in the loss; the full MoE-KD uses them only in the prototypes."""
        return self.recipe.asks_teacher or self.ablation.teacher_is_posterior

    @property
    def asks_features(self) -> bool:
        """Whether the teacher's features are in the loss."""
        return self.recipe.asks_features and self.feature_weight > 0.0
