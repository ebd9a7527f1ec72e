"""Sphinx: ``sphinx-build -W docs docs/_build``."""

project = "fast-attention"
author = "the founders of fast-attention"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
exclude_patterns = ["_build"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
