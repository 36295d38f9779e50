"""`compress quantize`, `prune --bits`, and pruning of low-bit models."""

from __future__ import annotations

import json
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, PRUNE, listing, make_workplace
from click.testing import CliRunner
from conftest import others_slow, save_reference
from safetensors.torch import load_file, save_file
from test_quantized_weight import DIVISIBLE, KINDS
from torch import Tensor

import cli
from compress import quantize as module
from compress.options.quantize import EMBEDDING, QuantiserOptions
from compress.plans.apply import apply
from compress.plans.plan import pruning_plan, same_plan
from compress.rounding.activation_scales import EXPONENTS, Rescaling, activation_scales, candidates, errors, load_rescaling
from compress.rounding.quantizer import Quantiser
from engine.checkpoint import remote_code
from engine.checkpoint.artifact import read_provenance
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.skip_table_file import FILE_NAME as SKIP_TABLES
from engine.decoder.model import Decoder
from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.kernels.stored.quantized_weight import QuantizedWeight, quantise
from engine.kernels.stored.scheme import Scheme

QUANTIZE = ["quantize", "model", "--bits", "4", "--group-size", "16", "--evaluation-samples", "2", *CALIBRATION]
BLIND = ["quantize", "model", "--bits", "8", "--group-size", "16", "--evaluation-samples", "0"]
TOKENS = torch.randint(3, 96, (4, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with `model`, text, and `small`, the model with 4 bits."""
    path = tmp_path_factory.mktemp("quantize")
    make_workplace(path)
    with chdir(path):
        run(*QUANTIZE, "-o", "small")
    return path


@pytest.fixture
def place(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.main, [*arguments, "--json", "--threads", "1"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def refused(place: Path, *arguments: str) -> str:
    """Return the message of a refused command, which must not write anything."""
    before = listing(place)
    result = CliRunner().invoke(cli.main, list(arguments), catch_exceptions=False)
    assert result.exit_code == 1 and result.stdout == "" and result.stderr.count("\n") == 1, result.output
    assert listing(place) == before
    return result.stderr


@torch.no_grad()
def logits(checkpoint: Checkpoint) -> Tensor:
    return Decoder(checkpoint.config, checkpoint.weights(torch.float32))(TOKENS)


def off(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


# The command


def test_an_artifact_with_its_figures(place: Path) -> None:
    figures = read_provenance(place / "small")["figures"]
    small, full = Checkpoint(place / "small"), Checkpoint(place / "model")
    assert (figures["weight_bits"], figures["group_size"], figures["experts_only"]) == (4, 16, False)
    assert (figures["bytes_before"], figures["bytes_after"]) == (full.bytes, small.bytes)
    assert figures["bytes_not_quantized"] == small.plain_bytes
    assert figures["bytes_not_quantized_share"] == small.plain_bytes / small.bytes
    assert figures["parameters_before"] == figures["parameters_after"] == full.parameters
    assert 0 < abs(figures["perplexity_after"] / figures["perplexity_before"] - 1) < 0.1
    packed = [name for name in small.shapes if small.scheme(name) is not None]
    errors_squared = sum(float((small.tensor(name) - full.tensor(name)).double().square().sum()) for name in packed)
    weights_squared = sum(float(full.tensor(name).double().square().sum()) for name in packed)
    assert figures["relative_weight_error"] == pytest.approx((errors_squared / weights_squared) ** 0.5, rel=1e-5)
    assert len(figures["relative_weight_error_per_layer"]) == 3 and 0.05 < figures["relative_weight_error"] < 0.1
    assert not figures["activation_aware"] and figures["output_error_ratio"] is None
    assert "4 bits" in (place / "small" / "README.md").read_text()
    inspected = run("inspect", "small", "--checksums")
    assert (inspected["weight_bits"], inspected["group_size"], inspected["kind"]) == (4, 16, "artifact")
    assert inspected["bytes"] == small.bytes and inspected["skip_tables"] and inspected["dtype"] == "float32"
    assert run("inspect", "model")["weight_bits"] is None


def test_what_reads_runs_on_it(place: Path) -> None:
    generated = run("generate", "small", "-p", "the quick", "-n", "4", "--skip-threshold", "1")
    assert generated["generated_tokens"] == 4
    text = [*CALIBRATION[:2], "--samples", "2", "--sequence-length", "16"]
    value = run("evaluate", "small", *text)["value"]
    assert value == pytest.approx(read_provenance(place / "small")["figures"]["perplexity_after"], rel=1e-6)
    result = CliRunner().invoke(cli.main, ["bench", "small", "-p", "4", "-n", "0", "-r", "1", "--json"])
    (row,) = json.loads(result.stdout)["rows"]
    small = Checkpoint(place / "small")
    shapes = 16 * sum(small.scheme(name) is not None for name in small.shapes)
    assert (row["weight_bits"], row["weights_bytes"]) == (4, small.bytes - shapes)
    assert row["parameters"] == small.parameters and "| small (4 bits) |" in result.stderr


def test_rounding_alone_reads_no_text(place: Path) -> None:
    (place / "text.txt").unlink()
    shutil.copy(place / "small" / SKIP_TABLES, place / "model" / SKIP_TABLES)
    figures = run(*BLIND, "--experts-only", "--data", "text.txt")
    assert figures["artifact"] == "model-8-bit" and figures["perplexity_after"] is None
    assert (place / "model-8-bit" / SKIP_TABLES).read_bytes() == (place / "model" / SKIP_TABLES).read_bytes()
    attention = "model.layers.0.self_attn.q_proj.weight"
    result, full = Checkpoint(place / "model-8-bit"), Checkpoint(place / "model")
    assert torch.equal(result.tensor(attention), full.tensor(attention))
    assert 0 < off(logits(result), logits(full)) < 0.06
    assert "exists already" in refused(place, *BLIND, "-o", "model-8-bit")
    figures = run(
        "quantize",
        "model",
        "--bits",
        "4",
        "--group-size",
        "-1",
        "--evaluation-samples",
        "0",
        "-o",
        "model-8-bit",
        "--overwrite",
    )
    assert figures["group_size"] == -1 and Checkpoint(place / "model-8-bit").schemes_used == (Scheme(4, -1),)


def test_a_killed_run_goes_on_from_its_scales(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*QUANTIZE, "--activation-aware", "-o", "aware"]
    whole = run(*command)
    assert whole["activation_aware"] and 0.5 < whole["output_error_ratio"] < 1
    assert len(whole["exponents_per_layer"]) == 3 and all(len(own) == 3 for own in whole["exponents_per_layer"])
    expected = (place / "aware" / "model.safetensors").read_bytes()
    shutil.rmtree(place / "aware")
    monkeypatch.setattr(module, "Quantiser", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    assert CliRunner().invoke(cli.main, command).exit_code == 130
    assert (place / ".aware.work" / "activation_scales.safetensors").is_file() and not (place / "aware").exists()
    monkeypatch.undo()
    monkeypatch.chdir(place)
    monkeypatch.setattr(module, "activation_scales", lambda *given, **named: pytest.fail("they were found before"))
    assert run(*command, "--resume")["output_error_ratio"] == pytest.approx(whole["output_error_ratio"])
    assert (place / "aware" / "model.safetensors").read_bytes() == expected
    assert not (place / ".aware.work").exists()


def test_rounding_with_error_feedback(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The artifact has the matrices of the pass, and a killed run goes on with them."""
    command = [*QUANTIZE, "--rounding", "gptq", "-o", "fed"]
    figures = run(*command)
    assert figures["rounding"] == "gptq" and not figures["activation_aware"]
    assert figures["relative_weight_error"] > run(*QUANTIZE, "-o", "near", "--rounding", "nearest")["relative_weight_error"]
    expected = (place / "fed" / "model.safetensors").read_bytes()
    assert expected != (place / "near" / "model.safetensors").read_bytes()
    assert (place / "near" / "model.safetensors").read_bytes() == (place / "small" / "model.safetensors").read_bytes()
    shutil.rmtree(place / "fed")
    monkeypatch.setattr(module, "Quantiser", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    assert CliRunner().invoke(cli.main, command).exit_code == 130
    work, layers = place / ".fed.work", len(Checkpoint(place / "model").config.layers)
    assert sorted(path.name for path in (work / "rounded").glob("rounded-*")) == [
        f"rounded-{layer}.safetensors" for layer in range(layers)
    ]
    monkeypatch.undo()
    monkeypatch.chdir(place)
    run(*command, "--resume")
    assert (place / "fed" / "model.safetensors").read_bytes() == expected and not work.exists()


def test_two_ways_of_rounding_are_refused(place: Path) -> None:
    result = CliRunner().invoke(cli.main, [*QUANTIZE, "--activation-aware", "--rounding", "gptq", "-o", "out"])
    assert result.exit_code == 1 and "--activation-aware is --rounding awq, and --rounding is gptq" in result.output
    assert not (place / "out").exists()
    aware = run(*QUANTIZE, "--rounding", "awq", "-o", "aware")
    assert aware["rounding"] == "awq" and aware["activation_aware"]


def test_pruning_copies_packed_weights(place: Path) -> None:
    """The artifact has the full model's experts with the same bytes. Routers and norms can be trained beside them."""
    plan = ["--plan", "plan.json", *CALIBRATION, "--evaluation-samples", "2"]
    pruned = run("prune", "small", *plan, "--recover-steps", "1", "-o", "pruned")
    assert pruned["experts_per_layer"] == [3, 5, 2]
    expert, router = 3 * (32 * 48 // 2 + 32 * 48 // 16 * 4 + 16), 32 * 4
    assert pruned["bytes_before"] - pruned["bytes_after"] == 8 * (expert + router)
    before, after = load_file(place / "small" / "model.safetensors"), load_file(place / "pruned" / "model.safetensors")
    block = "model.layers.1.block_sparse_moe.experts"
    for kept, own in enumerate((0, 1, 2, 3, 5)):
        for part in ("packed", "scale", "shape"):
            assert torch.equal(after[f"{block}.{kept}.w2.weight_{part}"], before[f"{block}.{own}.w2.weight_{part}"])
    assert not torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    at_once = run("prune", "model", *plan, "--bits", "4", "--group-size", "16", "-o", "at-once")
    assert at_once["weight_bits"] == 4 and at_once["bytes_after"] == pruned["bytes_after"]
    made = load_file(place / "at-once" / "model.safetensors")
    assert made.keys() == after.keys()
    assert all(torch.equal(made[name], after[name]) for name in made if name.endswith(("_packed", "_scale", "_shape")))
    assert Checkpoint(place / "at-once").raw_config["auto_map"] and run("inspect", "at-once")["weight_bits"] == 4
    run(*PRUNE[:1], "small", *PRUNE[2:4], "--method", "fisher", *CALIBRATION, "--evaluation-samples", "0", "-o", "fisher")


@pytest.mark.parametrize(
    "command",
    [
        ["quantize", "small", "--bits", "4"],
        ["prune", "small", "--sparsity", "0.5", "--bits", "4"],
        ["prune", "small", "--sparsity", "0.5", "--merge", "cka"],
        ["prune", "small", "--sparsity", "0.5", "--distill"],
        ["merge", "small", "--experts", "3"],
        ["densify", "small"],
        ["distill", "--teacher", "model", "--student", "small"],
    ],
)
def test_weights_of_few_bits_are_not_changed(command: list[str], place: Path) -> None:
    assert "`compress quantize` the result" in refused(place, *command, "--data", "text.txt", "-o", "out")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--group-size", "32"],
            "w2.weight has 48 inputs, which groups of 32 do not fill in whole words of 32 bits; take --group-size 16",
        ),
        (["--group-size", "4"], "take --group-size 16"),
        (["--group-size", "24"], "has 32 inputs, which groups of 24"),
        (["--group-size", "0"], "group size is 0"),
        (["--group-size", "-2"], "group size is -2"),
        (["--data", "none.txt"], "none.txt"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], said: str, place: Path) -> None:
    assert said in refused(place, *QUANTIZE, *arguments, "-o", "out")


def test_bad_models_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference("llama", place / "dense")
    assert "no experts" in refused(place, "quantize", "dense", "--bits", "8", "--experts-only", "-o", "out")
    tensors = load_file(place / "model" / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.4.w3.weight"
    tensors[name][7, 5] = torch.inf
    save_file(tensors, place / "model" / "model.safetensors")
    assert f"{name} holds NaN or infinity" in refused(place, *QUANTIZE, "-o", "out")
    small = Checkpoint(place / "small")
    monkeypatch.setattr(remote_code, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="transformers reads low-bit weights only if compressed-tensors is installed"):
        remote_code.check_loadable(small.directory, small.raw_config)
    with pytest.raises(OptionError, match="bits is 5; it must be one of 2, 3, 4, 8"):
        QuantiserOptions(5).check(small.config)


# Scales by activations


def test_candidates_by_hand() -> None:
    """The mean sizes are 1 and 4. With α = 1 they are centered on 1, with α = 0.5 their roots are."""
    s_AD = candidates(torch.tensor([[1.0, -8.0, 0.0], [-1.0, 0.0, 0.0]]))
    assert len(s_AD) == len(EXPONENTS) and s_AD[0].tolist() == [1.0, 1.0, 1.0]
    sizes = torch.tensor([1.0, 4.0, 5 / 3 * 1e-4])
    for index, alpha in ((5, 0.5), (10, 1.0)):
        expected = sizes**alpha / (4.0 * sizes[2]) ** (alpha / 2)
        assert torch.allclose(s_AD[index], expected, rtol=1e-5)
    assert torch.isfinite(candidates(torch.zeros(2, 3))).all(), "no activations at all"


def test_errors_are_those_of_the_outputs() -> None:
    torch.manual_seed(0)
    weight, x, s_AD = torch.randn(5, 8), torch.randn(7, 8), torch.rand(2, 8) + 0.5
    found = errors(weight, x, s_AD, Scheme(4, 8), torch.float32)
    for s_D, error in zip(s_AD, found.tolist(), strict=True):
        rounded = quantise(weight * s_D, 4, 8).dequantised(torch.float32)
        assert error == pytest.approx(float((x / s_D @ rounded.T - x @ weight.T).square().sum()), rel=1e-4)


PEAKED = ("input_layernorm", "post_attention_layernorm", "a_layernorm", "operator_norm", "ffn_norm")
PEAKED += tuple(f"layers.{layer}.norm." for layer in range(6))
"""Parts of the names of the norms that are given one large channel."""


@pytest.mark.parametrize("family", others_slow(KINDS, "mixtral", "gpt_oss"))
def test_folding_changes_nothing_and_helps_rounding(family: str, tmp_path: Path) -> None:
    """The model has some large channels, as large models have."""
    save_reference(family, tmp_path / "full", **DIVISIBLE.get(family, {}))
    tensors = load_file(tmp_path / "full" / "model.safetensors")
    one = float(Checkpoint(tmp_path / "full").config.zero_centered)
    for name, tensor in tensors.items():
        if any(part in name for part in PEAKED):
            tensor[3] = 12.0 * (tensor[3] + one) - one
    save_file(tensors, tmp_path / "full" / "model.safetensors")
    full = Checkpoint(tmp_path / "full")
    scheme = Scheme(4, 8)
    found = activation_scales(full, TOKENS, scheme, experts_only=False, dtype=torch.float32)
    assert all(after <= before for before, after in found.errors)

    def folded(name: str) -> Tensor:
        return found.rescaled(name, full.tensor(name))

    with torch.no_grad():
        same = Decoder(full.config, folded)(TOKENS)
    expected = logits(full)
    assert off(same, expected) < 1e-5
    assert sum(not torch.equal(folded(name), full.tensor(name)) for name in full.shapes) > 10, (
        "and yet it did change weights"
    )
    distances = []
    for directory, rescaling in (("plain", None), ("aware", found)):
        quantiser = Quantiser(QuantiserOptions(*scheme), rescaling)
        apply(same_plan(full.config.experts_by_layer), full, tmp_path / directory, quantiser=quantiser)
        distances.append(off(logits(Checkpoint(tmp_path / directory)), expected))
    assert distances[1] < distances[0]
    assert sum(after for _, after in found.errors) < 0.8 * sum(before for before, _ in found.errors)
    found.save(tmp_path / "scales")
    again = load_rescaling(tmp_path / "scales")
    assert (again.exponents, again.errors) == (found.exponents, found.errors)
    assert all(
        torch.equal(one.s_D, two.s_D) and one._replace(s_D=0) == two._replace(s_D=0)
        for one, two in zip(again.folds, found.folds, strict=True)
    )


def test_experts_alone_leave_attention_unscaled(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path)
    found = activation_scales(Checkpoint(tmp_path), TOKENS, Scheme(4, 8), experts_only=True, dtype=torch.float32)
    named = {name for fold in found.folds for name in (fold.before, *fold.readers)}
    assert named and not any("self_attn" in name or "input_layernorm" in name for name in named)
    assert Rescaling().factor("anything", torch.ones(2, 2)) is None


def test_the_head_has_8_bits_on_request(place: Path) -> None:
    """The head has 8 bits whatever the other weights have. It is a group of its own, matched by name in other libraries."""
    figures = run(*QUANTIZE, "--quantize-head", "-o", "head")
    config = json.loads((place / "head" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_1"]["targets"] == ["re:.*lm_head$"] and "lm_head" not in config["ignore"]
    assert config["config_groups"]["group_1"]["weights"]["num_bits"] == 8
    whole, small = Checkpoint(place / "model"), Checkpoint(place / "head")
    assert small.scheme("lm_head.weight") == Scheme(8, 16) and small.fewest_bits == Scheme(4, 16)
    expected = quantise(whole.tensor("lm_head.weight").float(), 8, 16, whole.model_dtype).dequantised(torch.float32)
    assert torch.equal(small.tensor("lm_head.weight", torch.float32), expected)
    assert figures["quantize_head"] and len(figures["relative_weight_error_per_layer"]) == len(whole.config.layers)
    head = Decoder(small.config, small.weights(torch.float32))
    plain = Decoder(small.config, small.source(torch.float32))
    with torch.inference_mode():
        assert torch.allclose(head(TOKENS), plain(TOKENS), rtol=1e-5, atol=1e-6)


def test_a_tied_head_keeps_its_dtype(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path, tie_word_embeddings=True)
    with pytest.raises(OptionError, match="give --embedding-bits in place of --quantize-head"):
        QuantiserOptions(8, 16, quantize_head=True).check(Checkpoint(tmp_path).config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_embedding_has_its_own_bits_on_request(bits: int, tied: bool, tmp_path: Path) -> None:
    """Where it is the head too, logits are products with the rounded matrix."""
    save_reference("mixtral", tmp_path / "model", tie_word_embeddings=tied, hidden_size=32)
    whole, options = Checkpoint(tmp_path / "model"), QuantiserOptions(4, 16, embedding_bits=bits)
    plan, quantiser = same_plan(whole.config.experts_by_layer), Quantiser(options)
    apply(plan, whole, tmp_path / "small", quantiser=quantiser)
    small = Checkpoint(tmp_path / "small")
    assert small.scheme(EMBEDDING) == Scheme(bits, 16) and small.model_dtype == whole.model_dtype
    expected = quantise(whole.tensor(EMBEDDING).float(), bits, 16, whole.model_dtype).dequantised(torch.float32)
    assert torch.equal(small.tensor(EMBEDDING, torch.float32), expected)
    own, plain = Decoder(small.config, small.weights(torch.float32)), Decoder(small.config, small.source(torch.float32))
    assert isinstance(own.embedding, QuantizedWeight) and (own.head is own.embedding) == tied
    assert own.embedding.nbytes < plain.embedding.nbytes
    with torch.inference_mode():
        assert torch.allclose(own(TOKENS), plain(TOKENS), rtol=1e-5, atol=1e-6)
    groups = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]["config_groups"]
    named = [group for group in groups.values() if "re:.*model\\.embed_tokens$" in group["targets"]]
    assert [group["weights"]["num_bits"] for group in named] == [bits]  # programs that read linear layers do not take it
    assert quantiser.figures(whole, small)["embedding_bits"] == bits
    weights, readers, _ = quantiser.card(small)
    assert f"those of the embedding {bits}" in weights and "moe-compress reads them" in readers


def test_a_low_bit_embedding_stays_as_it_is_when_experts_go(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path / "model", tie_word_embeddings=True, hidden_size=32)
    whole = Checkpoint(tmp_path / "model")
    quantiser = Quantiser(QuantiserOptions(8, 16, embedding_bits=4))
    apply(same_plan(whole.config.experts_by_layer), whole, tmp_path / "small", quantiser=quantiser)
    small = Checkpoint(tmp_path / "small")
    kept = {layer: [0, 2] for layer in small.config.moe_layers}
    apply(pruning_plan(kept), small, tmp_path / "fewer")
    fewer = Checkpoint(tmp_path / "fewer")
    assert fewer.scheme(EMBEDDING) == Scheme(4, 16)
    assert torch.equal(fewer.tensor(EMBEDDING), small.tensor(EMBEDDING))


def test_generation_reads_a_low_bit_embedding(place: Path) -> None:
    """The text is that of the same model with an embedding that was dequantized before."""
    run(*QUANTIZE, "--embedding-bits", "8", "-o", "low")
    shutil.copytree(place / "low", place / "plain", ignore=shutil.ignore_patterns("compression.json", "*.index.json"))
    (path,) = (place / "plain").glob("model*.safetensors")
    tensors = {name: own for name, own in load_file(path).items() if not name.startswith(EMBEDDING)}
    save_file(tensors | {EMBEDDING: Checkpoint(place / "low").tensor(EMBEDDING)}, path, {"format": "pt"})
    low, plain = (Engine.open(place / name, dtype="float32") for name in ("low", "plain"))
    assert low.generate("the tokens", max_new_tokens=12) == plain.generate("the tokens", max_new_tokens=12)
    assert low.report().weights_bytes < plain.report().weights_bytes
