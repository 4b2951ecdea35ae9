"""Configuration of the documentation site: python -m sphinx -W docs docs/_build/html"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx_gallery.scrapers import figure_rst

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs/_ext")]

import fixpoint  # noqa: E402

project = "fixpoint"
author = "The fixpoint developers"
copyright = "2026, the fixpoint developers"
release = version = fixpoint.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "matplotlib.sphinxext.plot_directive",
    "docstrings",
    "formulas",
    "reference",
]
exclude_patterns = ["_build", "gallery/*.ipynb", "gallery/*.zip", "sg_execution_times.rst"]
highlight_language = "text"
html_theme = "furo"
html_math_renderer = "mathml"
html_title = "fixpoint"
html_logo = "_static/logo.svg"
html_theme_options = {"sidebar_hide_name": False}
html_static_path = ["_static"]
html_css_files = ["custom.css"]
myst_enable_extensions = ["attrs_inline", "dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Inputs", "params_style"), ("Outputs", "params_style"), "Source"]
napoleon_use_rtype = False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
plot_html_show_source_link = False
plot_html_show_formats = False
plot_include_source = False
plot_formats = [("png", 144)]
plot_rcparams = {"savefig.bbox": "tight"}

INTERNAL = {
    "at_time", "backtracks", "cell_class", "defines", "extra_repr", "has_V", "may_sync",
    "most_factors", "no_fused_path", "no_parallel_path", "origin", "parallel_form",
    "plain_states", "recurrence", "restart", "restarts", "rows", "run_with_state",
    "shared_options", "state_has_rows", "steps_until", "unrollable",
}  # fmt: skip
"""Attributes through which parts of the package work together: not for users."""


def skip_internal(
    app: object, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    text = getattr(obj, "__doc__", None) or ""
    unwritten = name == "forward" and not text  # else torch's own text for subclasses
    return True if name in INTERNAL or unwritten or text.startswith("Alias for field") else None


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
    "filename_pattern": r"/\d",
    "image_scrapers": ("matplotlib", saved_figures),
    "within_subsection_order": "FileNameSortKey",
    "capture_repr": (),
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,
    "remove_config_comments": True,
}


def setup(app: object) -> None:
    app.connect("autodoc-skip-member", skip_internal)
