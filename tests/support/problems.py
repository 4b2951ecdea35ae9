"""Fixed-point problems with known answers: the one table on which every solver is run.

`PROBLEMS` holds the maps phi with their starts and answers; `PROBLEMS_BY_NAME` finds one by name.
Two further tables say what a test must know before it compares digits:

- `ROOTS`: every real root of the problems that have several, where their number is finite. The
  `root` of such a problem is None, because a correct solver may end at any of them.
- `SINGULAR`: problems whose I - J is singular at a root. There a residual r only promises an
  error of the order r^(1/m); the value is m. Elsewhere the error is about ||(I - J)^-1|| r.

Systems F(z) = 0 are written as phi(z) = z - F(z) / scale. The scale is 1, as published, except
where one number makes plain iteration sensible. Roots are closed forms, or were computed with 40
digits from the equations alone and embedded; only the large smooth ones are computed here, by
Newton from the start.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]
Numbers = float | Sequence[float] | Tensor


@dataclass(frozen=True, eq=False)
class Problem:
    """One map phi with its starts and its answer.

    `kind` says what may be asked of a solver:

    - "contraction": plain iteration provably converges (Lipschitz constant below 1 in some norm).
    - "map": a natural fixed-point map; plain iteration may or may not converge.
    - "root": a system F(z) = 0; from every start undamped Newton converges within 20 steps on
      well-conditioned Jacobians, plain iteration need not converge.
    - "hard": as "root", but undamped Newton is slow, fails, or meets (nearly) singular Jacobians.
    - "none": no fixed point, or a row of NaN; no such row may be called converged.
    """

    name: str
    phi: Map  # (B, D) -> (B, D), each row on its own
    z0: Tensor  # (B, D), float64, one start a row
    root: Tensor | None  # (B, D), float64, the answer for each start
    kind: str
    source: str


PROBLEMS: list[Problem] = []
ROOTS: dict[str, Tensor] = {}  # (R, D), float64
SINGULAR: dict[str, int] = {}


def vector(x: Numbers) -> Tensor:
    return torch.atleast_1d(torch.as_tensor(x, dtype=torch.float64))


def add(
    name: str,
    phi: Map,
    *,
    kind: str,
    z0: Sequence[Numbers],
    source: str,
    root: Numbers | None = None,
    roots: Sequence[Numbers] = (),
    singular: int = 0,
) -> None:
    """Append one problem; `z0` lists the starts, `root` is one row shared by all of them."""
    starts = torch.stack([vector(z) for z in z0])
    answer = None if root is None else vector(root).expand_as(starts).clone()
    PROBLEMS.append(Problem(name, phi, starts, answer, kind, source))
    if roots:
        ROOTS[name] = torch.stack([vector(z) for z in roots])
    if singular:
        SINGULAR[name] = singular


def fixed_point(
    *, kind: str, z0: Sequence[Numbers], source: str, **answer: Any
) -> Callable[[Map], Map]:
    """Decorator: the function is phi and its name the problem's name."""

    def register(phi: Map) -> Map:
        add(phi.__name__, phi, kind=kind, z0=z0, source=source, **answer)
        return phi

    return register


def system(
    *, z0: Sequence[Numbers], source: str, kind: str = "root", scale: float = 1.0, **answer: Any
) -> Callable[[Map], Map]:
    """Decorator: the function is F and phi(z) = z - F(z) / scale."""

    def register(F: Map) -> Map:
        def phi(z: Tensor) -> Tensor:
            return z - F(z) / scale

        add(F.__name__, phi, kind=kind, z0=z0, source=source, **answer)
        return F

    return register


def nearby(z: Numbers, *shifts: float) -> list[Tensor]:
    """The standard start and copies of it moved by each shift in every coordinate."""
    return [vector(z), *(vector(z) + s for s in shifts)]


def newton_root(phi: Map, z: Numbers, steps: int = 20) -> Tensor:
    """Root (D,) of a smooth problem by undamped Newton in float64; ends at rounding level.

    phi acts on each row alone, so one backward pass through D equal rows gives the whole Jacobian.
    """
    z = vector(z)
    eye = torch.eye(z.numel(), dtype=torch.float64)
    for _ in range(steps):
        rows = z.expand(z.numel(), -1).clone().requires_grad_()
        fz = phi(rows)
        (J,) = torch.autograd.grad(fz.diagonal().sum(), rows)
        step = torch.linalg.solve(eye - J, fz[0].detach() - z)
        z = z + step
        if step.abs().max() <= 1e-14 * z.abs().max():
            break
    return z


def columns(*values: Tensor) -> Tensor:
    return torch.stack(values, dim=-1)


def indices(n: int, z: Tensor) -> Tensor:
    """1, ..., n in the dtype and on the device of z."""
    return torch.arange(1, n + 1, dtype=z.dtype, device=z.device)


