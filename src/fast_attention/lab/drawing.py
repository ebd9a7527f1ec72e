"""Colours and style of pictures; figures as inline SVG, whose colours a page sets anew in the dark."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any, NamedTuple

import matplotlib
import matplotlib.colors
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, PALE, GRID, GOOD, SOFT, PAPER = "#1f2933", "#9aa5b1", "#e4e7eb", "#2f855a", "#52606d", "#ffffff"
COLOURS = ("#0b69a3", "#d64545", "#8d5fd3", "#b7791f", GOOD, "#718096")
DARK = {  # what stands for a colour in the dark
    INK: "#e6ebf0", PALE: "#7b8794", GRID: "#2c353e", SOFT: "#aeb9c4", PAPER: "#14181d", COLOURS[0]: "#5ab0e8",
    COLOURS[1]: "#f08080", COLOURS[2]: "#b79bf0", COLOURS[3]: "#e0a84a", COLOURS[4]: "#58bd87", COLOURS[5]: "#a3b1c2",
}  # fmt: skip
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "fast-attention", "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"], "font.size": 8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": PALE, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "text.color": INK, "legend.frameon": False, "axes.axisbelow": True, "axes.titlesize": 9,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "grid.color": GRID, "grid.linewidth": 0.5,
}  # fmt: skip


class Picture(NamedTuple):
    """An SVG element and its alternative text."""

    svg: str
    alt: str

    @property
    def themed(self) -> str:
        """The picture for a page, whose style sheet has a variable for each colour: ``--1f2933``."""
        return re.sub("|".join(DARK), lambda match: f"var(--{match[0][1:]})", self.svg)


def svg(figure: Figure, alt: str) -> str:
    """The figure as an SVG element that scales with the page, with its alternative text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)


def attention_map(axes: Axes, matrix: Any, top: float) -> None:
    """An attention matrix on a square-root scale up to ``top``, negative weights shown as 0."""
    weights = np.clip(np.nan_to_num(np.asarray(matrix)), 0.0, None)
    norm = matplotlib.colors.PowerNorm(0.5, 0.0, max(top, 1e-9), clip=True)
    axes.imshow(weights, cmap=matplotlib.colormaps["magma"].resampled(64), norm=norm, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
