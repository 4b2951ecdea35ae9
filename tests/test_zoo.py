"""The zoo: each program is short, has a title and a row in the docs, and one fact that holds.

The gallery runs them to their end.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "examples/zoo").glob("*.py"))
PAGE = (ROOT / "docs/zoo.md").read_text(encoding="utf-8")

FACTS = {
    "01_multiscale_digits": ("known = ", "glyphs('STIXGeneral*.ttf').shape == (4, 10, 32, 32)"),
    "02_transformer": ("data = ", "Block()(torch.ones(2, 16, 32), torch.zeros(2, 16, 32)).isfinite().all()"),
    "03_karate": ("given = ", "(torch.linalg.eigvalsh(A)[-1] - 1).abs() < 1e-5"),
    "04_neural_image": ("images, ", "target.min() == 0 and target.max() == 1"),
    "05_sudoku": ("embed, ", "grids.shape == (288, 16)"),
    "06_lasso": ("path, ", "error(solve(phi, z0, layer.solver).check().z) < error(z0)"),
    "07_bratu": ("lambda_ = ", "..."),
}
