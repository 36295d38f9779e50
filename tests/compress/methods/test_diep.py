"""DiEP: gradients of the scores against finite differences, the relaxed layers, the alternation, and resumption."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import save_reference
from torch import Tensor

from compress.methods.diep import (
    ALPHA_STEPS,
    DiepState,
    SearchInputs,
    discrete_scores,
    full_hidden_states,
    gradients,
    new_state,
    relaxed,
    run_epoch,
    search,
    starting_alphas,
)
from compress.methods.gate_gradients import gate_gradients
from compress.options.prune import DiepOptions
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder, own_routing, routed_by
from engine.decoder.routing import Gated, MixedExperts, Routing, ShiftedLogits
from engine.errors import OptionError, OutputError
from engine.passes.memory_budget import MemoryBudget

TOKENS = torch.randint(3, 96, (3, 8), generator=torch.Generator().manual_seed(1))
STEP = 1e-5
NAIVE_LAYER: dict[str, Callable[[Routing, Tensor, Tensor], Routing]] = {
    "paper": lambda own, alpha, beta: MixedExperts(alpha, beta),
    "routed": ShiftedLogits,
    "gated": lambda own, alpha, beta: Gated(own, 1 / (1 + torch.exp(-alpha - 2)), beta),
}
RELAXATIONS = pytest.mark.parametrize("relaxation", NAIVE_LAYER)


def tiny(path: Path, dtype: torch.dtype = torch.float64) -> Decoder:
    """Return a model with two MoE layers of six experts around a dense layer."""
    save_reference("qwen2_moe", path, mlp_only_layers=[1])
    checkpoint = Checkpoint(path)
    return Decoder(checkpoint.config, checkpoint.source(dtype))


@pytest.fixture(name="decoder")
def float64_decoder(tmp_path: Path) -> Decoder:
    return tiny(tmp_path)


def some_state(decoder: Decoder, options: DiepOptions) -> DiepState:
    """Return scores that differ from the start of the search."""
    generator = torch.Generator().manual_seed(2)
    alphas = [0.3 * torch.randn(6, generator=generator, dtype=torch.float64) for _ in decoder.config.moe_layers]
    state = new_state(alphas, options)
    state.betas = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.8, 1.3)]
    return state


@torch.no_grad()
def naive_loss(decoder: Decoder, options: DiepOptions, alphas: list[Tensor], betas: list[Tensor]) -> float:
    """Return CE + λ·Φ + μ·mean gate, straight from the definitions."""
    full = decoder.hidden_states(TOKENS)
    moes = [layer.moe for layer in decoder.config.layers if layer.moe is not None]
    make = NAIVE_LAYER[options.relaxation]
    with routed_by(decoder, [make(own_routing(m), a, b) for m, a, b in zip(moes, alphas, betas, strict=True)]):
        hidden = decoder.hidden_states(TOKENS)
    logits = hidden @ decoder.head_VD.T
    entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    norms = [float((hidden[s] - full[s]).square().sum()) ** 0.5 for s in range(len(TOKENS))]
    assert options.pressure is not None
    pressure = options.pressure * float((1 / (1 + torch.exp(-torch.cat(alphas) - 2))).mean())
    return float(entropy) + options.reconstruction_weight * sum(norms) / len(norms) + pressure


@RELAXATIONS
def test_gradients_of_the_whole_loss_equal_finite_differences(decoder: Decoder, relaxation: str) -> None:
    options = DiepOptions(relaxation, reconstruction_weight=0.1, pressure=0.7).filled()
    state = some_state(decoder, options)
    alphas, betas = [a.detach().clone() for a in state.alphas], [b.detach().clone() for b in state.betas]
    with full_hidden_states(decoder, TOKENS) as full:
        loss = gradients(SearchInputs(decoder, TOKENS, full, options), [0, 1, 2], state, is_alpha=True)
        assert abs(loss - naive_loss(decoder, options, alphas, betas)) < 1e-6
        got = [alpha.grad.clone() for alpha in state.alphas]
        assert all(beta.grad is None for beta in state.betas), "a step of α leaves β alone"
        gradients(SearchInputs(decoder, TOKENS, full, options), [0, 1, 2], state, is_alpha=False)
        assert all(alpha.grad is None for alpha in state.alphas), "and a step of β leaves α alone"
        got += [beta.grad.clone()[None] for beta in state.betas]
    expected = []
    for values in (
        *alphas,
        *(beta.view(1) for beta in betas),
    ):  # views: changing them changes the values that the loss reads
        for i in range(len(values)):
            values[i] += STEP
            above = naive_loss(decoder, options, alphas, betas)
            values[i] -= 2 * STEP
            expected.append((above - naive_loss(decoder, options, alphas, betas)) / (2 * STEP))
            values[i] += STEP
    assert torch.allclose(torch.cat(got), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-7)
    assert float(torch.cat(got).abs().min()) > 0


def test_paper_layer_is_the_mixture_of_all_experts(decoder: Decoder) -> None:
    options = DiepOptions("paper").filled()
    state = some_state(decoder, options)
    routing = relaxed(state, options)(0, decoder.moe_blocks[0].routing, slice(None))
    block = decoder.moe_blocks[0]
    x = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    block.routing, shared, block.shared = routing, block.shared, None
    mixture = state.alphas[0].detach().exp() / state.alphas[0].detach().exp().sum()
    naive = 0.8 * sum(mixture[i] * block.experts[i](x) for i in range(6))
    assert torch.allclose(block(x), naive, atol=1e-12)
    block.shared = shared
    assert not torch.allclose(block(x), naive), "the shared expert is outside the relaxation"


def test_routed_relaxation_starts_as_the_full_model(decoder: Decoder) -> None:
    options = DiepOptions("routed", reconstruction_weight=1e6).filled()
    state = new_state(starting_alphas(decoder, TOKENS, options), options)
    with full_hidden_states(decoder, TOKENS) as full:
        with torch.no_grad(), routed_by(decoder, relaxed_routings(decoder, state, options)):
            assert torch.equal(decoder.hidden_states(TOKENS), full[slice(0, 3)]), "Φ = 0"
        loss = gradients(SearchInputs(decoder, TOKENS, full, options), [0, 1, 2], state, is_alpha=True)
    assert loss == pytest.approx(naive_loss(decoder, replace(options, reconstruction_weight=0.0), *zeros_and_ones()))
    assert all(bool(alpha.grad.isfinite().all()) for alpha in state.alphas), "the norm's kink gives no NaN"


def relaxed_routings(decoder: Decoder, state: DiepState, options: DiepOptions) -> list[Routing]:
    route = relaxed(state, options)
    return [route(number, block.routing, slice(None)) for number, block in enumerate(decoder.moe_blocks)]


def zeros_and_ones() -> tuple[list[Tensor], list[Tensor]]:
    return [torch.zeros(6, dtype=torch.float64)] * 2, [torch.ones((), dtype=torch.float64)] * 2


@pytest.mark.parametrize("relaxation", ["paper", "routed"])
def test_gradients_of_alpha_sum_to_zero_in_each_layer(decoder: Decoder, relaxation: str) -> None:
    """α is defined up to a constant per layer where a softmax follows: plain gradient steps keep its mean.

    `routed` shifts logits, and a shift of all of them changes nothing either.
    """
    options = DiepOptions(relaxation).filled()
    state = some_state(decoder, options)
    with full_hidden_states(decoder, TOKENS) as full:
        gradients(SearchInputs(decoder, TOKENS, full, options), [0, 1, 2], state, is_alpha=True)
    for alpha in state.alphas:
        assert abs(float(alpha.grad.sum())) < 1e-7 * float(alpha.grad.abs().max())


@RELAXATIONS
def test_recomputing_activations_and_small_groups_change_no_gradient(decoder: Decoder, relaxation: str) -> None:
    options = DiepOptions(relaxation).filled()
    state = some_state(decoder, options)
    grads = []
    with full_hidden_states(decoder, TOKENS) as full:
        for recompute, tokens_per_group in ((False, 4096), (True, 4096), (True, 8), (True, 16)):
            decoder.checkpoint_activations = recompute
            inputs = SearchInputs(decoder, TOKENS, full, options, MemoryBudget(tokens_per_group))
            gradients(inputs, [2, 0, 1], state, is_alpha=True)
            grads.append(torch.cat([alpha.grad for alpha in state.alphas]))
    assert torch.equal(grads[1], grads[0])
    assert all(torch.allclose(other, grads[0], rtol=1e-6) for other in grads[2:])


# The search


def test_three_alpha_steps_to_one_beta_step_and_a_rate_that_falls_to_zero(decoder: Decoder) -> None:
    options = DiepOptions("gated", epochs=4, batch_size=2, learning_rate=0.1, start="zero").filled()
    state = new_state(starting_alphas(decoder, TOKENS, options), options)
    assert all(beta.item() == 1.0 for beta in state.betas) and not any(alpha.any() for alpha in state.alphas)
    moved, rates = [], []
    optimisers = {"α": state.alpha_optimiser, "β": state.beta_optimiser}
    for name, optimiser in optimisers.items():
        optimiser.register_step_post_hook(
            lambda own, *_, name=name: (moved.append(name), rates.append(own.param_groups[0]["lr"]))
        )
    history = []
    with full_hidden_states(decoder, TOKENS) as full:
        for epoch in range(4):
            before = [p.detach().clone() for p in (*state.alphas, *state.betas)]
            run_epoch(SearchInputs(decoder, TOKENS, full, options), state, epoch)
            history.append([not torch.equal(a, b) for a, b in zip(before, (*state.alphas, *state.betas), strict=True)])
    assert ALPHA_STEPS == 3 and moved == list("αααβαααβ"), "counted over steps, not epochs"
    assert history == [[True, True, False, False], [True] * 4] * 2, "two steps an epoch"
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 8)) for step in range(8)])
    assert rates[0] == 0.1 and rates[-1] < 0.005
    assert len(state.losses) == 8 and all(map(math.isfinite, state.losses))


def test_only_the_scores_are_trained(decoder: Decoder) -> None:
    options = DiepOptions("paper", epochs=3, batch_size=3).filled()
    weights = {name: value.clone() for name, value in decoder.state_dict().items()}
    state = new_state(starting_alphas(decoder, TOKENS, options), options)
    with full_hidden_states(decoder, TOKENS) as full:
        for epoch in range(3):
            run_epoch(SearchInputs(decoder, TOKENS, full, options), state, epoch)
    assert all(p.grad is None and not p.requires_grad for p in decoder.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in decoder.state_dict().items())
    held = [p for o in (state.alpha_optimiser, state.beta_optimiser) for g in o.param_groups for p in g["params"]]
    assert list(map(id, held)) == list(map(id, [*state.alphas, *state.betas]))
    assert sum(p.numel() for p in held) == 6 + 6 + 1 + 1


def test_search_lowers_the_loss(decoder: Decoder) -> None:
    options = DiepOptions("paper", epochs=12, batch_size=3, learning_rate=0.1).filled()
    state = new_state(starting_alphas(decoder, TOKENS, options), options)
    with full_hidden_states(decoder, TOKENS) as full:
        for epoch in range(12):
            run_epoch(SearchInputs(decoder, TOKENS, full, options), state, epoch)
    assert state.losses[-1] < state.losses[0] - 0.01


@RELAXATIONS
def test_a_resumed_search_gives_the_same_scores_bit_for_bit(relaxation: str, tmp_path: Path) -> None:
    decoder = tiny(tmp_path / "model", torch.float32)
    options = DiepOptions(relaxation, epochs=4, batch_size=2, seed=5)
    straight = search(decoder, TOKENS, options, state_path=tmp_path / "straight")
    path = tmp_path / "state"
    half = search(decoder, TOKENS, options, state_path=path, progress=lambda epochs: islice(epochs, 2))
    resumed = search(tiny(tmp_path / "again", torch.float32), TOKENS, options, state_path=path, resume=True)
    assert tuple(straight) == (0, 2)
    assert all(torch.equal(resumed[layer], straight[layer]) for layer in straight)
    assert not any(torch.equal(half[layer], straight[layer]) for layer in straight)
    assert path.read_bytes() == (tmp_path / "straight").read_bytes(), "losses and moments too"
    seen: list[int] = []
    done = search(decoder, TOKENS, options, state_path=path, resume=True, progress=lambda e: seen.extend(e) or ())
    assert not seen and all(torch.equal(done[layer], straight[layer]) for layer in straight), "nothing is left to do"
    fresh = search(decoder, TOKENS, options, state_path=path)
    assert all(torch.equal(fresh[layer], straight[layer]) for layer in straight), "without resume it begins again"


def test_a_state_that_cannot_be_saved_is_an_error_of_output(decoder: Decoder, tmp_path: Path) -> None:
    options = DiepOptions("paper", epochs=1)
    with pytest.raises(OutputError, match="state of the search"):
        search(decoder, TOKENS, options, state_path=tmp_path / "missing" / "state")


def test_scores_by_hand(decoder: Decoder) -> None:
    options = DiepOptions("paper").filled()
    state = some_state(decoder, options)
    state.alphas[0] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 5.0]).log()  # ᾱ = 1/20 …
    normalised = discrete_scores(decoder, state, options)
    assert options.score == "normalised" and tuple(normalised) == (0, 2)
    assert torch.allclose(normalised[0].float(), 6 * 0.8 * torch.tensor([0.05, 0.1, 0.15, 0.2, 0.25, 0.25]))
    raw = discrete_scores(decoder, state, replace(options, score="raw"))
    assert torch.allclose(raw[2], 1.3 * state.alphas[1].detach())


def test_fisher_start_is_half_the_z_score_of_log_fisher_over_all_layers(decoder: Decoder) -> None:
    options = DiepOptions("gated", seed=3).filled()
    assert options.start == "fisher" and options.pressure == 0.5
    _, squares = gate_gradients(decoder, TOKENS, own_samples=True, seed=3)
    alphas = torch.cat(starting_alphas(decoder, TOKENS, options)).double()
    logs = torch.cat(list(squares.values())).log()
    assert bool(logs.isfinite().all()), "every expert of this model is routed to"
    assert torch.allclose(alphas, 0.5 * (logs - logs.mean()) / logs.std(), atol=1e-5)


def test_an_expert_never_routed_to_starts_at_the_lowest_of_the_others(decoder: Decoder) -> None:
    squares = {0: torch.tensor([1e-4, 1e-2, 1.0, 1e-3, 0.0, 1e-1]), 2: torch.tensor([1e-2] * 5 + [1e-6])}
    alphas = torch.cat(starting_alphas(decoder, TOKENS, DiepOptions("gated").filled(), lambda: squares))
    assert float(alphas[4]) == float(alphas[11]) == float(alphas.min()), "its floor of 1e-30 swamps no spread"
    tenths = torch.tensor([-4.0, -2, 0, -3, -6, -1, -2, -2, -2, -2, -2, -6])
    assert torch.allclose(alphas, 0.5 * (tenths - tenths.mean()) / tenths.std(), atol=1e-5)


# Ablations of the paper's table 2


def moved_scores(decoder: Decoder, options: DiepOptions) -> tuple[str, DiepState]:
    """Return which scores each of eight steps moved, and the state after them."""
    options = options.filled()
    state = new_state(starting_alphas(decoder, TOKENS, options), options)
    names: list[str] = []
    for name, optimiser in (("α", state.alpha_optimiser), ("β", state.beta_optimiser)):
        optimiser.register_step_post_hook(lambda *_, name=name: names.append(name))
    with full_hidden_states(decoder, TOKENS) as full:
        for epoch in range(4):
            run_epoch(SearchInputs(decoder, TOKENS, full, options), state, epoch)
    return "".join(names), state


def test_alpha_alone_leaves_beta_at_one(decoder: Decoder) -> None:
    moved, state = moved_scores(decoder, DiepOptions("paper", epochs=4, batch_size=2, ablation="alpha"))
    assert moved == "α" * 8 and all(float(beta) == 1.0 for beta in state.betas)


def test_fixed_beta_falls_in_equal_steps_and_is_in_the_layer_and_the_score(tmp_path: Path) -> None:
    save_reference("qwen2_moe", tmp_path, num_hidden_layers=4, mlp_only_layers=[1])
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float64))
    options = DiepOptions("paper", epochs=4, batch_size=2, ablation="fixed-beta", fixed_beta=(2.0, 1.0)).filled()
    moved, state = moved_scores(decoder, options)
    assert moved == "α" * 8 and [float(beta) for beta in state.betas] == [2.0, 1.5, 1.0]
    routing = relaxed(state, options)(1, decoder.moe_blocks[1].routing, slice(None))
    assert isinstance(routing, MixedExperts) and float(routing.beta) == 1.5
    scores = discrete_scores(decoder, state, replace(options, score="raw"))
    assert torch.equal(scores[2], 1.5 * state.alphas[1].detach())


def test_beta_alone_ranks_by_frequency_times_beta(decoder: Decoder, tmp_path: Path) -> None:
    options = DiepOptions("paper", epochs=4, batch_size=2, ablation="beta", beta_learning_rate=0.3)
    moved, state = moved_scores(decoder, options)
    assert moved == "β" * 8 and not any(bool(alpha.any()) for alpha in state.alphas)
    frequencies = {0: torch.tensor([0.5, 0.1, 0.2, 0.6, 0.3, 0.3]), 2: torch.tensor([0.4, 0.4, 0.3, 0.3, 0.3, 0.3])}
    scores = search(decoder, TOKENS, options, frequencies=frequencies)
    betas = dict(zip((0, 2), (float(beta.detach()) for beta in state.betas), strict=True))
    assert abs(betas[0] - betas[2]) > 0.01, "layers differ"
    assert all(torch.allclose(scores[layer], frequencies[layer] * betas[layer]) for layer in scores)
    started = DiepOptions("gated", ablation="beta").filled()
    assert started.start == "zero", "an α that is never trained needs no gate Fisher"


def test_alpha_and_beta_have_their_own_rates(decoder: Decoder) -> None:
    def distances(**rates: float) -> tuple[float, float]:
        _, state = moved_scores(decoder, DiepOptions("paper", epochs=4, batch_size=2, **rates))
        alphas, betas = torch.cat(state.alphas).detach(), torch.stack(state.betas).detach()
        return float(alphas.abs().max()), float((betas - 1).abs().max())

    both, own = distances(learning_rate=0.01), distances(learning_rate=0.01, beta_learning_rate=0.1)
    assert own[1] > 5 * both[1] and own[0] < 2 * both[0]
    assert distances(alpha_learning_rate=0.0)[0] == 0.0 < distances(alpha_learning_rate=0.0)[1]
    filled = DiepOptions("gated", learning_rate=0.2, beta_learning_rate=0.3).filled()
    assert (filled.alpha_learning_rate, filled.beta_learning_rate) == (0.2, 0.3)


def test_recentering_keeps_the_mean_of_alpha_at_zero_and_can_be_left_out(decoder: Decoder) -> None:
    means = []
    for recenter in (True, False):
        options = DiepOptions("paper", epochs=4, batch_size=2, learning_rate=0.1, recenter=recenter)
        means.append(max(abs(float(alpha.mean())) for alpha in moved_scores(decoder, options)[1].alphas))
    assert means[0] < 1e-7 and means[1] > 1e-3, "Adam's steps do not keep it, although the gradient's sum is zero"


@pytest.mark.parametrize(
    "wrong", [{"fixed_beta": (1.0,)}, {"fixed_beta": (1.0, 0.0)}, {"beta_learning_rate": -1.0}], ids=str
)
def test_values_with_which_no_search_is_possible(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong)).replace("_", "-")):
        replace(DiepOptions(), **wrong).check()  # type: ignore[arg-type]
