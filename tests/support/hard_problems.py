"""Problems on which solvers differ: 39 hard maps and the stiff ones, each with one start.

Every map has a fixed point. `HARD` holds ill-conditioned, non-normal and nearly singular linear
maps, extreme scales, spectral radii about 1, saddles, cycles, chaos, jumps, small domains, double
roots, tanh layers of gain 0.9 to 6 and the Bratu problem; `STIFF` linear maps whose J has large
negative eigenvalues (charge sloshing), with spectra of the negative J as named. A solver is given
300 evaluations (of a Jacobian: updates) and asked for rms(phi(z) - z) <= 1e-10 rms(phi(z));
a residual of 1e-9 counts as solved.
"""

import math

import torch
from torch import Tensor

from support.problems import Map, Numbers, Problem, bratu_2d, neighbors, vector

HARD: list[Problem] = []
STIFF: list[Problem] = []
F64 = torch.float64


def hard(name: str, phi: Map, z0: Numbers, source: str, table: list[Problem] = HARD) -> None:
    """Append one problem with one start; answers are judged by their residual."""
    table.append(Problem(name, phi, vector(z0)[None], None, "hard", source))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def rotated(spectrum: Tensor, seed: int) -> Tensor:
    """A dense symmetric matrix with the given eigenvalues."""
    Q, _ = torch.linalg.qr(random(len(spectrum), len(spectrum), seed=seed))
    return Q @ torch.diag(spectrum) @ Q.mT


def affine(A: Tensor, b: Tensor | float = 1.0) -> Map:
    return lambda z: z @ A.to(z).mT + (b.to(z) if isinstance(b, Tensor) else b)


def hard_affine(name: str, A: Tensor, source: str, *, table: list[Problem] = HARD) -> None:
    D = len(A)
    hard(name, affine(A, random(D, seed=D)), torch.zeros(D), source, table)


def rotations(modulus: float, n: int) -> Tensor:
    """Block diagonal: n rotations of the plane by angles over (0, pi), times the modulus."""
    angles = math.pi * torch.arange(1, n + 1, dtype=F64) / (n + 1)
    c, s = angles.cos(), angles.sin()
    return modulus * torch.block_diag(*torch.stack((c, -s, s, c), 1).reshape(n, 2, 2))


def of_radius(rho: float, D: int, seed: int) -> Tensor:
    A = random(D, D, seed=seed)
    return rho / torch.linalg.eigvals(A).abs().max() * A


D = 20
SLOW = 1 - torch.logspace(-4, 0, D, dtype=F64)
ONE = torch.cat((torch.linspace(-0.9, 0.9, D - 1, dtype=F64), torch.ones(1, dtype=F64)))


def one_minus(gap: float) -> Tensor:
    """Eigenvalues in [-0.9, 0.9] and one of 1 - gap."""
    return torch.cat((ONE[:-1], ONE[-1:] - gap))


hard("slow_modes", lambda z: SLOW.to(z) * z + 1, torch.zeros(D), "eigenvalues 0 .. 1 - 1e-4")
hard_affine("near_singular_1e-9", rotated(one_minus(1e-9), seed=1), "one eigenvalue 1 - 1e-9")
hard_affine("near_singular_1e-6", rotated(one_minus(1e-6), seed=2), "one eigenvalue 1 - 1e-6")
hard_affine("saddle_near_one", rotated(one_minus(-1e-3), seed=3), "one eigenvalue 1 + 1e-3")
hard_affine("shift_0.999", 0.999 * torch.eye(D, dtype=F64).roll(1, 0), "cyclic shift times 0.999")
hard_affine("rotations_0.999", rotations(0.999, 10), "ten rotations of modulus 0.999")
hard_affine("nilpotent_3", torch.diag(torch.full((D - 1,), 3.0, dtype=F64), 1), "J^20 = 0")
hard_affine(
    "triangular_5",
    torch.diag(torch.linspace(-0.5, 0.5, D, dtype=F64)) + random(D, D, seed=4).triu(1),
    "strictly upper triangle of normal numbers: transient growth",
)
hard_affine("radius_0.99", of_radius(0.99, D, seed=5), "dense, spectral radius 0.99")
hard_affine("radius_1.01", of_radius(1.01, D, seed=6), "dense, spectral radius 1.01")
hard_affine("radius_0.99_d100", of_radius(0.99, 100, seed=7), "dense, spectral radius 0.99")
hard_affine(
    "indefinite_10", rotated(torch.linspace(-10, 0.9, D, dtype=F64), seed=8), "spectrum -10 .. 0.9"
)
hard_affine(
    "saddle",
    rotated(torch.cat((torch.linspace(-3, 0.9, 10), torch.linspace(1.1, 4, 10))).double(), seed=9),
    "eigenvalues on both sides of 1",
)
hard_affine(
    "graded",
    torch.diag(10.0 ** torch.linspace(-2, 2, D, dtype=F64))
    @ rotated(torch.linspace(-0.9, 0.9, D, dtype=F64), seed=10)
    @ torch.diag(10.0 ** torch.linspace(2, -2, D, dtype=F64)),
    "units from 1e-2 to 1e2: S A S^-1 with A symmetric",
)


