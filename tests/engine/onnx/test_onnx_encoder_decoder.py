"""Exported encoder-decoders equal transformers, and `compress export` writes them with its usual guarantees."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from artifacts_for_tests import listing
from safetensors.torch import load_file
from test_encoder_decoder import DENSIFY, SIZES, change_config, change_tensors, make_model, make_pairs, refused, run
from test_onnx_parity import operators
from torch import Tensor

from compress.export.encoder_decoder import export_encoder_decoder
from compress.export.encoder_decoder_parity import round_weights
from compress.options.export import ExportOptions
from engine.checkpoint.artifact import read_provenance
from engine.checkpoint.kinds import DECODER_NAME, ENCODER_NAME
from engine.errors import ExportError
from engine.onnx.encoder_decoder import write_encoder_decoder
from engine.onnx.encoder_decoder_runtime import OnnxEncoderDecoder, TargetState
from engine.onnx.relative_attention import buckets
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint

SOURCE, PREFILL, STEPS, PADDING = 20, 6, 8, 9
SWITCH = SIZES | {"d_ff": 32}
DENSE = {name: size for name, size in SWITCH.items() if "sparse" not in name and "expert" not in name}
MODELS: dict[str, dict[str, Any]] = {
    "full": SWITCH,
    "pruned": SWITCH,
    "one expert, capacity 5": SWITCH | {"num_experts": 1, "expert_capacity": 5},
    "capacity 2": SWITCH | {"expert_capacity": 2},
    "router bias": SWITCH | {"router_bias": True},
    "untied": SWITCH | {"tie_word_embeddings": False},
    "gelu": SWITCH | {"dense_act_fn": "gelu_new"},
    "near distances": SWITCH | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10},
    "dense": DENSE,
    "dense, gated, head of its own": DENSE | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "dense, gated by silu": DENSE | {"feed_forward_proj": "gated-silu"},
}


def make(path: Path, **sizes: Any) -> None:
    """Save a tiny random model with weights large enough that differences show in its outputs."""
    from transformers import AutoModelForSeq2SeqLM, SwitchTransformersConfig, T5Config

    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config((SwitchTransformersConfig if "num_experts" in sizes else T5Config)(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0 if "relative" in name or "router" in name else 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    if "feed_forward_proj" in sizes and not sizes.get("tie_word_embeddings", True):
        head = torch.randn(sizes["vocab_size"], sizes["d_model"]) * 0.1
        change_tensors(path, lambda tensors: tensors.update({"lm_head.weight": head}))


def prune(path: Path, kept: tuple[int, ...]) -> None:
    """Keep these experts and their router rows in every sparse layer."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".expert_" in name]:
            head, expert, tail = re.split(r"(?<=\.expert_)(\d+)", name)
            tensor = tensors.pop(name)
            if int(expert) in kept:
                tensors[f"{head}{kept.index(int(expert))}{tail}"] = tensor
        for name in [name for name in tensors if ".router." in name]:
            tensors[name] = tensors[name][list(kept)]

    change_tensors(path, change)
    change_config(path, num_experts=len(kept))


def exported(checkpoint: EncoderDecoderCheckpoint, directory: Path, **options: Any) -> OnnxEncoderDecoder:
    directory.mkdir()
    write_encoder_decoder(checkpoint, directory, **{"dtype": torch.float32, "portable": False} | options)
    return OnnxEncoderDecoder(directory, checkpoint.config, threads=1)


