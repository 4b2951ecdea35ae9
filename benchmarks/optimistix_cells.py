"""optimistix on the hard and stiff problems: docs/optimistix.json, read by hard_problem_table.py.

It runs in an environment of its own, since fixpoint does not depend on jax:

    python -m venv jax && jax/bin/pip install jax optimistix torch numpy scipy
    jax/bin/python benchmarks/optimistix_cells.py
"""

from __future__ import annotations

import contextlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import torch
from recorder import BUDGET, Recorder

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from support.hard_problems import HARD, STIFF  # noqa: E402
from support.problems import Problem  # noqa: E402

jax.config.update("jax_enable_x64", True)
TOLERANCE = {"rtol": 1e-13, "atol": 1e-13}
SOLVERS: dict[str, Any] = {
    "fixed point": optimistix.FixedPointIteration(**TOLERANCE),
    "Newton": optimistix.Newton(**TOLERANCE),
    "Chord": optimistix.Chord(**TOLERANCE),
    "Dogleg": optimistix.Dogleg(**TOLERANCE),
    "Levenberg-Marquardt": optimistix.LevenbergMarquardt(**TOLERANCE),
}


class Phi:
    """phi of one start, (D,) -> (D,), as a function that jax differentiates.

    recorder: of the solve; jax compiles a solver once for all starts.
    """

    def __init__(self) -> None:
        self.recorder: Recorder

        @jax.custom_jvp
        def phi(z: jax.Array) -> jax.Array:
            like = jax.ShapeDtypeStruct(z.shape, z.dtype)
            return jax.pure_callback(lambda z: self.recorder(_row(z))[0].numpy(), like, z)

        @phi.defjvp
        def derivative(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
            (z,), (v,) = primals, tangents
            like = jax.ShapeDtypeStruct((z.size, z.size), z.dtype)
            J = jax.pure_callback(lambda z: self.recorder.jacobian(_row(z)).numpy(), like, z)
            return phi(z), J @ v

        self.plain = lambda z, _: phi(z)
        self.residual = lambda z, _: phi(z) - z


def _row(z: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(z))[None]


def solve(name: str, phi: Phi, z0: torch.Tensor) -> None:
    start, solver = jnp.asarray(z0[0].numpy()), SOLVERS[name]
    options = {"max_steps": BUDGET, "throw": False}
    with contextlib.suppress(Exception):  # the recorder ends a solve by an exception
        if name == "fixed point":
            solution = optimistix.fixed_point(phi.plain, solver, start, **options)
        elif name == "Levenberg-Marquardt":
            solution = optimistix.least_squares(phi.residual, solver, start, **options)
        else:
            solution = optimistix.root_find(phi.residual, solver, start, **options)
        jax.block_until_ready(solution.value)


def cell(name: str, problem: Problem) -> tuple[int, int] | None:
    """Evaluations and products up to the solution, of a Jacobian D; None where it finds none."""
    phi = Phi()
    recorder = phi.recorder = Recorder(problem.phi, problem.z0)
    solve(name, phi, problem.z0)
    return (recorder.at, recorder.products_at) if recorder.solved else None


def main() -> None:
    rows = []
    for problem in HARD + STIFF:
        cells = {name: cell(name, problem) for name in SOLVERS}
        rows.append(f"  {json.dumps(problem.name)}: {json.dumps(cells)}")
        print(rows[-1], flush=True)
    versions = json.dumps({name: version(name) for name in ("jax", "optimistix")})
    text = f'{{\n "versions": {versions},\n "problems": {{\n' + ",\n".join(rows) + "\n }\n}\n"
    (ROOT / "docs" / "optimistix.json").write_text(text)


if __name__ == "__main__":
    main()