def neighbors(z: Tensor) -> tuple[Tensor, Tensor]:
    """z_{i-1} and z_{i+1} along the last axis, zero beyond both ends."""
    zero = torch.zeros_like(z[..., :1])
    return torch.cat([zero, z[..., :-1]], -1), torch.cat([z[..., 1:], zero], -1)


def orthogonal(n: int) -> Tensor:
    """The sine matrix sqrt(2 / (n + 1)) sin(i j pi / (n + 1)): symmetric, orthogonal, dense."""
    i = torch.arange(1, n + 1, dtype=torch.float64)
    return math.sqrt(2 / (n + 1)) * torch.sin(torch.outer(i, i) * math.pi / (n + 1))


def symmetric(spectrum: Numbers) -> Tensor:
    """A dense symmetric matrix with the given eigenvalues."""
    spectrum = vector(spectrum)
    Q = orthogonal(spectrum.numel())
    return Q @ torch.diag(spectrum) @ Q


def skewed(spectrum: Numbers) -> Tensor:
    """A dense non-normal matrix with the given eigenvalues: S A S^-1, A symmetric, S diagonal."""
    A = symmetric(spectrum)
    S = torch.linspace(1, 4, A.shape[0], dtype=torch.float64)
    return S[:, None] * A / S


def rotation(degrees: float) -> Tensor:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def add_affine(name: str, A: Tensor, source: str, kind: str = "contraction") -> None:
    """phi(z) = A z + b, with b = root - A root for a root chosen first."""
    D = A.shape[0]
    root = torch.cos(torch.arange(1, D + 1, dtype=torch.float64))
    b = root - A @ root

    def phi(z: Tensor) -> Tensor:
        return z @ A.to(z).mT + b.to(z)

    add(name, phi, kind=kind, z0=[torch.zeros(D), torch.ones(D)], source=source, root=root)


def spectrum(rho: float, D: int, low: float | None = None) -> Tensor:
    return torch.linspace(-rho if low is None else low, rho, D, dtype=torch.float64)


AFFINE = "textbook, affine map"
add_affine("affine_rho_0.1", symmetric(spectrum(0.1, 5)), AFFINE)
add_affine("affine_rho_0.5", symmetric(spectrum(0.5, 5)), AFFINE)
add_affine("affine_rho_0.9", symmetric(spectrum(0.9, 5)), AFFINE)
add_affine("affine_rho_0.99", symmetric(spectrum(0.99, 5)), AFFINE)
add_affine("affine_skewed_rho_0.5", skewed(spectrum(0.5, 5)), AFFINE)
add_affine("affine_skewed_rho_0.9", skewed(spectrum(0.9, 5)), AFFINE)
add_affine("affine_d100", symmetric(spectrum(0.9, 100, low=-0.99)), "spectrum in [-0.99, 0.9]")
add_affine("affine_skewed_d100", skewed(spectrum(0.9, 100, low=-0.99)), "spectrum in [-0.99, 0.9]")
add_affine("nilpotent", torch.diag(torch.ones(4, dtype=torch.float64), 1), "J^5 = 0")
add_affine("rotation_0.95", 0.95 * rotation(81), "complex pair, 0.95 exp(+-81 degrees i)")
add_affine("rotation_1.05", 1.05 * rotation(81), "complex pair outside the unit circle", kind="map")
add_affine("affine_expanding", symmetric([-3.0, 1.5, 4.0]), "no eigenvalue inside", kind="map")


@fixed_point(kind="contraction", z0=[0.0, 1.0, -8.0, 1e3], root=2.0, source=AFFINE)
def affine_scalar(z: Tensor) -> Tensor:
    return 0.5 * z + 1


@fixed_point(kind="contraction", z0=[2.0], root=2.0, source="already solved at the start")
def already_solved(z: Tensor) -> Tensor:
    return 0.5 * z + 1


@fixed_point(kind="map", z0=[0.0, 3.0], root=1.0, source="J = -1, plain iteration has period 2")
def reflection(z: Tensor) -> Tensor:
    return 2 - z


@fixed_point(
    kind="contraction",
    z0=[[0.0, 0.0, 0.0], [1.0, -1.0, 5.0]],
    root=[1.0, -2.0, 0.5],
    source="J = 0, constant map",
)
def constant(z: Tensor) -> Tensor:
    return 0 * z + z.new_tensor([1.0, -2.0, 0.5])


# Four pages: 1 -> 2, 3; 2 -> 4; 3 -> 1, 2, 4; 4 -> 1. Column j holds the links of page j.
LINKS = torch.tensor(
    [[0, 0, 2, 6], [3, 0, 2, 0], [3, 0, 0, 0], [0, 6, 2, 0]], dtype=torch.float64
).div(6)