def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Return two sources, the second of them padded, and their targets."""
    generator = torch.Generator().manual_seed(1)
    source_BS, target_BL = (torch.randint(3, 200, (2, length), generator=generator) for length in (SOURCE, PREFILL + STEPS))
    real_BS = torch.ones_like(source_BS, dtype=torch.bool)
    real_BS[1, -PADDING:] = False
    target_BL[:, 0] = SIZES["decoder_start_token_id"]
    return source_BS.masked_fill(~real_BS, 0), real_BS, target_BL


PIECES = [(0, PREFILL), *((begin, begin + 1) for begin in range(PREFILL, PREFILL + STEPS))]


@torch.no_grad()
def by_transformers(model: Any, source_BS: Tensor, real_BS: Tensor, target_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden states of the sources, and the logits of a prefill and of the steps after it."""
    encoded = model.get_encoder()(input_ids=source_BS, attention_mask=real_BS.long())
    past, logits = None, []
    for begin, end in PIECES:
        outputs = model(
            encoder_outputs=encoded,
            attention_mask=real_BS.long(),
            decoder_input_ids=target_BL[:, begin:end],
            past_key_values=past,
            use_cache=True,
        )
        past, logits = outputs.past_key_values, [*logits, outputs.logits]
    return encoded[0], torch.cat(logits, dim=1)


def by_graphs(found: OnnxEncoderDecoder, source_BS: Tensor, real_BS: Tensor, target_BL: Tensor) -> tuple[Tensor, Tensor]:
    target = found.read(source_BS, real_BS)
    logits = [found.write(target_BL[:, begin:end], target) for begin, end in PIECES]
    return target.states_BSD, torch.cat(logits, dim=1)


def differences(model: Any, found: OnnxEncoderDecoder) -> dict[str, float]:
    """Return the largest |difference| of hidden states and of logits of a prefill and 8 steps, also for a padded batch."""
    source_BS, real_BS, target_BL = texts()
    alone = source_BS[:1], real_BS[:1], target_BL[:1]
    states, logits = (a - b for a, b in zip(by_transformers(model, *alone), by_graphs(found, *alone), strict=True))
    together = zip(
        by_transformers(model, source_BS, real_BS, target_BL), by_graphs(found, source_BS, real_BS, target_BL), strict=True
    )
    both_states, both_logits = (a - b for a, b in together)
    return {
        "encoder": float(states.abs().max()),
        "prefill": float(logits[:, :PREFILL].abs().max()),
        "decode": float(logits[:, PREFILL:].abs().max()),
        "padded batch": max(float(both_states[real_BS].abs().max()), float(both_logits.abs().max())),
    }


def check_graphs_of(directory: Path, portable: bool, mixtures: bool) -> None:
    for name in (ENCODER_NAME, DECODER_NAME):
        onnx.checker.check_model(directory / name)
        used = operators(directory, name)
        assert set(used) == ({"", "com.microsoft"} if mixtures and not portable else {""})
        assert used.get("com.microsoft", {"MoE"}) == {"MoE"}


@pytest.mark.parametrize("portable", [False, True], ids=["moe", "portable"])
@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_what_transformers_gives(name: str, portable: bool, tmp_path: Path, onnx_parity: Any) -> None:
    make(tmp_path / "model", **MODELS[name])
    if name == "pruned":
        prune(tmp_path / "model", (1, 3))
    checkpoint = EncoderDecoderCheckpoint(tmp_path / "model")
    found = exported(checkpoint, tmp_path / "onnx", portable=portable)
    form = f", {'portable' if portable else 'moe'}" if checkpoint.experts else ""
    for what, difference in differences(checkpoint.load(torch.float32), found).items():
        onnx_parity(checkpoint.row.model_type[:6], name + form, what, difference)
    check_graphs_of(tmp_path / "onnx", portable, bool(checkpoint.experts))


def test_a_full_expert_drops_tokens_in_the_graph_too(tmp_path: Path) -> None:
    """With room for all tokens the weights give other results, so tokens were dropped, in the prefill too."""
    make(tmp_path / "model", **MODELS["capacity 2"])
    narrow = by_graphs(exported(EncoderDecoderCheckpoint(tmp_path / "model"), tmp_path / "narrow"), *texts())
    change_config(tmp_path / "model", expert_capacity=64)
    wide = by_graphs(exported(EncoderDecoderCheckpoint(tmp_path / "model"), tmp_path / "wide"), *texts())
    assert all(float((a - b).abs().max()) > 0.05 for a, b in zip(narrow, wide, strict=True))


