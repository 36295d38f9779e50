"""Effect of low-bit weights on the demo model: bytes, perplexity, and the divergence of its predictions from the full model.

python benchmarks/quantize.py [--windows 256]

Everything is computed in float32, so that only weights differ, on the half of the held-out documents that is for reports;
perplexities are compared document by document. "largest alone" is the usual reference: rounding to nearest
with the scale given by the largest weight of a group, and no other scale tried.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from held_out import windows_of
from results import markdown, save
from torch import Tensor

from calibrate.options import CalibrationOptions
from compress.options.quantize import AWQ, GPTQ, NEAREST, QuantiserOptions, QuantizeOptions
from compress.quantize import quantize
from compress.run.losses import Losses
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.decoder.model import Decoder
from engine.kernels.stored.quantized_weight import Weight
from engine.kernels.stored.scheme import WHOLE_ROW
from engine.passes.memory_budget import UNLIMITED

ROWS = {
    "8 bits, groups of 32": QuantiserOptions(8),
    "4 bits, groups of 16": QuantiserOptions(4, 16),
    "4 bits, groups of 32": QuantiserOptions(4),
    "4 bits, groups of 32, activation-aware": QuantiserOptions(4),
    "4 bits, groups of 32, error feedback": QuantiserOptions(4),
    "4 bits, groups of 32, experts only": QuantiserOptions(4, experts_only=True),
    "4 bits, groups of 32, experts only, error feedback": QuantiserOptions(4, experts_only=True),
    **{
        f"{bits} bits, groups of 32{way}": QuantiserOptions(bits, experts_only="experts only" in way)
        for bits in (3, 2)
        for way in (
            *("", ", activation-aware", ", error feedback"),
            *(", experts only", ", experts only, error feedback"),
        )
    },
    "4 bits, whole rows": QuantiserOptions(4, WHOLE_ROW),
    "4 bits, whole rows, activation-aware": QuantiserOptions(4, WHOLE_ROW),
    "4 bits, whole rows, error feedback": QuantiserOptions(4, WHOLE_ROW),
}
WAYS = {"activation-aware": AWQ, "error feedback": GPTQ}
"""Ways of rounding, by the last words of a title."""
REFERENCE = "4 bits, groups of 32, largest alone"


class Reference(Checkpoint):
    """The model with matrices rounded to nearest, scale = largest / 7.5."""

    def stored(self, name: str, dtype: torch.dtype | None = None) -> Weight:
        """Return a tensor, rounded."""
        tensor = super().stored(name, dtype)
        if name not in self._multiplied or not isinstance(tensor, Tensor):
            return tensor
        groups = tensor.float().view(tensor.shape[0], -1, 32)
        scales = (groups.abs().amax(-1, keepdim=True) / 7.5).to(tensor.dtype).float()
        return ((groups / scales).round().clamp(-8, 7) * scales).view(tensor.shape)


@torch.inference_mode()
def measured(checkpoint: Checkpoint, full: Decoder, tokens_SL: Tensor) -> tuple[Losses, float]:
    """Return the losses on each window, and the mean KL(p_full ‖ p) of a prediction, in nats."""
    decoder = Decoder(checkpoint.config, checkpoint.weights(torch.float32)).eval()
    losses, divergence = list[Tensor](), 0.0
    for rows in UNLIMITED.batches(*tokens_SL.shape):
        tokens_BL = tokens_SL[rows]
        logs, wanted = (each(tokens_BL)[:, :-1].log_softmax(-1) for each in (decoder, full))
        losses.append(-logs.gather(-1, tokens_BL[:, 1:, None]).double().sum((1, 2)))
        divergence += float((wanted.exp() * (wanted - logs)).sum())
    predictions = tokens_SL.shape[1] - 1
    return Losses(torch.cat(losses), predictions), divergence / (tokens_SL.shape[0] * predictions)


def rounded(title: str, options: QuantiserOptions, directory: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Return the demo model quantized with these options, and the figures of its artifact."""
    figures = quantize(
        QuantizeOptions(
            model="demo",
            output=directory / title,
            method="quantize",
            calibration=CalibrationOptions(samples=32, evaluation_samples=0),
            quantiser=options,
            rounding=WAYS.get(title.split(", ")[-1], NEAREST),
            dtype=torch.float32,
        )
    )
    return Checkpoint(directory / title), figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=256, help="held-out windows of 256 tokens")
    arguments = parser.parse_args()
    checkpoint = Checkpoint(DEMO_DIRECTORY)
    windows = windows_of("demo", "report", arguments.windows)
    full = Decoder(checkpoint.config, checkpoint.weights(torch.float32)).eval()
    whole, _ = measured(checkpoint, full, windows.tokens_SL)
    rows: list[dict[str, Any]] = []

    def add(title: str, own: Checkpoint, size: int | None, figures: dict[str, Any]) -> None:
        losses, divergence = measured(own, full, windows.tokens_SL)
        row = {"title": title, "bytes": size, "perplexity": losses.perplexity, "divergence": divergence}
        row["stderr"] = losses.standard_error(windows.documents_S)
        row["ratio"] = list(losses.ratio_to(whole, windows.documents_S))
        names = ("relative_weight_error", "bytes_not_quantized_share", "output_error_ratio")
        rows.append(row | {name: figures.get(name) for name in names})

    with tempfile.TemporaryDirectory() as directory:
        add("bfloat16, as stored", checkpoint, checkpoint.bytes, {})
        for title, options in ROWS.items():
            own, figures = rounded(title, options, Path(directory))
            add(title, own, own.bytes, figures)
            if title == "4 bits, groups of 32":
                add(REFERENCE, Reference(DEMO_DIRECTORY), own.bytes, {})
    save("quantize", {"sequences": list(windows.tokens_SL.shape), "rows": rows})


