"""The final scores of a DiEP search as the artifact's file `diep_scores.json`, for people and pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.files.json_file import load_json, write_json
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest

FILE_NAME = "diep_scores.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class DiepScores:
    """α by decoder layer and expert of the source model, β by layer."""

    alpha: dict[int, list[float]]
    beta: dict[int, float]


def scores_of_state(state: Path, layers: tuple[int, ...]) -> DiepScores:
    """Return the scores in the state file of a search (`diep.save_state`) over these MoE layers."""
    with SafetensorsFile(state) as file:
        check_digest(file)
        alpha = {layer: file.tensor(f"alpha.{index}").tolist() for index, layer in enumerate(layers)}
        beta = {layer: float(file.tensor(f"beta.{index}")) for index, layer in enumerate(layers)}
    return DiepScores(alpha, beta)


def save_scores(scores: DiepScores, directory: Path) -> None:
    """Write the file into an artifact's directory."""
    layers = {str(layer): {"alpha": scores.alpha[layer], "beta": scores.beta[layer]} for layer in scores.alpha}
    write_json(directory / FILE_NAME, {"schema_version": SCHEMA_VERSION, "layers": layers})


def load_scores(directory: Path) -> DiepScores | None:
    """Return the scores of an artifact, None where it has none. Raises CheckpointError for a damaged file."""
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    values = load_json(path, "DiEP scores")
    layers = values.get("layers")
    if values.get("schema_version") != SCHEMA_VERSION or not isinstance(layers, dict) or not layers:
        raise CheckpointError(f"{path}: is not of schema {SCHEMA_VERSION}; copy the artifact again")
    alpha, beta = {}, {}
    for name, own in layers.items():
        if not (name.isascii() and name.isdigit() and isinstance(own, dict) and _are_scores(own)):
            raise CheckpointError(f"{path}: layers must map layer numbers to alpha and beta; copy the artifact again")
        alpha[int(name)], beta[int(name)] = own["alpha"], own["beta"]
    return DiepScores(alpha, beta)


def _are_scores(own: dict[str, Any]) -> bool:
    alpha = own.get("alpha")
    return isinstance(alpha, list) and bool(alpha) and all(_is_number(value) for value in [*alpha, own.get("beta")])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
