"""A network as an ONNX graph, of a window or of one time step."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint.export.agreement import Agreement, compare, torch_scores
from fixpoint.export.equilibrium import Equilibrium
from fixpoint.export.network import Network, check_finished, read_network, sensor_windows
from fixpoint.training import load_trained
from fixpoint.training.commands.console import say

_NEEDED = ("onnx", "onnxscript")


class StepGraph(nn.Module):
    """Scores (B, C) and the state after one more sample (B, d).

    The state (B, S) is that of the network, 0 at the start. Where time steps have their own
    normalization or step sizes its last number counts the samples; beyond the window the scores are
    NaN.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        equilibria = [layer for layer in network.layers if isinstance(layer, Equilibrium)]
        self.maps = nn.ModuleList([layer.map for layer in equilibria])

    def forward(self, sample: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        network, size = self.network, self.network.state_size
        h, t = state[:, :size], None
        if network.own_steps:
            t = state[:, size]
            index = t.clamp(0, network.timesteps - 1).long()
        h = network.advance(sample, h, 0 if t is None else index)
        # 0 x is 0 where x is finite. ONNX leaves open what max(0, NaN) is.
        x = network.inputs.apply(sample, 0 if t is None else index)
        good = (0 * x == 0).all(1, keepdim=True)
        if t is not None:
            inside = (t >= 0) & (t < network.timesteps) & (t == t.floor())
            good = good & inside[:, None]
        h = torch.where(good, h, torch.nan)
        scores = F.linear(network.output(h), network.head, network.head_bias)
        return scores, h if t is None else torch.cat([h, state[:, size:] + 1], 1)


def carried_size(network: Network) -> int:
    """Count the numbers of the state of a graph: the network's, and the count where it has one."""
    return network.state_size + bool(network.own_steps)


def write_onnx(network: Network, file: Path, *, streaming: bool = False) -> None:
    """Write a graph with a dynamic batch.

    Inputs are `window` (B, T, d), or `sample` (B, d) and `state` (B, S; 0 at the start, see
    `StepGraph`). Outputs are `scores` (B, C) and of a step `next_state` (B, S). A sample with NaN
    or inf has NaN scores. The metadata of the file say the same, with classes and channels.

    Raises:
        ImportError: a package of the extra onnx is missing.
        OSError: the file cannot be written.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"--to onnx needs {' and '.join(missing)}: install the extra, torch-fixpoint[onnx]"
        )
    model = _step_model(network)
    if not streaming:
        from fixpoint.export.onnx_window import over_window

        model = over_window(model, network)
    for name, text in metadata(network, streaming=streaming).items():
        model.metadata_props.add(key=name, value=text)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(model.SerializeToString())
    except OSError as error:
        raise OSError(
            f"--out must be a folder that can be written; {file.parent} cannot "
            f"({error.strerror}): give another one"
        ) from None


def metadata(network: Network, *, streaming: bool) -> dict[str, str]:
    """Return what the inputs and outputs of a graph are, by key."""
    size = carried_size(network)
    texts = {
        "classes": json.dumps(network.classes),
        "channels": json.dumps(network.channels),
        "timesteps": str(network.timesteps),
        "scores": "one for each class; their softmax is the probability",
    }
    if not streaming:
        return texts | {"window": "samples in the units of the sensor, (batch, timesteps, channel)"}
    counted = "; its last number counts the samples: start again after timesteps of them"
    return texts | {
        "sample": "one time step in the units of the sensor, (batch, channel)",
        "state": f"(batch, {size}), zeros at the start, then next_state"
        + (counted if network.own_steps else ""),
    }


def _step_model(network: Network) -> Any:
    """Return the graph of one time step."""
    d, S = network.input_size, carried_size(network)
    arguments = {"sample": torch.zeros(2, d), "state": torch.zeros(2, S)}
    batch = torch.export.Dim("batch")
    shapes = {name: {0: batch} for name in arguments}
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            StepGraph(network).eval(),
            kwargs=arguments,
            input_names=list(arguments),
            output_names=["scores", "next_state"],
            dynamic_shapes=shapes,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def onnx_scores(file: Path, windows: Tensor) -> Tensor:
    """Return scores, (B, C), of windows, (B, T, d), by onnxruntime, which must be installed."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    x = windows.float().contiguous().numpy()
    if names == ["window"]:
        return torch.from_numpy(session.run(None, {"window": x})[0])
    state = np.zeros((len(x), session.get_inputs()[1].shape[1]), np.float32)
    for sample in x.swapaxes(0, 1):
        scores, state = session.run(None, {"sample": sample, "state": state})
    return torch.from_numpy(scores)


def export_onnx(
    console: Console,
    path: Path,
    *,
    out: Path | None = None,
    streaming: bool = False,
    data: str | None = None,
) -> Agreement | None:
    """Write a graph and print its agreement with torch on the test windows.

    Args:
        path: the folder of a finished run, or a checkpoint in it.
        out: folder of the file; `onnx` in that of the run if not given.
        streaming: a graph of one time step; else of a window.
        data: where the data of the run are now, if they were moved.

    Returns:
        The agreement; None without onnxruntime.

    Raises:
        ValueError: the run cannot be exported, or a package is missing.
        OSError: a file is missing, or cannot be written.
    """
    check_finished(path.expanduser())
    run = load_trained(path, data=data)
    file = (out or run.folder / "onnx") / ("step.onnx" if streaming else "window.onnx")
    write_onnx(read_network(run, equilibria=True), file, streaming=streaming)
    say(console, f"{run.recipe.label} of {run.form.name}: {file}")
    if importlib.util.find_spec("onnxruntime") is None:
        say(console, "onnxruntime is not installed: the graph was not compared with torch.")
        return None
    windows = sensor_windows(run.raw, "test")
    scores = torch.cat([onnx_scores(file, part) for part in windows.split(512)])
    agreement = compare(scores, torch_scores(run), run.raw.y_test)
    say(console, f"Test windows, by onnxruntime: {agreement}")
    return agreement


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch's exporter prints and warns of its own code."""
    logger: Any = logging.getLogger("torch.onnx")
    level = logger.level
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
