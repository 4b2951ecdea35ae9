"""`fixpoint info` names what a report of a problem needs."""

import json
import os
import subprocess
import sys

import numpy
import torch


def info(*options, **environment):
    result = subprocess.run(
        [sys.executable, "-m", "fixpoint", "info", *options],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return result.stdout


def test_json_names_versions_threads_and_the_data_folder(tmp_path):
    found = json.loads(info("--json", FIXPOINT_DATA=str(tmp_path), OMP_NUM_THREADS="1"))
    assert found["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["packages"]["numpy"] == numpy.__version__
    assert found["threads"] == 1
    assert found["data_folder"] == str(tmp_path)
    assert len(found["cuda"]) == torch.cuda.device_count()
    assert found["blas"] != "unknown"


def test_plain_lines():
    lines = info().splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["python", "system", "cpu"]
