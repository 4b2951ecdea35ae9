"""A network as an ONNX graph, of a window or of one time step."""

from __future__ import annotations

import contextlib
import importlib.util
import io
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
from fixpoint.export.network import Network, check_finished, raw_data, read_network
from fixpoint.training import load_trained
from fixpoint.training.commands.console import say

_NEEDED = ("onnx", "onnxscript")


class StepGraph(nn.Module):
    """Scores (B, C) and state (B, n) after one more sample (B, d), at time step t if it counts."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, sample: Tensor, state: Tensor, t: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        h = _step(self.network, sample, state, 0 if t is None else t)
        return F.linear(h, self.network.head, self.network.head_bias), h


def _step(network: Network, sample: Tensor, h: Tensor, t: int | Tensor) -> Tensor:
    x = network.normalized(sample, t)
    h = network.recurrence.step(x, h, t)
    # 0 x is 0 where x is finite. ONNX leaves open what max(0, NaN) is.
    return torch.where((0 * x == 0).all(1, keepdim=True), h, torch.nan)


def write_onnx(network: Network, file: Path, *, streaming: bool = False) -> None:
    """Write a graph with a dynamic batch.

    Inputs are `window` (B, T, d), or `sample` (B, d), `state` (B, n; 0 at the start) and, where
    time steps have their own normalization or step sizes, `t` (int64, from 0). Outputs are
    `scores` (B, C) and of a step `next_state` (B, n). A sample with NaN or inf has NaN scores.

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
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(model.SerializeToString())
    except OSError as error:
        raise OSError(
            f"--out must be a folder that can be written; {file.parent} cannot "
            f"({error.strerror}): give another one"
        ) from None


def _step_model(network: Network) -> Any:
    """The graph of one time step."""
    d, n = network.input_size, network.hidden_size
    arguments = {"sample": torch.zeros(2, d), "state": torch.zeros(2, n)}
    arguments |= {"t": torch.tensor(0)} if network.bounded else {}
    batch = torch.export.Dim("batch")
    shapes = {name: {0: batch} if value.dim() else {} for name, value in arguments.items()}
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
    """Scores, (B, C), of windows, (B, T, d), by onnxruntime, which must be installed."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    x = windows.float().contiguous().numpy()
    if names == ["window"]:
        return torch.from_numpy(session.run(None, {"window": x})[0])
    state = np.zeros((len(x), session.get_inputs()[1].shape[1]), np.float32)
    for t in range(x.shape[1]):
        given = {"sample": x[:, t], "state": state}
        given |= {"t": np.array(t)} if "t" in names else {}
        scores, state = session.run(None, given)
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
    write_onnx(read_network(run), file, streaming=streaming)
    say(console, f"{run.recipe.label} of {run.recipe.data.dataset}: {file}")
    if importlib.util.find_spec("onnxruntime") is None:
        say(console, "onnxruntime is not installed: the graph was not compared with torch.")
        return None
    raw = raw_data(run)
    scores = torch.cat([onnx_scores(file, part) for part in raw.x_test.split(512)])
    agreement = compare(scores, torch_scores(run), raw.y_test)
    say(console, f"Test windows, by onnxruntime: {agreement}")
    return agreement


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter prints and warns of its own code."""
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
