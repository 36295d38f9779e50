"""Weights of the graph lie, by its own account, beyond the end of their file."""

from pathlib import Path

OF = "export"
REFUSED_BY = "every"
SAYS = "model.onnx"
SIGNED = True


def plant(directory: Path) -> None:
    import onnx

    model = onnx.load(directory / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "offset":
                entry.value = str(2**62)
    onnx.save(model, directory / "model.onnx")