def table(figures: dict[str, Any]) -> str:
    """Return the table of the page."""
    rows, (sequences, length) = figures["rows"], figures["sequences"]
    whole = rows[0]
    cells = [
        [
            row["title"],
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['perplexity']:.3f} ± {row['stderr']:.3f}",
            "–" if row is whole else "{:.3f} ({:.3f} to {:.3f})".format(*row["ratio"]),
            "–" if row is whole else f"{row['divergence']:.4f}",
            "–" if row["relative_weight_error"] is None else f"{row['relative_weight_error']:.1%}",
        ]
        for row in rows
    ]
    about = (
        f"The demo model on {sequences} × {length} tokens of held-out documents. Perplexities have their standard error "
        "over documents; the ratio to the first row, with its interval of 95 %, is paired by document. KL is from the first "
        "row's predictions, in nats a token.\n\n"
    )
    return about + markdown(["", "weights MB", "perplexity", "ratio", "KL", "weights off by"], cells)


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return the percent of the divergence that two ways of rounding remove, and the megabytes of plain attention."""
    rows = {row["title"]: row for row in figures["rows"]}

    def removed(title: str, way: str) -> str:
        return f"{100 * (1 - rows[f'{title}, {way}']['divergence'] / rows[title]['divergence']):.0f}"

    plain = rows["4 bits, groups of 32, experts only"]["bytes"] - rows["4 bits, groups of 32"]["bytes"]
    return {
        "aware": removed("4 bits, groups of 32", "activation-aware"),
        "aware_rows": removed("4 bits, whole rows", "activation-aware"),
        "feedback": removed("4 bits, groups of 32", "error feedback"),
        "feedback_rows": removed("4 bits, whole rows", "error feedback"),
        "feedback_experts": removed("4 bits, groups of 32, experts only", "error feedback"),
        "attention_mb": f"{plain / 1e6:.1f}",
        "feedback_3": removed("3 bits, groups of 32", "error feedback"),
        "feedback_2": removed("2 bits, groups of 32", "error feedback"),
        "feedback_experts_3": removed("3 bits, groups of 32, experts only", "error feedback"),
        "feedback_experts_2": removed("2 bits, groups of 32, experts only", "error feedback"),
    }


TABLES = {"quantize": table}
IN_TEXT = {"quantize": quoted}


if __name__ == "__main__":
    main()
