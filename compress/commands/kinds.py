"""Kinds of models. Each verb that differs by kind has a table with one row per kind."""

from __future__ import annotations

from typing import Literal

Kind = Literal["decoder", "encoder-decoder", "classifier"]


def kind_of(model: str) -> Kind:
    """Return the kind of a model, given as a directory, a hub id or 'demo'. An export has the kind of its source."""
    from engine.checkpoint.kinds import is_classifier, is_encoder_decoder
    from engine.checkpoint.model_directory import resolve

    directory = resolve(model)
    if is_classifier(directory):
        return "classifier"
    return "encoder-decoder" if is_encoder_decoder(directory) else "decoder"
