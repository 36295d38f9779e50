"""Gate gradients: derivatives of the loss by a factor g_i = 1 on each expert's contribution, which is never trained.

Two methods use them: gate_fisher.py and gate_taylor.py. One forward and one backward pass compute the gradients of the
gates alone. Sequences are batched, and each has gates of its own, so each has a gradient of its own.

Several processes share the sequences. Each process also draws the random numbers of the sequences before its own, so that
all samples are those of a single process.

Shape suffixes: S sequences, B sequences of one batch, L positions, N experts of a layer, D hidden, V vocabulary.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from compress.cost.counts import OperationCounts
from compress.cost.phases import PassCosts, Phase
from compress.methods.inputs import MethodRun
from compress.options.prune import PruneOptions
from compress.training.losses import logits_of, next_token_loss
from engine.adapted.adapted_gradients import layerwise_decoder
from engine.decoder.model import capped
from engine.decoder.routing import Gated, Routing
from engine.errors import DataError
from engine.families.config import DecoderConfig
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state
from engine.passes import processes
from engine.passes.layerwise import AnyDecoder, Head, LayerwiseDecoder, Loss, Route, backward, in_company
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.memory_need import MemoryDemand
from engine.passes.streaming import chunk_tokens

SAVE_EVERY_SECONDS = 20.0


class Sums:
    """Sums of the gradients of this process's sequences, from which an interrupted pass continues."""

    def __init__(self, tensors: dict[str, Tensor], seed: int, device: torch.device | str) -> None:
        self.tensors = tensors
        """The sums by name, float64."""
        self.generator = torch.Generator(device=device).manual_seed(seed)
        """Random numbers for the model's own samples."""
        self.sequences = 0

    def save(self, path: Path) -> None:
        """Write the file. An existing file is replaced only when the new one is complete."""
        tensors = self.tensors | {"random": self.generator.get_state()}
        write_state(path, tensors, {"gradients": str(self.sequences)}, "the state of gradients")

    def load(self, path: Path) -> None:
        """Read a file of `save`. Raises DataError for any other file."""
        with SafetensorsFile(path) as file:
            seen, shapes = file.metadata.get("gradients", ""), {name: own.shape for name, own in file.entries.items()}
            if not seen.isdecimal() or any(shapes.get(name) != tuple(own.shape) for name, own in self.tensors.items()):
                raise DataError(f"{path}: is not the state of this pass; leave out --resume")
            check_digest(file)
            self.tensors = {name: file.tensor(name).clone() for name in self.tensors}
            self.generator.set_state(file.tensor("random").clone())
            self.sequences = int(seen)


