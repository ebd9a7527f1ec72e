"""The drawing kit: inline SVG with its text, colours, panels side by side, axes of lengths."""

from __future__ import annotations

import base64
import functools
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal, NamedTuple, ParamSpec

import matplotlib
import matplotlib.colors
import numpy as np
import PIL.Image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from fast_attention.lab import hover
from fast_attention.lab.numbers import exactly

INK, PALE, GRID, WIN, GOOD = "#1f2933", "#9aa5b1", "#e4e7eb", "#d9f2e3", "#2f855a"
SOFT, PAPER, ON_LIGHT, ON_DARK = "#52606d", "#ffffff", "#111111", "#fefefe"  # ON: text on a colour, the same by night
COLOURS = ("#0b69a3", "#d64545", "#8d5fd3", "#b7791f", "#2f855a", "#718096")
MORE = ("#9b2c5e", "#5a4a2f")


class Theme(NamedTuple):
    """A colour's name on a page, and what stands for it in the dark."""

    name: str
    dark: str


THEMES = {
    INK: Theme("p-ink", "#e6ebf0"), PALE: Theme("p-pale", "#7b8794"), GRID: Theme("p-grid", "#2c353e"),
    WIN: Theme("p-win", "#123a27"), SOFT: Theme("p-soft", "#aeb9c4"), PAPER: Theme("p-paper", "#14181d"),
    COLOURS[0]: Theme("p-0", "#5ab0e8"), COLOURS[1]: Theme("p-1", "#f08080"), COLOURS[2]: Theme("p-2", "#b79bf0"),
    COLOURS[3]: Theme("p-3", "#e0a84a"), COLOURS[4]: Theme("p-4", "#58bd87"), COLOURS[5]: Theme("p-5", "#a3b1c2"),
    MORE[0]: Theme("p-6", "#e07fae"), MORE[1]: Theme("p-7", "#c4ad84"),
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
        """The picture for a page, whose style sheet knows its colours by name."""
        return re.sub("|".join(THEMES), lambda match: f"var(--{THEMES[match[0]].name})", self.svg)


def picture(draw: Callable[Given, tuple[Figure, str]]) -> Callable[Given, Picture]:
    """Turn a function that returns a figure and its alternative text into one that returns a picture."""

    @functools.wraps(draw)
    def drawn(*args: Given.args, **options: Given.kwargs) -> Picture:
        with matplotlib.rc_context(STYLE):
            figure, alt = draw(*args, **options)
            return Picture(svg(figure, alt), alt)

    return drawn


def svg(figure: Figure, alt: str) -> str:
    """The figure as an SVG element that scales with the page, with its alternative text and its hover texts."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)
    text = re.sub('(?<="data:image/png;base64,)[^"]+', lambda match: _palette(match[0]), text)
    return text.replace("</svg>", f"{hover.overlay(figure)}</svg>")


def _palette(image: str) -> str:
    """A PNG of at most 256 colours, none transparent, with a byte for each pixel instead of four; both in base 64."""
    pixels = np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(image))).convert("RGBA"))
    colours, numbers = np.unique(pixels.reshape(-1, 4), axis=0, return_inverse=True)
    if len(colours) > 256 or colours[:, 3].min() < 255:
        return image
    small, buffer = PIL.Image.fromarray(numbers.reshape(pixels.shape[:2]).astype(np.uint8), "P"), io.BytesIO()
    small.putpalette(colours[:, :3].tobytes())
    small.save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def figure_grid(
    height: float, rows: int = 1, columns: int = 1, *, width: float = WIDE, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure ``height`` by ``width`` inches, and its panels."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def panels(
    count: int, height: float, columns: int, margin: float = 0.5, across: str = "", up: str = "", **options: Any
) -> tuple[Figure, list[Axes]]:
    """A panel for each of ``count``, in rows of ``columns``, and labels that all of them share."""
    columns = min(columns, max(count, 1))
    rows = max(math.ceil(count / columns), 1)
    figure, grid = figure_grid(margin + height * rows, rows, columns, **options)
    for axes in grid[count:]:
        axes.set_visible(False)
    if across or up:
        figure.supxlabel(across, fontsize=9)
        figure.supylabel(up, fontsize=9)
    return figure, grid[: max(count, 1)]


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
    axes.imshow(
        weights, cmap=matplotlib.colormaps["magma"].resampled(64), norm=norm, interpolation="nearest", **options
    )
    axes.set_xticks([])
    axes.set_yticks([])


def baselines(axes: Axes, values: Mapping[str, float], reach: float = math.inf) -> None:
    """A dotted line for every baseline no further than ``reach`` heights of the axes from what they show."""
    low, high = axes.get_ylim()
    for name, value in values.items():
        if low - reach * (high - low) <= value <= high + reach * (high - low):
            axes.axhline(value, color=PALE, linewidth=0.8, linestyle=":")
            axes.annotate(name, (0.005, value), (0, 2), xycoords=("axes fraction", "data"),
                          textcoords="offset points", fontsize=6.5, color=PALE)  # fmt: skip


def line(
    axes: Axes, points: Mapping[Any, float], style: str = "-", says: hover.Series | None = None, **options: Any
) -> None:
    """A line through points, which says its numbers where ``says`` says how."""
    axes.plot(list(points), list(points.values()), style, **{"marker": "o", "markersize": 3, **options})
    if says is not None and points:
        hover.series(axes, points, says)


def bars(
    axes: Axes, names: Sequence[str], series: Mapping[str, Iterable[float]], colours: Sequence[str], unit: str = ""
) -> None:
    """Horizontal bars: a row for each name, in it a bar for each of the series, which the legend names."""
    high = 0.76 / len(series)
    for number, (label, values) in enumerate(series.items()):
        at = [i + (number - (len(series) - 1) / 2) * (high + 0.02) for i in range(len(names))]
        drawn = list(values)
        axes.barh(at, drawn, high, color=colours[number], label=label)
        for name, y, value in zip(names, at, drawn, strict=True):
            says = f"{name}, {label}: {exactly(value)}{unit}"
            hover.box(axes, 0.0, y - high / 2, value, y + high / 2, says)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.3, -0.7)
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="lower right")


def number(value: float, _: Any = None) -> str:
    """A tick without an exponent."""
    return f"{value:g}"


def folded(name: str, most: int) -> str:
    """A long name in two lines."""
    return name if len(name) < most else name.replace("(", "\n(", 1)
