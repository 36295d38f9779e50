"""Speculative decoding: the target's own distribution by enumeration, greedy text to the token, counts and refusals."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import FAMILIES, FURTHER_FAMILIES, NAIVE, save_reference
from drafts_for_tests import LONGROPE, save_pair
from packages_for_tests import needs_numba
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from torch import Tensor

import cli
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.errors import OptionError
from engine.generation import speculative
from engine.generation.generate import Engine
from engine.generation.options import SamplingOptions
from engine.generation.sampling import probabilities
from engine.generation.speculative import draw, residual, verify
from engine.kernels.kernel_choice import DECODING

PROMPT = "def read(path):"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


# The procedure


def tables(*rows: tuple[int, ...]) -> Tensor:
    """Return distributions, given in twelfths."""
    return torch.tensor(rows, dtype=torch.float64) / 12


# Distributions p and q of the first token, and after each first token. All p/q and sums of residuals are multiples of 1/12.
P_FIRST, Q_FIRST = tables((3, 3, 6)), tables((6, 3, 3))
P_NEXT, Q_NEXT = tables((2, 1, 9), (4, 4, 4), (0, 9, 3)), tables((4, 4, 4), (4, 4, 4), (8, 1, 3))
P_LAST = tables((12, 0, 0), (1, 5, 6), (6, 0, 6))  # depends on the second token


def test_the_output_has_the_distribution_of_the_target() -> None:
    """All drafts and, in steps of 1/12, all uniform numbers are tried: P(three tokens) = p(x1) p(x2 | x1) p(x3 | x2)."""
    grid = [(step + 0.5) / 12 for step in range(12)]
    found, rejected = torch.zeros(3, 3, 3, dtype=torch.float64), 0
    for x1, x2 in itertools.product(range(3), repeat=2):
        drafted = Q_FIRST[0, x1] * Q_NEXT[x1, x2]
        for uniforms in itertools.product(grid, repeat=3):
            p, q = [P_FIRST[0], P_NEXT[x1], P_LAST[x2]], [Q_FIRST[0], Q_NEXT[x1]]
            accepted, following = verify(p, q, [x1, x2], uniforms)
            rejected += accepted < 2
            written = [*[x1, x2][:accepted], following]
            weight = drafted / 12**3
            # A rejection ends the round early. Later rounds give the rest, by the target's distribution.
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
    """With p = (1/4, 1/4, 1/2), q = (1/2, 1/4, 1/4), token 0 stays with probability 1/2, and only token 2 replaces it."""
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

QUICK = ("mixtral", "gpt_oss", "granitemoe", "qwen3")
"""Families that `make test` runs."""


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in QUICK),
        *(pytest.param(family, {}, marks=pytest.mark.slow) for family in FAMILIES if family not in {*QUICK, *NAIVE}),
        ("deepseek_v3", {}),
        ("mixtral", {"sliding_window": 6}),
        ("mixtral", LONGROPE),
    ],
)
def test_greedy_text_is_that_of_the_target(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path, family, **changes)
    plain = Engine.open(target).generate(PROMPT, max_new_tokens=40)
    for count in (1, 5):
        engine = Engine.open(target, draft=draft, draft_tokens=count)
        assert engine.generate(PROMPT, max_new_tokens=40) == plain
        rate = engine.report().draft_acceptance_rate
        assert rate is not None and 0 < rate < 1, "accepted and rejected tokens are both needed for this to test anything"


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=needs_numba), "float32"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in ("mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "gpt_oss", "llama_moe", "qwen2")),
        *(
            (family, {})
            for family, sizes in FURTHER_FAMILIES.items()
            if not {"linear_attention", "conv"} & {*sizes.get("layer_types", sizes.get("layers_block_type", ()))}
        ),
        ("olmoe", {"clip_qkv": 0.5}),
        ("mixtral", {"sliding_window": 6}),
        ("mixtral", LONGROPE),
    ],
)
def test_several_steps_at_once_give_the_logits_of_single_ones(
    family: str, dtype: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Logits are bit-identical through the compiled kernels. The tokens go past the point where the frequencies switch."""
    save_reference(family, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)
    number = getattr(torch, dtype)
    decoder = Decoder(checkpoint.config, checkpoint.source(number)).eval()
    tokens = torch.randint(3, 96, (1, 30), generator=torch.Generator().manual_seed(1))
    single, several = (KeyValueCache(checkpoint.config, 1, 30, number) for _ in range(2))
    with torch.inference_mode():
        for cache in (single, several):
            decoder.last_logits(tokens[:, :20], None, cache)
        steps = [decoder.last_logits(tokens[:, at : at + 1], None, single, DECODING) for at in range(20, 30)]
        decoder.step_logits(torch.full((1, 5), 7), several, DECODING)
        several.length = 20  # forgets these tokens
        pieces = tokens[:, 20:].split(7, dim=1)
        each, together = torch.cat(steps), torch.cat([decoder.step_logits(p, several, DECODING)[0] for p in pieces])
    if dtype == "bfloat16":
        assert torch.equal(together, each)
    else:
        assert torch.allclose(together, each, rtol=0, atol=1e-5)


