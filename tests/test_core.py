"""torch and NumPy are enough to solve, differentiate and train; the rest names its extra."""

import os
import subprocess
import sys

import pytest

EXTRAS = (
    *("scipy", "torchdeq", "matplotlib", "lightning_fabric", "typer", "click", "rich", "jinja2"),
    *("pooch", "safetensors", "filelock", "tomli_w", "numba", "triton", "tensorboard", "onnx"),
)
BLOCK = f"import sys\nsys.modules |= dict.fromkeys({EXTRAS})\n"
"""A module that is None in sys.modules is not found."""


MISSING = {
    "from fixpoint import SciPySolver, solve; import torch; "
    "solve(torch.cos, torch.zeros(1, 1).double(), SciPySolver())": "SciPySolver needs scipy",
    "from fixpoint import register_torchdeq; register_torchdeq()": "torchdeq needs torchdeq",
    "import fixpoint.analysis.plots": "fixpoint.analysis.plots needs matplotlib",
    "import fixpoint.training": "fixpoint.training needs lightning_fabric",
}


def run(code, **options):
    command = [sys.executable, "-c", BLOCK + code]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_the_core_needs_torch_and_numpy_alone():
    """Solve cos z = z, differentiate by the implicit function theorem, train an ERNN step.

    The bundled windows are read; what needs more names its extra.
    """
    result = run(
        f"codes = {list(MISSING)}"
        """
import torch
import fixpoint
from fixpoint.models import ERNN, FastGRNN
import fixpoint.analysis

a = torch.tensor([[1.0]], dtype=torch.float64, requires_grad=True)
layer = fixpoint.FixedPoint(fixpoint.Anderson(rtol=1e-12, atol=0.0), fixpoint.Implicit())
z = layer(lambda z: torch.cos(a * z), torch.zeros(1, 1).double()).z
z.sum().backward()
assert abs(z.item() - 0.7390851332151607) < 1e-10
# dz/da = -z sin z / (1 + sin z)
expected = -z.item() * z.sin().item() / (1 + z.sin().item())
assert abs(a.grad.item() - expected) < 1e-8
for model in (ERNN(3, 4, batch_first=True), FastGRNN(3, 4, batch_first=True)):
    optimizer = torch.optim.Adam(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(2, 5, 3))[0].square().sum().backward()
    optimizer.step()
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before))

from fixpoint.data import load_dataset
assert len(load_dataset("har2-sample").x_test) == 324

for code in codes:
    try:
        exec(code)
    except ImportError as error:
        print(error)
""",
        env=os.environ | {"FIXPOINT_DATA": "/nowhere"},
    )
    assert result.returncode == 0, result.stderr
    for line, message in zip(result.stdout.splitlines(), MISSING.values(), strict=True):
        assert message in line
        assert line.endswith("which is not installed: pip install 'torch-fixpoint[bench]'")


def test_the_command_line_without_its_packages_is_one_line():
    result = run("from fixpoint.cli import main; main()")
    assert result.returncode == 2
    assert result.stderr == (
        "fixpoint: the command line needs typer, which is not installed: "
        "pip install 'torch-fixpoint[bench]'\n"
    )


def test_the_help_imports_nothing_heavy():
    pytest.importorskip("typer")
    code = "import sys; sys.argv = ['fixpoint', '--help']\nfrom fixpoint.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit as exit:\n    assert not exit.code\n"
    code += "print([m for m in ('torch', 'numpy', 'matplotlib', 'scipy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "compare" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


def test_python_dash_m():
    pytest.importorskip("typer")
    result = subprocess.run(
        [sys.executable, "-m", "fixpoint", "--version"], capture_output=True, text=True
    )
    import fixpoint

    assert (result.returncode, result.stdout.strip()) == (0, fixpoint.__version__)


def test_lazy_names_are_those_that_type_checkers_see():
    import ast
    from pathlib import Path

    import fixpoint

    tree = ast.parse(Path(fixpoint.__file__).read_text(encoding="utf-8"))
    seen = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fixpoint.")
        for alias in node.names
    }
    assert seen | {"__version__"} == set(fixpoint.__all__) == set(dir(fixpoint))
    assert all(hasattr(fixpoint, name) for name in fixpoint.__all__)
    with pytest.raises(AttributeError, match="module 'fixpoint' has no attribute 'Andersson'"):
        _ = fixpoint.Andersson