@fixed_point(
    kind="contraction",
    z0=[[0.25] * 4, [1.0, 0.0, 0.0, 0.0]],
    root=torch.linalg.solve(
        torch.eye(4, dtype=torch.float64) - 0.85 * LINKS,
        torch.full((4,), 0.15 / 4, dtype=torch.float64),
    ),
    source="Page, Brin, Motwani, Winograd (1999), PageRank with damping 0.85",
)
def pagerank(z: Tensor) -> Tensor:
    return 0.85 * z @ LINKS.to(z).mT + 0.15 / 4


@fixed_point(
    kind="contraction", z0=[1.0, 0.0, -3.0], root=0.7390851332151607, source="textbook, cos z = z"
)
def cosine(z: Tensor) -> Tensor:
    return torch.cos(z)


@fixed_point(
    kind="map", z0=[1.0, 0.5, -0.5], root=0.0, singular=3, source="h = tanh h, sublinear iteration"
)
def tanh_sublinear(z: Tensor) -> Tensor:
    return torch.tanh(z)


ALPHA = [1e-6, 1e-3, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0]


@fixed_point(
    kind="map",
    z0=[[0.0] * 8, [1.0] * 8],
    root=[
        0.01442189571377182259672527,
        0.1436260284342617714585458,
        0.3047732572086081538987776,
        0.6118115548653089456637632,
        0.8812253607755204730345704,
        0.9611797513715394705963792,
        0.9950052293665156446069761,
        0.9999877113487792399772003,
    ],
    source="h = tanh(h + alpha) = Phi(alpha) for eight alpha from 1e-6 to 5",
)
def tanh_shifted(z: Tensor) -> Tensor:
    return torch.tanh(z + z.new_tensor(ALPHA))


@fixed_point(
    kind="contraction",
    z0=[[0.5, 1.0, 2.0, 0.25], [math.pi] * 4],
    root=[0.55247998690657035, 1.4987011335178483, 2.4870421608182725, 1.0940820324261775],
    source="Kepler (1609), E = M + e sin E, e from 0.1 to 0.95",
)
def kepler(E: Tensor) -> Tensor:
    M, e = E.new_tensor([0.5, 1.0, 2.0, 0.25]), E.new_tensor([0.1, 0.5, 0.8, 0.95])
    return M + e * torch.sin(E)


@fixed_point(
    kind="map", z0=[1.0, 0.0], root=0.56714329040978387, source="omega constant, z = exp(-z)"
)
def omega(z: Tensor) -> Tensor:
    return torch.exp(-z)


@fixed_point(
    kind="map",
    z0=[1.0, 3.0],
    root=(1 + math.sqrt(5)) / 2,
    source="golden section, z = 1 + 1 / z",
)
def golden_section(z: Tensor) -> Tensor:
    return 1 + 1 / z


@fixed_point(
    kind="map",
    z0=[1.0, 3.0],
    root=math.sqrt(2),
    source="Heron, z = (z + 2 / z) / 2, J = 0 at the root",
)
def heron(z: Tensor) -> Tensor:
    return (z + 2 / z) / 2


@fixed_point(
    kind="map",
    z0=[0.5, 0.6],
    roots=[1 - 1 / 3.2, 0.0],
    source="May (1976), logistic map r = 3.2: plain iteration ends in a 2-cycle",
)
def logistic(z: Tensor) -> Tensor:
    return 3.2 * z * (1 - z)


@fixed_point(
    kind="map",
    z0=[[7.0] * 3, [4.0] * 3],
    root=[3.6040579666955366, 6.7154130457107098, 12.468327310829958],
    source="Colebrook (1939), z = 1 / sqrt(f) for Re = 4e3, 1e5, 1e8",
)
def colebrook(z: Tensor) -> Tensor:
    Re, roughness = z.new_tensor([4e3, 1e5, 1e8]), z.new_tensor([0.05, 1e-3, 1e-6])
    return -2 * torch.log10(roughness / 3.7 + 2.51 * z / Re)


@fixed_point(
    kind="map",
    z0=[0.5, 0.1],
    root=(15 + math.sqrt(53809)) / 394,
    source="Dempster, Laird, Rubin (1977), section 1: EM for genetic linkage",
)
def em_linkage(p: Tensor) -> Tensor:
    x = 125 * p / (2 + p)
    return (x + 34) / (x + 72)


@fixed_point(
    kind="map",
    z0=[2.0, 5.0, 0.1],
    root=1.0,
    source="log domain: the Newton step from 5 leaves it (z < 0)",
)
def log_domain(z: Tensor) -> Tensor:
    return z - torch.log(z)


@system(
    z0=[1.0, 2.0],
    scale=8.0,
    root=1.165373043062414717,
    source="a z^3 - z - 2 = 0 at a = 2, the implicit gradient is -0.221399",
)
def cubic(z: Tensor) -> Tensor:
    return 2 * z**3 - z - 2


@fixed_point(
    kind="map",
    z0=[1.0],
    root=-0.85138307286692439349,
    source="plain iteration diverges from 1; the only real fixed point repels (J = 6.5)",
)
def diverging_cubic(z: Tensor) -> Tensor:
    return 3 * z**3 + 1


