"""Hover text of pictures: spots that say their exact number where the mouse rests, as SVG titles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fast_attention.lab.numbers import exactly

Form = Literal["panel", "box", "line", "point"]
FORMS: tuple[Form, ...] = ("panel", "box", "line", "point")  # from below to above: the smallest is met first
RADIUS, SLACK = 5.0, 1.0  # in points: of the spot around a point; how far outside of the axes one may lie
DPI = 72.0  # of SVG


class Spot(Artist):
    """A spot of a picture with its text; invisible, and no part of the layout."""

    def __init__(self, form: Form, corners: Sequence[tuple[float, float]], text: str) -> None:
        super().__init__()
        self.set_in_layout(False)
        self.form, self.corners, self.text = form, corners, text


class Series(NamedTuple):
    """How a line says its points: its name, and both coordinates in words."""

    name: str
    across: Callable[[Any], str] = "{:,} tokens".format
    up: Callable[[float], str] = exactly

    def at(self, x: Any, y: float) -> str:
        """One point."""
        return f"{self.name}: {self.up(y)} at {self.across(x)}"

    def through(self, points: Mapping[Any, float]) -> str:
        """The line by its ends."""
        (first, start), (last, end) = (list(points.items())[i] for i in (0, -1))
        return f"{self.name}: {self.up(start)} at {self.across(first)}, {self.up(end)} at {self.across(last)}"


def point(axes: Axes, x: float, y: float, text: str) -> None:
    """Let a point say its text."""
    axes.add_artist(Spot("point", [(x, y)], text))


def box(axes: Axes, left: float, low: float, right: float, high: float, text: str) -> None:
    """Let a rectangle say its text: a bar, a cell."""
    axes.add_artist(Spot("box", [(left, low), (right, high)], text))


def panel(axes: Axes, text: str) -> None:
    """Let all that lies within axes say a text, where nothing smaller has one."""
    axes.add_artist(Spot("panel", [], text))


def curve(axes: Axes, across: Iterable[float], up: Iterable[float], text: str) -> None:
    """Let a curve say one text, wherever it is met."""
    axes.add_artist(Spot("line", list(zip(across, up, strict=True)), text))


def series(axes: Axes, points: Mapping[Any, float], says: Series) -> None:
    """Let a line and each of its points say their numbers."""
    if len(points) > 1:
        curve(axes, points, points.values(), says.through(points))
    for x, y in points.items():
        point(axes, x, y, says.at(x, y))


def cells(axes: Axes, table: Any, words: Callable[[int, int], str]) -> None:
    """Let every cell of an image say its text, given row and column; those that are no number say nothing."""
    for (row, column), value in np.ndenumerate(np.asarray(table)):
        if not np.isnan(value):
            box(axes, column - 0.5, row - 0.5, column + 0.5, row + 0.5, words(row, column))


def overlay(figure: Figure) -> str:
    """The spots of a figure that was drawn, as SVG elements to lie above all."""
    spots = sorted(figure.findobj(Spot), key=lambda each: FORMS.index(each.form))  # type: ignore[union-attr]
    shapes = "\n".join(filter(None, (_shape(figure, spot) for spot in spots)))  # type: ignore[arg-type]
    return f'<g class="spots" fill="none" pointer-events="all">\n{shapes}\n</g>\n' if shapes else ""


def _shape(figure: Figure, spot: Spot) -> str:
    """One spot as an element; empty where the axes do not show it."""
    axes = spot.axes
    if axes is None or not axes.get_visible():
        return ""
    scale, height = DPI / figure.dpi, DPI * figure.get_figheight()
    extents = np.reshape(axes.bbox.extents, (2, 2))
    window = extents * scale
    shown = axes.transData.transform(np.asarray(spot.corners, dtype=float)) if spot.corners else extents
    pixels = shown * scale
    pixels = pixels[np.isfinite(pixels).all(axis=1)]
    within = np.clip(pixels, *window)
    outside = np.abs(pixels - within).max(axis=1, initial=0.0) > SLACK
    if not len(pixels) or (outside.all() and spot.form in ("line", "point")):
        return ""
    title = f"<title>{escape(spot.text, quote=False)}</title>"
    at = [(x, height - y) for x, y in within]
    if spot.form == "point":
        return f'<circle cx="{at[0][0]:.1f}" cy="{at[0][1]:.1f}" r="{RADIUS:g}">{title}</circle>'
    if spot.form == "line":
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        return f'<polyline points="{path}" pointer-events="stroke" stroke-width="{RADIUS:g}">{title}</polyline>'
    left, right = sorted(x for x, _ in at)
    top, low = sorted(y for _, y in at)
    size = f'width="{right - left:.1f}" height="{low - top:.1f}"'
    return f'<rect x="{left:.1f}" y="{top:.1f}" {size}>{title}</rect>'