def gate_gradients(
    decoder: AnyDecoder,
    tokens_SL: Tensor,
    *,
    own_samples: bool,
    seed: int = 0,
    state_path: Path | None = None,
    budget: MemoryBudget = UNLIMITED,
    progress: Callable[[Iterable[slice]], Iterable[slice]] = iter,
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return (Σ_s ∂L_s/∂g, Σ_s (∂L_s/∂g)²), each [N] float64 by decoder layer index.

    own_samples: whether L is of tokens sampled from the model's own predictions (true Fisher), or of the text's next
    tokens.

    state_path: where the sums are saved during the pass, so that an interrupted pass continues from there, or at its layer
    where layers are read one by one. Each process has its own file.
    """
    layers, counts = decoder.config.moe_layers, decoder.config.experts_per_layer
    zeros = torch.zeros(sum(counts), dtype=torch.float64)
    sums = Sums({"first": zeros, "second": zeros.clone()}, seed, decoder.device)

    def add(tokens_BL: Tensor, directory: Path | None) -> None:
        gradients = _of_batch(decoder, tokens_BL, sums.generator if own_samples else None, directory, budget)
        gradient_BN = torch.cat([each.double().cpu() for each in gradients], dim=1)
        sums.tensors["first"] += gradient_BN.sum(0)
        sums.tensors["second"] += gradient_BN.square().sum(0)

    pass_over_text(
        decoder, tokens_SL, sums, add, own_samples=own_samples, state_path=state_path, budget=budget, progress=progress
    )
    first, second = (dict(zip(layers, sums.tensors[name].split(counts), strict=True)) for name in ("first", "second"))
    return first, second


def pass_over_text(
    decoder: AnyDecoder,
    tokens_SL: Tensor,
    sums: Sums,
    add: Callable[[Tensor, Path | None], None],
    *,
    own_samples: bool,
    state_path: Path | None = None,
    budget: MemoryBudget = UNLIMITED,
    progress: Callable[[Iterable[slice]], Iterable[slice]] = iter,
) -> None:
    """Add the gradients of all sequences to `sums`, in which those of all processes are added up at the end.

    add: adds those of some sequences [B, L]; its second argument is where a pass layer by layer keeps its state.
    state_path: where the sums are saved. Each process has its own file.
    """
    own = processes.own_rows(*tokens_SL.shape, budget=budget)
    own_SL = tokens_SL[own]
    if state_path is not None:
        state_path = processes.own_directory(state_path.parent, own) / state_path.name
    if state_path is not None and state_path.exists():
        sums.load(state_path)
    elif own_samples:
        for _ in range(own.start):
            _pass_over(tokens_SL.shape[1], decoder.config.vocabulary_size, sums.generator)
    saved, (count, length) = time.monotonic(), own_SL.shape
    is_layerwise = isinstance(decoder, LayerwiseDecoder)
    size = (
        max(1, decoder.sweep_tokens(budget) // length)
        if isinstance(decoder, LayerwiseDecoder)
        else budget.sequences_per_batch(length)
    )
    parts = [slice(start, min(start + size, count)) for start in range(sums.sequences, count, size)]
    with in_company(decoder, len(parts), tokens_SL[:1], *gated(decoder, 1)):
        for rows in progress(parts):
            kept = state_path.with_suffix("") / f"from-{rows.start}" if state_path is not None and is_layerwise else None
            add(own_SL[rows], kept)
            sums.sequences = rows.stop
            if state_path is not None and (kept or time.monotonic() - saved >= SAVE_EVERY_SECONDS):
                sums.save(state_path)
                saved = time.monotonic()
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)
    processes.add_up(list(sums.tensors.values()))


def _of_batch(
    decoder: AnyDecoder,
    tokens_BL: Tensor,
    generator: torch.Generator | None,
    directory: Path | None,
    budget: MemoryBudget,
) -> list[Tensor]:
    """Return ∂L_s/∂g of each sequence, [B, N] float64 for each MoE layer.

    With a generator, L is of tokens sampled from the model's own predictions.
    """
    route, gates = gated(decoder, len(tokens_BL))
    loss = sampled_loss(decoder, tokens_BL, generator)
    backward(decoder, tokens_BL, route, loss, trained=gates, generator=generator, directory=directory, budget=budget)
    return [torch.zeros_like(gate) if gate.grad is None else gate.grad for gate in gates.values()]


def sampled_loss(decoder: AnyDecoder, tokens_BL: Tensor, generator: torch.Generator | None) -> Loss:
    """Return the negative log-likelihood of tokens that the model samples itself or, without a generator, of the text."""

    def loss(hidden_BLD: Tensor, model: Head, part: slice) -> Tensor:
        targets_BL = tokens_BL[part].to(decoder.device)
        if generator is not None:
            rows = zip(hidden_BLD.detach().split(1), targets_BL.split(1), strict=True)
            targets_BL = torch.cat(
                [
                    _sample_next(states, model.head_VD, tokens, generator, model.head_bias_V, model.logit_cap)
                    for states, tokens in rows
                ]
            )
        return next_token_loss(hidden_BLD, model.head_VD, targets_BL, model.head_bias_V, model.logit_cap)

    return loss


def gated(decoder: AnyDecoder, sequences: int) -> tuple[Route, dict[str, Tensor]]:
    """Return the model's own routings with gates of one, and those gates, [B, N] for each MoE layer."""
    gates = [
        torch.ones(sequences, count, device=decoder.device, requires_grad=True) for count in decoder.config.experts_per_layer
    ]

    def route(number: int, own: Routing, part: slice) -> Routing:
        return Gated(own, gates[number][part])

    return route, {f"gate.{number}": gate for number, gate in enumerate(gates)}


@torch.no_grad()
def _sample_next(
    hidden_1LD: Tensor,
    head_VD: Tensor | None,
    tokens_1L: Tensor,
    generator: torch.Generator,
    bias_V: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the text with each next token replaced by one sampled from the model's prediction at that position."""
    drawn = [tokens_1L[0, :1]]
    for hidden in hidden_1LD[0, :-1].split(chunk_tokens(hidden_1LD.shape[-1] if head_VD is None else len(head_VD))):
        probabilities = capped(logits_of(hidden, head_VD, bias_V), cap).softmax(-1)
        drawn.append((probabilities / _waiting_times(probabilities.shape, generator)).argmax(-1))
    return torch.cat(drawn)[None]


def _waiting_times(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return exponential waiting times.

    For probabilities p, the argmax of p / waiting time is an outcome that is drawn with these probabilities.
    """
    return torch.empty(shape, device=generator.device).exponential_(generator=generator)


def _pass_over(length: int, vocabulary: int, generator: torch.Generator) -> None:
    """Draw and discard the random numbers of `_sample_next` for one sequence."""
    for part in torch.empty(length - 1).split(chunk_tokens(vocabulary)):
        _waiting_times((len(part), vocabulary), generator)


# Used by both methods


def loaded_decoder(run: MethodRun) -> AnyDecoder:
    """Return the decoder: whole, this process's shard or one that reads its layers one by one.

    Layers are read one by one under a memory limit, and for models that transformers runs.
    """
    prepared, device = run.prepared, run.options.device
    if run.memory_budget.limit is not None or not prepared.checkpoint.has_own_decoder:
        return layerwise_decoder(prepared.checkpoint, prepared.dtype, device)
    decoder = processes.load_decoder(prepared.checkpoint, prepared.dtype, device, run.options.shard)
    decoder.checkpoint_activations = True
    return decoder


def gradient_scores(
    run: MethodRun,
    name: str,
    score: Callable[..., dict[int, Tensor]],
    decoder: Callable[[], AnyDecoder] | None = None,
) -> dict[int, Tensor]:
    """Return scores from gate gradients, [N] by decoder layer index, computed once for all runs on this model and text.

    name: of the scores' file in the work directory. score: `fisher_scores` or `taylor_scores`. decoder: returns a decoder
    that is already loaded.
    """

    def compute() -> dict[str, list[float]]:
        scored = score(
            loaded_decoder(run) if decoder is None else decoder(),
            run.prepared.tokens_SL,
            run.options.diep.seed,
            state_path=run.work.shared / f"{name}.safetensors",
            budget=run.memory_budget,
            progress=run.bar("gate gradients (batches)"),
        )
        return {str(layer): row.tolist() for layer, row in scored.items()}

    values = run.work.once(f"{name}_scores", compute, shared=True)
    return {int(layer): torch.tensor(row, dtype=torch.float64) for layer, row in values.items()}


def gradient_memory(demand: MemoryDemand, options: PruneOptions, config: DecoderConfig) -> MemoryDemand:
    """Return the memory demand of a run that also needs gradients."""
    return replace(demand, gradients=True)


def gradient_phase(costs: PassCosts, *, own_samples: bool) -> Phase:
    """Return the phase of one pass with gradients over the text, or over samples of the model's own."""
    passes, tokens, length = costs.passes, costs.tokens, costs.length
    counts = (
        passes.gradient(tokens, length) + passes.head(tokens, products=2) + OperationCounts(read_bytes=passes.file_bytes)
    )
    if own_samples:
        counts += passes.sampling(tokens)
    return Phase("gate gradients", counts, costs.weights.whole(passes) + passes.gradient_bytes(tokens, length))
