"""The largest difference between exported encoder-decoders and transformers, on the tiny random models of the tests.

python benchmarks/encoder_decoder_parity.py [--models full,pruned]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import ROOT, markdown, save

TITLES = {
    "full": "Switch Transformer",
    "pruned": "with two of four experts",
    "one expert, capacity 5": "with one expert, of capacity 5",
    "capacity 2": "with experts of capacity 2",
    "untied": "with a head of its own",
    "dense": "T5",
    "dense, gated, head of its own": "T5 1.1: gated, with a head of its own",
}


def table(figures: dict[str, Any]) -> str:
    """Return the largest difference of hidden states and logits by model and form of the experts."""
    forms = figures["forms"]
    rows = [
        [title, *(f"{max(own[form].values()):.1e}" if form in own else "–" for form in forms)]
        for title, own in figures["models"].items()
    ]
    return markdown(["", *forms], rows)


TABLES = {"encoder_decoder_parity": table}


def main() -> None:
    import torch

    for folder in ("tests", "tests/support", "tests/engine/onnx", "tests/compress/dense"):
        sys.path.insert(0, str(ROOT / folder))
    sys.path.insert(0, str(ROOT))  # before `tests`, which has folders of the same names
    from test_onnx_encoder_decoder import MODELS, differences, exported, make, prune

    from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(TITLES), type=lambda text: text.replace(", ", "; ").split(","))
    torch.set_num_threads(1)
    forms = {"MoE operator": False, "standard operators": True}
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in (each.replace("; ", ", ") for each in parser.parse_args().models):
            place = Path(scratch) / name
            make(place / "model", **MODELS[name])
            if name == "pruned":
                prune(place / "model", (1, 3))
            checkpoint = EncoderDecoderCheckpoint(place / "model")
            model = checkpoint.load(torch.float32)
            found[TITLES[name]] = {
                form: differences(model, exported(checkpoint, place / form, portable=is_portable))
                for form, is_portable in forms.items()
                if checkpoint.experts or is_portable
            }
    save("encoder_decoder_parity", {"forms": list(forms), "models": found})


if __name__ == "__main__":
    main()