@pytest.mark.parametrize("portable", [False, True], ids=["moe", "portable"])
def test_experts_that_no_token_chose_are_not_computed(portable: bool, tmp_path: Path) -> None:
    """The weights of these experts are NaN, which would show in every logit."""
    make(tmp_path / "model", **SWITCH)
    checkpoint = EncoderDecoderCheckpoint(tmp_path / "model")
    model, chosen = checkpoint.load(torch.float32), {}
    for layer in checkpoint.experts:
        chosen[layer] = set()
        router = model.get_submodule(f"{checkpoint.block(layer)}.router")
        router.register_forward_hook(lambda *seen, own=chosen[layer]: own.update(seen[2][2].argmax(-1).flatten().tolist()))
    source_BS, real_BS, target_BL = (tensor[:1, :2] for tensor in texts())
    with torch.no_grad():
        model(input_ids=source_BS, decoder_input_ids=target_BL)
    idle = {layer: set(range(SWITCH["num_experts"])) - used for layer, used in chosen.items()}
    assert all(idle.values())
    names = [f"{checkpoint.block(layer)}.experts.expert_{expert}.wo.weight" for layer in idle for expert in idle[layer]]
    change_tensors(tmp_path / "model", lambda tensors: [tensors[name].fill_(torch.nan) for name in names])
    found = exported(EncoderDecoderCheckpoint(tmp_path / "model"), tmp_path / "onnx", portable=portable)
    assert bool(found.write(target_BL, found.read(source_BS, real_BS)).isfinite().all())
    assert not bool(by_graphs(found, *texts())[1].isfinite().all()), "and other tokens do choose them"


def test_keys_and_values_of_the_source_are_computed_once(tmp_path: Path) -> None:
    """After the first call the graph no longer reads the hidden states that keys and values were made from."""
    make(tmp_path / "model", **DENSE)
    found = exported(EncoderDecoderCheckpoint(tmp_path / "model"), tmp_path / "onnx")
    source_BS, real_BS, target_BL = texts()
    expected = by_graphs(found, source_BS, real_BS, target_BL)[1]
    target = found.read(source_BS, real_BS)
    found.write(target_BL[:, :PREFILL], target)
    target.states_BSD = torch.full_like(target.states_BSD, torch.nan)
    again = [found.write(target_BL[:, begin:end], target) for begin, end in PIECES[1:]]
    assert torch.equal(torch.cat(again, dim=1), expected[:, PREFILL:])


@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets(both_ways: bool) -> None:
    """By hand for 8 buckets up to distance 16: 0 and 1 (0 to 3) are exact, then logarithmic. transformers has the same."""
    from transformers.models.t5.modeling_t5 import T5Attention

    # Both ways: 4 buckets a side, 2 of them exact, and ln(d / 2) / ln 8 · 2 is 1 at d = 5.7. Otherwise 4 exact ones of 8,
    # and ln(d / 4) / ln 4 · 4 is 1 at 5.7, 2 at 8, 3 at 11.3.
    worked_out = [0, 1, 2, 2, 2, 2, 3, 3] if both_ways else [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7]
    assert buckets(-torch.arange(len(worked_out)), 8, 16, both_ways).tolist() == worked_out
    assert buckets(torch.arange(1, 8), 8, 16, both_ways).tolist() == ([5, 6, 6, 6, 6, 7, 7] if both_ways else [0] * 7)
    distances = torch.arange(-300, 301)
    for count, farthest in ((8, 10), (32, 128), (64, 200)):
        expected = T5Attention._relative_position_bucket(distances, both_ways, count, farthest)
        assert torch.equal(buckets(distances, count, farthest, both_ways), expected)


