"""The file of skip tables beside a checkpoint, checked against its model without torch.

For each MoE layer it holds `gamma1`, [K-1], and `gamma2`, [N, N], both float32 (engine/decoder/skip_tables.py). Either
all layers also have `importance`, float32 [1], or none, as in files of earlier versions.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import CheckpointError
from engine.families.config import DecoderConfig
from engine.files.element_type import FLOAT32
from engine.files.finite import is_finite
from engine.files.mapped_file import RELEASE_EVERY_BYTES
from engine.files.safetensors_file import SafetensorsFile

FILE_NAME = "skip_tables.safetensors"
SKIP_RULES = ("diep", "naee", "mc-moe")
"""Names of the rules of skipping (engine/decoder/skip_tables.py)."""


def table_name(layer: int, table: str) -> str:
    """The name in the file of one MoE layer's "gamma1", "gamma2" or "importance"."""
    return f"moe_layers.{layer}.{table}"


def has_skip_tables(directory: Path, config: DecoderConfig) -> bool:
    """Whether a checkpoint brings skip tables. Raises CheckpointError for tables that are damaged or of another model."""
    path = directory / FILE_NAME
    if not path.is_file():
        return False
    with SafetensorsFile(path) as file:
        check_skip_tables(file, config)
    return True


def has_importance(file: SafetensorsFile) -> bool:
    """Whether the file holds `importance`, which files of earlier versions lack."""
    return any(name.endswith(".importance") for name in file.entries)


def check_skip_tables(file: SafetensorsFile, config: DecoderConfig) -> None:
    """Raise CheckpointError unless the file holds the tables of this model, of finite numbers."""
    layers = [moe for layer in config.layers if (moe := layer.moe) is not None]
    shapes: dict[str, tuple[int, ...]] = {
        table_name(index, "gamma1"): (moe.experts_per_token - 1,) for index, moe in enumerate(layers)
    }
    shapes |= {table_name(index, "gamma2"): (moe.experts, moe.experts) for index, moe in enumerate(layers)}
    if has_importance(file):
        shapes |= {table_name(index, "importance"): (1,) for index in range(len(layers))}
    if file.entries.keys() != shapes.keys():
        odd = sorted(file.entries.keys() ^ shapes.keys())[0]
        raise CheckpointError(
            f"{file.path}: tensor {odd} is {'missing' if odd in shapes else 'not expected'} for "
            f"{len(layers)} MoE layers; the skip tables are of another model, calibrate again"
        )
    for name, shape in shapes.items():
        entry = file.entries[name]
        if entry.shape != shape or entry.element != FLOAT32:
            raise CheckpointError(
                f"{file.path}: tensor {name} is {entry.element} {list(entry.shape)} and the model asks for {FLOAT32} "
                f"{list(shape)}; the skip tables are of another model, calibrate again"
            )
        if not is_finite(file, name, RELEASE_EVERY_BYTES):
            raise CheckpointError(f"{file.path}: tensor {name} holds NaN or infinity; the file is damaged, calibrate again")
