"""Rounds the matrices of a model with error feedback (gptq.py), layer by layer, in one streaming pass over text.

Every matrix is rounded for the inputs that it has in the model as it is; GPTQ §4 takes the inputs that the rounded layers
before it give. Inputs of an expert are weighted as the model weighs its output (w²), so that H counts the output's error.
One layer is in memory at a time with its inputs, and the moments of a few of its feed-forward networks. Several processes
share a layer's networks: each runs the model on all of the text, and rounds and writes its own part, to the same numbers.

Shape suffixes: T tokens, R tokens of one network, D hidden, F width, I inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from calibrate.ffn_inputs import FfnInputs, Text, groups_within
from calibrate.product_inputs import check_inputs, watch_products
from compress.options.quantize import OUTSIDE, QuantiserOptions
from compress.rounding.gptq import Feedback, factoring_bytes, matrix_bytes, shrunk
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import Expert
from engine.decoder.model import DecoderLayer
from engine.decoder.parameters import layer_weights
from engine.files.mapped_file import Releasing
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state
from engine.kernels.stored.quantized_weight import QuantizedWeight, Weight
from engine.kernels.stored.scheme import Scheme
from engine.passes import processes
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.streaming import stream_layers

MOMENT_BYTES = 256 << 20
"""Bytes of the moments that are summed up together; those of one network may take more."""
MOMENT_BYTES_WITHIN_LIMIT = 32 << 20
"""Such bytes under a memory limit, where the inputs are read more often, from a file."""


class FeedbackRounding:
    """The matrices that `round_layers` has rounded into a directory."""

    def __init__(self, directory: Path, scheme_of: Callable[[str], Scheme]) -> None:
        self._directory, self._scheme_of = directory, scheme_of
        self._opened: dict[int, list[SafetensorsFile]] = {}
        """The layers' files, one of each process, whose mapped pages are released together."""
        self._releasing = Releasing(self._release)

    def __call__(self, name: str) -> QuantizedWeight | None:
        """Return a rounded matrix; None for the output head and the embedding, which are rounded to nearest."""
        if name in OUTSIDE:
            return None
        layer = int(name.split(".")[2])  # model.layers.N.…
        if layer not in self._opened:
            self._opened[layer] = self._open(layer)
        file = next(file for file in self._opened[layer] if f"{name}.packed" in file.entries)
        packed_OB, scales_OC = (file.tensor(f"{name}.{part}") for part in ("packed", "scales"))
        self._releasing.read(packed_OB.nbytes + scales_OC.nbytes)
        bits = self._scheme_of(name).bits
        return QuantizedWeight(packed_OB, scales_OC, bits, packed_OB.shape[1] * 8 // bits)

    def is_complete(self, layers: int) -> bool:
        """Return whether all layers of a model of so many are rounded, by all processes."""
        return all(path.is_file() for path in _paths(self._directory, layers - 1))

    def _open(self, layer: int) -> list[SafetensorsFile]:
        files = [SafetensorsFile(path) for path in _paths(self._directory, layer)]
        for file in files:
            check_digest(file)
        return files

    def _release(self) -> None:
        for file in (file for own in self._opened.values() for file in own):
            file.release()


def round_layers(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    directory: Path,
    options: QuantiserOptions,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    budget: MemoryBudget = UNLIMITED,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> FeedbackRounding:
    """Round the matrices of every layer into `directory`. An interrupted pass resumes at its layer."""
    wanted = set(options.names(checkpoint.config))
    found = FeedbackRounding(directory, options.scheme_of)
    if processes.told(found.is_complete(len(checkpoint.config.layers))):
        return found
    directory.mkdir(parents=True, exist_ok=True)
    text = Text(slice(0, len(tokens_SL)), tokens_SL.shape[1])

    def visit(index: int, layer: DecoderLayer) -> Callable[[], None]:
        return partial(_LayerRounding(checkpoint, index, layer, text, wanted, options, (dtype, budget)).write, directory)

    stream_layers(
        checkpoint,
        tokens_SL,
        visit,
        dtype=dtype,
        device=device,
        budget=budget,
        directory=processes.own_directory(directory / "pass", text.rows),
        progress=progress,
    ).close()
    processes.wait()
    return found


def _paths(directory: Path, layer: int) -> list[Path]:
    """Return the files of a layer, by the rank of the process that writes it."""
    ranks = ["", *(f"-{rank}" for rank in range(1, processes.count()))]
    return [directory / f"rounded-{layer}{rank}.safetensors" for rank in ranks]


class _LayerRounding:
    """Collects the inputs of one layer's matrices while it runs, and rounds them afterwards."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        index: int,
        layer: DecoderLayer,
        text: Text,
        wanted: Collection[str],
        options: QuantiserOptions,
        within: tuple[torch.dtype, MemoryBudget],
    ) -> None:
        """within: dtype and memory of the pass."""
        self._checkpoint, self._index, self._options = checkpoint, index, options
        dtype, self._budget = within
        named = layer_weights(checkpoint.config, index, layer)
        self._names = {id(weight): name for name, weight in named if name in wanted}
        self._inputs: FfnInputs | None = None
        block, of_networks = layer.feed_forward, set[int]()
        if block is not None:
            inputs = FfnInputs(block, text, dtype, include=("shared",), budget=self._budget, release=checkpoint.release)
            of_networks = {id(weight) for network in inputs.networks for weight in network.projections}
            if of_networks & self._names.keys():
                self._inputs = inputs
            else:
                inputs.stop()
                inputs.close()
        self._moments = _Moments(self._names.keys() - of_networks)
        watch_products(layer, self._moments.see)

    def write(self, directory: Path) -> None:
        """Round the layer's matrices and write their file."""
        tensors: dict[str, Tensor] = {}
        source = self._checkpoint.source(torch.float32)
        for names, moment_II in chain(self._of_attention() if processes.is_first() else (), self._of_networks()):
            check_inputs(self._checkpoint, names[0], moment_II)
            self._budget.relieve(self._checkpoint.release, factoring_bytes(len(moment_II)))
            feedback = Feedback(moment_II)
            for name in names:
                self._budget.relieve(self._checkpoint.release, matrix_bytes(self._checkpoint.shapes[name]))
                scheme, scale_dtype = self._options.scheme_of(name), self._checkpoint.dtype(name)
                rounded = feedback.round(source(name), scheme, scale_dtype)
                tensors |= {f"{name}.packed": rounded.packed_OB, f"{name}.scales": rounded.scales_OC}
        write_state(_paths(directory, self._index)[processes.rank()], tensors, {}, "rounded matrices")
        if self._inputs is not None:
            self._inputs.close()

    def _of_attention(self) -> Iterator[tuple[list[str], Tensor]]:
        """Yield the matrices outside of feed-forward networks that share an input, and its moment."""
        for keys, sum_II in self._moments.sums.items():
            yield [self._names[key] for key in keys], sum_II

    def _of_networks(self) -> Iterator[tuple[list[str], Tensor]]:
        """Yield the matrices of this process's feed-forward networks that share an input, and its moment."""
        if self._inputs is None:
            return
        self._inputs.stop()
        mean_DD, _ = mean_moment(self._inputs)
        numbers = processes.share(range(len(self._inputs.networks)))
        networks = [self._inputs.networks[number] for number in numbers]
        sizes = [8 * (network.width**2 + network.down_DF.shape[0] ** 2) for network in networks]
        for group in groups_within(most_moment_bytes(self._budget), sizes):
            for own in network_moments(self._inputs, [numbers[place] for place in group]).values():
                inputs_DD, units_FF = own.moments(mean_DD)
                down, known = own.network.down_DF, [each for each in own.network.projections if id(each) in self._names]
                for weights, moment_II in (
                    ([each for each in known if each is not down], inputs_DD),
                    ([each for each in known if each is down], units_FF),
                ):
                    if weights:
                        yield [self._names[id(each)] for each in weights], moment_II


def most_moment_bytes(budget: MemoryBudget) -> int:
    """Return the bytes of the moments that are summed up together."""
    return MOMENT_BYTES if budget.limit is None else MOMENT_BYTES_WITHIN_LIMIT


def mean_moment(inputs: FfnInputs) -> tuple[Tensor, int]:
    """Return the mean of x·xᵀ over all tokens that the block reads, [D, D], and their number, which counts as 1 at least."""
    tokens, sum_DD = 0, torch.zeros(())
    for batch in inputs.batches():
        tokens, sum_DD = tokens + len(batch.x_TD), sum_DD + second_moment(batch.x_TD)
    return sum_DD / max(tokens, 1), max(tokens, 1)


def network_moments(inputs: FfnInputs, numbers: Iterable[int]) -> dict[int, NetworkMoments]:
    """Return the sums of some of the block's networks over all their tokens, by their numbers."""
    found = {number: NetworkMoments(inputs.networks[number]) for number in numbers}
    for batch in inputs.batches():
        for number, own in found.items():
            own.add(*inputs.used(batch, number)[:2])
    return found


def second_moment(x_TI: Tensor) -> Tensor:
    """Return Σ x·xᵀ, [I, I] in float64 on the CPU; products are computed in float32 where the inputs are."""
    x_TI = x_TI.detach().float()
    return (x_TI.T @ x_TI).double().cpu()


class _Moments:
    """Sums Σ x·xᵀ of the inputs of matrices; those that read one input together share a sum."""

    def __init__(self, wanted: Collection[int]) -> None:
        """wanted: the `id` of each matrix."""
        self._wanted = wanted
        self.sums: dict[tuple[int, ...], Tensor] = {}
        """[I, I] in float64, by the matrices that share it."""

    def see(self, x: Tensor, weights: Sequence[Weight]) -> None:
        """Add the input of a product with these weights."""
        keys = tuple(id(weight) for weight in weights if id(weight) in self._wanted)
        if keys:
            square_II = second_moment(x.flatten(0, -2))
            self.sums[keys] = self.sums[keys] + square_II if keys in self.sums else square_II


class NetworkMoments:
    """Sums of one network: of its inputs and of its hidden units, weighted by w²."""

    def __init__(self, network: Expert) -> None:
        self.network, self._weight = network, 0.0
        hidden, width = network.down_DF.shape[0], network.width
        self._inputs_DD = torch.zeros(hidden, hidden, dtype=torch.float64)
        self._units_FF = torch.zeros(width, width, dtype=torch.float64)
        self._tokens = 0

    def add(self, x_RD: Tensor, weight_R: Tensor) -> None:
        """Add some tokens. weight_R: the weights of the network's outputs."""
        self._tokens += len(x_RD)
        self._weight += float(weight_R.double().square().sum())
        for sum_II, rows_RI in ((self._inputs_DD, x_RD), (self._units_FF, self.network.units(x_RD))):
            sum_II += second_moment(weight_R.to(rows_RI.device)[:, None] * rows_RI.float())

    def moments(self, mean_DD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the moments of the inputs [D, D] and of the hidden units [F, F], with priors for few tokens.

        mean_DD: the mean over all tokens of the layer.
        """
        # The mean w²: divided by it, a token of the network counts as one token of the prior.
        typical = self._weight / max(self._tokens, 1) or 1.0
        inputs_DD = shrunk(self._inputs_DD / typical, self._tokens, mean_DD)
        units_FF = self._units_FF / typical
        spread = float(units_FF.diagonal().mean()) / max(self._tokens, 1)
        return inputs_DD, shrunk(units_FF, self._tokens, spread * torch.eye(len(units_FF), dtype=torch.float64))
