"""Pictures as inline SVG with a text that says what they show: growth with length, errors per head, matrices."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib
import matplotlib.colors
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fast_attention.lab.records import EXACT, Cell, Comparison, Error
from fast_attention.lab.verdicts import Pass, crossing, percent

INK, PALE, WIN = "#1f2933", "#9aa5b1", "#d9f2e3"
COLOURS = ("#0b69a3", "#d64545", "#8d5fd3", "#b7791f", "#2f855a", "#718096")
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fast-attention",
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
}


Quantity = Callable[[Cell], float | None]
Crossed = Pass | None


class Picture(NamedTuple):
    """An SVG element and the text that stands for it."""

    svg: str
    alt: str


def growth(record: Comparison, quantity: Quantity, unit: str, alt: str, crossed: Crossed = None) -> Picture:
    """A panel per kind of mechanism: a quantity against length, log-log, exact attention as the line to beat.

    Args:
        record: What was measured.
        quantity: The number of a cell, or None.
        unit: The label of the vertical axis.
        alt: What the picture shows.
        crossed: The pass whose crossovers are marked.
    """
    families: dict[str, list[str]] = {}
    for name in record.mechanisms:
        families.setdefault(name.split("(")[0], []).append(name)
    shown = {family: names for family, names in families.items() if any(_line(record, n, quantity)[0] for n in names)}
    columns = min(5, max(len(shown), 1))
    rows = max(math.ceil(len(shown) / columns), 1)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 0.5 + 2.15 * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
        for axes, (family, names) in zip(panels, shown.items(), strict=False):
            _panel(axes, record, family, names, quantity, crossed)
        for axes in panels[len(shown) :]:
            axes.set_visible(False)
        for axes in panels[max(len(shown) - columns, 0) : len(shown)]:
            axes.tick_params(labelbottom=True)
        figure.supxlabel("tokens", fontsize=9)
        figure.supylabel(unit, fontsize=9)
        return Picture(svg(figure, alt), alt)


def _line(record: Comparison, name: str, quantity: Quantity) -> tuple[list[int], list[float]]:
    points = [(cell.length, quantity(cell)) for cell in record.cells if cell.mechanism == name]
    known = sorted((length, value) for length, value in points if value)
    return [length for length, _ in known], [value for _, value in known]


def _panel(
    axes: Axes,
    record: Comparison,
    family: str,
    names: list[str],
    quantity: Quantity,
    crossed: Crossed,
) -> None:
    axes.set_title(family, fontsize=9, fontweight="bold", loc="left")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths, exact = _line(record, EXACT, quantity)
    ticks = [cell.length for cell in record.cells if cell.mechanism == EXACT]
    axes.plot(lengths, exact, color=INK, linewidth=1.6, label="exact" if len(names) > 1 else None)
    for colour, name in zip(itertools.cycle(COLOURS), names, strict=False):
        own, values = _line(record, name, quantity)
        settings = name[len(family) + 1 : -1] or "default"
        axes.plot(own, values, color=colour, linewidth=1.6, marker="o", markersize=3, label=settings)
        theirs = dict(zip(lengths, exact, strict=True))
        both = [(length, value) for length, value in zip(own, values, strict=True) if length in theirs]
        if both and name == names[0]:
            at, mine = zip(*both, strict=True)
            reference = [theirs[length] for length in at]
            better = [a < b for a, b in zip(mine, reference, strict=True)]
            axes.fill_between(at, mine, reference, where=better, color=WIN, interpolate=True, linewidth=0)
        where = crossing(record, name, crossed) if crossed else None
        if where is not None:
            axes.axvline(where, color=colour, linewidth=0.8, linestyle=":")
            label = f"{where:,.0f}" if where > min(own) else f"≤ {where:,.0f}"
            late = math.log(where / min(own)) > 0.7 * math.log(max(ticks) / min(ticks))
            place: Any = {"xy": (where, 0.98), "xycoords": ("data", "axes fraction"), "va": "top"}
            axes.annotate(label, **place, fontsize=7, color=colour, ha="right" if late else "left")
    axes.set_xticks(ticks, [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in ticks])
    axes.minorticks_off()
    axes.grid(color="#e4e7eb", linewidth=0.5)
    axes.set_axisbelow(True)
    if len(names) > 1:
        axes.legend(fontsize=6, frameon=False, loc="lower right", handlelength=1.2, labelspacing=0.2)


def heat(errors: list[Error], layers: list[str]) -> Picture:
    """Output error of every approximation (a row) in every head of every layer (columns), on a logarithmic scale."""
    heads = [len(row) for row in errors[0].output]
    edges = list(itertools.accumulate(heads, initial=0))
    table = np.array([[value for row in error.output for value in row] for error in errors], dtype=float)
    table = np.clip(np.nan_to_num(table, nan=np.inf), 1e-3, 10.0)
    alt = "Relative output error of every approximation in every head: " + "; ".join(
        f"{error.mechanism} median {percent(found[0])}, worst {percent(found[1])}"
        for error in errors
        if (found := error.summary()) is not None
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 1.3 + 0.24 * len(errors)), layout="constrained")
        axes = figure.subplots()
        norm = matplotlib.colors.LogNorm(1e-2, 3.0)
        image = axes.imshow(table, aspect="auto", cmap="YlOrRd", norm=norm, interpolation="nearest")
        axes.set_yticks(range(len(errors)), [error.mechanism for error in errors])
        centres = [(before + after - 1) / 2 for before, after in itertools.pairwise(edges)]
        axes.set_xticks(centres, [f"{layer}\n({count} heads)" for layer, count in zip(layers, heads, strict=True)])
        for edge in edges[1:-1]:
            axes.axvline(edge - 0.5, color="white", linewidth=2)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(errors)), [_median_and_worst(error) for error in errors])
        right.tick_params(length=0)
        right.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, extend="both", pad=0.01, aspect=30, shrink=0.9)
        bar.set_ticks([0.01, 0.03, 0.1, 0.3, 1.0, 3.0], labels=["1 %", "3 %", "10 %", "30 %", "100 %", "300 %"])
        bar.outline.set_visible(False)  # type: ignore[operator]
        return Picture(svg(figure, alt), alt)


def _median_and_worst(error: Error) -> str:
    found = error.summary()
    return "" if found is None else f"{percent(found[0])} / {percent(found[1])}"


def matrices(exact: Tensor, approximate: dict[str, Tensor], where: str) -> Picture:
    """Exact attention's matrix of one head beside each approximation's, on one colour scale (square root)."""
    alt = f"Attention matrices of {where}: exact attention, then {', '.join(approximate)}"
    shown = {"exact attention": exact, **approximate}
    top = float(exact.flatten().quantile(0.999)) if exact.numel() < 2**24 else float(exact.max())
    columns = min(5, len(shown))
    rows = math.ceil(len(shown) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 2.75 * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, (name, matrix) in zip(panels, shown.items(), strict=False):
            norm = matplotlib.colors.PowerNorm(0.5, 0.0, max(top, 1e-9), clip=True)
            axes.imshow(matrix.nan_to_num().clamp_min(0.0).numpy(), cmap="magma", norm=norm, interpolation="nearest")
            axes.set_title(_folded(name), fontsize=8, fontweight="bold" if name == "exact attention" else "normal")
            axes.set_xticks([])
            axes.set_yticks([])
        for axes in panels[len(shown) :]:
            axes.set_visible(False)
        return Picture(svg(figure, alt), alt)


def _folded(name: str) -> str:
    return name if len(name) < 30 else name.replace("(", "(\n", 1)


def svg(figure: Any, alt: str) -> str:
    """The figure as an SVG element that scales with the page and carries its text for screen readers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