def add_tanh_layer(name: str, gamma: float, D: int) -> None:
    """phi(z) = tanh(W z + b), W = gamma Q with Q orthogonal, so the Lipschitz constant is gamma."""
    W = gamma * orthogonal(D)
    root = 0.9 * torch.sin(torch.arange(1, D + 1, dtype=torch.float64))
    b = torch.atanh(root) - W @ root

    def phi(z: Tensor) -> Tensor:
        return torch.tanh(z @ W.to(z).mT + b.to(z))

    z0 = [torch.zeros(D), torch.ones(D), -torch.ones(D)]
    source = f"tanh layer, Lipschitz constant {gamma}"
    add(name, phi, kind="contraction", z0=z0, source=source, root=root)


add_tanh_layer("tanh_layer_0.5", 0.5, D=5)
add_tanh_layer("tanh_layer_0.9", 0.9, D=5)
add_tanh_layer("tanh_layer_0.99_d64", 0.99, D=64)


@fixed_point(
    kind="contraction",
    z0=[[0.0] * 5, [0.0, 5.0, -1.0, 2.0, 20.0]],
    root=[10 * 0.9**4, 10 * 0.9**3, 10 * 0.9**2, 10 * 0.9, 10.0],
    source="Bellman (1957), value iteration: walk left or right, reward 1 at the right end",
)
def bellman(v: Tensor) -> Tensor:
    left = torch.cat([v[..., :1], v[..., :-1]], -1)
    right = torch.cat([v[..., 1:], v[..., -1:]], -1)
    reward = v.new_tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    return torch.maximum(0.9 * left, reward + 0.9 * right)


def add_sinkhorn() -> None:
    """Log-domain Sinkhorn; potentials f, g chosen first, f centred, which makes it unique.

    A contraction in Hilbert's metric: max - min of the change in f.
    """
    x = torch.linspace(0, 1, 4, dtype=torch.float64)
    C, eps = (x[:, None] - x) ** 2, 0.25
    f = torch.tensor([0.3, -0.1, -0.4, 0.2], dtype=torch.float64)
    g = torch.tensor([-0.2, 0.1, 0.4, -0.1], dtype=torch.float64)
    P = torch.exp((f[:, None] + g - C) / eps)
    log_a, log_b = P.sum(1).log(), P.sum(0).log()

    def phi(f: Tensor) -> Tensor:
        cost = C.to(f)
        g = eps * (log_b.to(f) - torch.logsumexp((f[..., :, None] - cost) / eps, -2))
        f = eps * (log_a.to(f) - torch.logsumexp((g[..., None, :] - cost) / eps, -1))
        return f - f.mean(-1, keepdim=True)

    source = "Sinkhorn (1967); Cuturi (2013), algorithm 1, in the log domain"
    add("sinkhorn", phi, kind="contraction", z0=nearby([0.0] * 4, 1.0), source=source, root=f)


add_sinkhorn()


def bratu_1d(lam: float, n: int) -> Map:
    """Damped Jacobi (2/3) for -u'' = lam exp(u), u(0) = u(1) = 0, on n interior points."""
    h = 1 / (n + 1)

    def phi(u: Tensor) -> Tensor:
        left, right = neighbors(u)
        return u / 3 + (left + right + h**2 * lam * torch.exp(u)) / 3

    return phi


def bratu_2d(lam: float, n: int) -> Map:
    """The same for -laplace u = lam exp(u) on the unit square, n by n interior points."""
    h = 1 / (n + 1)

    def phi(u: Tensor) -> Tensor:
        u = u.unflatten(-1, (n, n))
        (left, right), (up, down) = neighbors(u), (v.mT for v in neighbors(u.mT))
        jacobi = (left + right + up + down + h**2 * lam * torch.exp(u)) / 4
        return (u / 3 + jacobi * 2 / 3).flatten(-2)

    return phi


def add_smooth(name: str, phi: Map, z0: Sequence[Numbers], source: str) -> None:
    """A map whose root is computed by Newton from its first start."""
    add(name, phi, kind="map", z0=z0, source=source, root=newton_root(phi, z0[0]))


BRATU = "Bratu (1914), "
add_smooth("bratu_1d", bratu_1d(1.0, 15), nearby([0.0] * 15, 0.1), BRATU + "lambda = 1")
add_smooth("bratu_1d_fold", bratu_1d(3.5, 15), nearby([0.0] * 15), BRATU + "lambda = 3.5 near fold")
add_smooth("bratu_2d", bratu_2d(5.0, 7), nearby([0.0] * 49, 0.1), BRATU + "lambda = 5, square")


def chandrasekhar_map(c: float, n: int) -> Map:
    """H(mu) = 1 / (1 - c/2 int_0^1 mu H(nu) / (mu + nu) d nu), midpoint rule with n points."""
    mu = (torch.arange(1, n + 1, dtype=torch.float64) - 0.5) / n
    K = c / (2 * n) * mu[:, None] / (mu[:, None] + mu)

    def phi(H: Tensor) -> Tensor:
        return 1 / (1 - H @ K.to(H).mT)

    return phi


