"""Performer, Fig. 4 (Choromanski et al. 2020): the error of attention from random features against their number."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from fast_attention.lab.drawing import COLOURS, INK, figure_grid, labelled, line, logarithmic, number, picture
from fast_attention.lab.hover import Series
from fast_attention.lab.numbers import digits
from fast_attention.lab.reproducing.reproduction import Budget, Claim, Published, Reproduced, Reproduction, Row
from fast_attention.lab.tables import Table, Value
from fast_attention.mechanism import Shape
from fast_attention.mechanisms import Favor, FavorPlus
from fast_attention.nn.bound import Bound

LENGTH, WIDTH = 4096, 16
FEATURES = (16, 32, 64, 128, 256, 512)
SCALES = (0.35, 0.5, 0.7, 1.0)  # standard deviations of queries and keys: the paper does not give its own
MOSTLY = 0.75  # of the settings, for a statement about all of them
COMPARED = 256  # features, for the comparison with uniform weights
UNIFORM = "uniform weights"


class Estimator(NamedTuple):
    """Which features, and whether their directions are orthogonal."""

    features: str
    orthogonal: bool

    @property
    def label(self) -> str:
        """As pictures and tables call it."""
        return f"{self.features}, {'orthogonal' if self.orthogonal else 'independent'}"

    def mechanism(self, num_features: int) -> Favor | FavorPlus:
        """With so many rows of the projection; trigonometric features are a sine and a cosine of each."""
        kind = Favor if self.features == "trigonometric" else FavorPlus
        return kind(num_features=num_features, orthogonal=self.orthogonal)


ESTIMATORS = tuple(Estimator(*each) for each in itertools.product(("positive", "trigonometric"), (True, False)))


@torch.no_grad()
def run(budget: Budget) -> Iterator[Row]:
    """Mean squared errors of outputs, draw by draw: queries, keys, values and features are drawn anew."""
    for draw, scale in itertools.product(range(budget.seeds), SCALES):
        if budget.has(draw=draw, scale=scale):
            continue
        if draw and not budget.left:
            return
        budget.watch(f"draw {draw + 1} of {budget.seeds}, scale {scale:g}")
        yield {"draw": draw, "scale": scale, "errors": errors(draw, scale)}


def errors(draw: int, scale: float) -> list[Row]:
    """The mean squared error of every estimator and number of features against exact attention, in one draw."""
    torch.manual_seed(draw)
    q, k = (scale * torch.randn(1, 1, LENGTH, WIDTH) for _ in range(2))
    v = torch.randn(1, 1, LENGTH, WIDTH)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())

    def error(out: Tensor) -> float:
        return (out.double() - exact).square().mean().item()

    rows: list[Row] = [{"estimator": UNIFORM, "features": 0, "mse": error(v.mean(-2, keepdim=True))}]
    for estimator, m in itertools.product(ESTIMATORS, FEATURES):
        bound = Bound(estimator.mechanism(m), Shape(1, WIDTH, LENGTH))
        rows.append({"estimator": estimator.label, "features": m, "mse": error(bound(q, k, v))})
    return rows


def medians(record: Reproduced, scale: float, estimator: str) -> dict[int, float]:
    """The median over the draws of the mean squared error, by the number of features."""
    errors: dict[int, list[float]] = {}
    for row in (each for held in record.of(scale=scale) for each in held["errors"]):
        if row["estimator"] == estimator:
            value = math.inf if row["mse"] is None else row["mse"]  # a record has no infinities
            errors.setdefault(row["features"], []).append(value)
    return {m: statistics.median(values) for m, values in sorted(errors.items())}


def slope(points: dict[int, float]) -> float:
    """The exponent of a power of the number of features, fitted to the logarithms."""
    across, up = [math.log(m) for m in points], [math.log(value) for value in points.values()]
    return statistics.linear_regression(across, up).slope


def claims(record: Reproduced) -> list[Claim]:
    """What Fig. 4 shows."""
    scales = [scale for scale in SCALES if record.of(scale=scale)]
    lines = {(scale, each): medians(record, scale, each.label) for scale in scales for each in ESTIMATORS}
    return [
        _orthogonal(lines, "positive"),
        _orthogonal(lines, "trigonometric"),
        _positive_wins(lines, scales),
        _falls(lines, scales),
        _beats_uniform(record, lines, scales),
    ]


def _orthogonal(lines: dict[tuple[float, Estimator], dict[int, float]], features: str) -> Claim:
    pairs = [
        (value, lines[scale, each._replace(orthogonal=False)][m])
        for (scale, each), points in lines.items() if each == Estimator(features, True)
        for m, value in points.items()
    ]  # fmt: skip
    won = sum(ours < other for ours, other in pairs)
    paper = f"{features} features err less with orthogonal directions than with independent ones"
    return Claim(paper, f"in {won} of {len(pairs)} medians", won > MOSTLY * len(pairs))


def _positive_wins(lines: dict[tuple[float, Estimator], dict[int, float]], scales: list[float]) -> Claim:
    positive, trigonometric = (Estimator(name, True) for name in ("positive", "trigonometric"))
    won = [
        scale for scale in scales
        if all(lines[scale, positive][m] < value for m, value in lines[scale, trigonometric].items())
    ]  # fmt: skip
    lost = [scale for scale in scales if scale not in won]
    ours = f"so for queries and keys of standard deviation {_listed(won)}" if won else "never so"
    if lost:
        ratios = [trigonometric_ratio(lines, scale) for scale in lost]
        ours += (
            f", and not at {_listed(lost)}, where trigonometric ones have {_listed(ratios)} times their error "
            f"at {max(FEATURES)} features"
        )
    return Claim("positive features err less than trigonometric ones", ours, not lost)


def trigonometric_ratio(lines: dict[tuple[float, Estimator], dict[int, float]], scale: float) -> float:
    """The error of orthogonal trigonometric features over that of positive ones, at the most features."""
    most = max(FEATURES)
    return lines[scale, Estimator("trigonometric", True)][most] / lines[scale, Estimator("positive", True)][most]


def _falls(lines: dict[tuple[float, Estimator], dict[int, float]], scales: list[float]) -> Claim:
    slopes = {scale: slope(lines[scale, Estimator("positive", True)]) for scale in scales}
    words = ", ".join(f"m^{value:.2f} at {scale:g}" for scale, value in slopes.items())
    falling = all(value < -0.5 for value in slopes.values())
    return Claim(
        "the error falls with the number of features m", f"that of positive orthogonal ones as {words}", falling
    )


def _beats_uniform(
    record: Reproduced, lines: dict[tuple[float, Estimator], dict[int, float]], scales: list[float]
) -> Claim:
    ratios = {scale: _beside_uniform(record, lines, scale) for scale in scales}
    lost = [scale for scale, ratio in ratios.items() if ratio >= 1]
    words = ", ".join(f"{digits(ratio)} at {scale:g}" for scale, ratio in ratios.items())
    ours = f"the error of {COMPARED} of them over that of uniform weights is {words}"
    return Claim("positive features estimate attention accurately", ours, not lost)


def _beside_uniform(record: Reproduced, lines: dict[tuple[float, Estimator], dict[int, float]], scale: float) -> float:
    return lines[scale, Estimator("positive", True)][COMPARED] / medians(record, scale, UNIFORM)[0]


def _listed(values: Iterable[float]) -> str:
    *others, last = [digits(value) for value in values]
    return f"{', '.join(others)} and {last}" if others else last


@picture
def drawing(record: Reproduced) -> tuple[Figure, str]:
    """Error against features, a panel for each scale; dotted: uniform weights."""
    scales = [scale for scale in SCALES if record.of(scale=scale)]
    figure, panels = figure_grid(4.2, 1, len(scales))
    for axes, scale in zip(panels, scales, strict=True):
        logarithmic(axes, 2)
        for each in ESTIMATORS:
            points = medians(record, scale, each.label)
            colour, dash = COLOURS[each.features == "trigonometric"], "-" if each.orthogonal else "--"
            line(axes, points, dash, Series(each.label, "{} rows".format), color=colour, label=each.label)
        axes.axhline(medians(record, scale, UNIFORM)[0], color=INK, linestyle=":", label=UNIFORM)
        axes.set_title(f"standard deviation {scale:g}")
        axes.xaxis.set_major_formatter(number)
        labelled(axes, "rows of the projection", "mean squared error of the output" if axes is panels[0] else "")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    draws = len(record.of(scale=scales[0]))
    words = f"medians of {draws} draws, L = {LENGTH}, d = {WIDTH}, by the standard deviation of queries and keys"
    return figure, f"Mean squared error of the output against features: {words}"


def tables(record: Reproduced) -> list[Table]:
    """The medians, beside what the paper says in words, since it prints no numbers."""
    heads = ["estimator", *(f"{m} features" for m in FEATURES), "slope", "published"]
    shown = []
    for scale in (scale for scale in SCALES if record.of(scale=scale)):
        uniform = medians(record, scale, UNIFORM)[0]
        rows = []
        for each, published in zip(ESTIMATORS, PUBLISHED, strict=True):
            points = medians(record, scale, each.label)
            cells = [Value(f"{points[m]:.1e}", "fast" if points[m] < uniform else "slow") for m in FEATURES]
            rows.append([each.label, *cells, f"{slope(points):.2f}", str(published.value)])
        rows.append([UNIFORM, *[f"{uniform:.1e}"] * len(FEATURES), "0", "not shown"])
        title = f"Mean squared error, queries and keys of standard deviation {scale:g}; marked: below uniform weights"
        shown.append(Table(heads, rows, title=title, left=(len(heads) - 1,)))
    return shown


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    scales = [scale for scale in SCALES if record.of(scale=scale)]
    lines = {(scale, each): medians(record, scale, each.label) for scale in scales for each in ESTIMATORS}
    useful = [scale for scale in scales if _beside_uniform(record, lines, scale) < 1]
    won = [scale for scale in useful if trigonometric_ratio(lines, scale) > 1]
    both = f"at {_listed(won)}" if won else "at none of these scales"
    return [
        f"Positive features beat uniform weights and trigonometric features {both}: {COMPARED} of them beat uniform "
        f"weights at {_listed(useful) if useful else 'none'}.",
        "The paper says of its inputs only that they are suitably normalised. The errors depend on their scale more "
        "than on anything else: of positive features they grow with |q + k|, of trigonometric ones with |q - k| and "
        "where attention weights are small, so that the scale decides which line is lower.",
        "The paper draws means over 15 draws. Here they are medians: at 1 the estimates have tails so heavy that a "
        "mean is that of its worst draw. Flat lines there are no mistake: with fewer features than about "
        "e^(|q + k|^2) nothing averages out.",
        "The paper does not draw uniform weights. An error above theirs is worse than not looking at the queries.",
        "Trigonometric features are counted by rows of the projection; each gives a sine and a cosine.",
        "Our orthogonal directions have the signs of their QR decomposition corrected, without which they are not "
        "uniform on the sphere; the official code leaves that out. At these numbers of features it does not show.",
    ]


PUBLISHED = (
    Published("positive, orthogonal", "least of all, falling", "Fig. 4, a curve"),
    Published("positive, independent", "above orthogonal", "Fig. 4, a curve"),
    Published("trigonometric, orthogonal", "above positive", "Fig. 4, a curve"),
    Published("trigonometric, independent", "most of all", "Fig. 4, a curve"),
)
PERFORMER = Reproduction(
    name="performer",
    title="Error of random features against their number",
    paper="Choromanski et al. 2020, arXiv 2009.14794, Fig. 4",
    minutes=5,
    seeds=15,
    published=PUBLISHED,
    run=run,
    claims=claims,
    drawing=drawing,
    tables=tables,
    why=why,
)
