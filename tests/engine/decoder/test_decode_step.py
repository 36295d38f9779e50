"""A whole decoding step in one compiled call: bit-identical to layer by layer, and the cases where it is not used."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, FURTHER_FAMILIES, save_reference
from kernels_for_tests import kernels, needs_integers
from nearness import is_as_near
from packages_for_tests import needs_numba
from torch import Tensor

import engine.kernels.kernel_choice
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.block_pool import BlockTable
from engine.decoder.experts import Expert
from engine.decoder.kv_cache import KeyValueCache, position_bytes, state_bytes
from engine.decoder.model import Decoder, routed_by
from engine.decoder.paged_cache import PagedBatch, PagedCache
from engine.decoder.routing import Selection, Skipping
from engine.decoder.step import tables
from engine.decoder.step.decode_step import DecodeStep
from engine.kernels.kernel_choice import DECODING, TORCH, KernelChoice
from engine.kernels.stored.quantized_weight import QuantizedWeight, quantise

TOKENS = torch.randint(3, 96, (3, 11), generator=torch.Generator().manual_seed(1))
NOT_WHOLE = {"llama4_text", "phimoe", "minimax"}
"""Families with features that only the layers implement."""
NEARLY_TIED = {"qwen3_5_moe_text", "glm4_moe_lite"}
"""Families in whose first sequence two experts tie, or a number lies between two roundings: either result is right."""
HAVE_STATES = {"qwen3_next", "qwen3_5_moe_text", "qwen3_5_text", "lfm2_moe", "nemotron_h"}
"""Families whose states cannot forget tokens, which are therefore read one by one."""
CHOOSE_OUTSIDE = ("llama_moe",)
"""Families whose experts are chosen outside of the compiled step."""
GREEDY = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
"""DeepSeek V2-Lite's choice, by a softmax in float32 over all experts."""
SERVED = [family for family in (*FAMILIES, *FURTHER_FAMILIES) if family not in NOT_WHOLE]