CHANDRASEKHAR = "Chandrasekhar (1960), H-equation; Kelley (1995), section 5.6, "
add(
    "chandrasekhar",
    chandrasekhar_map(0.9, 10),
    kind="map",
    z0=nearby([1.0] * 10, 0.5),
    root=[
        1.0967358168344777703,
        1.2334840217223595239,
        1.3423629130310345061,
        1.4356463490493696237,
        1.5178684864866109014,
        1.5914920868821104441,
        1.6581057513926862741,
        1.7188372512295918272,
        1.7745363737392700026,
        1.8258694825916461664,
    ],
    source=CHANDRASEKHAR + "c = 0.9",
)
add(
    "chandrasekhar_critical",
    chandrasekhar_map(1.0, 10),
    kind="hard",
    z0=[[1.0] * 10],
    root=[
        1.1332066611849013219,
        1.3491667458614117457,
        1.5463183741120233699,
        1.7357949887403032931,
        1.921045883345469425,
        2.1036363184638282013,
        2.284413816962899569,
        2.463888244613040155,
        2.6423889538132129493,
        2.8201400129029099699,
    ],
    singular=2,
    source=CHANDRASEKHAR + "c = 1, where I - J is singular",
)
add_smooth(
    "chandrasekhar_d100",
    chandrasekhar_map(0.99, 100),
    nearby([1.0] * 100),
    CHANDRASEKHAR + "c = 0.99",
)


# "Testing unconstrained optimization software", ACM Trans. Math. Softw. 7
MGH = "Moré, Garbow, Hillstrom (1981), problem "


@system(
    kind="hard",
    z0=nearby([-1.2] + [1.0] * 9, 0.05),
    root=[1.0] * 10,
    source=MGH + "21, the chained form",
)
def generalized_rosenbrock(z: Tensor) -> Tensor:
    return torch.cat([1 - z[..., :1], 10 * (z[..., 1:] - z[..., :-1] ** 2)], -1)


@system(
    kind="hard",
    z0=nearby([3.0, -1.0, 0.0, 1.0], 0.05),
    root=[0.0] * 4,
    singular=2,
    source=MGH + "13",
)
def powell_singular(z: Tensor) -> Tensor:
    z1, z2, z3, z4 = z.unbind(-1)
    return columns(
        z1 + 10 * z2,
        math.sqrt(5) * (z3 - z4),
        (z2 - 2 * z3) ** 2,
        math.sqrt(10) * (z1 - z4) ** 2,
    )


def powell(z: Tensor) -> Tensor:
    z1, z2 = z.unbind(-1)
    # exp(-z1) + exp(-z2) - 1.0001, without the cancellation at the root
    return columns(1e4 * z1 * z2 - 1, torch.expm1(-z1) + torch.exp(-z2) - 1e-4)


POWELL_ROOTS = [
    [1.0981593296998174557e-5, 9.1061467398665240109],
    [9.1061467398665240109, 1.0981593296998174557e-5],
]


@system(kind="hard", z0=[[0.0, 1.0]], roots=POWELL_ROOTS, source=MGH + "3")
def powell_badly_scaled(z: Tensor) -> Tensor:
    return powell(z)


@system(z0=nearby([-3.0, -1.0, -3.0, -1.0], 0.05), source=MGH + "14, its gradient: several roots")
def wood(z: Tensor) -> Tensor:
    z1, z2, z3, z4 = z.unbind(-1)
    a, b = z2 - z1**2, z4 - z3**2
    return columns(
        -200 * z1 * a - (1 - z1),
        200 * a + 20.2 * (z2 - 1) + 19.8 * (z4 - 1),
        -180 * z3 * b - (1 - z3),
        180 * b + 20.2 * (z4 - 1) + 19.8 * (z2 - 1),
    )


@system(z0=nearby([-1.0, 0.0, 0.0], 0.05), root=[1.0, 0.0, 0.0], source=MGH + "7")
def helical_valley(z: Tensor) -> Tensor:
    z1, z2, z3 = z.unbind(-1)
    angle = torch.atan2(z2, z1)
    # the cut lies on the negative z2 axis: turns run from -1/4 to 3/4
    turns = torch.where(angle < -math.pi / 2, angle + 2 * math.pi, angle) / (2 * math.pi)
    return columns(10 * (z3 - 10 * turns), 10 * (torch.hypot(z1, z2) - 1), z3)


