"""`fixpoint info` names what a report of a problem needs."""

import json
import os
import subprocess
import sys

import numpy
import torch
from typer.testing import CliRunner

from fixpoint.cli.app import app


def test_json_names_versions_threads_and_the_data_folder(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "fixpoint", "info", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"FIXPOINT_DATA": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    found = json.loads(result.stdout)
    assert found["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["packages"]["numpy"] == numpy.__version__
    assert found["threads"] == 1
    assert found["data_folder"] == str(tmp_path)
    assert len(found["cuda"]) == torch.cuda.device_count()
    assert found["blas"] != "unknown"


def test_plain_lines():
    lines = CliRunner().invoke(app, ["info"]).stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["python", "system", "cpu"]
