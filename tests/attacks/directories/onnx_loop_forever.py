"""The graph has a node that never ends, for an output that nobody asked for."""

from pathlib import Path

OF = "export"
REFUSED_BY = ("inspect", "generate", "evaluate", "bench")
SAYS = "Loop"
SIGNED = True


def plant(directory: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    model = onnx.load(directory / "model.onnx", load_external_data=False)
    body = helper.make_graph(
        [helper.make_node("Identity", ["going"], ["on"]), helper.make_node("Identity", ["count"], ["kept"])],
        "forever",
        [helper.make_tensor_value_info(n, t, []) for n, t in (("count", TensorProto.INT64), ("going", TensorProto.BOOL))],
        [helper.make_tensor_value_info(n, t, []) for n, t in (("on", TensorProto.BOOL), ("kept", TensorProto.INT64))],
    )
    true = helper.make_tensor("always", TensorProto.BOOL, [], [True])
    model.graph.initializer.append(true)
    model.graph.node.append(helper.make_node("Loop", ["", "always"], ["never"], body=body))
    model.graph.node.append(helper.make_node("Shape", ["never"], ["size"]))
    model.graph.output.append(helper.make_tensor_value_info("size", TensorProto.INT64, [None]))
    onnx.save(model, directory / "model.onnx")
