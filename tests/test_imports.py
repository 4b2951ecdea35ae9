"""Imports follow docs/architecture.md without circles; `import fixpoint` loads only torch."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fixpoint

PACKAGE = Path(fixpoint.__file__).parent
DOC = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")


def layers(text):
    """Of each part of the package its layer, and of each layer the layers that it may import."""
    layer_of, allowed = {}, {}
    table = text.partition("| layer | modules and folders | may import |\n")[2]
    for row in re.findall(r"^\| (\w+) \| (.+) \| (.*)\|$", table, re.MULTILINE):
        name, parts, others = row
        allowed[name] = {name, *re.findall(r"\w+", others)}
        layer_of |= dict.fromkeys(re.findall(r"`(\w+)`", parts), name)
    return layer_of, allowed


LAYER_OF, ALLOWED = layers(DOC)
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


def wrong_imports(name, imported):
    """Those imports of module `name` that its layer may not have."""
    allowed = ALLOWED[LAYER_OF[part_of(name)]]
    inside = [i for i in imported if i.split(".")[0] == "fixpoint"]
    return [i for i in inside if LAYER_OF[part_of(i)] not in allowed]


def circles(graph):
    """Sets of nodes that reach each other; `graph` has the successors of each node."""

    def reached(node):
        found, todo = set(), list(graph.get(node, ()))
        while todo:
            if (new := todo.pop()) not in found:
                found.add(new)
                todo += graph.get(new, ())
        return found

    reach = {node: reached(node) for node in graph}
    groups = {frozenset({n, *(m for m in reach[n] if n in reach.get(m, ()))}) for n in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def graph_below(package, imported):
    """The imports between the modules and folders directly below a package."""
    graph = {}
    for name, others in imported.items():
        inside = [n[len(package) + 1 :].split(".")[0] for n in (name, *others)
                  if n.startswith(f"{package}.")]  # fmt: skip
        if name.startswith(f"{package}."):
            graph.setdefault(inside[0], set()).update(set(inside[1:]) - {inside[0]})
    return graph


@pytest.fixture(scope="module")
def imported():
    """The imports of each module by its name."""
    return {name_of(path): imports(path) for path in MODULES}


def test_a_module_imports_what_its_layer_may(imported):
    wrong = {name: wrong_imports(name, others) for name, others in imported.items()}
    assert [item for item in wrong.items() if item[1]] == []


def test_the_table_has_every_part_of_the_package_and_no_other():
    assert set(LAYER_OF) == {part_of(name_of(path)) for path in MODULES}
    assert set().union(*ALLOWED.values()) == set(ALLOWED) == set(LAYER_OF.values())


def test_no_modules_import_each_other(imported):
    assert circles(imported) == []


def test_no_folders_import_each_other(imported):
    for package in {name.rpartition(".")[0] for name in imported} - {""}:
        assert circles(graph_below(package, imported)) == [], package


def test_a_circle_is_found():
    graph = {"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a", "d"]}
    assert circles(graph) == [["b", "c"]]
    imported = {"p.x.one": ["p.y.two"], "p.y.three": ["p.x.four", "p.y.two", "q"], "p.y.two": []}
    assert circles(imported) == []
    assert circles(graph_below("p", imported)) == [["x", "y"]]


def test_only_plots_and_charts_import_matplotlib(imported):
    for name, others in imported.items():
        roots = {other.split(".")[0] for other in others}
        assert "matplotlib" not in roots or name.startswith("fixpoint.analysis.plots"), name


def test_only_one_module_uses_private_torch_api(imported):
    for path in MODULES:
        others = imported[name_of(path)]
        private = [n for n in others if n.startswith("torch.") and "._" in n]
        text = path.read_text(encoding="utf-8")
        used = re.findall(r"\btorch\._[a-zA-Z]\w*|\w+\._version\b", text)
        assert path.name == "_torch.py" or private + used == [], path


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
def test_the_rule_of_the_table(name, imported, wrong):
    assert bool(wrong_imports(name, [imported])) == wrong


HEAVY = {
    "fixpoint": "matplotlib scipy lightning_fabric typer rich pooch torchdeq numba fixpoint.models "
    "fixpoint.training fixpoint.data",
    "fixpoint.models, fixpoint.analysis, fixpoint.data": "matplotlib scipy lightning_fabric typer "
    "rich pooch triton",
    "fixpoint.cli.app": "matplotlib scipy lightning_fabric fixpoint.training",
    "fixpoint.analysis.plots": "matplotlib.pyplot",
}


def test_an_import_loads_nothing_heavy():
    """One after another in one process; plots need no display."""
    code = "import sys\n"
    for modules, heavy in HEAVY.items():
        code += f"import {modules}\n"
        code += f"print(*['{modules}: ' + m for m in {heavy.split()} if m in sys.modules])\n"
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert result.stdout.split() == []


FIRST_GRADIENT = """
import sys, torch
from fixpoint import FixedPoint, Phantom, Root, Unrolled, attach_gradient
from fixpoint.sequence import solve_sequence
a = torch.tensor([[0.5]], requires_grad=True)
phi, z0 = lambda z: a * z + 1, torch.zeros(1, 1)
for backward in (None, Phantom(), Unrolled()):
    FixedPoint("anderson", backward)(phi, z0).z.sum().backward()
Root()(lambda z: phi(z) - z, z0).z.sum().backward()
attach_gradient(phi, torch.full((1, 1), 2.0)).sum().backward()
solve_sequence(lambda h, x: torch.tanh(a * h + x), torch.ones(4, 1, 1), z0).z.sum().backward()
assert a.grad != 0
print("torch._dynamo" in sys.modules)
"""


def test_a_first_gradient_does_not_wait_for_the_compiler():
    done = subprocess.run(
        [sys.executable, "-c", FIRST_GRADIENT], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