def layer_by_layer(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_step", lambda *given: None)


def served(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that records whether each step was computed whole."""
    taken: list[bool] = []
    own = decoder._step

    def step(*given: Any) -> Tensor | None:
        made = own(*given)
        taken.append(made is not None)
        return made

    monkeypatch.setattr(decoder, "_step", step)
    return taken


def decoded(
    decoder: Decoder,
    tokens_BL: Tensor,
    at_once: int = 1,
    kept: torch.dtype = torch.bfloat16,
    choice: KernelChoice = DECODING,
) -> Tensor:
    """Return the logits after 4 tokens, reading `at_once` tokens at a time. kept: dtype of keys and values."""
    cache = KeyValueCache(decoder.config, len(tokens_BL), tokens_BL.shape[1], kept)
    with torch.inference_mode():
        decoder.last_logits(tokens_BL[:, :4], None, cache)
        parts = tokens_BL[:, 4:].split(at_once, dim=1)
        read = decoder if at_once == 1 else decoder.step_logits
        return torch.cat([read(part, cache=cache, choice=choice) for part in parts], dim=1)


def served_together(decoder: Decoder, tokens_BL: Tensor, kept: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the logits of three steps of a paged cache, where texts have different lengths and lie in several blocks."""
    config = decoder.config
    size = position_bytes(config, kept) * 96 + state_bytes(config, kept) * len(tokens_BL)
    cache = PagedCache(config, size, kept, block_size=4, sequences=len(tokens_BL))
    texts, tables, found = [row.tolist() for row in tokens_BL], [BlockTable() for _ in tokens_BL], []
    with torch.inference_mode():
        for row, (text, table) in enumerate(zip(texts, tables, strict=True)):
            cache.pool.extend(table, 6 + row)
            decoder.last_logits(torch.tensor([text[: 6 + row]]), None, PagedBatch(cache, [table], [6 + row], [0]))
            cache.pool.fill(table, text, 6 + row)
        for _ in range(3):
            new_B1 = torch.tensor([[text[table.length]] for text, table in zip(texts, tables, strict=True)])
            for table in tables:
                cache.pool.extend(table, table.length + 1)
            found.append(decoder.last_logits(new_B1, None, PagedBatch(cache, tables, None, [0] * len(tables)), DECODING))
            for text, table in zip(texts, tables, strict=True):
                cache.pool.fill(table, text, table.length + 1)
    return torch.stack(found)


@needs_numba
@pytest.mark.parametrize("family", sorted(HAVE_STATES))
def test_several_positions_at_once_go_through_layers_with_a_state(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.bfloat16))
    logits = []
    for choice in (DECODING, TORCH):
        cache = KeyValueCache(decoder.config, 1, 7, torch.bfloat16)
        with torch.inference_mode():
            decoder.last_logits(TOKENS[:1, :4], None, cache)
            logits.append(decoder(TOKENS[:1, 4:7], cache=cache, choice=choice).float())
            with pytest.raises(AssertionError, match="cannot forget"):
                decoder.step_logits(
                    TOKENS[:1, 4:7], cache=KeyValueCache(decoder.config, 1, 7, torch.bfloat16), choice=choice
                )
    assert float((logits[0] - logits[1]).abs().max()) <= 0.05 * float(logits[1].abs().max())


@needs_numba
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in SERVED),
        ("mixtral", {"sliding_window": 4}),
        ("granitemoe", {"residual_multiplier": 0.3}),
        ("deepseek_v2", GREEDY),
    ],
)
def test_a_step_gives_the_bits_of_the_layers(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_reference(family, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)
    whole, layers = (Decoder(checkpoint.config, checkpoint.source(torch.bfloat16)) for _ in range(2))
    layer_by_layer(layers, monkeypatch)
    step, taken = whole._step, served(whole, monkeypatch)
    first = int(family in NEARLY_TIED)
    for tokens_BL, at_once in ((TOKENS[first:], 1), (TOKENS[first : first + 1], 1), (TOKENS[first : first + 1], 3)):
        if at_once == 1 or family not in HAVE_STATES:
            assert torch.equal(decoded(whole, tokens_BL, at_once), decoded(layers, tokens_BL, at_once))
    assert torch.equal(served_together(whole, TOKENS[first:]), served_together(layers, TOKENS[first:]))
    assert taken and all(taken)
    assert not is_called_back(step)
    assert (step._calls > 0) == (family in CHOOSE_OUTSIDE)


@needs_numba
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "gemma4_text")),
        ("mixtral", {"head_dim": 32}),
        ("deepseek_v3", {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_head_dim": 40}),
    ],
)
def test_a_step_reads_keys_and_values_of_8_bits_as_they_are_stored(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families with plain, grouped, latent and windowed attention, and with a state beside it; sizes that are multiplied as
    integers."""
    save_reference(family, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)
    whole, layers = (Decoder(checkpoint.config, checkpoint.source(torch.bfloat16)) for _ in range(2))
    layer_by_layer(layers, monkeypatch)
    taken = served(whole, monkeypatch)
    for tokens_BL, at_once in ((TOKENS, 1), (TOKENS[:1], 3)):
        if at_once == 1 or family not in HAVE_STATES:
            assert_same(*(decoded(each, tokens_BL, at_once, torch.int8) for each in (whole, layers)))
    assert_same(*(served_together(each, TOKENS, torch.int8) for each in (whole, layers)))
    assert taken and all(taken)
    found, expected = (decoded(whole, TOKENS[:1], 1, torch.int8, choice).float() for choice in (DECODING, TORCH))
    assert float((found - expected).abs().max()) <= 0.05 * float(expected.abs().max())
    exact = decoded(whole, TOKENS[:1], 1, torch.bfloat16, TORCH).float()
    assert not torch.equal(found, exact), "rounding to 8 bits changes logits"


def assert_same(own: Tensor, plain: Tensor) -> None:
    """Require the same bits, or without products of pairs of bfloat16 nearly the same: there some logits of the step are
    rounded to neighbors of those of the layers, with caches of 16 bits too."""
    assert torch.equal(own, plain) or not kernels.MULTIPLIES_BFLOAT16
    assert float((own.float() - plain.float()).abs().max()) <= 2**-7 * float(plain.float().abs().max())


def is_called_back(step: DecodeStep) -> bool:
    """Return whether the last step called the attention of some layer back."""
    assert step._records is not None
    return bool((step._records.tables.layers["mixes"] == kernels.OUTSIDE).any())


@needs_integers
@pytest.mark.parametrize(
    "family", ["qwen3_next", "qwen3_5_moe_text", "nemotron_h", "lfm2_moe", "mixtral", "deepseek_v3", "glm4_moe_lite"]
)
def test_some_projections_have_few_bits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some projections of a layer are in 8 bits, and others are not."""
    save_reference(family, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    plain = checkpoint.source(torch.bfloat16)

    def weights(name: str) -> Any:
        is_projection = any(part in name for part in ("in_proj_qkv", "in_proj.", "k_proj", "kv_a_proj"))
        return quantise(plain(name), 8, 32, torch.bfloat16) if is_projection else plain(name)

    whole, layers = (Decoder(checkpoint.config, weights) for _ in range(2))
    layer_by_layer(layers, monkeypatch)
    step, taken = whole._step, served(whole, monkeypatch)
    first = int(family in NEARLY_TIED)
    assert torch.equal(decoded(whole, TOKENS[first:]), decoded(layers, TOKENS[first:]))
    assert taken and all(taken) and not is_called_back(step)


@needs_integers
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_few_bits(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_reference("mixtral", tmp_path, **wide)
    checkpoint = Checkpoint(tmp_path)
    plain = checkpoint.source(torch.bfloat16)

    def weights(name: str) -> Any:
        is_matrix = plain(name).dim() == 2 and "gate.weight" not in name and "embed" not in name
        return quantise(plain(name), bits, 32, torch.bfloat16) if is_matrix else plain(name)

    whole, layers = (Decoder(checkpoint.config, weights) for _ in range(2))
    assert isinstance(whole.head, QuantizedWeight)
    layer_by_layer(layers, monkeypatch)
    taken = served(whole, monkeypatch)
    clear = TOKENS[:2]  # in the third sequence two experts tie on some processors, and either choice is right
    assert torch.equal(decoded(whole, clear), decoded(layers, clear))
    assert taken and all(taken)


def narrowed(decoder: Decoder, multiple: int = 1, bits: int | None = None) -> Decoder:
    """Keep random hidden units of the experts, a multiple of `multiple`: the same number in the second mixture of layers,
    and another number in each expert of the others. With `bits`, experts are then quantized."""
    generator = torch.Generator().manual_seed(0)
    for layer, block in enumerate(decoder.moe_blocks):
        most = block.experts[0].width // multiple
        for index, expert in enumerate(block.experts):
            width = most // 2 if layer == 1 else [1, most, *range(2, most)][index % most]
            units = torch.randperm(most * multiple, generator=generator)[: width * multiple].sort().values
            gate, up, down, *biases = expert.projections
            parts = [gate[units], up[units], down[:, units].contiguous()]
            parts = parts if bits is None else [quantise(part, bits, 32, torch.bfloat16) for part in parts]
            extra = [biases[0][units], biases[1][units], biases[2]] if biases else []
            block.experts[index] = Expert(*parts, *extra, swiglu=expert.swiglu)
        assert len({expert.width for expert in block.experts}) == (1 if layer == 1 else min(most, len(block.experts)))
    return decoder


@needs_numba
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_experts_of_differing_widths(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step gives the bits of the layers, and is as near to the logits in float64 as torch is."""
    save_reference(family, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    plain = checkpoint.source(torch.bfloat16)
    whole, layers = (narrowed(Decoder(checkpoint.config, plain)) for _ in range(2))
    layer_by_layer(layers, monkeypatch)
    taken = served(whole, monkeypatch)
    clear = TOKENS[:2]  # in the third sequence two experts tie on some processors, and either choice is right
    for tokens_BL, at_once in ((clear, 1), (clear[:1], 1), (clear[:1], 3)):
        assert torch.equal(decoded(whole, tokens_BL, at_once), decoded(layers, tokens_BL, at_once))
    assert taken and all(taken)
    compiled = decoded(whole, clear)
    exact = narrowed(Decoder(checkpoint.config, lambda name: plain(name).double()))
    with torch.inference_mode():
        exact_logits = exact(clear)[:, 4:]
    monkeypatch.setattr(engine.kernels.kernel_choice, "_load_kernels", lambda: None)
    by_torch = decoded(whole, clear)
    errors = [(made.double() - exact_logits).norm(dim=-1) for made in (compiled, by_torch)]
    assert is_as_near(*errors) and errors[0].median() < 0.05 * exact_logits.norm(dim=-1).median()


@needs_integers
@pytest.mark.parametrize("bits", [4, 8])
def test_low_bit_experts_of_differing_widths(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference("mixtral", tmp_path, hidden_size=64, intermediate_size=192)
    checkpoint = Checkpoint(tmp_path)
    whole, layers = (narrowed(Decoder(checkpoint.config, checkpoint.source(torch.bfloat16)), 32, bits) for _ in range(2))
    layer_by_layer(layers, monkeypatch)
    taken = served(whole, monkeypatch)
    clear = TOKENS[:2]  # as above
    assert torch.equal(decoded(whole, clear), decoded(layers, clear))
    assert taken and all(taken)


@needs_numba
@pytest.mark.parametrize("threshold", [0.7, torch.tensor([0.0, 0.9, 2.0])])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("importance", [None, 26.0])
def test_skipping_and_what_observers_see(
    threshold: float | Tensor, normalise: bool, importance: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_reference("mixtral", tmp_path, num_experts_per_tok=3)
    checkpoint = Checkpoint(tmp_path)
    importance_1 = None if importance is None else torch.tensor([importance])
    told: list[list[tuple[Tensor, Tensor, Selection]]] = []
    made = []
    for is_whole in (True, False):
        decoder = Decoder(checkpoint.config, checkpoint.source(torch.bfloat16))
        if not is_whole:
            layer_by_layer(decoder, monkeypatch)
        torch.manual_seed(0)
        experts = len(decoder.moe_blocks[0].experts)
        gammas = [(torch.rand(2), torch.rand(experts, experts) * 2) for _ in decoder.moe_blocks]
        rules = [
            Skipping(block.routing, gamma1, gamma2, threshold, normalise, 1 + layer % 2, importance_1)
            for layer, (block, (gamma1, gamma2)) in enumerate(zip(decoder.moe_blocks, gammas, strict=True))
        ]
        seen: list[tuple[Tensor, Tensor, Selection]] = []
        told.append(seen)
        for block in decoder.moe_blocks:
            block.observer = observer(seen)
        with routed_by(decoder, rules):
            taken = served(decoder, monkeypatch) if is_whole else [True]
            tokens = TOKENS if isinstance(threshold, Tensor) else TOKENS[:2]
            cache = KeyValueCache(checkpoint.config, len(tokens), 8, torch.bfloat16)
            with torch.inference_mode():
                steps = [decoder.last_logits(tokens[:, i : i + 1], None, cache, DECODING) for i in range(6)]
            made.append(torch.stack(steps))
        assert taken and all(taken)
    skipped = sum(int((selection.experts < 0).sum()) for _, _, selection in told[0])
    assert torch.equal(*made) and skipped > 0
    important = [(x.float().abs().sum(1) > (importance or 0.0), selection) for x, _, selection in told[0]]
    assert importance is None or 0.1 < float(torch.cat([is_important for is_important, _ in important]).float().mean()) < 0.9
    assert importance is None or all((selection.experts[is_important] >= 0).all() for is_important, selection in important)
    for (x, logits, whole), (same_x, same_logits, each) in zip(*told, strict=True):
        assert torch.equal(x, same_x) and torch.equal(logits, same_logits)
        for one, other in zip(by_expert(whole), by_expert(each), strict=True):
            assert one == pytest.approx(other, rel=1e-6)


def by_expert(selection: Selection) -> list[dict[int, float]]:
    """Return each token's experts with their weights, because experts of equal logits may come in any order."""
    rows = zip(selection.experts.tolist(), selection.weights.tolist(), strict=True)
    return [dict(zip(experts, weights, strict=True)) for experts, weights in rows]


def observer(seen: list[tuple[Tensor, Tensor, Selection]]) -> Callable[[Tensor, Tensor, Selection], None]:
    return lambda x_TD, logits_TN, selection: seen.append((x_TD.clone(), logits_TN.clone(), selection))


@needs_numba
def test_what_the_kernels_do_not_know_goes_through_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference("mixtral", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.bfloat16))
    expected = decoded(decoder, TOKENS)
    taken = served(decoder, monkeypatch)
    watched: list[int] = []
    decoder.moe_blocks[1].expert_observer = lambda index, output, weight: watched.append(index)
    decoded(decoder, TOKENS)
    assert watched and not any(taken)
    decoder.moe_blocks[1].expert_observer = None
    taken.clear()

    class Reversed:
        def __init__(self, base: Any) -> None:
            self.base = base

        def __call__(self, logits_TN: Tensor) -> Selection:
            chosen: Selection = self.base(-logits_TN)
            return chosen

    with routed_by(decoder, [Reversed(block.routing) for block in decoder.moe_blocks]):
        assert not torch.equal(decoded(decoder, TOKENS), expected)
    assert not any(taken)
    taken.clear()
    assert torch.equal(decoded(decoder, TOKENS), expected) and all(taken)  # its own rule is used again
    cache = KeyValueCache(checkpoint.config, 1, 4, torch.float16)
    with torch.inference_mode():
        decoder.last_logits(TOKENS[:1, :1], None, cache, DECODING)
    assert not taken[-1]


@needs_numba
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_attention_that_is_called_back_gives_the_same_bits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_reference(family, tmp_path)
    for name in ("_attends", "_attends_to_latents"):
        monkeypatch.setattr(tables, name, lambda *given: False)
    checkpoint = Checkpoint(tmp_path)
    whole, layers = (Decoder(checkpoint.config, checkpoint.source(torch.bfloat16)) for _ in range(2))
    layer_by_layer(layers, monkeypatch)
    step, taken = whole._step, served(whole, monkeypatch)
    for tokens_BL, at_once in ((TOKENS, 1), (TOKENS[:1], 3)):
        assert torch.equal(decoded(whole, tokens_BL, at_once), decoded(layers, tokens_BL, at_once))
    assert torch.equal(served_together(whole, TOKENS), served_together(layers, TOKENS))
    assert taken and all(taken) and is_called_back(step)


def with_attention_outside(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Return a decoder whose step calls its attention back."""
    save_reference("deepseek_v3", directory)
    monkeypatch.setattr(tables, "_attends_to_latents", lambda *given: False)
    checkpoint = Checkpoint(directory)
    return Decoder(checkpoint.config, checkpoint.source(torch.bfloat16))


@needs_numba
@pytest.mark.parametrize("part", ["attention", "choice"])
def test_an_error_of_a_part_that_is_called_back_ends_the_step(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = with_attention_outside(tmp_path, monkeypatch)
    expected = decoded(decoder, TOKENS)

    def fails(*given: Any, **options: Any) -> Tensor:
        raise MemoryError("no more")

    with monkeypatch.context() as patched:
        if part == "attention":
            patched.setattr(decoder.layers[1].attention, "forward", fails)
        else:
            decoder.moe_blocks[0].observer = lambda *seen: None  # logits in float32 are seen outside
            patched.setattr(decoder.moe_blocks[0], "logits", fails)
        cache = KeyValueCache(decoder.config, 1, 4, torch.bfloat16)
        with pytest.raises(MemoryError, match="no more"):
            decoder(TOKENS[:1, :1], cache=cache, choice=DECODING)
    assert torch.equal(decoded(decoder, TOKENS), expected), "the next step is none the worse"


@needs_numba
def test_observers_see_choices_that_are_called_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference("deepseek_v3", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    whole, layers = (Decoder(checkpoint.config, checkpoint.source(torch.bfloat16)) for _ in range(2))
    layer_by_layer(layers, monkeypatch)
    seen: dict[str, list[tuple[Tensor, ...]]] = {"whole": [], "layers": []}
    for name, decoder in (("whole", whole), ("layers", layers)):
        for block in decoder.moe_blocks:
            block.observer = lambda x, logits, selection, own=seen[name]: own.append((x.clone(), logits, *selection))
        decoded(decoder, TOKENS[:2])
    assert len(seen["whole"]) == len(seen["layers"]) > 0
    for one, other in zip(seen["whole"], seen["layers"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@needs_numba
@pytest.mark.parametrize("part", ["_mix", "_choose"])
def test_a_call_that_is_lost_to_an_interrupt_ends_the_step(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops an interrupt before the first line of a function that compiled code calls."""
    decoder = with_attention_outside(tmp_path, monkeypatch)
    decoder.moe_blocks[0].observer = lambda *seen: None
    expected, outside = decoded(decoder, TOKENS), decoder._step._records.outside
    setattr(outside, part, lambda *given: None)
    cache = KeyValueCache(decoder.config, 1, 4, torch.bfloat16)
    with pytest.raises(KeyboardInterrupt), torch.inference_mode():
        decoder(TOKENS[:1, :1], cache=cache, choice=DECODING)
    delattr(outside, part)
    assert torch.equal(decoded(decoder, TOKENS), expected)


@needs_numba
def test_a_decoder_that_decoded_is_copied_and_used_by_two_threads(tmp_path: Path) -> None:
    save_reference("deepseek_v3", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.bfloat16))
    expected = decoded(decoder, TOKENS)
    shared: dict[int, object] = {id(own): own for own in (decoder.config, decoder.rotary)}
    assert torch.equal(decoded(copy.deepcopy(decoder, shared), TOKENS), expected)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(made, expected) for made in pool.map(lambda _: decoded(decoder, TOKENS), range(12)))


@needs_numba
def test_a_decoder_that_decoded_goes_with_its_last_reference(tmp_path: Path) -> None:
    save_reference("deepseek_v3", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.bfloat16))
    decoded(decoder, TOKENS)
    layers, weight = weakref.ref(decoder.layers), weakref.ref(decoder.moe_blocks[0].router_ND)
    gc.disable()
    try:
        del decoder
        assert layers() is None and weight() is None
    finally:
        gc.enable()


def test_moved_weights_are_read_where_they_are(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    decoder, other = (Decoder(checkpoint.config, checkpoint.source(torch.bfloat16)) for _ in range(2))
    before = decoded(decoder, TOKENS)
    for parameter in decoder.parameters():
        parameter.data = parameter.data.clone().mul_(0.5)
    halved = decoded(decoder, TOKENS)
    for parameter in other.parameters():
        parameter.data = parameter.data.clone().mul_(0.5)
    assert torch.equal(halved, decoded(other, TOKENS)) and not torch.equal(halved, before)
    assert isinstance(decoder._step, DecodeStep)
