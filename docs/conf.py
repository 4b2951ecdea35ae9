"""Configuration of the documentation site: python -m sphinx -W docs docs/_build/html"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.writers.html5 import HTML5Translator as HTMLTranslator
from sphinx_gallery.scrapers import figure_rst

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fixpoint  # noqa: E402

project = "fixpoint"
author = "The fixpoint developers"
copyright = "2026, the fixpoint developers"
release = version = fixpoint.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "matplotlib.sphinxext.plot_directive",
]
exclude_patterns = ["_build", "gallery/*.ipynb", "gallery/*.zip", "sg_execution_times.rst"]
highlight_language = "text"
html_theme = "furo"
html_math_renderer = "mathml"
html_title = "fixpoint"
html_logo = "_static/logo.png"
html_theme_options = {"sidebar_hide_name": False}
html_static_path = ["_static"]
html_css_files = ["custom.css"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Inputs", "params_style"), ("Outputs", "params_style"), "Source"]
napoleon_use_rtype = False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
plot_html_show_source_link = False
plot_html_show_formats = False
plot_formats = [("png", 144)]
plot_rcparams = {"savefig.bbox": "tight"}


def saved_figures(block: tuple, variables: dict, gallery: dict, **options: object) -> str:
    """Show the PNG files that an example has written into its folder."""
    found = sorted(Path(variables["src_file"]).parent.glob("*.png"))
    paths = []
    for path in found:
        paths.append(next(variables["image_path_iterator"]))
        path.replace(paths[-1])
    return figure_rst(paths, gallery["src_dir"])


sphinx_gallery_conf = {
    "examples_dirs": [str(ROOT / "examples")],
    "gallery_dirs": ["gallery"],
    "filename_pattern": r"/(?!10_)\d",  # 10 reads what a command has written
    "image_scrapers": ("matplotlib", saved_figures),
    "within_subsection_order": "FileNameSortKey",
    "capture_repr": (),
    "download_all_examples": False,
    "show_memory": False,
    "default_thumb_file": str(ROOT / "docs" / "_static" / "logo.png"),
    "remove_config_comments": True,
}


def prepare(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Make of our docstrings what napoleon reads: sections, and no markup in formulas."""
    lines[:] = with_sections(lines, fields=getattr(obj, "_fields", ()))
    for i, line in enumerate(lines):
        if not re.match(r"\s*(>>>|\.\.\. )", line):
            parts = re.split(r"(`[^`]*`)", line)
            # |g| and z* are markup in RST, and so is a word that ends in an underscore.
            parts[::2] = [re.sub(r"([|*\\]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
            lines[i] = "".join(parts)


def with_sections(lines: list[str], fields: tuple[str, ...]) -> list[str]:
    """`Inputs: x` as a section, and the fields of a named tuple as its attributes."""
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


def as_mathml(translator: HTMLTranslator, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show without a script from elsewhere."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


NUMBER = re.compile(r"[<>~+-]? ?\d[\d.,e+-]*(?: ± [\d.e+-]+)?(?: %)?")


class WholeNumbers(SphinxPostTransform):
    """No line ends inside a number of a table, as at the hyphen of 1e-3."""

    default_priority = 700

    def run(self, **options: object) -> None:
        for entry in self.document.findall(nodes.entry):
            for text in list(entry.findall(nodes.Text)):
                if not isinstance(text.parent, nodes.literal) and NUMBER.search(text):
                    text.parent.replace(text, _with_whole_numbers(str(text)))


def _with_whole_numbers(text: str) -> list[nodes.Node]:
    """The parts of a text, those of numbers in an element of their own."""
    parts: list[nodes.Node] = []
    start = 0
    for match in NUMBER.finditer(text):
        parts += [nodes.Text(text[start : match.start()])] if match.start() > start else []
        parts.append(nodes.inline("", match[0], classes=["number"]))
        start = match.end()
    return parts + ([nodes.Text(text[start:])] if start < len(text) else [])


def setup(app: Sphinx) -> None:
    app.add_post_transform(WholeNumbers)
    app.connect("autodoc-process-docstring", prepare, priority=100)
    app.add_html_math_renderer("mathml", (as_mathml, None), (as_mathml, None))
