"""ONNX graphs of a window and of one step give the scores of torch."""

import copy

import pytest
import torch
from support.random_runs import MODELS, random_network, random_run

from fixpoint.export import onnx, read_network
from fixpoint.export.onnx import onnx_scores, write_onnx

pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra onnx)")
pytest.importorskip("onnxscript", reason="needs onnxscript (extra onnx)")

FEW = ("ernn K=2 tanh", "fastgrnn", "rnn", "gru", "lstm of 2 layers")


def close(given, expected):
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("model", [*FEW, "self-feedback"])
def test_scores_are_those_of_torch_for_any_batch(model, windows, tmp_path, monkeypatch):
    """Both graphs are made from that of one step, which torch takes a second to export."""
    network = random_network(normalize="column", **MODELS[model])
    step = onnx._step_model(network)
    monkeypatch.setattr(onnx, "_step_model", lambda network: copy.deepcopy(step))
    for streaming in (False, True):
        write_onnx(network, tmp_path / "graph.onnx", streaming=streaming)
        for count in (1, 5):
            given = onnx_scores(tmp_path / "graph.onnx", windows[:count])
            close(given, network.scores(windows[:count]))


def test_equilibria_are_a_loop_in_the_graph_of_each_step(windows, tmp_path, monkeypatch):
    options = {"model": "ernn", "map": "self-feedback", "solver": "picard"}
    run = random_run(normalize="column", hidden=4, backward="implicit", **options)
    network = read_network(run, equilibria=True)
    step = onnx._step_model(network)
    assert [n.op_type for n in step.graph.node].count("Loop") == 1
    monkeypatch.setattr(onnx, "_step_model", lambda network: copy.deepcopy(step))
    with torch.no_grad():
        expected = run.model(run.data.inputs(run.data.x_test[::8][:5]))
    for streaming in (False, True):
        write_onnx(network, tmp_path / "graph.onnx", streaming=streaming)
        for count in (1, 5):
            given = onnx_scores(tmp_path / "graph.onnx", windows[:count])
            torch.testing.assert_close(given, expected[:count], rtol=1e-3, atol=1e-3)


def test_a_step_without_a_time_index(windows, tmp_path):
    network = random_network(model="fastrnn", normalize="asinh")
    write_onnx(network, tmp_path / "graph.onnx", streaming=True)
    close(onnx_scores(tmp_path / "graph.onnx", windows[:3]), network.scores(windows[:3]))


def test_a_sample_that_is_not_finite_spoils_its_own_window(windows, tmp_path):
    network = random_network(model="ernn")
    write_onnx(network, tmp_path / "graph.onnx")
    for value in (torch.nan, torch.inf):
        spoiled = windows[:3].clone()
        spoiled[1, 7, 2] = value
        given = onnx_scores(tmp_path / "graph.onnx", spoiled)
        assert given[1].isnan().all()
        close(given[[0, 2]], network.scores(windows[[0, 2]]))


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs onnx and onnxscript: install the extra"):
        write_onnx(random_network(), tmp_path / "graph.onnx")
