"""`fixpoint info`: the machine, for the report of a problem."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

PACKAGES = [
    "torch-fixpoint",
    "torch",
    "numpy",
    "numba",
    "triton",
    "scipy",
    "torchdeq",
    "matplotlib",
    "lightning-fabric",
    "onnx",
    "onnxruntime",
]

app = typer.Typer(add_completion=False)


def environment() -> dict[str, Any]:
    """Return the versions, threads, devices, BLAS and the folder of the data, as plain values.

    Example:
        >>> from fixpoint.cli.info import environment
        >>> sorted(environment())[:4]
        ['blas', 'cpu', 'cuda', 'data_folder']
    """
    import torch

    from fixpoint.data.storage import folder

    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "threads": torch.get_num_threads(),
        "blas": _blas(torch.__config__.show()),
        "cuda": [
            {
                "name": torch.cuda.get_device_name(i),
                "capability": list(torch.cuda.get_device_capability(i)),
            }
            for i in range(torch.cuda.device_count())
        ],
        "packages": {name: _version(name) for name in PACKAGES},
        "data_folder": str(folder()),
    }


def _blas(configuration: str) -> str:
    """Return the name of the BLAS in torch's account of its build."""
    marker = "BLAS_INFO="
    if marker not in configuration:
        return "unknown"
    return configuration.split(marker)[1].split(",")[0].strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False,
) -> None:
    """Print versions, threads, devices, BLAS and the folder of the data."""
    found = environment()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
        typer.echo(f"{key:12} {value if value != [] else 'none'}")
