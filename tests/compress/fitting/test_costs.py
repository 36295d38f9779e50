"""The costs and sizes of `compress fit`, against naive implementations and files on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from artifacts_for_tests import make_workplace
from conftest import others_slow, save_reference
from family_matrix import ROWS
from safetensors.torch import load_file
from test_prediction_layers import with_prediction_layer
from test_quantized_weight import DIVISIBLE

from compress.fit import stored_bytes
from compress.fitting.candidate import Choice, choice_of, rounding_of
from compress.fitting.costs import OTHERS, Divergence, Factors, Item, Option, Table, least_read, table
from compress.fitting.divergence import Reference
from compress.fitting.measured import bands, corrections_of, weight_file_bytes
from compress.fitting.rounding_costs import DOWN, READERS, rounding_costs
from compress.fitting.sizes import Sizes, kept_levels
from compress.fitting.substitution import rounded, squared_error, with_blocks_of, with_matrices_of
from compress.options.quantize import EMBEDDING, HEAD
from compress.plans.apply import apply
from compress.plans.plan import same_plan
from compress.rounding.mixed_widths import everything_rounded, kinds_of_others, other_matrices
from compress.rounding.quantizer import Quantiser
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.errors import OptionError
from engine.families.tensor_shapes import routed_tensors
from engine.files.safetensors_writer import PAGE_BYTES
from engine.kernels.stored.quantized_weight import quantise
from engine.kernels.stored.scheme import BITS, Scheme

LATENT = ("deepseek_v2", "kimi_k2", "glm4_moe_lite")
FILLED = DIVISIBLE | {family: {"q_lora_rank": 24} for family in LATENT} | {"deepseek": {"moe_intermediate_size": 24}}
"""Sizes that groups of 8 fill."""
TOKENS = torch.randint(3, 96, (6, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("costs")
    make_workplace(path, intermediate_size=96)
    return Checkpoint(path / "model")


def decoder_of(checkpoint: Checkpoint) -> Decoder:
    return Decoder(checkpoint.config, checkpoint.weights(torch.float32)).eval()


def test_the_cost_of_rounding_equals_a_naive_implementation(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to nearest, so that the reference needs no moments; the reference goes through the whole decoder."""

    class Nearest:
        def __init__(self, moment_II: torch.Tensor) -> None:
            pass

        def round_all(self, matrices: list[tuple[torch.Tensor, Scheme]], dtype: torch.dtype) -> list[object]:
            return [quantise(weight, *scheme, dtype) for weight, scheme in matrices]

    monkeypatch.setattr("compress.fitting.rounding_costs.Feedback", Nearest)
    schemes, hidden = [Scheme(8, 16), Scheme(4, 16)], checkpoint.config.hidden_size
    weights = {layer: torch.rand(hidden, dtype=torch.float64) for layer in checkpoint.config.moe_layers}
    found = rounding_costs(checkpoint, TOKENS, weights, schemes, tmp_path / "costs", dtype=torch.float32)
    decoder, seen = decoder_of(checkpoint), {}
    for layer in checkpoint.config.moe_layers:
        block = decoder.layers[layer].feed_forward
        block.observer = lambda x, logits, selection, layer=layer: seen.update({layer: (x, selection)})
    decoder(TOKENS)
    for layer, (x_TD, selection) in seen.items():
        for number, expert in enumerate(decoder.layers[layer].feed_forward.experts):
            token_R, slot_R = (selection.experts == number).nonzero(as_tuple=True)
            x_RD, w_R = x_TD[token_R], selection.weights[token_R, slot_R]
            gate, up, down = (own.detach() for own in expert.projections)
            h_RF = torch.nn.functional.silu(x_RD @ gate.T) * (x_RD @ up.T)
            for place, scheme in enumerate(schemes):
                own = [
                    quantise(each, *scheme, checkpoint.model_dtype).dequantised(torch.float32) for each in (gate, up, down)
                ]
                changed_RF = torch.nn.functional.silu(x_RD @ own[0].T) * (x_RD @ own[1].T)
                for part, off_RD in ((READERS, (changed_RF - h_RF) @ down.T), (DOWN, h_RF @ (own[2] - down).T)):
                    expected = 0.5 * (weights[layer] * (w_R[:, None] * off_RD).double().square()).sum() / TOKENS.numel()
                    assert float(found[layer][part][number, place]) == pytest.approx(float(expected), rel=1e-3, abs=1e-15)


