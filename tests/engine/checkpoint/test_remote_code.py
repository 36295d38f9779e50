"""A pruned directory with a different number of experts per layer loads in transformers alone and computes the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from engine.checkpoint import remote_code
from engine.families.table import ARCHITECTURES

Kept = list[list[int] | None]  # the experts that each layer keeps; None: the layer has no experts
KEPT: Kept = [[0, 2, 3], [1], [0, 1, 2, 3]]  # the second layer keeps fewer than top-k
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 64
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 4},
}
ISOLATED = """
import sys
sys.modules.update(dict.fromkeys(("engine", "compress", "calibrate")))  # None: importing one of them raises
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
for directory in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    with torch.no_grad():
        logits = model(load_file(directory + "/tokens.safetensors")["tokens"]).logits
    save_file({"logits": logits}, directory + "/logits.safetensors")
"""


@pytest.fixture(autouse=True)
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cache into which transformers copies remote code. It read the path when it was imported."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


def full_model(family: str, **overrides: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | FAMILIES[family] | overrides)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def write_pruned(full: Any, directory: Path, kept: Kept = KEPT) -> Path:
    """Save, then drop tensors and router rows by their names on disk, as a compressor would."""
    full.save_pretrained(directory)
    pruned: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(directory / "model.safetensors").items():
        parts = key.split(".")
        keep = kept[int(parts[2])] if parts[1] == "layers" else None
        if keep is not None and "experts" in parts:
            expert = parts.index("experts") + 1
            if int(parts[expert]) not in keep:
                continue
            parts[expert] = str(keep.index(int(parts[expert])))
        elif keep is not None and parts[-2] == "gate":
            tensor = tensor[keep].contiguous()
        pruned[".".join(parts)] = tensor
    save_file(pruned, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    counts = [None if keep is None else {"num_local_experts": len(keep)} for keep in kept]
    config |= {"block_configs": [{"ffn": {"moe": moe}} for moe in counts], "auto_map": remote_code.auto_map()}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / remote_code.FILE_NAME).write_text(remote_code.render(ARCHITECTURES[full.config.model_type]))
    return directory


def load(directory: Path, **kwargs: Any) -> Any:
    """Load with every tensor accounted for, because transformers only logs missing and unexpected ones."""
    auto: Any = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(directory, trust_remote_code=True, output_loading_info=True, **kwargs)
    assert not any(info.values()), info
    return model


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(TOKENS).logits
    return logits


def masked_logits(full: Any, kept: Kept = KEPT) -> torch.Tensor:
    """Return the full model's logits with the router logits of the removed experts at minus infinity."""

    def mask(keep: list[int]) -> Any:
        def hook(gate: nn.Module, args: tuple[torch.Tensor], outputs: Any) -> Any:
            logits = torch.full_like(outputs[0], -torch.inf)
            logits[:, keep] = outputs[0][:, keep]
            weights, chosen = logits.softmax(-1).topk(2)
            if getattr(gate, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, chosen

        return hook

    layers = zip(full.model.layers, kept, strict=True)
    hooks = [layer.mlp.gate.register_forward_hook(mask(keep)) for layer, keep in layers if keep is not None]
    logits = logits_of(full)
    for handle in hooks:
        handle.remove()
    return logits


@pytest.mark.parametrize("experts_implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_full_model_with_masked_router(family: str, experts_implementation: str, tmp_path: Path) -> None:
    full = full_model(family)
    directory = write_pruned(full, tmp_path / "pruned")
    pruned = load(directory, experts_implementation=experts_implementation)
    assert type(pruned).__name__ == "CompressedForCausalLM"
    assert type(pruned.config) is type(full.config)
    assert [layer.mlp.experts.gate_up_proj.shape[0] for layer in pruned.model.layers] == [3, 1, 4]
    assert [layer.mlp.gate.top_k for layer in pruned.model.layers] == [2, 1, 2]
    expected = masked_logits(full)
    torch.testing.assert_close(logits_of(pruned), expected, atol=1e-5, rtol=0)
    assert (expected - logits_of(full)).abs().max() > 0.1  # removing these experts does change the output


def test_only_families_with_other_names_of_down_projections_name_them() -> None:
    """Files that earlier versions wrote for all other families must stay equal to the text that is written now."""
    usual, own = (f"name.startswith(({names}))" for names in ('"down", "output"', '"down", "output", "w2"'))
    texts = {name: remote_code.render(row) for name, row in ARCHITECTURES.items()}
    assert {name for name, text in texts.items() if own in text} == {"lfm2_moe"}
    assert all((usual in text) != (own in text) for text in texts.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_save_pretrained_round_trip(family: str, tmp_path: Path) -> None:
    first = load(write_pruned(full_model(family), tmp_path / "pruned"))
    first.save_pretrained(tmp_path / "again")
    names = set(load_file(tmp_path / "pruned/model.safetensors"))
    assert set(load_file(tmp_path / "again/model.safetensors")) == names
    ours = remote_code.render(ARCHITECTURES[first.config.model_type])
    assert (tmp_path / "again" / remote_code.FILE_NAME).read_text() == ours
    assert json.loads((tmp_path / "again/config.json").read_text())["auto_map"] == remote_code.auto_map()
    second = load(tmp_path / "again")
    assert torch.equal(logits_of(first), logits_of(second))


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_matches_greedy_without_cache(family: str, tmp_path: Path) -> None:
    model = load(write_pruned(full_model(family), tmp_path / "pruned"))
    prompt = TOKENS[:1]
    mask = torch.ones_like(prompt)
    generated = model.generate(prompt, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    with torch.no_grad():
        scores = model(generated).logits[0, prompt.shape[1] - 1 : -1]
    scores[:, SHAPE["eos_token_id"]] = -torch.inf
    assert generated[0, prompt.shape[1] :].tolist() == scores.argmax(-1).tolist()


def test_bfloat16_and_tied_embeddings(tmp_path: Path) -> None:
    full = full_model("Mixtral", tie_word_embeddings=True)
    for parameter in full.parameters():  # unlike from_pretrained, `full.to` would also round the rotary buffer
        parameter.data = parameter.data.bfloat16()
    pruned = load(write_pruned(full, tmp_path / "pruned"))
    assert {parameter.dtype for parameter in pruned.parameters()} == {torch.bfloat16}
    assert pruned.lm_head.weight is pruned.model.embed_tokens.weight
    torch.testing.assert_close(logits_of(pruned.float()), masked_logits(full.float()), atol=1e-5, rtol=0)


def test_layer_without_experts_is_left_alone(tmp_path: Path) -> None:
    full = full_model("Qwen3Moe", mlp_only_layers=[1])
    kept: Kept = [[0, 2, 3], None, [1]]
    pruned = load(write_pruned(full, tmp_path / "pruned", kept))
    torch.testing.assert_close(logits_of(pruned), masked_logits(full, kept), atol=1e-5, rtol=0)


def test_from_config_needs_no_checkpoint(tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(write_pruned(full_model("Olmoe"), tmp_path / "pruned"))
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, trust_remote_code=True)
    assert [layer.mlp.gate.weight.shape[0] for layer in model.model.layers] == [3, 1, 4]
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    assert model.model.layers[1].mlp.experts.down_proj.grad.abs().sum() > 0


def test_router_logits_are_refused_and_switched_off_in_the_config(tmp_path: Path) -> None:
    model = load(write_pruned(full_model("Mixtral", output_router_logits=True), tmp_path / "pruned"))
    assert logits_of(model).isfinite().all()
    with pytest.raises(ValueError, match="same number of experts in every layer"):
        model(TOKENS, output_router_logits=True)


def test_more_experts_than_the_config_has_are_refused(tmp_path: Path) -> None:
    directory = write_pruned(full_model("Mixtral"), tmp_path / "pruned")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_local_experts": 3}))
    with pytest.raises(ValueError, match=r"asks for 4 experts, config\.json has 3"):
        load(directory)


@pytest.mark.slow
def test_loads_where_this_package_is_not_importable(tmp_path: Path) -> None:
    directories = [write_pruned(full_model(family), tmp_path / family / "pruned") for family in FAMILIES]
    for directory in directories:
        save_file({"tokens": TOKENS}, directory / "tokens.safetensors")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", ISOLATED, *map(str, directories)]
    done = subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for family, directory in zip(FAMILIES, directories, strict=True):
        expected = masked_logits(full_model(family))
        torch.testing.assert_close(load_file(directory / "logits.safetensors")["logits"], expected, atol=1e-5, rtol=0)
