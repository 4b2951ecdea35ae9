import pytest
from support.random_runs import STRICT

from fixpoint.data import load_dataset
from fixpoint.export.c.compiler import compile_c, run_c
from fixpoint.export.c.writer import write_c


@pytest.fixture(scope="session")
def windows():
    """Test windows in the units of the sensor."""
    return load_dataset("har2-sample").x_test[::8].contiguous()


@pytest.fixture
def execute(tmp_path):
    """Write a network as C, compile and run it: labels and scores of windows."""

    def run(network, windows, *, compiler="gcc", flags=STRICT, prefix=()):
        write_c(network, tmp_path, title="a test")
        compile_c(tmp_path, tmp_path / "classify", compiler, flags=flags)
        return run_c([*prefix, str(tmp_path / "classify")], windows)

    return run