def test_an_interrupted_pass_gives_the_same_costs(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {
        layer: torch.ones(checkpoint.config.hidden_size, dtype=torch.float64) for layer in checkpoint.config.moe_layers
    }

    def costs(directory: Path):
        return rounding_costs(checkpoint, TOKENS, weights, [Scheme(4, 16)], directory, dtype=torch.float32)

    whole, writes = costs(tmp_path / "whole"), []
    from compress.fitting import rounding_costs as module

    write = module._write

    def stops(path: Path, *rest: object) -> None:
        if writes:
            raise KeyboardInterrupt
        writes.append(path)
        write(path, *rest)

    monkeypatch.setattr(module, "_write", stops)
    with pytest.raises(KeyboardInterrupt):
        costs(tmp_path / "parts")
    monkeypatch.setattr(module, "_write", lambda path, *rest: (writes.append(path), write(path, *rest)))
    again = costs(tmp_path / "parts")
    assert len(set(writes)) == len(writes) == len(weights)
    assert all(torch.equal(whole[layer][part], again[layer][part]) for layer in whole for part in whole[layer])


def test_divergence_equals_the_logits_of_whole_models(checkpoint: Checkpoint) -> None:
    names, scheme = other_matrices(checkpoint.config), Scheme(4, 16)
    with Reference(checkpoint, TOKENS, torch.float32) as reference:
        assert reference.divergence(checkpoint) == pytest.approx(0.0, abs=1e-9)
        found = reference.divergence(rounded(checkpoint, names, scheme))
    assert found > 0.0

    def source(name: str) -> torch.Tensor:
        tensor = checkpoint.tensor(name).float()
        return quantise(tensor, *scheme, torch.float32).dequantised(torch.float32) if name in names else tensor

    p, q = (own(TOKENS)[:, :-1].log_softmax(-1) for own in (decoder_of(checkpoint), Decoder(checkpoint.config, source)))
    assert found == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)