@needs_numba
def test_half_precision_writes_what_it_writes_alone(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    plain = Engine.open(target, dtype="bfloat16", device="cpu").generate(PROMPT, max_new_tokens=60)
    engine = Engine.open(target, dtype="bfloat16", device="cpu", draft=draft)
    assert engine.generate(PROMPT, max_new_tokens=60) == plain


def test_the_distributions_are_those_of_the_text_so_far(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Despite earlier drafts and rejections, p and q of every round are those of a forward pass over all tokens."""
    target, draft = pair
    engine = Engine.open(target, draft=draft, draft_tokens=3)
    options = SamplingOptions(
        1.5,
        top_p=0.95,
        top_k=40,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        min_p=0.001,
        top_n_sigma=3.5,
        repetition_penalty=1.25,
        logit_bias=((7, 1.5),),
        seed=1,
    )
    rounds: list[tuple[list[Tensor], list[Tensor], list[int], int]] = []

    def watched(p: list[Tensor], q: list[Tensor], drafted: list[int], uniforms: list[float]) -> tuple[int, int]:
        accepted, following = verify(p, q, drafted, uniforms)
        rounds.append((p, q, drafted, accepted))
        assert len(p) == len(q) + 1 == len(drafted) + 1 == len(uniforms)
        return accepted, following

    monkeypatch.setattr(speculative, "verify", watched)
    (result,) = engine.generate(PROMPT, max_new_tokens=40, sampling=options)
    prompt, written = engine.encode(PROMPT), list(result.token_ids)
    assert engine.draft is not None
    done = 1
    for p, q, drafted, accepted in rounds:
        assert drafted[:accepted] == written[done : done + accepted]
        for decoder, distributions in ((engine.decoder, p), (engine.draft.decoder, q)):
            for place, distribution in enumerate(distributions):
                generated = written[:done] + drafted[:place]
                with torch.inference_mode():
                    logits = decoder(torch.tensor([prompt + generated]))[0, -1].clone()  # type: ignore[operator]
                    logits[7] += 1.5
                    for token in {*prompt, *generated}:
                        logits[token] *= 0.8 if logits[token] > 0 else 1.25
                    for token in generated:
                        logits[token] -= 0.25
                    logits[sorted(set(generated))] -= 0.5
                    assert torch.allclose(distribution, probabilities(logits[None], options)[0], rtol=0, atol=1e-5)
        done += accepted + 1
    assert done == len(written) == 40
    figures = {len(drafted): accepted for _, _, drafted, accepted in rounds}
    assert len(figures) > 1, "the last round drafts only what there is room for"
    proposed, accepted = sum(len(drafted) for _, _, drafted, _ in rounds), sum(each[3] for each in rounds)
    report = engine.report()
    assert report.draft_acceptance_rate == accepted / proposed and 0 < accepted < proposed
    assert report.tokens_per_target_forward == 39 / len(rounds)
    # The target reads each drafted token and one more of each round; 3 layers, 2 experts.
    assert report.experts_read == (len(prompt) + proposed + len(rounds)) * 3 * 2


def test_a_model_accepts_all_of_its_own_drafts(pair: tuple[Path, Path]) -> None:
    engine = Engine.open(pair[0], draft=pair[0], draft_tokens=4)
    engine.generate(PROMPT, max_new_tokens=21)
    report = engine.report()
    assert report.draft_acceptance_rate == 1.0 and report.tokens_per_target_forward == 5.0
    assert report.weights_bytes == 2 * engine.weights_bytes
    engine.generate(PROMPT, max_new_tokens=1)
    assert engine.report().draft_acceptance_rate is None and engine.report().tokens_per_target_forward is None


def test_ends_in_the_middle_of_an_accepted_run(pair: tuple[Path, Path]) -> None:
    """With the target as its own draft every run is accepted, so these ends lie at each place of a run."""
    plain, drafting = Engine.open(pair[0]), Engine.open(pair[0], draft=pair[0], draft_tokens=4)
    (whole,) = plain.generate(PROMPT, max_new_tokens=40)
    lengths = set()
    for ending in dict.fromkeys(whole.token_ids):
        plain.end_tokens = drafting.end_tokens = frozenset({ending})
        (cut,) = drafting.generate(PROMPT, max_new_tokens=40)
        assert [cut] == plain.generate(PROMPT, max_new_tokens=40) and cut.finish_reason == "stop"
        lengths.add(cut.generated_tokens % 5)
    assert lengths == set(range(5))
    plain.end_tokens = drafting.end_tokens = frozenset()
    for start in range(4, 12):
        stop = whole.text[start : start + 2]
        cut = drafting.generate(PROMPT, max_new_tokens=40, stop=stop)
        assert cut == plain.generate(PROMPT, max_new_tokens=40, stop=stop)
        assert "".join(drafting.stream(PROMPT, max_new_tokens=40, stop=stop)) == cut[0].text


def test_all_positions_can_be_used(pair: tuple[Path, Path]) -> None:
    engine = Engine.open(pair[0], draft=pair[1])
    engine.end_tokens = frozenset()
    assert engine.generate("x" * 120, max_new_tokens=8)[0].generated_tokens == 8


def test_the_seed_decides(pair: tuple[Path, Path]) -> None:
    engine = Engine.open(pair[0], draft=pair[1])
    texts = [engine.generate("x", sampling=SamplingOptions(1.0, seed=seed), max_new_tokens=20) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_what_cannot_be_drafted_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = pair
    for count in (0, 64):
        with pytest.raises(OptionError, match=f"draft tokens are {count}"):
            Engine.open(target, draft=draft, draft_tokens=count)
    with pytest.raises(OptionError, match="one prompt at a time, and 2 were given"):
        Engine.open(target, draft=draft).generate(["a", "b"])
    other = Path(shutil.copytree(draft, tmp_path / "other"))
    add_tokenizer(other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a":', '"aa":'))
    with pytest.raises(OptionError, match="different tokenizers"):
        Engine.open(target, draft=other)
    save_reference("llama", tmp_path / "longer", vocab_size=VOCABULARY + 8)
    add_tokenizer(tmp_path / "longer")
    with pytest.raises(OptionError, match="264 and 272 rows of embeddings"):
        Engine.open(target, draft=tmp_path / "longer")
    save_reference("llama", tmp_path / "short", vocab_size=VOCABULARY, max_position_embeddings=32)
    add_tokenizer(tmp_path / "short")
    with pytest.raises(OptionError, match="the draft has 32 positions"):
        Engine.open(target, draft=tmp_path / "short").generate("x" * 30, max_new_tokens=8)
    exported = Path(shutil.copytree(draft, tmp_path / "exported"))
    (exported / "model.onnx").touch()
    for pairing in ((exported, draft), (target, exported)):
        with pytest.raises(OptionError, match="exported: is an exported model"):
            Engine.open(pairing[0], draft=pairing[1])


def test_the_command_reports_the_draft(pair: tuple[Path, Path]) -> None:
    target, draft = map(str, pair)
    options = ["generate", target, "-p", PROMPT, "-n", "12", "--dtype", "float32"]
    plain, drafted = (
        json.loads(CliRunner().invoke(cli.main, [*options, *more, "--json"]).stdout)
        for more in ([], ["--draft", draft, "--draft-tokens", "2"])
    )
    assert drafted["text"] == plain["text"] and drafted["generated_tokens"] == plain["generated_tokens"]
    assert plain["draft_acceptance_rate"] is plain["tokens_per_target_forward"] is None
    assert 0 <= drafted["draft_acceptance_rate"] <= 1 <= drafted["tokens_per_target_forward"] <= 3
    refused = CliRunner().invoke(cli.main, [*options, "-p", "another", "--draft", draft])
    assert refused.exit_code == 1 and "one prompt at a time" in refused.stderr
