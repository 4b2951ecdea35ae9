"""The zoo: each program is short, has a title and a row of the page, and one fact that holds.

The gallery runs them to their end.
"""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fixpoint import solve
from fixpoint.analysis import spectral_radius
from fixpoint.models import DEQ

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "examples/zoo").glob("*.py"))


def digits(n):
    assert n["known"].shape[1:] == (10, 32, 32)
    assert len(n["glyphs"]("STIXGeneral*.ttf")) == 4


def transformer(n):
    """The block contracts before it is trained."""
    torch.manual_seed(0)
    model = n["Classifier"](DEQ(n["Block"](), n["Anderson"](rtol=1e-3)))
    tokens = model.embedded(n["data"].x_test[:8]).detach()
    z = model.layer(tokens).detach()
    assert spectral_radius(lambda z: model.layer.f(z, tokens), z).max() < 1


def karate(n):
    assert n["club"].number_of_edges() == 78
    assert torch.linalg.eigvalsh(n["A"])[-1].item() == pytest.approx(1, abs=1e-5)


def neural_image(n):
    assert n["target"].shape == (1600,)
    assert n["psnr"](n["target"] + 0.1) == pytest.approx(20, abs=1e-4)


def sudoku(n):
    assert len(n["grids"].unique(dim=0)) == 288
    x, solution = n["puzzles"](n["grids"], 64, digits=5)
    given = x[..., :4].sum(2) == 1
    assert (given.sum(1) == 5).all()
    assert (x.argmax(2)[given] == solution[given]).all()


def lasso(n):
    """|A^T (A z - b)| <= lambda, with equality where z is not 0: the solution of LASSO."""
    z = solve(n["phi"], n["z0"], n["layer"].solver).check().z
    slope = (z @ n["A_fit"].T - n["b_fit"]) @ n["A_fit"]
    weight, on = n["start"].exp().item(), z != 0
    assert slope.abs().max() <= weight * (1 + 1e-8)
    torch.testing.assert_close(slope[on], -weight * z[on].sign(), rtol=1e-7, atol=0)


def bratu(n):
    phi, z0 = n["bratu"](torch.tensor([5.0]).double()), torch.zeros(1, 21, 21).double()
    u = solve(phi, z0, n["Broyden"](rtol=1e-11)).check().z[0]
    np.testing.assert_allclose(u.numpy(), n["sparse_newton"](5.0), rtol=1e-9)


def sinkhorn(n):
    P = n["observed"]
    torch.testing.assert_close(P.sum(0), torch.ones_like(P[0]), rtol=0, atol=1e-9)
    torch.testing.assert_close(P.sum(1), torch.ones_like(P[0]), rtol=0, atol=1e-8)


def market(n):
    torch.testing.assert_close(n["found"], n["exact"], rtol=1e-11, atol=0)
    assert n["slopes"][0] == pytest.approx(n["slopes"][1], rel=1e-9)


def cable(n):
    assert n["slopes"][3].item() == pytest.approx(n["quotient"].item(), rel=1e-6)


def charge_density(n):
    """Electrons are conserved, and the response is symmetric."""
    v, response = n["v"], n["layer"](n["phi"], n["z0"], rtol=1e-12).check().z[0]
    assert response.sum().item() == pytest.approx(len(v), abs=1e-9)
    rows = [torch.autograd.grad(response[i], v, retain_graph=True)[0] for i in (2, 7)]
    assert rows[0][7].item() == pytest.approx(rows[1][2].item(), rel=1e-7)


FACTS = {
    "01_multiscale_digits": ("tests = ", {}, digits),
    "02_transformer": ("curves = {}", {}, transformer),
    "03_karate": ("given = ", {}, karate),
    "04_neural_image": ("images, curves = ", {}, neural_image),
    "05_sudoku": ("embed, head = ", {}, sudoku),
    "06_lasso": ("for solver in ", {}, lasso),
    "07_bratu": ("lambda_ = torch", {"N, MIDDLE = 101, 50": "N, MIDDLE = 21, 10"}, bratu),
    "08_sinkhorn": ("w = torch.ones", {}, sinkhorn),
    "09_market": ("SIGMA = ", {}, market),
    "10_scipy_cable": ("SAG = ", {}, cable),
    "11_charge_density": (
        "traces = ",
        {"U = 60, 0.05": "U = 10, 0.05", "v[40], v[41]": "v[7], v[8]", "v[14]": "v[2]"},
        charge_density,
    ),
}
"""Of each program the line that its part ends before, its changes, and what holds there."""


def test_every_program_has_a_fact():
    assert [path.stem for path in PROGRAMS] == sorted(FACTS)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_it_is_a_short_lesson_with_a_row_of_the_page(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 100
    title, line, *text = ast.get_docstring(ast.parse(source)).splitlines()
    assert re.fullmatch("=+", line)
    assert len(line) == len(title)
    assert len(" ".join(text).split()) > 50
    page = (ROOT / "docs/zoo.md").read_text(encoding="utf-8")
    assert f"](gallery/zoo/{path.stem})" in page


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_fact_holds(path):
    end, changes, check = FACTS[path.stem]
    source = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in source
        source = source.replace(old, new)
    assert source.count(f"\n{end}") == 1
    namespace = {"__name__": path.stem}
    exec(compile(source.split(f"\n{end}")[0], path.name, "exec"), namespace)
    check(namespace)
