"""The ONNX graph of one time step, repeated over a window by ONNX's own loop."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto, checker, helper

from fixpoint.export.network import Network


def over_window(step: Any, network: Network) -> Any:
    """Return a model from `window` (B, T, d) to `scores` (B, C), with the step as the body of a
    `Scan`.

    Loop-carried are the state, from 0, and the scores.
    """
    d, C = network.input_size, len(network.classes)
    S = step.graph.input[1].type.tensor_type.shape.dim[1].dim_value
    body = helper.make_graph(
        step.graph.node,
        "step",
        [*_values(("state", S), ("old_scores", C)), *_values(("sample", d))],
        _values(("next_state", S), ("scores", C)),
        initializer=step.graph.initializer,
    )
    start = [helper.make_node("Shape", ["window"], ["batch"], start=0, end=1)]
    for name, size in (("state", S), ("scores", C)):
        start.append(helper.make_node("Constant", [], [f"{name}_size"], value_ints=[size]))
        shape = ["batch", f"{name}_size"]
        start.append(helper.make_node("Concat", shape, [f"{name}_shape"], axis=0))
        start.append(helper.make_node("ConstantOfShape", [f"{name}_shape"], [f"first_{name}"]))
    scan = helper.make_node(
        "Scan",
        ["first_state", "first_scores", "window"],
        ["last_state", "last_scores"],
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[1],
    )
    window = helper.make_tensor_value_info(
        "window", TensorProto.FLOAT, ["batch_size", network.timesteps, d]
    )
    scores = helper.make_tensor_value_info("last_scores", TensorProto.FLOAT, ["batch_size", C])
    graph = helper.make_graph([*start, scan], "window", [window], [scores])
    model = helper.make_model(
        graph, opset_imports=step.opset_import, ir_version=step.ir_version, functions=step.functions
    )
    model.graph.output[0].name = "scores"
    model.graph.node[-1].output[1] = "scores"
    checker.check_model(model)
    return model


def _values(*named: tuple[str, int]) -> list[Any]:
    return [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch_size", size])
        for name, size in named
    ]
