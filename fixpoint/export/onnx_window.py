"""The ONNX graph of one time step, repeated over a window by ONNX's own loop."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto, checker, helper

from fixpoint.export.network import Network


def over_window(step: Any, network: Network) -> Any:
    """A model from `window` (B, T, d) to `scores` (B, C), with the step as the body of a `Scan`.

    Loop-carried are the state, from 0, the scores, and the time index where the step has one.
    """
    d, n, C = network.input_size, network.hidden_size, len(network.classes)
    body = helper.make_graph(
        [*step.graph.node, *_following_index(network.bounded)],
        "step",
        [*_values(("state", n), ("old_scores", C)), *_index("t", network), *_values(("sample", d))],
        [*_values(("next_state", n), ("scores", C)), *_index("next_t", network)],
        initializer=step.graph.initializer,
    )
    start = [helper.make_node("Shape", ["window"], ["batch"], start=0, end=1)]
    for name, size in (("state", n), ("scores", C)):
        start.append(helper.make_node("Constant", [], [f"{name}_size"], value_ints=[size]))
        shape = ["batch", f"{name}_size"]
        start.append(helper.make_node("Concat", shape, [f"{name}_shape"], axis=0))
        start.append(helper.make_node("ConstantOfShape", [f"{name}_shape"], [f"first_{name}"]))
    start.append(helper.make_node("Constant", [], ["first_t"], value_int=0))
    carried = ["first_state", "first_scores", *(["first_t"] if network.bounded else [])]
    results = ["last_state", "last_scores", *(["last_t"] if network.bounded else [])]
    scan = helper.make_node(
        "Scan", [*carried, "window"], results, body=body, num_scan_inputs=1, scan_input_axes=[1]
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


def _index(name: str, network: Network) -> list[Any]:
    if not network.bounded:
        return []
    return [helper.make_tensor_value_info(name, TensorProto.INT64, [])]


def _following_index(bounded: bool) -> list[Any]:
    """next_t = t + 1."""
    if not bounded:
        return []
    return [
        helper.make_node("Constant", [], ["one_step_on"], value_int=1),
        helper.make_node("Add", ["t", "one_step_on"], ["next_t"]),
    ]