def test_the_embedding_and_the_head_of_another_model_count(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Matrices of a result that was written, read one by one, give the divergence of the whole result."""
    options = everything_rounded(checkpoint.config, 3, 32)
    names = [EMBEDDING, HEAD, *other_matrices(checkpoint.config)]
    apply(same_plan(checkpoint.config.experts_by_layer), checkpoint, tmp_path / "low", quantiser=Quantiser(options))
    low = Checkpoint(tmp_path / "low")
    with Reference(checkpoint, TOKENS, torch.float32) as reference:
        outside = reference.divergence(with_matrices_of(checkpoint, low, names[:2]))
        experts = [with_blocks_of(low, checkpoint.config.moe_layers, torch.float32, "cpu")]
        whole = reference.divergence(with_matrices_of(checkpoint, low, names), *experts)
        assert whole == pytest.approx(reference.divergence(low), rel=1e-4)
    p, q = (Decoder(checkpoint.config, source)(TOKENS)[:, :-1].log_softmax(-1) for source in (
        checkpoint.source(torch.float32),
        lambda name: (low if name in names[:2] else checkpoint).tensor(name, torch.float32),
    ))  # fmt: skip
    assert outside == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)


def test_the_squared_error_of_some_rows_stands_for_all(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    names, scheme = other_matrices(checkpoint.config)[:2], Scheme(2, 16)
    weights = [checkpoint.tensor(name).float() for name in names]
    off = [quantise(own, *scheme, checkpoint.model_dtype).dequantised(torch.float32) - own for own in weights]
    assert squared_error(checkpoint, names, scheme) == pytest.approx(sum(float(own.square().sum()) for own in off))
    assert {len(own) % 7 for own in weights} != {0}, "the rows are no multiple of those that are read"
    monkeypatch.setattr("compress.fitting.substitution.ERROR_ROWS", 7)
    steps = [-(-len(own) // 7) for own in off]
    read = [own[::step] for step, own in zip(steps, off, strict=True)]
    some = sum(len(own) / len(rows) * float(rows.square().sum()) for own, rows in zip(off, read, strict=True))
    assert all(len(rows) <= 7 for rows in read)
    assert squared_error(checkpoint, names, scheme) == pytest.approx(some)


def test_kinds_are_the_matrices_of_one_place_in_all_layers(checkpoint: Checkpoint) -> None:
    kinds = kinds_of_others(checkpoint.config)
    layers = range(len(checkpoint.config.layers))
    projections = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    assert list(kinds) == [*projections, EMBEDDING, HEAD]
    assert kinds[projections[1]] == [f"model.layers.{layer}.{projections[1]}" for layer in layers]
    everything = everything_rounded(checkpoint.config, 4, 16).names(checkpoint.config)
    named = {name for own in kinds.values() for name in own}
    assert named == set(everything) - routed_tensors(checkpoint.config)


def scores_of(checkpoint: Checkpoint, seed: int = 0) -> dict[int, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    widths = checkpoint.config.ffn_widths()
    return {
        layer: [torch.rand(width, generator=generator, dtype=torch.float64) for width in own]
        for layer, own in widths.items()
    }


def table_for(
    checkpoint: Checkpoint,
    multiple: int = 32,
    least: int = 2,
    *,
    group_size: int = 32,
    bits: tuple[int, ...] = tuple(sorted(BITS, reverse=True)),
    costs_of_units: float = 1.0,
) -> tuple[Table, dict[int, list[torch.Tensor]]]:
    scores = {layer: [costs_of_units * score for score in own] for layer, own in scores_of(checkpoint).items()}
    generator = torch.Generator().manual_seed(1)
    rounding = {
        layer: {part: torch.rand(len(own), len(bits), generator=generator).double().cumsum(1) for part in (READERS, DOWN)}
        for layer, own in scores.items()
    }
    shares = {layer: [0.25] * len(own) for layer, own in scores.items()}
    kinds = kinds_of_others(checkpoint.config)
    others = {kind: {each: 0.1 * place for place, each in enumerate(bits)} for kind in kinds}
    made = table(
        *(Sizes(checkpoint, group_size), bits, scores, rounding, shares, others),
        multiple=multiple,
        least_experts=least,
        keeps_plain=True,
    )
    return made, scores


@pytest.mark.parametrize("share", [0.15, 0.3, 0.6, 0.95])
def test_the_files_are_as_large_as_counted(checkpoint: Checkpoint, tmp_path: Path, share: float) -> None:
    """The counted size is an upper bound, and near: headers are counted with their longest offsets."""
    made, scores = table_for(checkpoint)
    least, most = made.least_and_most()
    options = made.chosen(least + share * (most - least), None)
    choice = choice_of(made.items, options, scores, checkpoint.config)
    quantiser = Quantiser(rounding_of(choice, 32)) if choice.bits else None
    apply(choice.plan, checkpoint, tmp_path / "result", quantiser=quantiser)
    size, counted = weight_file_bytes(tmp_path / "result"), made.total_bytes(options)
    assert size <= counted <= least + share * (most - least)
    tensors = sum(len(json.loads(_header(path))) for path in (tmp_path / "result").glob("*.safetensors"))
    assert counted - size < 12 * tensors + PAGE_BYTES + 192


def _header(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


@pytest.mark.parametrize("family", others_slow(ROWS, "mixtral", "qwen2_moe"))
def test_sizes_of_every_family(family: str, tmp_path: Path) -> None:
    """The whole model and a small one have at most the counted size, and the small one runs."""
    save_reference(family, tmp_path / "model", **FILLED.get(family, {}))
    checkpoint = Checkpoint(tmp_path / "model")
    made, scores = table_for(checkpoint, 8, checkpoint.config.architecture.least_experts, group_size=8, bits=(8, 4))
    least, most = made.least_and_most()
    for name, size in (("whole", most), ("small", least + 0.1 * (most - least))):
        options = made.chosen(size, None)
        choice = choice_of(made.items, options, scores, checkpoint.config)
        quantiser = Quantiser(rounding_of(choice, 8)) if choice.bits else None
        apply(choice.plan, checkpoint, tmp_path / name, quantiser=quantiser)
        assert weight_file_bytes(tmp_path / name) <= made.total_bytes(options) <= size
    assert choice.removes and choice.bits
    small = Checkpoint(tmp_path / "small")
    assert decoder_of(small)(TOKENS).isfinite().all()


def written(choice: Choice, source: Checkpoint, path: Path) -> dict[str, torch.Tensor]:
    """Write a choice and return its tensors."""
    apply(choice.plan, source, path, quantiser=Quantiser(rounding_of(choice, 8)) if choice.bits else None)
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("bits", [(), (8, 4)])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_the_unchanged_model_alone_has_layers_for_prediction(family: str, bits: tuple[int, ...], tmp_path: Path) -> None:
    """They count in no other choice, and no result has them: not one with equally many experts everywhere either."""
    source, _, prefix = with_prediction_layer(family, tmp_path / "source", **FILLED.get(family, {}))
    made, scores = table_for(source, 8, source.config.architecture.least_experts, group_size=8, bits=bits)
    whole = made.unchanged()
    assert whole is not None
    same = written(choice_of(made.items, whole, scores, source.config), source, tmp_path / "whole")
    assert same.keys() == load_file(tmp_path / "source" / "model.safetensors").keys()
    assert weight_file_bytes(tmp_path / "whole") <= stored_bytes(source)
    pairs = zip(made.items, whole, strict=True)
    equal = [Option(0) if item.layer != OTHERS and item.number == 0 else own for item, own in pairs]
    for name, options in (("equal", equal), ("ragged", made.chosen(0.8 * made.total_bytes(whole), None))):
        stored = written(choice_of(made.items, options, scores, source.config), source, tmp_path / name)
        size, counted = weight_file_bytes(tmp_path / name), made.total_bytes(options)
        assert counted - 12 * len(stored) - PAGE_BYTES - 192 < size <= counted, name
        assert not [own for own in stored if own.startswith(prefix)]


@pytest.mark.parametrize("share", [1.0, 1.0005, 1.01, 1.05, 1.2, 1.5, 1.8])
def test_what_a_token_reads_is_reached_from_the_least_on(checkpoint: Checkpoint, share: float) -> None:
    """Experts that are cheap to remove leave, and their tokens read others: the sums over items know nothing of that."""
    made, _ = table_for(checkpoint, costs_of_units=1e-3)
    least = least_read(Sizes(checkpoint, 32), (16, *sorted(BITS)), multiple=32, least_experts=2)
    target = share * least
    read = made.read_bytes(made.chosen(None, target))
    assert read <= target and (read >= 0.97 * target or share < 1.2)


def test_levels_by_hand() -> None:
    assert kept_levels(64, 16, 16) == [64, 48, 32, 16]
    assert kept_levels(70, 16, 16) == [70, 64, 48, 32, 16]
    assert kept_levels(64, 8, 3) == [64, 32]  # 56 … 8 in steps of four multiples
    assert kept_levels(16, 16, 16) == [16]


def test_costs_of_an_expert_by_hand(checkpoint: Checkpoint) -> None:
    """The cheapest units go first; rounding is added for experts that stay."""
    made, scores = table_for(checkpoint)
    item, score_F = made.items[0], scores[0][0]
    width = len(score_F)
    place = item.options.index(Option(width - 32, 8, 4))
    assert item.removal[place] == pytest.approx(float(score_F.sort().values[:32].sum()))
    whole = item.options.index(Option(width, 8, 4))
    assert item.rounding[place] == item.rounding[whole] > 0 and item.removal[whole] == 0.0
    entries = item.bytes[place] - item.read[place] / 0.25  # in headers, which no token reads
    assert 0 < entries < 12 * 200


def test_the_experts_that_cost_most_cannot_go(checkpoint: Checkpoint) -> None:
    made, scores = table_for(checkpoint, least=3)
    for layer, own in scores.items():
        totals = [float(each.sum()) for each in own]
        staying = set(sorted(range(len(own)), key=lambda number: -totals[number])[:3])
        for item in made.items:
            if item.layer == layer:
                assert (Option(0) not in item.options) == (item.number in staying)


def test_factors_by_hand() -> None:
    """Layers 0 and 1 are one band. The parts add up to 0.2 and 0.3, the whole has 0.1 and 0.6."""
    parts = {"0": [0.15, 0.1], "2": [0.05, 0.1], "-1": [0.0, 0.1]}
    point = {"measured_kl": 0.7, "measured_kl_of_removal": 0.1, "measured_kl_of_parts": parts}
    predicted = {0: Divergence(0.1, 0.1), 1: Divergence(0.2, 0.1), 2: Divergence(0.0, 0.4), -1: Divergence(0.0, 0.2)}
    known = {2: Factors(8.0, 3.0)}
    found = corrections_of(point, predicted, known)
    assert found[0] == found[1] == Factors(pytest.approx(0.5 * 0.15 / 0.3), pytest.approx(2.0 * 0.1 / 0.2))
    assert found[2] == Factors(8.0, pytest.approx(2.0 * 0.1 / 0.4)), "nothing was removed there"
    assert found[-1] == Factors(1.0, pytest.approx(2.0 * 0.1 / 0.2))
    kept = corrections_of(point, predicted, known, keeps_rounding=True)
    assert kept[0] == Factors(found[0].removal, 1.0) and kept[2] == Factors(8.0, 3.0)


def test_bands_by_hand() -> None:
    assert bands([0, 1, 2]) == [[0], [1], [2]]
    assert bands([*range(1, 13)]) == [[1, 2], [3], [4], [5, 6], [7, 8], [9], [10], [11, 12]]


def test_a_choice_numbers_experts_anew(checkpoint: Checkpoint) -> None:
    """Expert 0 of layer 0 goes, so that expert 1 is expert 0 of the result."""
    made, scores = table_for(checkpoint, least=1)
    options = [Option(0) if (item.layer, item.number) == (0, 0) else item.options[0] for item in made.items]
    index = next(place for place, item in enumerate(made.items) if (item.layer, item.number) == (0, 1))
    options[index] = Option(len(scores[0][1]), 8, 4)
    choice = choice_of(made.items, options, scores, checkpoint.config)
    assert choice.removes and choice.plan.layers[0][0].origin == 1
    assert {name.split("experts.")[1]: bits for name, bits in choice.bits.items()} == {
        "0.w1.weight": 8, "0.w3.weight": 8, "0.w2.weight": 4,
    }  # fmt: skip


def test_the_last_expert_alone_is_missed(checkpoint: Checkpoint) -> None:
    """The experts before it keep their numbers."""
    made, scores = table_for(checkpoint, least=1)
    last = len(scores[0]) - 1
    whole = [item.options[0] for item in made.items]
    fewer = [Option(0) if (item.layer, item.number) == (0, last) else item.options[0] for item in made.items]
    assert not choice_of(made.items, whole, scores, checkpoint.config).removes
    assert choice_of(made.items, fewer, scores, checkpoint.config).removes


def test_a_table_without_removal_has_widths_alone(checkpoint: Checkpoint) -> None:
    made, _ = table_for(checkpoint)
    widths, whole = made.without_removal(), [item.options[0].units for item in made.items]
    for item, own, units in zip(made.items, widths.items, whole, strict=True):
        assert {option.units for option in own.options} == {units} and not any(own.removal)
        assert own.bytes == [item.bytes[item.options.index(option)] for option in own.options]
    assert widths.total_bytes(widths.chosen(None, None)) == made.least_and_most()[1]


def test_bytes_that_a_token_reads_by_hand() -> None:
    """Three experts of 100 bytes with shares of 0.9, 0.7 and 0.4: two for a token. Their tokens go to those that stay."""
    items = [Item(0, n, [Option(1), Option(0)], [0.0] * 2, [0.0] * 2, [100, 0], [share * 100] * 2, share)
             for n, share in enumerate((0.9, 0.7, 0.4))]  # fmt: skip
    items.append(Item(OTHERS, 0, [Option(0)], [0.0], [0.0], [7], [7.0]))
    made = Table(items)
    rest = Option(0)
    assert made.read_bytes([Option(1), Option(1), Option(1), rest]) == pytest.approx(207)
    assert made.read_bytes([Option(1), Option(0), Option(1), rest]) == pytest.approx(207)
    assert made.read_bytes([Option(0), Option(0), Option(1), rest]) == pytest.approx(107)
    with pytest.raises(OptionError, match="the least that is possible is 207"):
        made.chosen(None, 150)
    rows = [replace(item, bytes=[104, 0], read=[item.read[0] + 4, item.read[0]], rows=4) for item in items[:3]]
    with_router = Table([*rows, items[3]])  # every token reads the rows of all that stay
    assert with_router.read_bytes([Option(1), Option(1), Option(1), rest]) == pytest.approx(219)
    assert with_router.read_bytes([Option(1), Option(0), Option(1), rest]) == pytest.approx(215)


def test_experts_of_a_layer_get_one_option_if_asked() -> None:
    """Alone, the first expert would keep 2 bytes and the second 1; together both keep 1, since 2 and 2 are too many."""
    cheap, dear = [0.0, 0.1], [0.0, 5.0]
    options = [Option(1, 8), Option(1, 4)]
    items = [Item(0, n, options, [0.0] * 2, cost, [2, 1], [2.0, 1.0]) for n, cost in enumerate((dear, cheap))]
    assert Table(items).chosen(3, None) == [Option(1, 8), Option(1, 4)]
    assert Table(items, by_layer=True).chosen(3, None) == [Option(1, 4), Option(1, 4)]
    assert Table(items, by_layer=True).chosen(4, None) == [Option(1, 8), Option(1, 8)]


def test_items_without_an_option_cost_infinity() -> None:
    items = [
        Item(0, 0, [Option(2), Option(1)], [0.0, 1.0], [0.0, 0.0], [2, 1], [2.0, 1.0]),
        Item(-1, 0, [Option(0)], [0.0], [0.5], [3], [3.0]),
    ]
    assert Table(items).costs({0: Factors(2.0, 9.0), -1: Factors(9.0, 4.0)}).tolist() == [[0.0, 2.0], [2.0, float("inf")]]
