"""DiEP: differentiable expert pruning (Bai et al.). The relaxed layers are in relaxations.py.

The model's weights are frozen. Each MoE layer has intra-layer scores α ∈ R^N and one inter-layer score β. They are trained
on L = CE(next token) + λ·‖F'(x; α, β) − F(x)‖_F through a relaxed layer, with three α-steps for each β-step. All experts of
all layers are then ranked by α·β.

Deviations from the paper, each an option: two more relaxations (relaxations.py); α may start from gate Fisher instead of
zero; the score may be the normalized N·ᾱ·β, since the softmax defines α only up to a constant per layer, and for the same
reason α's mean per layer is kept at zero.

Ablations of the paper's table 2 (SEARCH_ABLATIONS in compress/options/prune.py) train α alone or β alone. Every step then
trains the scores that are left. The paper does not state the proportions of its fixed β; here β changes in equal steps from
layer to layer, in the relaxed layer and in the ranking.

Several processes share the sequences of each step, and the gradients of α or β are summed over the processes. The steps are
therefore those of one process, and all processes have equal scores. (The relaxation `routed` begins where F' = F and ‖F' −
F‖_F has no gradient. Its gradient there is rounding error, which is equal only where each step has one group of sequences
per process.)

Shape suffixes: S sequences, B batch, L positions, D hidden, N experts of a layer.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from compress.cost.counts import OperationCounts
from compress.cost.phases import PassCosts, Phase, statistics_phase
from compress.methods.criterion import Criterion, by_scores, layer_scores
from compress.methods.gate_fisher import fisher_scores
from compress.methods.gate_gradients import gradient_phase, gradient_scores, loaded_decoder
from compress.methods.inputs import MethodRun
from compress.methods.relaxations import RELAXATIONS, gate
from compress.methods.saliency import frequency
from compress.options.plan_run import RunOptions
from compress.options.prune import DiepOptions, PruneOptions
from compress.report.diep_scores import save_scores, scores_of_state
from compress.run.job import statistics_of
from compress.training.losses import next_token_loss, reconstruction_loss
from compress.training.moments import restore, with_moments
from engine.decoder.model import Decoder
from engine.errors import DataError
from engine.families.config import DecoderConfig
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state
from engine.passes import processes
from engine.passes.activations import Activations, closed_on_error
from engine.passes.layerwise import AnyDecoder, Head, LayerwiseDecoder, Route, backward, in_company
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.memory_need import MemoryDemand

ALPHA_STEPS = 3
"""Number of α-steps for each β-step (DiEP, setting)."""

SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "raw": lambda alpha_N, beta: alpha_N * beta,
    "normalised": lambda alpha_N, beta: len(alpha_N) * alpha_N.softmax(0) * beta,
}
"""Functions from a layer's α and β to the scores by which experts are ranked."""
STARTS = {"zero": False, "fisher": True}
"""Whether α starts from gate Fisher; otherwise it starts at zero."""


@dataclass
class DiepState:
    """The state from which a search continues: scores, both optimizers, and its progress."""

    alphas: list[Tensor]
    betas: list[Tensor]
    alpha_optimiser: torch.optim.Adam
    beta_optimiser: torch.optim.Adam
    epoch: int = 0
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SearchInputs:
    """The inputs that all steps of a search share."""

    decoder: AnyDecoder
    tokens_SL: Tensor
    full: Activations
    """F(x), the full model's hidden states of every sequence."""
    options: DiepOptions
    budget: MemoryBudget = UNLIMITED


