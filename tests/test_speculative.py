"""Speculative decoding: the target's own distribution by enumeration, greedy text to the token, counts and refusals."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, save_reference
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from torch import Tensor

from engine import speculative
from engine.checkpoint import Checkpoint
from engine.errors import OptionError
from engine.generate import Engine
from engine.kv_cache import KeyValueCache
from engine.linear import decoding
from engine.model import Decoder
from engine.sampling import SamplingOptions, probabilities
from engine.speculative import draw, residual, verify

PROMPT = "def read(path):"
LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 24,
    },
}
"""The frequencies switch after 24 positions, among the generated tokens."""


def save_pair(path: Path, family: str = "mixtral", noise: float = 0.02, **changes: Any) -> tuple[Path, Path]:
    """A target, and a draft that is near enough to it to be right at times."""
    model = save_reference(family, path / "target", vocab_size=VOCABULARY, **changes)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(path / "draft")
    for name in ("target", "draft"):
        add_tokenizer(path / name)
    return path / "target", path / "draft"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


# The procedure


def tables(*rows: tuple[int, ...]) -> Tensor:
    """Distributions in twelfths."""
    return torch.tensor(rows, dtype=torch.float64) / 12


# What p and q give first, and after each first token. Thresholds p/q and the sums of residuals are all multiples of 1/12.
P_FIRST, Q_FIRST = tables((3, 3, 6)), tables((6, 3, 3))
P_NEXT, Q_NEXT = tables((2, 1, 9), (4, 4, 4), (0, 9, 3)), tables((4, 4, 4), (4, 4, 4), (8, 1, 3))
P_LAST = tables((12, 0, 0), (1, 5, 6), (6, 0, 6))  # depends on the second token


def test_the_output_has_the_distribution_of_the_target() -> None:
    """Over all drafts and, in steps of 1/12, all uniform numbers: P(three tokens) = p(x1) p(x2 | x1) p(x3 | x2)."""
    grid = [(step + 0.5) / 12 for step in range(12)]
    found, rejected = torch.zeros(3, 3, 3, dtype=torch.float64), 0
    for x1, x2 in itertools.product(range(3), repeat=2):
        drafted = Q_FIRST[0, x1] * Q_NEXT[x1, x2]
        for uniforms in itertools.product(grid, repeat=3):
            p, q = [P_FIRST[0], P_NEXT[x1], P_LAST[x2]], [Q_FIRST[0], Q_NEXT[x1]]
            accepted, following = verify(p, q, [x1, x2], uniforms)
            rejected += accepted < 2
            written = [x1, x2][:accepted] + [following]
            weight = drafted / 12**3
            # A rejection ends the round early; later rounds give the rest, by the target's distribution.
            match written:
                case [a]:
                    found[a] += weight * P_NEXT[a][:, None] * P_LAST
                case [a, b]:
                    found[a, b] += weight * P_LAST[b]
                case [a, b, c]:
                    found[a, b, c] += weight
    expected = P_FIRST[0][:, None, None] * P_NEXT[:, :, None] * P_LAST[None]
    assert rejected > 1000
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_one_token_by_hand() -> None:
    """p = (1/4, 1/4, 1/2), q = (1/2, 1/4, 1/4): token 0 stays with probability 1/2, and only token 2 replaces it."""
    p, q = P_FIRST[0], Q_FIRST[0]
    assert residual(p, q).tolist() == [0.0, 0.0, 0.25]
    assert verify([p, p], [q], [0], [0.49, 0.0]) == (1, 0)
    assert verify([p, p], [q], [0], [0.51, 0.0]) == (0, 2)
    assert verify([p, p], [q], [1], [0.99, 0.3]) == (1, 1)
    assert verify([p], [], [], [0.99]) == (0, 2)


def test_a_rejection_by_rounding_alone_draws_from_the_target() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.5000001, 0.25, 0.25])
    assert residual(p, q).tolist() == p.tolist()


def test_draw_never_gives_what_has_no_probability() -> None:
    weights = torch.tensor([0.0, 0.3, 0.0, 0.1, 0.0])
    last = 1 - 2.0**-53
    assert [draw(weights, uniform) for uniform in (0.0, 0.74, 0.76, last)] == [1, 1, 3, 3]


# The models


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES if family != "llama_moe"),
        ("mixtral", {"sliding_window": 6}),
        ("mixtral", LONGROPE),
    ],
)
def test_greedy_text_is_that_of_the_target(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path, family, **changes)
    plain = Engine.open(target).generate(PROMPT, max_new_tokens=40)
    for count in (1, 4, 7):
        engine = Engine.open(target, draft=draft, draft_tokens=count)
        assert engine.generate(PROMPT, max_new_tokens=40) == plain
        rate = engine.report().draft_acceptance_rate
        assert rate is not None and 0 < rate < 1, "accepted and rejected tokens are both needed for this to test anything"
