"""Imports point one way, and `import fixpoint` loads torch and nothing heavy."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fixpoint

PACKAGE = Path(fixpoint.__file__).parent
LAYERS = (
    (
        "_torch",
        "_tree",
        "_messages",
        "_validation",
        "solution",
        "derivatives",
        "captured",
        "failure",
    ),
    ("solvers",),
    ("backward",),
    ("fixed_point", "regularization"),
    ("__init__",),
    ("models",),
    ("analysis",),
    ("training",),
    ("paper",),
    ("cli",),
)
"""Lowest first: a module imports its own layer and those below."""
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts if len(parts) == 2 or parts[-1] != "__init__" else parts[:-1])


def part_of(name):
    """The first name below `fixpoint`: a module or a folder; `__init__` for the package itself."""
    return [*name.split("."), "__init__"][1]


def imports(path):
    """Full names of all modules that the import statements of a file name, nested ones too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            # `from fixpoint import models` names a module, `from fixpoint import solve` does not.
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = (PACKAGE.parent / whole.replace(".", "/")).with_suffix(".py").exists()
                is_folder = (PACKAGE.parent / whole.replace(".", "/")).is_dir()
                found.append(whole if is_module or is_folder else node.module)
    return found


def wrong_arrows(name, imported):
    """Those imports of module `name` that point the wrong way."""
    here = part_of(name)
    inside = [i for i in imported if i.split(".")[0] == "fixpoint"]
    if here == "data":
        return [i for i in inside if part_of(i) not in ("data", "_messages")]
    return [
        i
        for i in inside
        if (part_of(i) == "data" and here not in ("training", "paper", "cli"))
        or (part_of(i) != "data" and RANK[part_of(i)] > RANK[here])
    ]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_arrows_point_one_way(path):
    assert wrong_arrows(name_of(path), imports(path)) == []


def test_every_part_of_the_package_has_a_layer():
    parts = {part_of(name_of(path)) for path in MODULES}
    assert parts == {*RANK, "data"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_plots_and_charts_import_matplotlib(path):
    roots = {name.split(".")[0] for name in imports(path)}
    drawing = ("fixpoint.analysis.plots.", "fixpoint.analysis.plots.svg")
    assert "matplotlib" not in roots or name_of(path).startswith(drawing)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_one_module_uses_private_torch_api(path):
    private = [n for n in imports(path) if n.startswith("torch.") and "._" in n]
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"\btorch\._[a-zA-Z]\w*|\w+\._version\b", text)
    assert path.name == "_torch.py" or private + used == []


@pytest.mark.parametrize(
    ("name", "imported", "wrong"),
    [
        ("fixpoint.solvers.picard", "fixpoint.backward", True),
        ("fixpoint.solvers.picard", "fixpoint.solution", False),
        ("fixpoint.solvers.picard", "fixpoint", True),
        ("fixpoint.models.rnn.ernn", "fixpoint.training.engine.fit", True),
        ("fixpoint.models.rnn.ernn", "fixpoint.analysis", True),
        ("fixpoint.analysis.contraction_profile", "fixpoint.models", False),
        ("fixpoint.data.sources.har", "fixpoint._messages", False),
        ("fixpoint.data.sources.har", "fixpoint.solution", True),
        ("fixpoint.models.rnn.ernn", "fixpoint.data", True),
        ("fixpoint.training.engine.fit", "fixpoint.data", False),
        ("fixpoint.__init__", "fixpoint.models", True),
        ("fixpoint.solution", "torch", False),
    ],
)
def test_the_rule_itself(name, imported, wrong):
    assert bool(wrong_arrows(name, [imported])) == wrong


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "fixpoint",
            "matplotlib scipy lightning_fabric typer rich pooch torchdeq numba fixpoint.models "
            "fixpoint.training fixpoint.data",
        ),
        (
            "fixpoint.models, fixpoint.analysis, fixpoint.data",
            "matplotlib scipy lightning_fabric typer rich pooch triton",
        ),
        ("fixpoint.cli.app", "matplotlib scipy lightning_fabric fixpoint.training"),
    ],
)
def test_an_import_loads_nothing_heavy(module, heavy):
    code = f"import sys, {module}; print(*[m for m in {heavy.split()} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