def search(
    decoder: AnyDecoder,
    tokens_SL: Tensor,
    options: DiepOptions,
    *,
    state_path: Path | None = None,
    resume: bool = False,
    fisher: Callable[[], dict[int, Tensor]] | None = None,
    frequencies: Mapping[int, Tensor] | None = None,
    budget: MemoryBudget = UNLIMITED,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[int, Tensor]:
    """Run the search and return the scores s, [N] by decoder layer index.

    `state_path`: where the state is saved each epoch; `resume` continues from it. For a decoder that is read layer by
    layer, the state is saved at each step, together with the results of completed layers, so that `resume` continues at the
    interrupted layer. `fisher`: returns `fisher_scores` of this decoder, tokens and seed, where they are known.
    `frequencies`: shares of tokens routed to each expert, [N] by decoder layer index, for the ablation that ranks by them.
    """
    options = options.filled()
    kept = None
    if isinstance(decoder, Decoder):
        decoder.checkpoint_activations = True
    elif state_path is not None:
        kept = state_path.with_suffix("")
        if not resume and processes.is_first():
            shutil.rmtree(kept, ignore_errors=True)
    if state_path is not None and processes.told(resume and state_path.exists()):
        state = load_state(state_path, decoder, options)
    else:
        state = new_state(starting_alphas(decoder, tokens_SL, options, fisher, budget), options)
    remaining = range(state.epoch, options.epochs)
    if remaining:
        with full_hidden_states(decoder, tokens_SL, kept, budget) as full:
            inputs = SearchInputs(decoder, tokens_SL, full, options, budget)
            for epoch in progress(remaining):
                run_epoch(inputs, state, epoch, state_path if kept else None)
                state.epoch = epoch + 1
                if state_path is not None and processes.is_first():
                    save_state(state, state_path)
    if kept is not None and processes.is_first():
        shutil.rmtree(kept, ignore_errors=True)
    if options.trained.ranks_frequency:
        assert frequencies is not None, "the ablation ranks by frequency"
        return frequency_scores(decoder, state, frequencies)
    return discrete_scores(decoder, state, options)


def discrete_scores(decoder: AnyDecoder, state: DiepState, options: DiepOptions) -> dict[int, Tensor]:
    """Return s = α·β (DiEP §4.2), or N·ᾱ·β."""
    assert options.score is not None
    score = SCORES[options.score]
    layers = zip(decoder.config.moe_layers, state.alphas, state.betas, strict=True)
    return {layer: score(alpha.detach(), beta.detach()) for layer, alpha, beta in layers}


def frequency_scores(decoder: AnyDecoder, state: DiepState, frequencies: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return s = f·β, with f the share of tokens routed to each expert (DiEP, table 2)."""
    layers = zip(decoder.config.moe_layers, state.betas, strict=True)
    return {layer: frequencies[layer] * float(beta.detach()) for layer, beta in layers}


def starting_alphas(
    decoder: AnyDecoder,
    tokens_SL: Tensor,
    options: DiepOptions,
    fisher: Callable[[], dict[int, Tensor]] | None = None,
    budget: MemoryBudget = UNLIMITED,
) -> list[Tensor]:
    """Return the initial α, [N] per MoE layer: zero (uniform ᾱ), or half the z-score of log gate Fisher over all experts."""
    device = decoder.device
    if not STARTS[options.start or ""]:
        return [torch.zeros(count, device=device) for count in decoder.config.experts_per_layer]
    squares = fisher_scores(decoder, tokens_SL, options.seed, budget=budget) if fisher is None else fisher()
    logs = [(square + 1e-30).log() for square in squares.values()]
    every = torch.cat(logs)
    # Experts that no token is routed to have no gradient. Their logarithm would dominate the spread of all others.
    floor = every[every > math.log(1e-29)].min() if bool((every > math.log(1e-29)).any()) else every.min()
    every = every.clamp_min(floor)
    spread = every.std().clamp_min(1e-6)
    return [(0.5 * (log.clamp_min(floor) - every.mean()) / spread).float().to(device) for log in logs]


def new_state(alphas: list[Tensor], options: DiepOptions) -> DiepState:
    """Return a state with the initial β and new Adam optimizers. The few, badly scaled scores need adaptive rates."""
    alphas = [alpha.clone().requires_grad_(True) for alpha in alphas]
    starts = zip(starting_betas(len(alphas), options).tolist(), alphas, strict=True)
    betas = [torch.tensor(beta, device=alpha.device, requires_grad=True) for beta, alpha in starts]
    assert options.alpha_learning_rate is not None and options.beta_learning_rate is not None
    return DiepState(
        alphas,
        betas,
        torch.optim.Adam(alphas, lr=options.alpha_learning_rate),
        torch.optim.Adam(betas, lr=options.beta_learning_rate),
    )


def starting_betas(count: int, options: DiepOptions) -> Tensor:
    """Return the initial β of each of `count` MoE layers: 1, or the values of an ablation that never change."""
    if not options.trained.fixes_beta:
        return torch.ones(count)
    first, last = options.fixed_beta
    return torch.linspace(first, last, count)


@torch.no_grad()
def full_hidden_states(
    decoder: AnyDecoder, tokens_SL: Tensor, directory: Path | None = None, budget: MemoryBudget = UNLIMITED
) -> Activations:
    """Return F(x): the full model's hidden states after the last norm, computed once per sequence, by one process for all.

    For a decoder that is read layer by layer, each process computes all of them and continues from the state of an earlier
    pass in `directory`.
    """
    if isinstance(decoder, LayerwiseDecoder):
        every = slice(0, len(tokens_SL))
        return decoder.hidden_states(tokens_SL, directory and processes.own_directory(directory / "full", every), budget)

    def compute(rows: slice) -> Tensor:
        return decoder.hidden_states(tokens_SL[rows].to(decoder.device))

    full = Activations((*tokens_SL.shape, decoder.config.hidden_size), decoder.dtype, budget=budget)
    with closed_on_error(full):
        together = processes.is_spread(decoder)
        for rows, hidden in processes.in_turn(list(budget.batches(*tokens_SL.shape)), compute, together=together):
            full[rows] = hidden
    return full


def run_epoch(inputs: SearchInputs, state: DiepState, epoch: int, state_path: Path | None = None) -> None:
    """Run one pass over the sequences, in an order that depends only on seed and epoch, so that a resumed run repeats it.

    Steps that the state has taken are skipped. With `state_path` the state is saved after each step, and the results of
    completed layers are saved beside it during a step.
    """
    options, count = inputs.options, inputs.tokens_SL.shape[0]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(options.seed * 100_003 + epoch))
    per_epoch = math.ceil(count / options.batch_size)
    for index, rows in enumerate(order.split(options.batch_size)):
        step = epoch * per_epoch + index
        if step < len(state.losses):
            continue
        kept = None if state_path is None else state_path.with_suffix("") / f"step-{step}"
        is_alpha = is_alpha_step(step, options)
        optimiser = state.alpha_optimiser if is_alpha else state.beta_optimiser
        rate = options.alpha_learning_rate if is_alpha else options.beta_learning_rate
        assert rate is not None
        cosine = 0.5 * (1.0 + math.cos(math.pi * step / (per_epoch * options.epochs)))
        for group in optimiser.param_groups:
            group["lr"] = rate * cosine
        state.losses.append(gradients(inputs, rows.tolist(), state, is_alpha, kept))
        optimiser.step()
        if is_alpha and options.recenter and RELAXATIONS[options.relaxation].is_shift_invariant:
            with torch.no_grad():
                for alpha in state.alphas:
                    alpha -= alpha.mean()
        if state_path is not None and kept is not None and processes.is_first():
            save_state(state, state_path)
            shutil.rmtree(kept, ignore_errors=True)


def is_alpha_step(step: int, options: DiepOptions) -> bool:
    """Return whether a step trains α, and not β; with an ablation, every step trains the scores that are left."""
    trained = options.trained
    if trained.trains_alpha and trained.trains_beta:
        return step % (ALPHA_STEPS + 1) < ALPHA_STEPS
    return trained.trains_alpha


def gradients(
    inputs: SearchInputs, rows: list[int], state: DiepState, is_alpha: bool, directory: Path | None = None
) -> float:
    """Set .grad of α or of β to the batch's mean gradient, accumulated over small groups of sequences; return the loss.

    Gradient and loss are sums over all processes; `rows` is the whole batch. `directory`: passed to `backward`; with
    several groups each has a subdirectory.
    """
    decoder, tokens_SL, options, budget = inputs.decoder, inputs.tokens_SL, inputs.options, inputs.budget
    trained = state.alphas if is_alpha else state.betas
    for parameter in state.alphas + state.betas:
        parameter.grad = None
        parameter.requires_grad_(any(parameter is other for other in trained))
    own = processes.own_rows(len(rows), tokens_SL.shape[1], budget=budget)
    own_rows, predictions = rows[own], len(rows) * (tokens_SL.shape[1] - 1)
    own_BL = tokens_SL[own_rows]

    def loss(hidden_BLD: Tensor, model: Head, part: slice) -> Tensor:
        tokens, target = own_BL[part].to(decoder.device), inputs.full.select(own_rows[part]).to(decoder.device)
        entropy = next_token_loss(hidden_BLD, model.head_VD, tokens, model.head_bias_V, model.logit_cap) / predictions
        states_BLD = hidden_BLD if model.states_BLD is None else model.states_BLD
        return entropy + options.reconstruction_weight * reconstruction_loss(states_BLD, target) / len(rows)

    route, named = relaxed(state, options), _named("alpha" if is_alpha else "beta", trained)
    kept = directory and processes.own_directory(directory, own)
    with in_company(decoder, len(list(budget.batches(*own_BL.shape))), tokens_SL[:1], route, named):
        total = backward(decoder, own_BL, route, loss, trained=named, directory=kept, budget=budget)
    if processes.count() > 1:
        total = _add_up_processes(trained, total)
    if options.pressure and is_alpha:
        pressure = options.pressure * torch.cat([gate(alpha) for alpha in state.alphas]).mean()
        pressure.backward(inputs=trained)
        total += float(pressure.detach())
    return total


def _add_up_processes(trained: list[Tensor], loss: float) -> float:
    """Sum the gradients over all processes, and return the summed loss.

    A process without a sequence of the batch adds zero.
    """
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    processes.add_up([parameter.grad for parameter in trained if parameter.grad is not None])
    return processes.added_up([loss])[0]


def relaxed(state: DiepState, options: DiepOptions) -> Route:
    """Return the relaxed layer's Routing for every MoE layer."""
    make = RELAXATIONS[options.relaxation].routing
    return lambda number, own, part: make(own, state.alphas[number], state.betas[number])


def save_state(state: DiepState, path: Path) -> None:
    """Write scores and optimizer moments as one safetensors file.

    An existing file is replaced when the new one is complete.
    """
    tensors = with_moments(_named("alpha", state.alphas), state.alpha_optimiser)
    tensors |= with_moments(_named("beta", state.betas), state.beta_optimiser)
    header = json.dumps({"epoch": state.epoch, "losses": state.losses})
    write_state(path, tensors, {"diep": header}, "the state of the search")


def load_state(path: Path, decoder: AnyDecoder, options: DiepOptions) -> DiepState:
    """Read a file of `save_state`. Raises DataError for any other file."""
    with SafetensorsFile(path) as file:
        try:
            header = json.loads(file.metadata["diep"])
        except (KeyError, ValueError) as error:
            raise DataError(f"{path}: is not the state of a search; leave out --resume") from error
        check_digest(file)
        count = len(decoder.config.moe_layers)
        device = decoder.device
        alphas = [file.tensor(f"alpha.{index}").clone().to(device) for index in range(count)]
        state = new_state(alphas, options)
        restore(_named("alpha", state.alphas), state.alpha_optimiser, file)
        restore(_named("beta", state.betas), state.beta_optimiser, file)
    state.epoch, state.losses = header["epoch"], header["losses"]
    return state


def _named(name: str, values: list[Tensor]) -> dict[str, Tensor]:
    """Return the tensors under their names in the state file."""
    return {f"{name}.{index}": value for index, value in enumerate(values)}


# As a criterion


def _scores(run: MethodRun) -> dict[int, Tensor]:
    """Return the scores of a run. Gate Fisher, if the search starts from it, is computed once for all runs of a sweep."""
    frequencies = layer_scores(frequency, statistics_of(run)) if run.options.diep.trained.ranks_frequency else None
    decoder = loaded_decoder(run)
    return search(
        decoder,
        run.prepared.tokens_SL,
        run.options.diep,
        state_path=run.work.search_state,
        resume=run.options.resume or run.work.shared != run.work.path,
        fisher=lambda: gradient_scores(run, "fisher", fisher_scores, lambda: decoder),
        frequencies=frequencies,
        budget=run.memory_budget,
        progress=run.bar("searching (epochs)"),
    )


def _save_scores(run: MethodRun, directory: Path) -> None:
    if run.work.search_state.is_file():
        layers = run.prepared.checkpoint.config.moe_layers
        save_scores(scores_of_state(run.work.search_state, layers), directory)


def _memory(demand: MemoryDemand, options: PruneOptions, config: DecoderConfig) -> MemoryDemand:
    mixed = max(config.experts_per_layer) if RELAXATIONS[options.diep.relaxation].mixes_all else None
    return replace(demand, gradients=True, optimises=True, experts_per_token=mixed)


def _phases(costs: PassCosts, options: RunOptions) -> Iterator[Phase]:
    """Yield the phases: F(x) once, then epochs of passes with gradients through the relaxed layer."""
    diep, passes, whole = options.diep.filled(), costs.passes, costs.weights.whole(costs.passes)
    if diep.trained.ranks_frequency:
        yield statistics_phase("calibrating", costs)
    from_fisher = STARTS[diep.start or ""]
    if from_fisher:
        yield gradient_phase(costs, own_samples=True)
    read = OperationCounts() if from_fisher else OperationCounts(read_bytes=passes.file_bytes)
    yield Phase("full hidden states", passes.forward(costs.tokens, costs.length) + read, whole + costs.streaming_bytes)
    slots = passes.config.experts_by_layer if RELAXATIONS[diep.relaxation].mixes_all else None
    epoch = passes.gradient(costs.tokens, costs.length, slots) + passes.head(costs.tokens, products=2)
    memory = whole + passes.gradient_bytes(costs.tokens, costs.length, slots) + passes.kept_bytes(costs.tokens)
    yield Phase(f"searching ({diep.epochs} epochs)", epoch * diep.epochs, memory)


DIEP = Criterion(by_scores(_scores), _phases, _memory, add_files=_save_scores)