def watson(z: Tensor) -> Tensor:
    """Half the gradient of the sum of squares."""
    n = z.shape[-1]
    t = indices(29, z) / 29
    P = t[:, None] ** (indices(n, z) - 1)  # (29, n): t_i^(j-1)
    dP = torch.cat([torch.zeros_like(P[:, :1]), indices(n - 1, z) * P[:, :-1]], -1)
    value, slope = z @ P.mT, z @ dP.mT  # (B, 29)
    r = slope - value**2 - 1
    last = z[..., 1] - z[..., 0] ** 2 - 1
    ends = columns(z[..., 0] * (1 - 2 * last), last, *[0 * last] * (n - 2))
    return r @ dP - 2 * (r * value) @ P + ends


@system(
    z0=nearby([0.0] * 6, 0.01),
    root=[
        -0.015725086401458456766,
        1.0124348693691098571,
        -0.23299162595673768404,
        1.2604300877996083383,
        -1.5137289227222796668,
        0.99299643243113452184,
    ],
    source=MGH + "20, its gradient, n = 6",
)
def watson_6(z: Tensor) -> Tensor:
    return watson(z)


@system(
    kind="hard",
    z0=[[0.0] * 9],
    root=[
        -0.000015307036521394342168,
        0.99978970393194837874,
        0.014763963693556958679,
        0.14634232829936223006,
        1.0008211030047092362,
        -2.6177311405190151491,
        4.1044031644788564201,
        -3.1436122785564422296,
        1.0526264080101668952,
    ],
    source=MGH + "20, its gradient, n = 9",
)
def watson_9(z: Tensor) -> Tensor:
    return watson(z)


def chebyquad(z: Tensor) -> Tensor:
    """Mean of the Chebyshev polynomials T_i(2 z - 1) over z, minus their integral on [0, 1]."""
    n = z.shape[-1]
    x = 2 * z - 1
    before, T = torch.ones_like(x), x
    out = []
    for i in range(1, n + 1):
        integral = -1 / (i**2 - 1) if i % 2 == 0 else 0.0
        out.append(T.mean(-1) - integral)
        before, T = T, 2 * x * T - before
    return columns(*out)


def equal_weight_nodes() -> list[float]:
    """Chebyshev's five equal-weight quadrature nodes on [0, 1]."""
    outer, inner = (math.sqrt((5 + s * math.sqrt(11)) / 12) for s in (1, -1))
    return [(1 + x) / 2 for x in (-outer, -inner, 0.0, inner, outer)]


def permutations(values: Sequence[float]) -> list[list[float]]:
    if not values:
        return [[]]
    return [
        [v, *rest]
        for i, v in enumerate(values)
        for rest in permutations([*values[:i], *values[i + 1 :]])
    ]


@system(
    z0=[[1 / 3, 2 / 3], [0.3, 0.7]],
    roots=permutations([0.5 - math.sqrt(1 / 12), 0.5 + math.sqrt(1 / 12)]),
    source=MGH + "35, n = 2",
)
def chebyquad_2(z: Tensor) -> Tensor:
    return chebyquad(z)


@system(
    z0=[[i / 6 for i in range(1, 6)]],
    roots=permutations(equal_weight_nodes()),
    source=MGH + "35, n = 5",
)
def chebyquad_5(z: Tensor) -> Tensor:
    return chebyquad(z)


# a solves 10 a^10 - 11 a^9 + 1 = 0 and is not 1
BROWN = 0.97943030334986245179


@system(
    kind="hard",
    z0=nearby([0.5] * 10, 0.25),
    roots=[[1.0] * 10, [BROWN] * 9 + [BROWN**-9]],
    source=MGH + "27",
)
def brown_almost_linear(z: Tensor) -> Tensor:
    n = z.shape[-1]
    first = z[..., :-1] + z.sum(-1, keepdim=True) - (n + 1)
    return torch.cat([first, z.prod(-1, keepdim=True) - 1], -1)


# Problems 28 and 29 have one root: the integral equation uses the exact inverse of the stencil.
BOUNDARY_VALUE_START = [i * (i - 11) / 121 for i in range(1, 11)]
BOUNDARY_VALUE_ROOT = [
    -0.043164982518764870577,
    -0.081577156535386881534,
    -0.11448571438052928724,
    -0.14097357686259667963,
    -0.15990869618198312233,
    -0.16987720231277491898,
    -0.16908998378120835184,
    -0.15524953522183182195,
    -0.1253558916789349894,
    -0.075416533685892083955,
]


@system(
    z0=nearby(BOUNDARY_VALUE_START, 0.1),
    scale=4.0,
    root=BOUNDARY_VALUE_ROOT,
    source=MGH + "28",
)
def discrete_boundary_value(z: Tensor) -> Tensor:
    n = z.shape[-1]
    h = 1 / (n + 1)
    left, right = neighbors(z)
    return 2 * z - left - right + h**2 / 2 * (z + h * indices(n, z) + 1) ** 3


