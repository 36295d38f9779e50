"""Kinds of models: what a verb does differs by them, so it has a table with a row for each kind that it takes."""

from __future__ import annotations

from typing import Literal

Kind = Literal["decoder", "encoder-decoder", "classifier"]


def kind_of(model: str) -> Kind:
    """The kind of a model, given as a directory, a hub id or 'demo'. An export is of the kind that it was made from."""
    from engine.checkpoint.checkpoint import resolve
    from engine.checkpoint.kinds import is_classifier, is_encoder_decoder

    directory = resolve(model)
    if is_classifier(directory):
        return "classifier"
    return "encoder-decoder" if is_encoder_decoder(directory) else "decoder"
