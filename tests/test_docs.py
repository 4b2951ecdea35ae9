"""The Python of the documentation pages runs, and the reference has every public name."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

import fixpoint

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PLOT = re.compile(r"\.\. plot::\n    :include-source:\n\n(.*?)```", re.DOTALL)


def pages_with(pattern):
    return [path for path in PAGES if pattern.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", pages_with(BLOCK), ids=lambda path: path.stem)
def test_the_programs_of_a_page_run_in_turn(path):
    namespace = {}
    for block in BLOCK.findall(path.read_text(encoding="utf-8")):
        exec(compile(block, path.name, "exec"), namespace)


def test_results_are_those_that_the_page_names():
    """`print(Result(...).name)  # NAME` prints that name."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    namespace, printed = {}, []
    for block in BLOCK.findall(text):
        namespace["print"] = lambda *values: printed.append(values[0])
        exec(compile(block, "results.md", "exec"), namespace)
    named = re.findall(r"\.name\)  # (\w+)", text)
    assert named
    assert [value for value in printed if isinstance(value, str)] == named


def packages():
    """Public packages: those with an `__all__` of their own."""
    found = []
    for path in Path(fixpoint.__file__).parent.rglob("__init__.py"):
        parts = path.parent.relative_to(Path(fixpoint.__file__).parent.parent).parts
        name = ".".join(parts)
        if re.search(r"^__all__ = ", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.append(name)
    return sorted(found)


REFERENCE = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "api").glob("*.md"))


@pytest.mark.parametrize("name", packages())
def test_every_public_name_is_in_the_reference(name):
    """`automodule` documents `__all__`; what another entry documents needs no second one."""
    documented = set()
    for package in re.findall(r"automodule:: (\S+)", REFERENCE):
        module = importlib.import_module(package)
        documented |= {id(getattr(module, public)) for public in module.__all__}
    for path in re.findall(r"autoclass:: (\S+)", REFERENCE):
        package, public = path.rsplit(".", 1)
        documented.add(id(getattr(importlib.import_module(package), public)))
    module = importlib.import_module(name)
    assert [p for p in module.__all__ if id(getattr(module, p)) not in documented] == []


NO_EXAMPLE = {"ConvergenceError", "ConvergenceWarning", "Figure", "ShowsAllOptions"}
"""Raised, or of another package."""


def public_objects():
    for package in re.findall(r"automodule:: (\S+)", REFERENCE):
        if package != "fixpoint.analysis.plots":  # drawn on the site
            module = importlib.import_module(package)
            yield from (getattr(module, name) for name in module.__all__)


def test_every_public_class_has_an_example():
    """Results, which are tuples and dataclasses, are shown by what returns them."""
    missing = [
        kind.__name__
        for kind in public_objects()
        if inspect.isclass(kind)
        and not hasattr(kind, "_fields")
        and not dataclasses.is_dataclass(kind)
        and kind.__name__ not in NO_EXAMPLE
        and ">>>" not in (kind.__dict__.get("__doc__") or "")
    ]
    assert missing == []