@system(z0=nearby(BOUNDARY_VALUE_START, 0.1), root=BOUNDARY_VALUE_ROOT, source=MGH + "29")
def discrete_integral_equation(z: Tensor) -> Tensor:
    n = z.shape[-1]
    h = 1 / (n + 1)
    t = h * indices(n, z)
    G = torch.minimum(t[:, None], t) * (1 - torch.maximum(t[:, None], t))  # Green's function
    return z + h / 2 * (z + t + 1) ** 3 @ G


@system(kind="hard", z0=nearby([0.1] * 10, 0.02), source=MGH + "26, several roots, 0 is one")
def trigonometric(z: Tensor) -> Tensor:
    n = z.shape[-1]
    cos = torch.cos(z)
    return n - cos.sum(-1, keepdim=True) + indices(n, z) * (1 - cos) - torch.sin(z)


@system(
    z0=nearby([1 - i / 10 for i in range(1, 11)], 0.05),
    root=[1.0] * 10,
    source=MGH + "25, its gradient",
)
def variably_dimensioned(z: Tensor) -> Tensor:
    k = indices(z.shape[-1], z)
    s = (k * (z - 1)).sum(-1, keepdim=True)
    return z - 1 + k * s * (1 + 2 * s**2)


@system(
    z0=nearby([-1.0] * 10, 0.1),
    scale=6.0,
    root=[
        -0.57072213201122479366,
        -0.68180694998427509083,
        -0.7022100760176600347,
        -0.70551062989508039126,
        -0.70490615572874367102,
        -0.70149660702985113468,
        -0.69188932235479825491,
        -0.66579651440585374721,
        -0.59603510902636570971,
        -0.41641225752869334927,
    ],
    source=MGH + "30",
)
def broyden_tridiagonal(z: Tensor) -> Tensor:
    left, right = neighbors(z)
    return (3 - 2 * z) * z - left - 2 * right + 1


@system(
    z0=nearby([-1.0] * 10, 0.1),
    scale=8.0,
    root=[
        -0.4283028635872502737,
        -0.47659642435629024179,
        -0.5196524636468617255,
        -0.5580993248321808956,
        -0.59250615682945734876,
        -0.62450368219946792061,
        -0.62323947144059109141,
        -0.62139384179657349861,
        -0.6204535966590873594,
        -0.58646927072043506955,
    ],
    source=MGH + "31",
)
def broyden_banded(z: Tensor) -> Tensor:
    i = indices(z.shape[-1], z)
    offset = i[:, None] - i  # i - j
    band = ((offset <= 5) & (offset >= -1) & (offset != 0)).to(z)
    return z * (2 + 5 * z**2) + 1 - (z * (1 + z)) @ band.mT


@system(kind="hard", z0=nearby([0.5, -2.0], 0.1), root=[5.0, 4.0], source=MGH + "2")
def freudenstein_roth(z: Tensor) -> Tensor:
    z1, z2 = z.unbind(-1)
    return columns(
        -13 + z1 + ((5 - z2) * z2 - 2) * z2,
        -29 + z1 + ((z2 + 1) * z2 - 14) * z2,
    )


def matrix_square_root(z: Tensor, A: Tensor) -> Tensor:
    """X^2 - A, X filled row by row."""
    X = z.unflatten(-1, A.shape)
    return (X @ X - A.to(z)).flatten(-2)


@system(
    kind="hard",
    z0=[[1.0, 0.0, 0.0, 1.0]],
    roots=[[0.01, 50.0, 0.0, 0.01], [-0.01, -50.0, 0.0, -0.01]],
    source="Hammarling, in Burkardt, TEST_NONLIN, problem 15",
)
def hammarling_2(z: Tensor) -> Tensor:
    return matrix_square_root(z, torch.tensor([[1e-4, 1.0], [0.0, 1e-4]], dtype=torch.float64))


@system(
    kind="hard",
    z0=[[1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]],
    source="Hammarling, in Burkardt, TEST_NONLIN, problem 16: a continuum of roots",
)
def hammarling_3(z: Tensor) -> Tensor:
    A = torch.tensor([[1e-4, 1, 0], [0, 1e-4, 0], [0, 0, 1e-4]], dtype=torch.float64)
    return matrix_square_root(z, A)


@system(
    z0=nearby([1.0, 5.0], 0.1),
    roots=[[0.0, 3.0], [3.0, 0.0]],
    source="Dennis, Schnabel (1983), section 5.1",
)
def dennis_schnabel(z: Tensor) -> Tensor:
    z1, z2 = z.unbind(-1)
    return columns(z1 + z2 - 3, z1**2 + z2**2 - 9)


def one_minus_gauss(x: Tensor) -> Tensor:
    """(1 - exp(-x^2)) / x, which is 0 at 0."""
    safe = torch.where(x == 0, torch.ones_like(x), x)
    return torch.where(x == 0, x, -torch.expm1(-(safe**2)) / safe)


@system(
    kind="hard",
    z0=[[2.0, 2.0]],
    source="Burkardt, TEST_NONLIN, problem 18: every point of both axes is a root",
)
def sample_18(z: Tensor) -> Tensor:
    z1, z2 = z.unbind(-1)
    return columns(z2**2 * one_minus_gauss(z1), z1 * one_minus_gauss(z2))


