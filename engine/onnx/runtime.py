"""An exported decoder in onnxruntime, with the interface of our decoder: tokens, padding and a cache in, logits out.

Shape suffixes: B batch, L new positions, P all positions so far, K positions with logits, T tokens (B·L), M MoE layers,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.kinds import ONNX_NAME, is_exported
from engine.checkpoint.model_directory import ModelDirectory
from engine.decoder.kv_cache import KeyValueCache
from engine.errors import CheckpointError, OptionError
from engine.families.config import DecoderConfig
from engine.files.json_file import shown

DATA_NAME = "model.onnx.data"
"""File name of the weights, beside the graph."""
SHARES_CACHE = "shares_cache"
"""Metadata key: 1 if a call may write the new cache into the memory of the old one, 0 if the new cache is a longer copy."""
HEAD_MULTIPLE = 16
"""Divisor of the head dimensions that onnxruntime's grouped-query attention can rotate."""
SKIPPED = "experts_skipped"
"""Name of the output with the numbers of skipped experts, in graphs that skip."""
ENDLESS = ("Loop", "Scan", "SequenceMap")
"""Operators whose graphs may run without end."""
TYPES = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}
_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64}


def session(path: Path, threads: int) -> Any:
    """Return an onnxruntime session for the graph at `path`.

    Raises OptionError if onnxruntime is missing, CheckpointError for a graph that it refuses.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise OptionError("ONNX models need onnxruntime; install it with `pip install moe-compress[onnx]`") from error
    try:
        check_graph(path, onnx.load(path, load_external_data=False))
    except CheckpointError:
        raise
    except Exception as error:  # an exception of protobuf
        raise _unusable(path, "load", error) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors are raised as exceptions
    onnxruntime.set_default_logger_severity(4)  # for messages outside of a session, such as those of its allocators
    try:
        made = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        _ = made.get_modelmeta().custom_metadata_map  # read here, since any text in the graph may be invalid UTF-8
        _ = [(each.name, each.type, each.shape) for each in (*made.get_inputs(), *made.get_outputs())]
        return made
    except Exception as error:  # onnxruntime raises a dozen private exception classes
        raise _unusable(path, "load", error) from error


def _unusable(path: Path, verb: str, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:300]
    return CheckpointError(f"{path}: onnxruntime cannot {verb} it ({reason}); export the model again")


def check_graph(path: Path, model: Any) -> None:
    """Raise CheckpointError for an onnx.ModelProto that may never end, or whose weights are not in files beside it."""
    waiting = [model.graph, *model.functions]
    while waiting:
        graph = waiting.pop()
        tensors = list(getattr(graph, "initializer", ()))
        for node in graph.node:
            if node.op_type in ENDLESS:
                raise CheckpointError(
                    f"{path}: has a node {node.op_type}, which may never end and which no export contains; export it again"
                )
            for attribute in node.attribute:
                waiting += [attribute.g, *attribute.graphs]
                tensors += [attribute.t, *attribute.tensors]
        for tensor in tensors:
            places = [entry.value for entry in tensor.external_data if entry.key == "location"]
            if any(Path(place).name != place or place in ("", ".", "..") for place in places):
                raise CheckpointError(
                    f"{path}: has weights in {shown(places[0])}, which is not a file beside it; export it again"
                )


def backend_of(directory: Path, asked: str) -> str:
    """Return the backend for a directory; `auto` is onnx for an exported model and torch for any other.

    Raises OptionError for a backend that cannot run the model.
    """
    own = "onnx" if is_exported(directory) else "torch"
    if asked == "onnx" and own != "onnx":
        raise OptionError(f"{directory}: backend 'onnx' runs exported models only; make one with `compress export`")
    if asked not in ("auto", "torch", "onnx"):
        raise OptionError(f"backend {asked!r} is not known; choose auto, torch or onnx")
    return own if asked == "auto" else asked


def open_exported(model: ModelDirectory, device: str = "auto", dtype: str = "auto") -> OnnxDecoder:
    """Return the decoder of an exported model. Raises OptionError for a device or dtype that differs from the export's."""
    if device not in ("auto", "cpu"):
        raise OptionError(f"device {device!r} is not available with backend 'onnx'; it runs on the cpu")
    decoder = OnnxDecoder(model.directory, model.config)
    if dtype not in ("auto", str(decoder.dtype).removeprefix("torch.")):
        raise OptionError(f"{model.directory}: was exported in {decoder.dtype}; leave --dtype, or export it again")
    if decoder.skips:
        options = (model.provenance or {}).get("options")
        found = options.get("skip_threshold") if isinstance(options, dict) else None
        decoder.skip_threshold = float(found) if isinstance(found, int | float) else None
    return decoder


