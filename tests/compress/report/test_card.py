"""The front matter of a model card, which the hub reads as YAML."""

from __future__ import annotations

import yaml

from compress.report.card import front_matter


def test_front_matter_is_yaml_without_what_is_not_known() -> None:
    first, text, last = front_matter(["pruned", "moe-compress"], library=None, base="ada/tiny: a model")
    assert first == last == "---"
    assert yaml.safe_load(text) == {"base_model": "ada/tiny: a model", "tags": ["pruned", "moe-compress"]}
