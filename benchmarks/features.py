"""Ask each library for the derivatives of one equilibrium, z = cos(a z), and check the answers.

The right values have a closed form at z*. Libraries that are not installed are left out; JAX's need
an environment with torch too, as `jax_peers.py` says.
Run: python benchmarks/features.py
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fixpoint import Anderson, FixedPoint, Implicit, Root, attach_gradient

A = 0.5
Answers = dict[str, Callable[[], Any]]


def solution(a: float) -> float:
    """Iterate to z* by plain steps."""
    z = 0.9
    for _ in range(300):
        z = math.cos(a * z)
    return z


def slope(a: float) -> float:
    """Return dz*/da = -z sin(a z) / (1 + a sin(a z))."""
    z = solution(a)
    return -z * math.sin(a * z) / (1 + a * math.sin(a * z))


RIGHT = {"gradient": slope(A), "second": (slope(A + 1e-5) - slope(A - 1e-5)) / 2e-5}
RIGHT |= {"forward": RIGHT["gradient"], "root": RIGHT["gradient"], "found": RIGHT["gradient"]}
RIGHT |= {"graph": solution(A), "vmap": solution(A)}


def of_torch(f: Callable[[torch.Tensor], torch.Tensor]) -> Answers:
    """List what torch can ask of f(a) = z*."""
    a = torch.tensor(A, dtype=torch.float64, requires_grad=True)

    def second() -> torch.Tensor:
        (g,) = torch.autograd.grad(f(a), a, create_graph=True)
        return torch.autograd.grad(g, a)[0]

    constant = a.detach()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    return {
        "gradient": lambda: torch.autograd.grad(f(a), a)[0],
        "second": second,
        "forward": lambda: torch.func.jvp(f, (constant,), (torch.ones_like(a),))[1],
        "vmap": lambda: torch.func.vmap(f)(torch.stack([constant, constant]))[0],
        "graph": lambda: compiled(constant),
    }


def ours() -> Answers:
    start = torch.zeros(1, 1, dtype=torch.float64)
    layer, root = FixedPoint(Anderson(rtol=1e-12), Implicit()), Root()
    z = torch.full_like(start, solution(A))

    def gradient(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
        return of_torch(f)["gradient"]

    return of_torch(lambda a: layer(lambda z: torch.cos(a * z), start).z.sum()) | {
        "root": gradient(lambda a: root(lambda z: z - torch.cos(a * z), start).z.sum()),
        "found": gradient(lambda a: attach_gradient(lambda z: torch.cos(a * z), z).sum()),
    }


def torchdeq() -> Answers:
    from torchdeq import get_deq

    tolerances = {"f_tol": 1e-12, "b_tol": 1e-12, "f_max_iter": 100, "b_max_iter": 100}
    deq = get_deq(f_solver="anderson", b_solver="anderson", ift=True, **tolerances)
    start = torch.zeros(1, 1, dtype=torch.float64)
    return of_torch(lambda a: deq(lambda z: torch.cos(a * z), start)[0][-1].sum())


def xitorch() -> Answers:
    from xitorch.optimize import equilibrium, rootfinder

    start = torch.zeros(1, dtype=torch.float64)

    def solve(a: torch.Tensor) -> torch.Tensor:
        return equilibrium(lambda z, a: torch.cos(a * z), start, params=(a,), f_tol=1e-12).sum()

    def root(a: torch.Tensor) -> torch.Tensor:
        F = lambda z, a: z - torch.cos(a * z)  # noqa: E731
        return rootfinder(F, start, params=(a,), f_tol=1e-12).sum()

    return of_torch(solve) | {"root": of_torch(root)["gradient"]}


def torchopt() -> Answers:
    from torchopt.diff.implicit import custom_root

    @custom_root(lambda z, a: z - torch.cos(a * z), argnums=1)
    def solve(z: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        for _ in range(200):
            z = torch.cos(a * z)
        return z

    answers = of_torch(lambda a: solve(torch.zeros(1, dtype=torch.float64), a).sum())
    return answers | {"root": answers["gradient"], "found": answers["gradient"]}


def of_jax(f: Callable[[Any], Any]) -> Answers:
    """List what JAX can ask of f(a) = z*."""
    import jax

    return {
        "gradient": lambda: jax.grad(f)(A),
        "second": lambda: jax.grad(jax.grad(f))(A),
        "forward": lambda: jax.jvp(f, (A,), (1.0,))[1],
        "vmap": lambda: jax.vmap(f)(jax.numpy.array([A, A]))[0],
        "graph": lambda: jax.jit(f)(A),
    }


def jaxopt() -> Answers:
    import jax
    import jax.numpy as jnp
    from jaxopt import AndersonAcceleration, Broyden, implicit_diff

    jax.config.update("jax_enable_x64", True)
    anderson = AndersonAcceleration(lambda z, a: jnp.cos(a * z), tol=1e-12, maxiter=200)
    broyden = Broyden(lambda z, a: z - jnp.cos(a * z), tol=1e-12)

    @implicit_diff.custom_root(lambda z, a: z - jnp.cos(a * z))
    def steps(z: Any, a: Any) -> Any:
        for _ in range(200):
            z = jnp.cos(a * z)
        return z

    def of(solve: Callable[[Any, Any], Any]) -> Answers:
        return of_jax(lambda a: solve(jnp.zeros(1), a).sum())

    return of(lambda z, a: anderson.run(z, a).params) | {
        "root": of(lambda z, a: broyden.run(z, a).params)["gradient"],
        "found": of(steps)["gradient"],
    }


def optimistix() -> Answers:
    import jax
    import jax.numpy as jnp
    from optimistix import FixedPointIteration, Newton, fixed_point, root_find

    jax.config.update("jax_enable_x64", True)
    start, plain, newton = jnp.zeros(1), FixedPointIteration(1e-12, 1e-12), Newton(1e-12, 1e-12)
    F = lambda z, a: z - jnp.cos(a * z)  # noqa: E731
    phi = lambda z, a: jnp.cos(a * z)  # noqa: E731
    root = of_jax(lambda a: root_find(F, newton, start, a).value.sum())
    solve = of_jax(lambda a: fixed_point(phi, plain, start, a).value.sum())
    return solve | {"root": root["gradient"]}


LIBRARIES = (ours, torchdeq, xitorch, torchopt, jaxopt, optimistix)


def verdict(name: str, answer: Callable[[], Any] | None) -> str:
    """Say whether an answer is right, wrong, or an error."""
    if answer is None:
        return "none"
    try:
        found = float(answer())
    except Exception as error:  # whatever a library raises is its answer
        return f"error: {type(error).__name__}"
    if abs(found - RIGHT[name]) <= 1e-4 * abs(RIGHT[name]):
        return "right"
    return f"wrong: {found:.4g} for {RIGHT[name]:.4g}"


def main() -> None:
    warnings.simplefilter("ignore")
    print("| library | " + " | ".join(RIGHT) + " |")
    print("|---" * (len(RIGHT) + 1) + "|")
    for library in LIBRARIES:
        name = "torch-fixpoint" if library is ours else library.__name__
        try:
            title, answers = f"{name} {version(name)}", library()
        except (PackageNotFoundError, ImportError):
            continue
        print(f"| {title} | " + " | ".join(verdict(x, answers.get(x)) for x in RIGHT) + " |")


if __name__ == "__main__":
    main()
