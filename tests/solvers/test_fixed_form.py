"""States of fixed shape: the numbers of the eager update, no read of the host, in graphs."""

import pytest
import torch
from torch._higher_order_ops import while_loop

from fixpoint import (
    SQUAREM,
    Anderson,
    BarzilaiBorwein,
    Broyden,
    DampedPicard,
    InexactNewton,
    Picard,
    solve,
)
from fixpoint._torch import TorchDispatchMode, tree_flatten, tree_map, tree_unflatten

SOLVERS = {
    "Picard": lambda **o: Picard(beta=0.8, **o),
    "DampedPicard": lambda **o: DampedPicard(**o),
    "InexactNewton": lambda **o: InexactNewton(eta=0.8, learn=False, **o),
    "Anderson": lambda **o: Anderson(**o),
    "damped Anderson": lambda **o: Anderson(memory=3, beta=0.7, ridge=1e-8, **o),
    "Broyden": lambda **o: Broyden(memory=60, **o),
    "Broyden, little memory": lambda **o: Broyden(memory=5, **o),
    "SQUAREM": lambda **o: SQUAREM(**o),
}


def tanh_layer(B, D, dtype, norm=0.9):
    generator = torch.Generator().manual_seed(1)
    W = torch.randn(D, D, generator=generator, dtype=torch.float64)
    W = norm * W / torch.linalg.matrix_norm(W, 2)
    x = torch.randn(B, D, generator=generator, dtype=torch.float64)
    W, x = W.to(dtype), x.to(dtype)
    return lambda z: torch.tanh(z @ W.T + x), torch.zeros_like(x)


def own(x):
    """A copy that no compiler takes for its original."""
    return ~(~x) if x.dtype == torch.bool else x.neg().neg()


def is_active(z, fz, rtol):
    return (fz - z).square().sum(1) > rtol**2 * fz.square().sum(1)


def eagerly(solver, phi, z, updates, rtol):
    fz, state = phi(z), solver.init(z, None)
    active = is_active(z, fz, rtol)
    count = torch.zeros_like(active, dtype=torch.int64)
    for k in range(updates):
        if not active.any():
            break
        proposal, state = solver.update(k, z, fz, state)
        z = torch.where(active[:, None], proposal, z)
        fz, count = phi(z), count + active
        active = active & is_active(z, fz, rtol)
    return z, count


def in_a_loop(solver, phi, z0, updates, rtol, loop=while_loop):
    """As one `while_loop`."""
    z = own(z0)
    fz = phi(z)
    leaves, spec = tree_flatten(tree_map(own, solver.init_fixed(z, fz)))
    count = torch.zeros(len(z), dtype=torch.int64)

    def condition(k, z, fz, active, count, *leaves):
        return (k < updates) & active.any()

    def body(k, z, fz, active, count, *leaves):
        proposal, state = solver.update_fixed(k, z, fz, tree_unflatten(list(leaves), spec))
        z, leaves = torch.where(active[:, None], proposal, z), tree_flatten(state)[0]
        fz, still = phi(z), count + active
        active = active & is_active(z, fz, rtol)
        return (k + 1, z, fz, active, still, *[own(x) for x in leaves])

    k = torch.zeros((), dtype=torch.int64)
    start = (k, z, fz, is_active(z, fz, rtol), count, *leaves)
    _, z, _, _, count, *_ = loop(condition, body, start)
    return z, count


def plain_loop(condition, body, carried):
    """`while_loop`, step by step, with a check that no shape changes."""
    shapes = [(x.shape, x.dtype) for x in carried]
    while condition(*carried):
        carried = body(*carried)
        assert [(x.shape, x.dtype) for x in carried] == shapes
    return carried


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("B", "D"), [(1, 1), (1, 3), (1, 128), (7, 1), (7, 3), (128, 3), (7, 128)])
@pytest.mark.parametrize("name", SOLVERS)
def test_the_numbers_are_those_of_the_eager_update(name, B, D, dtype):
    solver, (phi, z0) = SOLVERS[name](max_iter=60, rtol=1e-5, atol=0.0), tanh_layer(B, D, dtype)
    rtol = 1e-5 if dtype == torch.float32 else 1e-9
    expected, updates = eagerly(solver, phi, z0, 60, rtol)
    z, count = in_a_loop(solver, phi, z0, 60, rtol, plain_loop)
    assert (count - updates).abs().max() <= 1
    assert torch.allclose(z, expected, rtol=0, atol=4 * rtol * expected.norm(dim=1).max().item())