def tanh_layer(gain: float, D: int, seed: int, scale: float = 1.0) -> Map:
    """phi(z) = s tanh(W z / s + b), W normal of variance gain^2 / D, so of radius near the gain."""
    W, b = gain * random(D, D, seed=seed) / D**0.5, 0.5 * random(D, seed=seed + 1)
    return lambda z: scale * torch.tanh(z / scale @ W.to(z).mT + b.to(z))


for gain in (0.9, 1.0, 1.5, 2.0, 3.0, 6.0):
    hard(f"tanh_gain_{gain:g}", tanh_layer(gain, 50, seed=30), torch.zeros(50), "random tanh layer")
hard("tanh_scale_1e-8", tanh_layer(0.95, D, 31, 1e-8), torch.zeros(D), "state of size 1e-8")
hard("tanh_scale_1e8", tanh_layer(0.95, D, 31, 1e8), torch.zeros(D), "state of size 1e8")


def limit_cycle(z: Tensor) -> Tensor:
    """A step of the normal form of Hopf's bifurcation about (1, 1), radius of the cycle 1."""
    x = z - 1
    square = (x * x).sum(-1, keepdim=True)
    return z + 0.5 * (x * (1 - square) + 2 * torch.stack((-x[..., 1], x[..., 0]), -1))


def van_der_pol(z: Tensor) -> Tensor:
    x, v = z.unbind(-1)
    return z + 0.2 * torch.stack((v, 3 * (1 - x * x) * v - x), -1)


def henon(z: Tensor) -> Tensor:
    x, y = z.unbind(-1)
    return torch.stack((1 - 1.4 * x * x + y, 0.3 * x), -1)


hard("limit_cycle", limit_cycle, [2.5, 0.5], "Hopf normal form: plain iteration ends on a circle")
hard("van_der_pol", van_der_pol, [2.0, 1.0], "explicit Euler step of van der Pol's oscillator")
hard("logistic_3.9", lambda z: 3.9 * z * (1 - z), [0.3], "May (1976): chaos")
hard("henon", henon, [0.1, 0.1], "Henon (1976): chaos in the plane")
hard("lozi", lambda z: 1 - 1.7 * z.abs() + 0.5 * z.flip(-1), [0.1, 0.4], "kink, after Lozi (1978)")

RELU, RELU_SHIFT = of_radius(1.3, D, seed=12), random(D, seed=13)


def jump(z: Tensor) -> Tensor:
    """Jumps by 1 where a coordinate changes its sign, away from the fixed point."""
    return 0.5 * z + torch.where(z > 0, 1.0, 2.0) + 0.2 * z.roll(1, -1).sign()


hard(
    "relu_layer",
    lambda z: torch.relu(z @ RELU.to(z).mT / 2 + RELU_SHIFT.to(z)),
    torch.zeros(D),
    "piecewise linear",
)
hard("jump", jump, torch.linspace(-4, 3, 8), "discontinuous: jumps at the signs")
hard("sqrt_domain", lambda z: torch.sqrt(z - 0.9) + 0.85, [0.95], "defined for z >= 0.9")
hard(
    "log_pole",
    lambda n: torch.log(3 / n) / torch.log(3.7477525683 * n / (n - 1)) + 1,
    [1.001],
    "defined for n > 1, steep at the pole; root near 1.3",
)
hard("log", lambda z: z - torch.log(z), [5.0], "z > 0: the Newton step from 5 leaves the domain")
hard("double_root", lambda z: z - z**2, [0.5], "g = -z^2")
hard("triple_root", lambda z: z - z**3, [0.5], "g = -z^3")
hard(
    "double_roots_mixed",
    lambda z: torch.cat((z[..., :2] - z[..., :2] ** 2, 0.9 * z[..., 2:] + z[..., :1]), -1),
    [0.5, 0.3, 1.0, 1.0],
    "two double roots that drive two slow coordinates",
)
hard("arctan", lambda z: z - torch.arctan(z - 1), [4.0], "undamped Newton diverges from 2.39 on")


def bratu(lam: float) -> Map:
    """Jacobi's iteration for -u'' = lam exp(u), u(0) = u(1) = 0, on D interior points."""

    def phi(u: Tensor) -> Tensor:
        left, right = neighbors(u)
        return (left + right) / 2 + lam / (u.shape[-1] + 1) ** 2 / 2 * torch.exp(u)

    return phi


hard("bratu_d50", bratu(3.0), torch.zeros(50), "Bratu (1914), lambda = 3, Jacobi")
hard("bratu_d100", bratu(3.0), torch.zeros(100), "Bratu (1914), lambda = 3, Jacobi")
hard("bratu_2d_d225", bratu_2d(5.0, 15), torch.zeros(225), "Bratu, lambda = 5, 15 x 15, Jacobi")


def sloshing(largest: float) -> Tensor:
    return -rotated(torch.logspace(-1, math.log10(largest), 60, dtype=F64), seed=0)


for largest in (30.0, 100.0, 300.0):
    hard_affine(
        f"sloshing_{largest:g}",
        sloshing(largest),
        f"charge sloshing: spectrum of J from -0.1 to -{largest:g}, spaced by logarithms",
        table=STIFF,
    )
