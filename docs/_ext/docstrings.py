"""Docstrings for napoleon: sections as it reads them, and no markup in formulas."""

from __future__ import annotations

import re

from sphinx.application import Sphinx


def prepare(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Convert one of our docstrings to napoleon's sections, with its formulas escaped."""
    lines[:] = with_sections(lines, fields=getattr(obj, "_fields", ()))
    for i, line in enumerate(lines):
        if not re.match(r"\s*(>>>|\.\.\. )", line):
            parts = re.split(r"(`[^`]*`)", line)
            # |g| and z* are markup in RST, and so is a word that ends in an underscore.
            parts[::2] = [re.sub(r"([|*\\]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
            lines[i] = "".join(parts)


def with_sections(lines: list[str], fields: tuple[str, ...]) -> list[str]:
    """Make `Inputs: x` a section, and the fields of a named tuple its attributes."""
    made = []
    in_fields = False
    for line in lines:
        line = re.sub(r"^(Inputs|Outputs): .*$", r"\1:", line)
        if line.startswith("Source: "):
            made.append("Source:")
            line = f"    {line.removeprefix('Source: ')}"
        names = re.match(r"^([\w, ]+): ", line)
        starts = bool(names) and set(names[1].split(", ")) <= set(fields)
        if starts and not in_fields:
            made.append("Attributes:")
        in_fields = starts or (in_fields and line.startswith(" "))
        made.append(f"    {line}" if in_fields else line)
    return made


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", prepare, priority=100)
    return {"parallel_read_safe": True}