# Stiff maps: steps are rejected, mixing is reduced, histories restart, differences depend.
@pytest.mark.parametrize("name", ["Anderson", "Broyden", "Broyden, little memory", "DampedPicard"])
def test_rejected_steps_and_dependent_differences_as_eagerly(name):
    spectrum = torch.cat((1 - torch.logspace(-4, -1, 4), torch.tensor([-20.0, -3.0]))).double()
    scale = torch.tensor([[0.1], [2.0], [0.0]], dtype=torch.float64)

    def phi(z):
        return spectrum * z + scale * torch.cos(z) + 1

    z0 = torch.zeros(3, 6, dtype=torch.float64)
    solver = SOLVERS[name](max_iter=25, rtol=1e-5, atol=0.0)
    for updates in (1, 4, 9, 14):
        expected, _ = eagerly(solver, phi, z0, updates, 1e-12)
        z, _ = in_a_loop(solver, phi, z0, updates, 1e-12, plain_loop)
        assert torch.allclose(z, expected, rtol=1e-6, atol=1e-6)


COMPILED = [("Anderson", "aot_eager", 7, 3, torch.float32)] + [
    pytest.param(name, "aot_eager", 7, 3, torch.float64, marks=pytest.mark.slow)
    for name in ("damped Anderson", "Broyden, little memory", "SQUAREM", "DampedPicard")
]


@pytest.mark.parametrize(("name", "backend", "B", "D", "dtype"), COMPILED)
def test_a_solve_is_one_graph(name, backend, B, D, dtype):
    torch._dynamo.reset()
    solver, (phi, z0) = SOLVERS[name](max_iter=60, rtol=1e-5, atol=0.0), tanh_layer(B, D, dtype)
    rtol = 1e-5 if dtype == torch.float32 else 1e-9
    expected, updates = eagerly(solver, phi, z0, 60, rtol)

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(z0):
        return in_a_loop(solver, phi, z0, 60, rtol)

    with torch.no_grad():
        z, count = compiled(z0)
    assert (count - updates).abs().max() <= 1
    assert torch.allclose(z, expected, rtol=0, atol=4 * rtol * expected.norm(dim=1).max().item())


