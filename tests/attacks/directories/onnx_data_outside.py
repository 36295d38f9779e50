"""The graph's weights are, by its own account, in a file above the directory: any file of the machine could be read."""

from pathlib import Path

OF = "export"
REFUSED_BY = "every"
SAYS = "model.onnx"
SIGNED = True


def plant(directory: Path) -> None:
    import onnx

    (directory.parent / "outside.data").write_bytes((directory / "model.onnx.data").read_bytes())
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../outside.data"
    onnx.save(model, directory / "model.onnx")
