"""Configs that are resolved without transformers equal transformers' result, or are left to transformers."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.families.plain_config import RECORD, PlainConfig, known_keys, read_plainly, recorded
from engine.families.resolve import decoder_config
from engine.families.table import ARCHITECTURES

FAMILIES = sorted(json.loads(RECORD.read_text())["families"])
ODD: tuple[Any, ...] = (None, True, -1, 0, 1, 3, 0.5, "bfloat16", [], [1], {"rope_type": "default", "rope_theta": 5e5})
UNDECLARED = (
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rotary_dim",
    "torch_dtype",
    "num_experts",
    "num_local_experts",
    "num_mtp_layers",
    "layer_types",
    "mlp_layer_types",
    "temperature",
    "num_labels",
    "name_or_path",
    "_name_or_path",
    "output_attentions",
    "attn_implementation",
    "_attn_implementation",
    "per_layer_config",
    "decoder_start_token_id",
    "a_key_of_nobody",
)
OF_IMAGES = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
NOT_COMPARED = frozenset(["read_as", "dtype", "id2label", "label2id", "ignore_keys_at_rope_validation"])


def values_of(config: Any) -> dict[str, Any]:
    """Return the public attributes of a config, except those that no decoder reads."""
    return {key: value for key, value in vars(config).items() if not key.startswith("_") and key not in NOT_COMPARED}


def variants(model_type: str) -> Iterator[dict[str, Any]]:
    """Yield configs of a family: whole, empty, and with one key left out or given an odd value."""
    whole = CONFIG_MAPPING[model_type]().to_dict()
    for key in ("model_type", "id2label", "label2id"):  # only `to_dict` writes these in full
        del whole[key]
    yield whole
    yield {}
    yield {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6} | OF_IMAGES}
    yield {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25} | OF_IMAGES}
    for key in (*whole, *UNDECLARED):
        yield {name: value for name, value in whole.items() if name != key}
        for odd in ODD:
            yield whole | {key: odd}
            yield {key: odd}


def check(model_type: str, config: dict[str, Any], warnings: list[str]) -> bool:
    """Return whether the config is read plainly. If it is, transformers must read the same values without a warning."""
    given, own = copy.deepcopy(config), copy.deepcopy(config)
    plain = read_plainly(model_type, own)
    if plain is None:
        assert own == config  # the config that transformers is then given
        return False
    warnings.clear()
    real = CONFIG_MAPPING[model_type](**given)
    assert values_of(plain) == values_of(real), config
    assert all(getattr(plain, name) == getattr(real, name) for name in real.attribute_map if hasattr(real, name))
    assert own == given  # transformers completes its input in place
    assert not warnings, (config, warnings)
    return True


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the warnings of transformers."""
    found: list[str] = []

    def note(self: logging.Logger, message: str, *rest: Any, **named: Any) -> None:
        found.append(message)

    monkeypatch.setattr(logging.Logger, "warning", note)
    monkeypatch.setattr(logging.Logger, "warning_once", note, raising=False)
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_transformers_reads_the_same(model_type: str, warned: list[str]) -> None:
    read = [check(model_type, config, warned) for config in variants(model_type)]
    assert read[0]  # a config as transformers writes it
    assert not all(read)


def test_the_record_is_of_this_transformers() -> None:
    assert json.loads(RECORD.read_text()) == json.loads(json.dumps(recorded()))


def test_keys_that_a_family_knows() -> None:
    config = json.loads((DEMO_DIRECTORY / "config.json").read_text())
    family = decoder_config(config).transformers_config
    assert isinstance(family, PlainConfig)
    assert known_keys(family) == known_keys(CONFIG_MAPPING["mixtral"]())


def test_most_families_are_read_without_transformers() -> None:
    read_as = {(row.words.read_as or name) for name, row in ARCHITECTURES.items()}
    assert read_as - set(FAMILIES) == {"gpt_oss", "llama4_text", "gemma4_text", "nemotron_h"}
    assert set(FAMILIES) <= read_as


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
        {"type": "linear", "factor": 2.0},
        {"rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": "10000"},
        {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    ],
)
def test_other_rotary_parameters_are_left_to_transformers(rope: dict[str, Any]) -> None:
    assert read_plainly("mixtral", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}) is not None
    assert read_plainly("mixtral", {"rope_parameters": rope}) is None
    assert read_plainly("mixtral", {"rope_scaling": rope}) is None