class OperationCount(TorchDispatchMode):
    """Operations of torch."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("B", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["Anderson", "Broyden", "SQUAREM"])
def test_an_update_that_reads_nothing_takes_no_more_operations(name, dtype, B, sync_count):
    phi, z0 = tanh_layer(B, 20, dtype)
    counts = {}
    for check_every in (1, 4):
        solver = SOLVERS[name](rtol=1e-6, check_every=check_every)
        z, state = z0, None
        with torch.no_grad(), OperationCount() as operations:
            for k in range(8):
                z, state = solver.update(k, z, phi(z), state)
        counts[check_every] = operations.count
    assert counts[4] <= counts[1]
    with torch.no_grad(), sync_count:
        solver.update(8, z, phi(z), state)
    assert sync_count.count == 0


@pytest.mark.parametrize("name", SOLVERS)
def test_an_update_of_fixed_form_reads_nothing(name, sync_count):
    solver, (phi, z) = SOLVERS[name](max_iter=20), tanh_layer(4, 3, torch.float64)
    with torch.no_grad(), sync_count:
        state = solver.init_fixed(z, phi(z))
        for k in range(8):
            z, state = solver.update_fixed(torch.tensor(k), z, phi(z), state)
    assert sync_count.count == 0


def test_rows_restart_in_fixed_form():
    """A row that restarts makes the updates of a new solve from there."""
    phi, z = tanh_layer(3, 4, torch.float64)
    solver, rows = Anderson(memory=3), torch.tensor([False, True, False])
    state = solver.init_fixed(z, phi(z))
    for k in range(5):
        z, state = solver.update_fixed(torch.tensor(k), z, phi(z), state)
    state = solver.restart_fixed(state, rows, z, phi(z))
    fresh, new = z, solver.init_fixed(z, phi(z))
    for k in range(4):
        z, state = solver.update_fixed(torch.tensor(k), z, phi(z), state)
        fresh, new = solver.update_fixed(torch.tensor(k), fresh, phi(fresh), new)
        assert torch.allclose(z[1], fresh[1], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(z[0], fresh[0], rtol=1e-12, atol=1e-12)


def test_broyden_needs_its_memory():
    z = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="pass memory=m"):
        Broyden().init_fixed(z, z)


def test_a_solver_without_a_state_of_fixed_shape_says_so():
    z = torch.zeros(1, 2)
    with pytest.raises(NotImplementedError, match="BarzilaiBorwein has no state of fixed shape"):
        BarzilaiBorwein().init_fixed(z, z)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_new_state_begins_a_cycle_of_squarem(fixed):
    solver, z = SQUAREM(), torch.zeros(1, 1, dtype=torch.float64)

    def phi(z):
        return 0.5 * z + 1

    state = solver.init_fixed(z, phi(z)) if fixed else None
    for k in range(4, 10):
        if fixed:
            z, state = solver.update_fixed(torch.tensor(k), z, phi(z), state)
        else:
            z, state = solver.update(k, z, phi(z), state)
    assert torch.allclose(z, torch.tensor([[2.0]], dtype=torch.float64))


def mixed_rows(B, D, dtype):
    """Rows whose maps differ, evaluated alike whatever the batch."""
    generator = torch.Generator().manual_seed(7)
    slope = torch.rand(B, D, generator=generator, dtype=torch.float64) * 1.8 - 0.9
    slope[::3, 1:] = slope[::3, :1]  # one eigenvalue: differences are collinear
    slope[1::5] *= 4  # steps that grow
    shift = torch.randn(B, D, generator=generator, dtype=torch.float64)
    return slope.to(dtype), shift.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("D", [1, 2, 5, 100])
@pytest.mark.parametrize("check_every", [1, 4])
@pytest.mark.parametrize("name", ["Anderson", "damped Anderson", "Broyden", "SQUAREM"])
def test_the_bits_of_a_row_do_not_depend_on_its_mates(name, check_every, D, dtype):
    slope, shift = mixed_rows(33, D, dtype)

    def run(rows):
        solver = SOLVERS[name](max_iter=40, rtol=1e-7, check_every=check_every)
        solution = solve(
            lambda z: slope[rows] * z + shift[rows], torch.zeros_like(shift[rows]), solver
        )
        return solution.z, solution.iterations, solution.result

    together = run(torch.arange(33))
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(33, generator=generator) for _ in range(3)]
    orders += [order[:n] for order, n in zip(orders, (1, 2, 9), strict=True)]
    orders += [torch.tensor([row]) for row in range(0, 33, 4)]
    for rows in orders:
        for alone, among in zip(run(rows), together, strict=True):
            assert torch.equal(alone, among[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SOLVERS)
def test_updates_past_convergence_remain_at_the_solution(name, dtype):
    phi, z = tanh_layer(5, 8, dtype, norm=0.5)
    solver = SOLVERS[name](max_iter=60, rtol=0.0, atol=0.0)
    exact = z.double()
    for _ in range(200):
        exact = tanh_layer(5, 8, torch.float64, norm=0.5)[0](exact)
    z = solve(phi, z, solver).z
    assert (z.double() - exact).norm() <= 1e3 * torch.finfo(dtype).eps * exact.norm()
