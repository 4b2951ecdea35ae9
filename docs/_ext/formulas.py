"""Formulas as MathML, and numbers of tables that no line break divides."""

from __future__ import annotations

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.writers.html5 import HTML5Translator

NUMBER = re.compile(r"[<>~+-]? ?\d[\d.,e+-]*(?: ± [\d.e+-]+)?(?: %)?")


def as_mathml(translator: HTML5Translator, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show without a script from elsewhere."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


class WholeNumbers(SphinxPostTransform):
    """Numbers of tables in elements of their own, so that no line ends at the hyphen of 1e-3."""

    default_priority = 700

    def run(self, **options: object) -> None:
        for entry in self.document.findall(nodes.entry):
            for text in list(entry.findall(nodes.Text)):
                if not isinstance(text.parent, nodes.literal) and NUMBER.search(text):
                    text.parent.replace(text, _with_whole_numbers(str(text)))


def _with_whole_numbers(text: str) -> list[nodes.Node]:
    """Split a text at its numbers, each number an inline element."""
    parts: list[nodes.Node] = []
    start = 0
    for match in NUMBER.finditer(text):
        parts += [nodes.Text(text[start : match.start()])] if match.start() > start else []
        parts.append(nodes.inline("", match[0], classes=["number"]))
        start = match.end()
    return parts + ([nodes.Text(text[start:])] if start < len(text) else [])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(WholeNumbers)
    app.add_html_math_renderer("mathml", (as_mathml, None), (as_mathml, None))
    return {"parallel_read_safe": True}
