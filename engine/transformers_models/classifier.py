"""A classifier of images or texts: validated when opened, loaded through transformers, split into features and head.

Any model of transformers' image or sequence classification works if its logits are the output of its last linear layer;
this is checked when the model is loaded. A mixture of experts behind the head (mixture_head.py) is stored in a separate
file. Without that file, the directory is an ordinary classifier that equals the average of all experts.

Shape suffixes: B batch, C classes, K experts, D features, H W of a feature map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.checkpoint.artifact import check_sizes, read_provenance
from engine.checkpoint.kinds import ONNX_NAME
from engine.checkpoint.tokenizer import load_tokenizer_of
from engine.errors import CheckpointError, CompressError, UnsupportedError
from engine.families.checks import check_token_ids
from engine.families.classifiers import classified
from engine.families.resolve import load_transformers_config
from engine.families.values import positive
from engine.files.json_file import load_json, shown
from engine.files.mapped_file import state_of
from engine.files.model_files import check_entries
from engine.files.safetensors_file import SafetensorsFile, open_shards
from engine.transformers_models.classifier_inputs import SMALL_SIZE, ImageInputs, TextInputs, image_inputs
from engine.transformers_models.mixture_head import Gate, MixtureHead, projector
from engine.transformers_models.transformers_model import SAME_MODEL, load_model

MIXTURE_NAME = "mixture.safetensors"
MIXTURE_KEY = "mixture_experts"
"""Key in config.json with the number of experts in MIXTURE_NAME."""
PROTOTYPES = "prototypes"
MAX_CLASSES = 1_000_000


class ClassifierDirectory:
    """A classifier with weights in any format: the content of config.json and its companions."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError for damaged or inconsistent files, UnsupportedError for a model that is no classifier."""
        check_entries(directory)
        self.directory = directory
        self.provenance = read_provenance(directory)
        if self.provenance is not None:
            check_sizes(directory, self.provenance)
        self.raw_config: dict[str, Any] = load_json(directory / "config.json", "model config")
        family, what = self.raw_config.get("model_type"), classified(self.raw_config)
        named = shown(self.raw_config.get("architectures"))
        if not isinstance(family, str) or what is None:
            raise UnsupportedError(
                f"{directory}: `architectures` in config.json is {named}, which is no classifier; give a model of image or "
                "sequence classification"
            )
        if self.raw_config.get("auto_map"):
            raise UnsupportedError(f"{directory}: config.json has auto_map, code of its own, which is never run; remove it")
        self.family, self.what = family, what
        try:
            self.config: Any = load_transformers_config(self.raw_config)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error
        if not 1 <= self.config.num_labels <= MAX_CLASSES:
            raise CheckpointError(f"{directory}: config.json has {self.config.num_labels} classes; it must have 1 or more")
        if what == "texts":
            try:
                check_token_ids("config.json", self.raw_config, positive(self.config, "vocab_size"))
            except CheckpointError as error:
                raise CheckpointError(f"{directory}: {error}") from error
        experts = self.raw_config.get(MIXTURE_KEY, 0)
        if type(experts) is not int or not 0 <= experts <= MAX_CLASSES:
            raise CheckpointError(
                f"{directory}: config.json: {MIXTURE_KEY} is {shown(experts)}; it must be a number of experts"
            )
        self.experts: int = experts
        """Number of experts of the mixture behind the head; 0 for a plain classifier."""

    @property
    def parameters(self) -> int:
        """Number of stored parameters; for an export the number in its provenance, 0 without provenance."""
        found = (self.provenance or {}).get("figures", {}).get("parameters")
        return found if isinstance(found, int) else 0

    @property
    def bytes(self) -> int:
        """Size of an export's graph in bytes."""
        return (self.directory / ONNX_NAME).stat().st_size

    @property
    def data(self) -> str | None:
        """Name of the examples that an artifact was distilled on or exported with; None if unknown."""
        options = (self.provenance or {}).get("options")
        options = options if isinstance(options, dict) else {}
        named = options.get("calibration", options)
        found = named.get("data") if isinstance(named, dict) else None
        return found if isinstance(found, str) else None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names, in the order of the logits."""
        names = self.config.id2label
        return tuple(str(names[number]) for number in range(len(names)))

    def inputs(self, length: int | None = None) -> ImageInputs | TextInputs:
        """Return the preprocessing of examples. length: maximum number of tokens of a text; None for the model's maximum."""
        if self.what == "images":
            return image_inputs(self.directory, self.config)
        tokenizer = load_tokenizer_of(self.directory, self.config.vocab_size)
        most = min(int(tokenizer.model_max_length), getattr(self.config, "max_position_embeddings", 512))
        return TextInputs(tokenizer, min(length or most, most), max(0, getattr(self.config, "pad_token_id", None) or 0))