@system(
    kind="hard",
    z0=[[3.0, 3.0], [1.0, -2.0]],
    root=[0.0, 0.0],
    singular=3,
    source="Burkardt, TEST_NONLIN, problem 19",
)
def sample_19(z: Tensor) -> Tensor:
    return z * (z**2).sum(-1, keepdim=True)


@system(
    kind="hard",
    z0=[1.0, 6.0],
    roots=[0.0, 5.0],
    singular=2,
    source="Burkardt, TEST_NONLIN, problem 20: a simple root at 0, a double one at 5",
)
def scalar_double_root(z: Tensor) -> Tensor:
    return z * (z - 5) ** 2


@system(
    z0=[[1.0, 0.0]],
    roots=[[0.0, 1.0], [-1.0, 2.0], [-math.sqrt(0.5), 1.5]],
    source="Boggs (1971)",
)
def boggs(z: Tensor) -> Tensor:
    z1, z2 = z.unbind(-1)
    return columns(z1**2 - z2 + 1, z1 - torch.cos(math.pi / 2 * z2))


# The systems on which SciPy tests its own nonlinear solvers
SCIPY = "SciPy, optimize/tests/test_nonlin.py, problem "


@system(z0=nearby([1.0] * 5, -0.5), scale=2.0, root=[0.0] * 5, source=SCIPY + "F")
def scipy_f(z: Tensor) -> Tensor:
    d = z.new_tensor([3.0, 2.0, 1.5, 1.0, 0.5])
    return d * z + 0.01 * (z**2).sum(-1, keepdim=True) * z


@system(
    kind="contraction",
    z0=[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0] * 6],
    root=[0.0] * 6,
    source=SCIPY + "F2 (phi = 0) and F2_lucky (solved at the start)",
)
def scipy_f2(z: Tensor) -> Tensor:
    return z


@system(
    kind="contraction",
    z0=nearby([1.0, 2.0, 3.0], 1.0),
    scale=2.0,
    root=[-2.5, -4.0, -3.5],
    source=SCIPY + "F3, as Jacobi iteration",
)
def scipy_f3(z: Tensor) -> Tensor:
    left, right = neighbors(z)
    return 2 * z - left - right + z.new_tensor([1.0, 2.0, 3.0])


@system(kind="hard", z0=[[-1.0, -2.0]], roots=POWELL_ROOTS, source=SCIPY + "F4_powell")
def scipy_f4(z: Tensor) -> Tensor:
    return powell(z)


@system(
    kind="hard",
    z0=[[2.0, 0.0, 2.0, 0.0]],
    roots=[[1.0] * 4, *(2 - 4 * torch.eye(4, dtype=torch.float64))],
    source=SCIPY + "F5, a pressure network: I - J is singular at the start",
)
def scipy_f5(z: Tensor) -> Tensor:
    P = 0.5 * z**2
    return torch.cat([P[..., 1:] - P[..., :1], z.sum(-1, keepdim=True) - 4], -1)


@system(z0=nearby([-0.5, 1.4], 0.1), root=[0.0, 1.0], source=SCIPY + "F6")
def scipy_f6(z: Tensor) -> Tensor:
    z1, z2 = z.unbind(-1)
    J0 = torch.tensor([[-4.256, 14.7], [0.8394989, 0.59964207]], dtype=torch.float64)
    v = columns((z1 + 3) * (z2**5 - 7) + 18, torch.sin(z2 * torch.exp(z1) - 1))
    return v @ torch.linalg.inv(J0).to(z).mT


@fixed_point(kind="none", z0=[0.0, 1.0], source="translation: the residual is 1 everywhere")
def translation(z: Tensor) -> Tensor:
    return z + 1


@fixed_point(kind="none", z0=[0.0, -2.0], source="exp(z) - z >= 1")
def exponential(z: Tensor) -> Tensor:
    return torch.exp(z)


@fixed_point(kind="none", z0=[0.5, 0.0], source="z^2 + 1 - z >= 3/4")
def parabola(z: Tensor) -> Tensor:
    return z**2 + 1


@system(
    kind="none",
    z0=[[i / 9 for i in range(1, 9)]],
    source=MGH + "35, n = 8: no real root, ||F||^2 >= 3.51687e-3",
)
def chebyquad_8(z: Tensor) -> Tensor:
    return chebyquad(z)


@fixed_point(
    kind="none",
    z0=[[1.0, 0.0], [math.nan, math.nan], [0.5, 2.0]],
    source="cos with a start of NaN in row 1; rows 0 and 2 have the root of cos",
)
def nan_row(z: Tensor) -> Tensor:
    return torch.cos(z)


PROBLEMS_BY_NAME: dict[str, Problem] = {p.name: p for p in PROBLEMS}
