"""The Python of the documentation pages runs, and the reference has every public name."""

import contextlib
import dataclasses
import importlib
import inspect
import io
import re
from pathlib import Path

import pytest

import fixpoint

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
OUTPUT = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


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
GROUP = re.compile(r"^\.\. reference:: (\S+)\n((?:   .*\n|\n)*)", re.MULTILINE)


def groups():
    """The groups of the reference: a package, and the names in it; None for those not named."""
    for package, content in GROUP.findall(REFERENCE):
        yield package, None if ":rest:" in content else content.split()


def test_the_groups_of_the_reference_name_things_that_exist():
    for package, names in groups():
        module = importlib.import_module(package)
        assert [name for name in names or () if not hasattr(module, name)] == []


def test_no_name_is_in_two_groups():
    named = [f"{package}.{name}" for package, names in groups() for name in names or ()]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("name", packages())
def test_every_public_name_is_in_the_reference(name):
    """An entry of another package for the same object is enough."""
    documented = set()
    for package, names in groups():
        module = importlib.import_module(package)
        documented |= {id(getattr(module, public)) for public in names or module.__all__}
    module = importlib.import_module(name)
    assert [p for p in module.__all__ if id(getattr(module, p)) not in documented] == []


def test_a_page_shows_what_its_programs_print():
    """A text block after a program is its output."""
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    namespace, pairs = {}, 0
    for block, expected in OUTPUT.findall(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "quickstart.md", "exec"), namespace)
        assert printed.getvalue() == expected
        pairs += 1
    assert pairs >= 4


def test_the_first_page_leads_to_each_use_in_two_clicks():
    """Links of the index, and their links: a solver's entry, a comparison, the condition."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert "`InexactNewton`" in index  # the site links names to their entries
    assert "](solvers_on_har2.md)" in index
    assert "](figures.md)" in index
    figures = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    assert "`plot_profile`" in figures


def test_the_page_of_the_paper_has_the_rows_of_the_readme():
    page = (ROOT / "docs" / "ernn.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for K in (1, 2):
        row = re.search(rf"^\| HAR-2 \| ERNN K={K} \|(.*)\|$", readme, re.MULTILINE)[1]
        last, paper = row.split("|")[1].strip(), row.split("|")[-1].strip()
        assert f"| ERNN K = {K} | {last} | {paper} |" in page


def test_plots_of_the_pages_are_files_that_exist():
    """Two plots written into one page would share a picture's name."""
    for page in PAGES:
        for path in re.findall(r"^\.\. plot::(.*)$", page.read_text(encoding="utf-8"), re.M):
            assert (page.parent / path.strip()).is_file()


NO_EXAMPLE = {"ConvergenceError", "ConvergenceWarning", "Figure", "OptionsMixin"}
"""Raised, or of another package."""


def public_objects():
    for package in sorted({package for package, _ in groups()}):
        if package not in ("fixpoint.analysis.plots", "fixpoint.backward"):  # drawn; abstract
            module = importlib.import_module(package)
            names = getattr(module, "__all__", ())
            yield from (getattr(module, name) for name in names)


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
