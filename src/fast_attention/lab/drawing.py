"""Draws pictures as inline SVG, whose colours a page sets anew in the dark; axes of lengths; attention maps."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Literal, NamedTuple, ParamSpec

import matplotlib
import matplotlib.colors
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

INK, PALE, GRID, GOOD, SOFT, PAPER = "#1f2933", "#9aa5b1", "#e4e7eb", "#2f855a", "#52606d", "#ffffff"
COLOURS = ("#0b69a3", "#d64545", "#8d5fd3", "#b7791f", GOOD, "#718096")
DARK = {  # what stands for a colour in the dark
    INK: "#e6ebf0", PALE: "#7b8794", GRID: "#2c353e", SOFT: "#aeb9c4", PAPER: "#14181d", COLOURS[0]: "#5ab0e8",
    COLOURS[1]: "#f08080", COLOURS[2]: "#b79bf0", COLOURS[3]: "#e0a84a", COLOURS[4]: "#58bd87", COLOURS[5]: "#a3b1c2",
}  # fmt: skip
WIDE = 12.5  # inches of a picture as wide as the page
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "fast-attention", "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"], "font.size": 8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": PALE, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "text.color": INK, "legend.frameon": False, "axes.axisbelow": True, "axes.titlesize": 9,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "grid.color": GRID, "grid.linewidth": 0.5,
}  # fmt: skip
Given = ParamSpec("Given")


class Picture(NamedTuple):
    """An SVG element and its alternative text."""

    svg: str
    alt: str

    @property
    def themed(self) -> str:
        """The picture for a page, whose style sheet has a variable for each colour: ``--1f2933``."""
        return re.sub("|".join(DARK), lambda match: f"var(--{match[0][1:]})", self.svg)


def picture(draw: Callable[Given, tuple[Figure, str]]) -> Callable[Given, Picture]:
    """Turn a function that returns a figure and its alternative text into one that returns a picture."""

    @functools.wraps(draw)
    def drawn(*args: Given.args, **options: Given.kwargs) -> Picture:
        with matplotlib.rc_context(STYLE):
            figure, alt = draw(*args, **options)
            return Picture(svg(figure, alt), alt)

    return drawn


def svg(figure: Figure, alt: str) -> str:
    """The figure as an SVG element that scales with the page, with its alternative text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)


def figure_grid(
    height: float, rows: int = 1, columns: int = 1, *, width: float = WIDE, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure ``height`` by ``width`` inches, and its panels."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def labelled(axes: Axes, across: str, up: str, fontsize: float = 8, grid: Literal["both", "x", "y"] = "both") -> None:
    """Labels of both axes, and a grid."""
    axes.set_xlabel(across, fontsize=fontsize)
    axes.set_ylabel(up, fontsize=fontsize)
    axes.grid(axis=grid)


def against_length(axes: Axes, lengths: Sequence[int], title: str = "", size: float = 8) -> None:
    """Logarithmic axes with a tick for every length."""
    axes.set_title(title)
    logarithmic(axes, 2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=size)
    axes.minorticks_off()
    axes.grid()


def logarithmic(axes: Axes, base: int = 10) -> None:
    """Logarithmic scales on both axes, of another base along the horizontal one, ticks at numbers without exponents."""
    axes.set_xscale("log", base=base)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FewTicks())
    axes.yaxis.set_major_formatter(number)
    axes.minorticks_off()


class FewTicks(LogLocator):
    """Ticks at powers of ten; within less than two of them at 1, 2 and 5 as well."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """The ticks between two values."""
        self.set_params(subs=(1.0,) if vmin > 0 and vmax > 100 * vmin else (1.0, 2.0, 5.0))
        return super().tick_values(vmin, vmax)


def attention_map(axes: Axes, matrix: Any, top: float, **options: Any) -> None:
    """An attention matrix on a square-root scale up to ``top``, negative weights shown as 0."""
    weights = np.clip(np.nan_to_num(np.asarray(matrix)), 0.0, None)
    norm = matplotlib.colors.PowerNorm(0.5, 0.0, max(top, 1e-9), clip=True)
    colours = matplotlib.colormaps["magma"].resampled(64)
    axes.imshow(weights, cmap=colours, norm=norm, interpolation="nearest", **options)
    axes.set_xticks([])
    axes.set_yticks([])


def line(axes: Axes, points: Mapping[Any, float], style: str = "-", **options: Any) -> None:
    """A line through points."""
    axes.plot(list(points), list(points.values()), style, **{"marker": "o", "markersize": 3, **options})


def number(value: float, _: Any = None) -> str:
    """A tick without an exponent."""
    return f"{value:g}"