class ClassifierCheckpoint(ClassifierDirectory):
    """A classifier with safetensors. Opening checks config and headers; `load` compares all names and shapes."""

    def __init__(self, directory: Path) -> None:
        """Raises the errors of ClassifierDirectory, also for weights."""
        super().__init__(directory)
        self.by_name, self.files = open_shards(directory)
        self._mixture = SafetensorsFile(directory / MIXTURE_NAME) if self.experts else None

    @cached_property
    def model_dtype(self) -> torch.dtype:
        """Dtype of most parameters, which is the compute dtype for `--dtype auto`."""
        dtypes = [file.entries[name].dtype for name, file in self._files()]
        floating = [dtype for dtype in dtypes if dtype.is_floating_point]
        if not floating:
            raise CheckpointError(f"{self.directory}: holds no floating-point weights; quantized weights are not read")
        return max(set(floating), key=floating.count)

    def _files(self) -> list[tuple[str, SafetensorsFile]]:
        """Return every tensor's name with its file, those of the mixture last."""
        own = [] if self._mixture is None else [(name, self._mixture) for name in self._mixture.entries]
        return [*self.by_name.items(), *own]

    @property
    def parameters(self) -> int:
        """Number of stored parameters, including the running statistics of norms, without counters."""
        entries = (file.entries[name] for name, file in self._files())
        return sum(torch.Size(entry.shape).numel() for entry in entries if entry.dtype.is_floating_point)

    @property
    def bytes(self) -> int:
        """Size of the stored tensors in bytes."""
        return sum(file.entries[name].nbytes for name, file in self._files())

    def check_finite(self, progress: Callable[[Iterable[str]], Iterable[str]] = iter) -> None:
        """Read every tensor once; raise CheckpointError naming the first that holds NaN or infinity."""
        files = dict(self._files())
        for name in progress(list(files)):
            tensor = files[name].tensor(name)
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise CheckpointError(f"{self.directory}: tensor {name} holds NaN or infinity; the file is damaged")
            files[name].release()

    def fingerprint(self) -> str:
        """Return a SHA-256 over config and all weights: classifiers are small enough to be read completely."""
        digest = hashlib.sha256(repr(sorted(self.raw_config.items())).encode())
        for name, file in sorted(self._files(), key=lambda pair: pair[0]):
            entry = file.entries[name]
            digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
            digest.update(file.tensor(name).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def identity(self) -> dict[str, str]:
        """Return the fingerprint and the state of the files, as for a decoder."""
        files = self.files if self._mixture is None else [*self.files, self._mixture]
        return {"fingerprint": self.fingerprint(), "state": state_of(files)}

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Classifier:
        """Return the model, frozen and in eval mode.

        Raises CheckpointError for tensors that do not fit, UnsupportedError for a model whose head is not found.
        """
        from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

        auto_class = AutoModelForImageClassification if self.what == "images" else AutoModelForSequenceClassification
        model = load_model(auto_class, self.directory, self.raw_config, dtype or self.model_dtype, self.parameters)
        classifier = Classifier(model, str(self.directory))
        try:
            classifier.check_head(self._sample())
        except CompressError:
            raise
        except Exception as error:  # any exception of a model with inconsistent sizes
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CheckpointError(f"{self.directory}: the model cannot be run ({reason}); {SAME_MODEL}") from error
        if self._mixture is not None:
            classifier.mixture = self._mixture_head(self._mixture, classifier.head)
        loaded: Classifier = classifier.to(device).eval().requires_grad_(False)
        return loaded

    def _sample(self) -> dict[str, Tensor]:
        """Return the smallest inputs that the model accepts."""
        if self.what == "texts":
            return {"input_ids": torch.zeros(1, 2, dtype=torch.long), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
        inputs = image_inputs(self.directory, self.config)
        height, width = inputs.size or SMALL_SIZE
        return inputs(torch.zeros(1, inputs.channels, height, width, dtype=torch.uint8))

    def _mixture_head(self, file: SafetensorsFile, head: nn.Linear) -> MixtureHead:
        where = f"{self.directory / MIXTURE_NAME}"
        tensors = {name: file.tensor(name).clone() for name in file.entries}
        prototypes_KD = tensors.pop(PROTOTYPES, torch.empty(0))
        if prototypes_KD.shape != (self.experts, head.in_features):
            raise CheckpointError(
                f"{where}: {PROTOTYPES} has shape {list(prototypes_KD.shape)}, and config.json and weights ask for "
                f"{[self.experts, head.in_features]}; {SAME_MODEL}"
            )
        try:
            return MixtureHead(gate_of(tensors, self.experts), prototypes_KD, head)
        except (KeyError, RuntimeError, IndexError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{where}: does not hold a gate of {self.experts} experts ({reason}); {SAME_MODEL}"
            ) from error


def gate_of(tensors: Mapping[str, Tensor], experts: int) -> Gate:
    """Return the gate with these tensors; without tensors it is uniform.

    Raises KeyError or RuntimeError for other tensors.
    """
    if not tensors:
        return Gate(None, None, experts)
    first, features = tensors["projector.0.weight"], tensors["classifier.weight"].shape[1]
    gate = Gate(projector(first.shape[1], features, first.dim() == 4), nn.Linear(features, experts), experts)
    gate.load_state_dict(dict(tensors))
    return gate


class Split(NamedTuple):
    """Outputs of a classifier before any mixture."""

    logits_BC: Tensor
    features_BD: Tensor
    """z: the input of the head."""
    map: Tensor | None
    """Last feature map before pooling, [B, D', H, W]; None for models without one."""

    @property
    def gated(self) -> Tensor:
        """Input of a gate's projector: the feature map if there is one (§5), otherwise the features."""
        return self.features_BD if self.map is None else self.map


class Classifier(nn.Module):
    """A transformers classifier, with a mixture behind its head if there is one."""

    def __init__(self, model: nn.Module, name: str, mixture: MixtureHead | None = None) -> None:
        """name: the model's name in messages. Raises UnsupportedError if no linear layer can be the head."""
        super().__init__()
        self.model, self.name, self.mixture = model, name, mixture
        classes = self.config.num_labels
        linear = [each for each, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        found = [each for each in linear if model.get_submodule(each).out_features == classes]
        if not found:
            raise UnsupportedError(
                f"{name}: has no linear layer of {classes} outputs, so its head is not known; take another"
            )
        self.head_name = found[-1]

    @property
    def config(self) -> Any:
        """Configuration of transformers."""
        return self.model.config

    @property
    def head(self) -> nn.Linear:
        """The head: its weight W and its bias."""
        layer = self.model.get_submodule(self.head_name)
        assert isinstance(layer, nn.Linear)
        return layer

    @torch.no_grad()
    def check_head(self, sample: Mapping[str, Tensor]) -> None:
        """Raise UnsupportedError unless the logits of a batch of one are the head's output for one vector."""
        split = self.split(**sample)
        if split.features_BD.dim() != 2 or not torch.equal(self.head(split.features_BD), split.logits_BC):
            raise UnsupportedError(
                f"{self.name}: its logits are not the output of its last linear layer ({self.head_name}); take another model"
            )

    def split(self, **inputs: Tensor) -> Split:
        """Return the logits of the plain head, with its features and the feature map."""
        seen: dict[str, Any] = {}
        base: Any = getattr(self.model, "base_model", self.model)
        dtype = self.head.weight.dtype
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        handles = [
            self.head.register_forward_pre_hook(lambda layer, given: seen.update(features=given[0])),
            base.register_forward_hook(lambda layer, given, made: seen.update(map=getattr(made, "last_hidden_state", None))),
        ]
        try:
            logits_BC: Tensor = self.model(**inputs).logits
        finally:
            for handle in handles:
                handle.remove()
        found = seen.get("map")
        return Split(logits_BC, seen["features"], found if found is not None and found.dim() == 4 else None)

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the logits [B, C] in float32; log-probabilities for a mixture."""
        split = self.split(**inputs)
        if self.mixture is None:
            return split.logits_BC.float()
        mixed_BC: Tensor = self.mixture(split.gated.float(), split.logits_BC.float())
        return mixed_BC
