"""Texts that one pass reads together get the bits that each gets alone, where `rows_are_independent` says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, FURTHER_FAMILIES, save_reference
from packages_for_tests import needs_numba
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.block_pool import BlockTable
from engine.decoder.independence import rows_are_independent
from engine.decoder.kv_cache import position_bytes, state_bytes
from engine.decoder.model import Decoder
from engine.decoder.paged_cache import PagedBatch, PagedCache
from engine.kernels.kernel_choice import DECODING, PROMPT, TORCH
from engine.kernels.linear import linear
from engine.kernels.torch_products import linear_by_blocks

WITH_STATES = ("minimax", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_text", "lfm2_moe", "nemotron_h")
"""Families of which one pass reads one text: their layers have states."""
WITHOUT = [family for family in (*FAMILIES, *FURTHER_FAMILIES) if family not in (*WITH_STATES, "llama_moe")]
"""All others but LLaMA-MoE, whose gate network is 6 wide in the tests, which the kernels do not multiply."""
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in WITHOUT),
    ("mixtral", {"sliding_window": 7}),
    ("mixtral", {"num_local_experts": 5}),
    ("deepseek_v3", {"n_routed_experts": 12}),
]
TEXTS = [torch.randint(3, 96, (count,), generator=torch.Generator().manual_seed(count)).tolist() for count in (30, 9, 41, 9)]
READ = (7, 0, 20, 1)
"""How much of each text was read before."""


def loaded(family: str, changes: dict[str, Any], directory: Path) -> Decoder:
    save_reference(family, directory, **changes)
    checkpoint = Checkpoint(directory)
    return Decoder(checkpoint.config, checkpoint.source(torch.bfloat16))


def read(decoder: Decoder, groups: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the hidden states of each text's second piece, and of the step after it; groups of texts are read together."""
    cache = PagedCache(decoder.config, position_bytes(decoder.config, torch.bfloat16) * 128, torch.bfloat16, block_size=4)
    tables = [BlockTable() for _ in TEXTS]
    for table, text, read in zip(tables, TEXTS, READ, strict=True):
        cache.pool.extend(table, len(text))
        if read:
            batch = PagedBatch(cache, [table], [read], [len(text)])
            decoder.hidden_states(torch.tensor([text[:read]]), None, batch, PROMPT)
            table.length = read
    found: dict[int, Tensor] = {}
    for group in groups:
        new = [len(TEXTS[row]) - 1 - READ[row] for row in group]
        tokens = [token for row in group for token in TEXTS[row][READ[row] : -1]]
        batch = PagedBatch(cache, [tables[row] for row in group], new, [len(TEXTS[row]) for row in group])
        hidden_LD = decoder.hidden_states(torch.tensor([tokens]), None, batch, PROMPT)[0]
        found |= dict(zip(group, hidden_LD.split(new), strict=True))
        for row in group:
            tables[row].length = len(TEXTS[row]) - 1
    step = PagedBatch(cache, tables, None, list(map(len, TEXTS)))
    last = torch.tensor([[text[-1]] for text in TEXTS])
    return [found[row] for row in range(len(TEXTS))], list(decoder.hidden_states(last, None, step, DECODING)[:, 0])


@needs_numba
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_texts_read_together_get_the_bits_of_texts_read_alone(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    decoder = loaded(family, changes, tmp_path)
    assert rows_are_independent(decoder, PROMPT)
    with torch.inference_mode():
        alone, after_alone = read(decoder, [[0], [1], [2], [3]])
        for groups in ([[0, 1, 2, 3]], [[3, 1], [2, 0]]):
            together, after = read(decoder, groups)
            assert all(map(torch.equal, together, alone)) and all(map(torch.equal, after, after_alone))


@needs_numba
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_a_text_gets_the_same_bits_in_pieces(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """No piece has one position, with which latent attention has a way of its own."""
    decoder, text = loaded(family, changes, tmp_path), TEXTS[2]

    def states(*pieces: int) -> Tensor:
        """Return the hidden states [L, D] of the text."""
        size = position_bytes(decoder.config, torch.bfloat16) * 128
        cache, table, found = PagedCache(decoder.config, size, torch.bfloat16, block_size=4), BlockTable(), []
        cache.pool.extend(table, len(text))
        for count in pieces:
            tokens = torch.tensor([text[table.length : table.length + count]])
            batch = PagedBatch(cache, [table], [count], [len(text)])
            found.append(decoder.hidden_states(tokens, None, batch, PROMPT)[0])
            table.length += count
        return torch.cat(found)

    with torch.inference_mode():
        assert torch.equal(states(7, 20, 2, 12), states(41))


@pytest.mark.parametrize("family", WITH_STATES)
def test_layers_with_states_read_one_text_at_a_time(family: str, tmp_path: Path) -> None:
    config = loaded(family, {}, tmp_path).config
    assert state_bytes(config, torch.bfloat16) and not PagedCache(config, 1 << 20, torch.bfloat16).pool.shares
    with pytest.raises(AssertionError, match="read together have no states"):
        PagedBatch(PagedCache(config, 1 << 20, torch.bfloat16), [BlockTable(), BlockTable()], [2, 2], [2, 2])


@needs_numba
def test_a_gate_network_that_the_kernels_do_not_multiply_is_not_independent(tmp_path: Path) -> None:
    assert not rows_are_independent(loaded("llama_moe", {}, tmp_path), PROMPT)


def test_without_the_kernels_for_many_rows_nothing_is_said_to_be_independent(tmp_path: Path) -> None:
    decoder = loaded("mixtral", {}, tmp_path)
    assert not rows_are_independent(decoder, TORCH)
    assert not rows_are_independent(decoder.float(), PROMPT)


@needs_numba
def test_a_width_that_the_kernels_do_not_multiply_is_not_independent(tmp_path: Path) -> None:
    assert not rows_are_independent(loaded("mixtral", {"intermediate_size": 42}, tmp_path), PROMPT)


@pytest.mark.parametrize(("outputs", "inputs"), [(6, 64), (64, 512), (256, 1024)])
def test_rows_of_products_by_blocks_do_not_depend_on_their_number(outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x_TI, weight_OI = torch.randn(70, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    bias_O = torch.randn(outputs, generator=generator)
    whole = linear_by_blocks(x_TI, weight_OI, bias_O)
    assert torch.allclose(whole, x_TI @ weight_OI.T + bias_O, atol=1e-3)
    for first in range(0, 40, 3):
        for count in (1, 2, 5, 16, 17, 30):
            assert torch.equal(
                linear_by_blocks(x_TI[first : first + count], weight_OI, bias_O), whole[first : first + count]
            )


@needs_numba
def test_a_matrix_that_is_trained_is_not_padded() -> None:
    x_TI, weight_OI = torch.randn(5, 32).bfloat16(), torch.randn(6, 32).bfloat16().requires_grad_()
    y_TO = linear(x_TI, weight_OI, choice=PROMPT)
    assert torch.equal(y_TO, torch.nn.functional.linear(x_TI, weight_OI))
    y_TO.sum().backward()
    assert weight_OI.grad is not None
