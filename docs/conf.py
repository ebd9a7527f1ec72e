"""Sphinx: ``sphinx-build -W docs docs/_build``. The pages of mechanisms are written before it reads."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # build and equations are beside it
GALLERY = sorted((HERE / "gallery").glob("**/plot_*.py"))

project = "fast-attention"
author = "the founders of fast-attention"
html_title = "fast-attention"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "equations",
]
napoleon_use_ivar = True  # attributes as a list, not as entries of their own
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
exclude_patterns = ["_build", "gallery", "ideas", "start"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_fence_as_directive = ["math"]  # as GitHub writes equations
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .gp ~ .go"  # prompts, and what is printed behind one: a command without is kept
highlight_language = "text"  # of blocks that name none: commands, and what they print
pygments_style = "friendly"
pygments_dark_style = "monokai"

if GALLERY:
    extensions.append("sphinx_gallery.gen_gallery")
sphinx_gallery_conf = {
    "examples_dirs": ["start", "gallery"],
    "gallery_dirs": ["auto_start", "auto_gallery"],
    "filename_pattern": r"/plot_",
    "image_scrapers": ("matplotlib",),
    "abort_on_example_error": True,
    "only_warn_on_example_error": False,
    "min_reported_time": 1,
    "write_computation_times": False,
    "download_all_examples": False,
    "notebook_extensions": {".py"},  # a notebook of each, to download
    "remove_config_comments": True,
    "within_subsection_order": "FileNameSortKey",
    "reset_modules": ("matplotlib",),
}


def _write(app: Any) -> None:
    """Write the pages of mechanisms."""
    importlib.import_module("build").mechanism_pages()


def _built_pages(app: Any, name: str, source: list[str]) -> None:
    """Lead to the pages of mechanisms, which a build makes: the files themselves lead to what is in the repository."""
    source[0] = re.sub(r"\]\((\.\./)?ideas/", r"](\1mechanisms/", source[0])


def setup(app: Any) -> None:
    """Write pages first; Sphinx lists the sources afterwards."""
    app.connect("builder-inited", _write, priority=100)
    app.connect("source-read", _built_pages)