class OnnxDecoder:
    """A decoder that onnxruntime runs on the CPU."""

    device = torch.device("cpu")

    def __init__(self, directory: Path, config: DecoderConfig, threads: int | None = None) -> None:
        self.config = config
        self._path = directory / ONNX_NAME
        self._session = session(self._path, threads or torch.get_num_threads())
        metadata = self._session.get_modelmeta().custom_metadata_map
        self._shares_cache = metadata.get(SHARES_CACHE) == "1"
        types = {each.name: each.type for each in self._session.get_inputs()}
        self._check(self._path, types)
        self.skips = any(each.name == SKIPPED for each in self._session.get_outputs())
        """Whether experts are skipped."""
        self.skip_threshold: float | None = None if self.skips else 0.0
        """Skip threshold of the graph; None if it is unknown."""
        self.observer: Callable[[Tensor], None] | None = None
        """Called after each run of a graph that skips, with the empty slots of each token and MoE layer, [T, M]."""
        self.dtype = TYPES[types["past_key_values.0.key"]]
        """Dtype of the cache and the logits."""
        self.weights_bytes = (directory / DATA_NAME).stat().st_size
        """Bytes of the weights as stored."""

    def _check(self, path: Path, types: dict[str, str]) -> None:
        """Raise CheckpointError for a graph that does not match the config."""
        config, layers = self.config, range(len(self.config.layers))
        caches = {f"past_key_values.{layer}.{part}" for layer in layers for part in ("key", "value")}
        shapes = {each.name: each.shape for each in (*self._session.get_inputs(), *self._session.get_outputs())}
        heads, key, value = config.cached
        cache = {"key": (heads, key), "value": (heads, value)}
        fits = (
            set(types) == caches | {"input_ids", "attention_mask"}
            and all(types[name] in TYPES and tuple(shapes[name][1::2]) == cache[name.rpartition(".")[2]] for name in caches)
            and [0, *shapes.get("logits", ())][-1] == config.vocabulary_size
        )
        if not fits:
            raise CheckpointError(
                f"{path}: its inputs and outputs are not those of the model that config.json describes; export it again"
            )

    def __call__(self, tokens_BL: Tensor, real_BP: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Return the logits of every new position, [B, L, V]."""
        return self._logits(tokens_BL, real_BP, cache, tokens_BL.shape[1])

    def last_logits(self, tokens_BL: Tensor, real_BP: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Return the logits of the last position only, [B, V]."""
        return self._logits(tokens_BL, real_BP, cache, 1)[:, 0]

    def _logits(self, tokens_BL: Tensor, real_BP: Tensor | None, cache: KeyValueCache | None, keep: int) -> Tensor:
        batch, new = tokens_BL.shape
        if cache is None:
            cache = KeyValueCache(self.config, batch, new, self.dtype)
        if self._shares_cache and cache.length and min(batch, new) > 1:
            # The attention node reads several positions after a past for one sequence only.
            pieces = [self._logits(tokens_B1, real_BP, cache, 1) for tokens_B1 in tokens_BL.split(1, dim=1)]
            return torch.cat(pieces[-keep:], dim=1)
        total = cache.length + new
        mask_BP = torch.ones(batch, total, dtype=torch.int64) if real_BP is None else real_BP[:, :total].long()
        inputs = {"input_ids": tokens_BL, "attention_mask": mask_BP, "logits_to_keep": torch.tensor([keep])}
        logits_BKV = torch.empty(batch, keep, self.config.vocabulary_size, dtype=self.dtype)
        past, present = self._cache_tensors(cache, total)
        outputs = {"logits": logits_BKV} | present
        if self.skips:
            outputs[SKIPPED] = torch.empty(batch, new, len(self.config.moe_layers), dtype=torch.int64)
        self._run(inputs | past, outputs)
        if self.skips and self.observer is not None:
            self.observer(outputs[SKIPPED].flatten(0, 1))
        if not self._shares_cache:
            for layer in range(len(self.config.layers)):
                key, value = (present[f"present.{layer}.{part}"][:, :, cache.length :] for part in ("key", "value"))
                cache.append(layer, key, value)
        cache.advance(new)
        return logits_BKV

    def _cache_tensors(self, cache: KeyValueCache, total: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the graph's cache inputs and outputs by name; both use one memory if the graph permits."""
        past, present = {}, {}
        for layer in range(len(self.config.layers)):
            for part, whole in (("key", cache.stored.keys[layer]), ("value", cache.stored.values[layer])):
                reads = whole if self._shares_cache else whole[:, :, : cache.length].contiguous()
                writes = whole if self._shares_cache else whole.new_empty((*whole.shape[:2], total, whole.shape[3]))
                past[f"past_key_values.{layer}.{part}"], present[f"present.{layer}.{part}"] = reads, writes
        return past, present

    def _run(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        """Run the graph on the tensors' own memory."""
        try:
            self._run_bound(inputs, outputs)
        except Exception as error:  # as in loading
            raise _unusable(self._path, "run", error) from error

    def _run_bound(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        binding = self._session.io_binding()
        inputs = {name: tensor.contiguous() for name, tensor in inputs.items()}  # kept alive until the run ends
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                bind(name, "cpu", 0, _NUMPY[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        self._session.run_with_iobinding(binding)