# The command


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `model`, a mixture with a tokenizer, and `out`, made dense from it with two FFNs."""
    path = tmp_path_factory.mktemp("sequences")
    make_model(path / "model", d_ff=32)
    make_pairs(path / "pairs.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        run(*DENSIFY, "--ffns", "2")
    return path


@pytest.fixture(name="place")
def workplace(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("model", "out"):
        shutil.copytree(made / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_writes_an_artifact_and_says_how_close_it_is(place: Path, onnx_parity: Any) -> None:
    figures = run("export", "model", "-o", "onnx", "--threads", "1")
    assert 0 < figures["max_abs_logit_difference"] <= 1e-4 and 0 < figures["max_abs_hidden_state_difference"] <= 1e-4
    assert (figures["format"], figures["experts_per_layer"]) == ("onnx", [4, 4, 4])
    written = {path.name for path in (place / "onnx").iterdir()}
    assert written >= {ENCODER_NAME, DECODER_NAME, "model.onnx.data", "config.json", "tokenizer.json", "compression.json"}
    provenance = read_provenance(place / "onnx")
    assert provenance is not None and set(provenance["files"]) == written - {"compression.json"}
    assert not list(place.glob(".*")), "nothing temporary is left"
    inspected, source = (run("inspect", name) for name in ("onnx", "model"))
    same = ("architecture", "layers", "experts_per_layer", "experts_per_token", "parameters", "active_parameters", "dtype")
    assert {name: inspected[name] for name in same} == {name: source[name] for name in same}
    assert inspected["kind"] == "onnx" and inspected["bytes"] == (place / "onnx" / "model.onnx.data").stat().st_size
    figures = run("export", "out", "-o", "dense", "--experts", "portable", "--threads", "1")
    assert figures["experts_per_layer"] == [] and figures["parameters"] == run("inspect", "out")["parameters"]
    checkpoint = EncoderDecoderCheckpoint(place / "out")
    found = OnnxEncoderDecoder(place / "dense", checkpoint.config, threads=1)
    for what, difference in differences(checkpoint.load(torch.float32), found).items():
        onnx_parity(checkpoint.row.model_type, "densified", what, difference)
    refused(place, ["export", "model", "-o", "onnx"], "exists already")
    assert run("export", "out", "-o", "onnx", "--overwrite", "--threads", "1")["experts_per_layer"] == []


def test_weights_are_in_the_data_file_once(place: Path) -> None:
    figures = run("export", "model", "-o", "onnx", "--threads", "1")
    stored = load_file(place / "model" / "model.safetensors")
    biases = {name: tensor for name, tensor in stored.items() if "relative" in name}
    rows = 2 * EncoderDecoderCheckpoint(place / "model").config.relative_attention_max_distance + 1
    tables = len(biases) * rows * SIZES["num_heads"] * 4
    kept = sum(tensor.numel() * 4 for name, tensor in stored.items() if name not in biases)
    assert len(biases) == 2 and figures["weights_bytes"] == kept + tables


@pytest.mark.parametrize(
    ("precision", "experts", "bits", "share"),
    [
        ("float16", "moe", None, 0.51),
        ("float16", "portable", None, 0.51),
        ("int8", "moe", 8, 0.32),
        ("int4", "moe", 4, 0.25),
    ],
)
def test_low_precision(place: Path, precision: str, experts: str, bits: int | None, share: float) -> None:
    """Logits equal those of the same rounded weights, up to the rounding of activations."""
    figures = run("export", "model", "-o", "onnx", "--precision", precision, "--experts", experts, "--threads", "1")
    checkpoint = EncoderDecoderCheckpoint(place / "model")
    model = checkpoint.load(torch.float32)
    if bits:
        (place / "again").mkdir()
        written = write_encoder_decoder(checkpoint, place / "again", dtype=torch.float32, portable=False, bits=bits)
        packings = written.packings
        assert {packing.bits for name, packing in packings.items() if "shared" not in name} == {bits}
        assert packings["shared.weight"].bits == 8 and not any("router" in name or "norm" in name for name in packings)
        round_weights(model, packings)
    found = OnnxEncoderDecoder(place / "onnx", checkpoint.config, threads=1)
    for values, expected in zip(by_graphs(found, *texts()), by_transformers(model, *texts()), strict=True):
        off = float((values.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        assert off < (0.1 if bits else 0.01)
    whole = sum(tensor.numel() * 4 for tensor in load_file(place / "model" / "model.safetensors").values())
    assert figures["weights_bytes"] < share * whole + 9000, "and the biases of all distances"


def wrong_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    import engine.onnx.encoder_decoder as module

    write = module.write_encoder_decoder

    def write_wrong(checkpoint: EncoderDecoderCheckpoint, *arguments: Any, **keywords: Any) -> Any:
        wrong = EncoderDecoderCheckpoint(checkpoint.directory)
        wrong.config.layer_norm_epsilon = 0.1
        return write(wrong, *arguments, **keywords)

    monkeypatch.setattr(module, "write_encoder_decoder", write_wrong)


def forgotten_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    write = OnnxEncoderDecoder.write

    def forgetful(self: OnnxEncoderDecoder, tokens_BL: Tensor, target: TargetState) -> Tensor:
        target.past["past_key_values.1.decoder.value"].zero_()
        return write(self, tokens_BL, target)

    monkeypatch.setattr(OnnxEncoderDecoder, "write", forgetful)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_norms, "output last_hidden_state at encoder of a random prompt of 1 tokens is off by .* removed"),
        (forgotten_keys, "output logits at step 1 of a random prompt of 1 tokens is off by .* removed"),
    ],
)
def test_what_differs_is_removed_and_the_step_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str
) -> None:
    before = listing(place)
    spoil(monkeypatch)
    with pytest.raises(ExportError, match=message):
        export_encoder_decoder(ExportOptions(model="model", output=place / "onnx", threads=1))
    assert listing(place) == before


def test_what_cannot_be_is_refused_and_nothing_is_written(place: Path) -> None:
    for options, fragments in (
        (["--format", "onnx-genai"], ("relative positions, which onnxruntime-genai does not run", "--format onnx")),
        (["--skip-threshold", "1"], ("none to skip",)),
        (["--precision", "int8", "--experts", "portable"], ("leave out --experts portable",)),
        (["-o", "/proc/nowhere/out"], ("cannot be",)),
    ):
        refused(place, ["export", "model", "-o", "onnx", *options], *fragments)
    whole = (place / "model" / "config.json").read_text()
    for changes, fragment in (
        ({"dense_act_fn": "gelu"}, "dense_act_fn='gelu'"),
        ({"router_dtype": "bfloat16"}, "router_dtype='bfloat16'"),
        ({"relative_attention_num_buckets": 2}, "relative_attention_num_buckets=2"),
        ({"relative_attention_max_distance": 10**9}, "up to distance 1000000000"),
        ({"num_heads": 2}, "another shape"),
    ):
        change_config(place / "model", **changes)
        refused(place, ["export", "model", "-o", "onnx"], fragment)
        (place / "model" / "config.json").write_text(whole)
    make_model(place / "odd", d_ff=24)
    refused(place, ["export", "odd", "-o", "onnx", "--precision", "int4"], "FFN width 24 is not a multiple")


def test_an_export_is_inspected_and_otherwise_refused(place: Path) -> None:
    run("export", "out", "-o", "onnx", "--threads", "1")
    for command in (["generate", "onnx", "-p", "a"], ["evaluate", "onnx"], ["bench", "onnx"], ["serve", "onnx"]):
        refused(place, command, "is an encoder-decoder, which this command does not take")
    for command in (["densify", "onnx", "--data", "stdlib", "-o", "x"], ["export", "onnx", "-o", "x"]):
        refused(place, command, "is an ONNX export")
    config = json.loads((place / "onnx" / "config.json").read_text())
    (place / "onnx" / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    refused(place, ["inspect", "onnx"], "config.json: has")
    (place / "onnx" / "compression.json").unlink()
    refused(place, ["inspect", "onnx"], "are not those of the model that config.json describes")
    (place / "onnx" / "config.json").write_text(json.dumps(config))
    refused(place, ["inspect", "onnx"], "no figures of its export")
