"""The reference: groups of names with a summary, and a link from every name in the guide.

The guide writes `Anderson(rtol=1e-5)` as plain code, which reads well everywhere; here each such
code becomes a link to the entry of the name.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import itertools
import re
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst.directives import flag
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

import fixpoint

CODE = re.compile(r"^(?:fixpoint\.)?((?:[a-z_]+\.)*\w+)((?:\.\w+)?)(?:\(.*\))?$", re.DOTALL)
COMMON = {"load", "rotate", "fit", "describe", "evaluate", "prepare", "scan", "panel", "save"}
"""Public functions whose names the guide also uses as words: linked with their module alone."""


class Reference(SphinxDirective):
    """The entries of some names of a module, after a table of their first lines.

    .. reference:: fixpoint

       solve FixedPoint

    With `:rest:` the names are those of `__all__` that the page does not have elsewhere.
    """

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {"rest": flag}

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        names = " ".join(self.content).split()
        if "rest" in self.options:
            page = Path(self.env.doc2path(self.env.docname)).read_text(encoding="utf-8")
            named = set(re.findall(r"\w+", page)) | {"Figure", "__version__"}
            public = importlib.import_module(module).__all__
            names = [name for name in public if name not in named]
        if not names:
            return [nodes.paragraph("", "None.")]
        summed = [name for name in names if callable(_get(module, name))]
        lines = [".. autosummary::", "   :nosignatures:", ""] if summed else []
        lines += [f"   ~{module}.{name}" for name in summed] + [""]
        for name in names:
            lines += _entry(module, name)
        parsed = nodes.Element()
        self.state.nested_parse(StringList(lines, source=self.env.docname), 0, parsed)
        return parsed.children


def _get(module: str, name: str) -> object:
    return getattr(importlib.import_module(module), name)


def _entry(module: str, name: str) -> list[str]:
    """Return the directive that documents a name."""
    thing, full = _get(module, name), f"{module}.{name}"
    if inspect.isclass(thing):
        members = [] if issubclass(thing, enum.Enum) else ["   :members:"]
        kind = "autoexception" if issubclass(thing, BaseException) else "autoclass"
        return [f".. {kind}:: {full}", *members, ""]
    if callable(thing) and hasattr(thing, "__name__"):
        return [f".. autofunction:: {full}", ""]
    return [f".. py:data:: {full}", "", f"   {_constants().get(name, '')}", ""]


@lru_cache
def _constants() -> dict[str, str]:
    """Return the string under each constant of the package, by its name."""
    found = {}
    for path in sorted(Path(fixpoint.__file__).parent.rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for before, after in itertools.pairwise(body):
            target = getattr(before, "target", None) or getattr(before, "targets", [None])[0]
            text = getattr(getattr(after, "value", None), "value", None)
            if isinstance(target, ast.Name) and isinstance(text, str):
                found[target.id] = re.sub(r"([|*])", r"\\\1", " ".join(text.split()))
    return found


class Links(SphinxPostTransform):
    """Links of code in the text to the entries of the names in it."""

    default_priority = 6  # before references are resolved

    def run(self, **options: object) -> None:
        if self.env.docname.startswith(("api/", "changelog", "gallery/")):
            return
        names = _known(self.env.domains["py"].objects)
        for literal in list(self.document.findall(nodes.literal)):
            if isinstance(literal.parent, nodes.reference) or "highlight" in literal["classes"]:
                continue
            full = _target(literal.astext(), names)
            if full is not None:
                entry = self.env.domains["py"].objects[full]
                link = make_refnode(
                    self.app.builder,
                    self.env.docname,
                    entry.docname,
                    entry.node_id,
                    literal.deepcopy(),
                    full,
                )
                literal.replace_self(link)


def _known(objects: dict[str, object]) -> dict[str, str]:
    """Map every ending of a full name, as `plots.plot_gap` and `plot_gap`, to the full name.

    Endings of several names are left out, save for names at the top of the package.
    """
    known: dict[str, str | None] = {}
    for full in sorted(objects, key=lambda name: name.count(".")):
        parts = full.split(".")[1:]
        for i in range(len(parts)):
            ending = ".".join(parts[i:])
            at_top = i == 0
            known[ending] = full if ending not in known or at_top else known[ending]
    return {ending: full for ending, full in known.items() if full}


def _target(code: str, names: dict[str, str]) -> str | None:
    """Return the full name of the entry that a piece of code is about, None if there is none."""
    match = CODE.match(code)
    if match is None:
        return None
    name, attribute = match[1], match[2]
    if name in COMMON or (name.islower() and "_" not in name and "(" not in code):
        return names.get(name) if "." in name else None
    return names.get(name + attribute) or names.get(name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("reference", Reference)
    app.add_post_transform(Links)
    return {"parallel_read_safe": True}
