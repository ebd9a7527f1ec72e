"""Performer, Fig. 4 (Choromanski et al. 2020): the error of attention from random features against their number.

Records: records/*-reproduce-performer.json. Again: ``python -m experiments.reproductions.performer --out
out/performer`` (5 minutes; with the same version of torch the same numbers).
"""

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

from experiments.reproductions import common
from experiments.reproductions.common import Budget, Claim, Reproduced, Reproduction, Row, Table
from fast_attention import Bound, Favor, FavorPlus, Shape
from fast_attention.lab.pictures import COLOURS, INK
from fast_attention.lab.tables import digits

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


POSITIVE, TRIGONOMETRIC = Estimator("positive", True), Estimator("trigonometric", True)
PUBLISHED = {  # Fig. 4 prints curves, no numbers
    POSITIVE: "least of all, falling", POSITIVE._replace(orthogonal=False): "above orthogonal",
    TRIGONOMETRIC: "above positive", TRIGONOMETRIC._replace(orthogonal=False): "most of all",
}  # fmt: skip


# Measuring


@torch.no_grad()
def measure(budget: Budget) -> Iterator[Row]:
    """Mean squared errors of outputs, draw by draw: queries, keys, values and features are drawn anew."""
    for draw, scale in itertools.product(range(budget.seeds), SCALES):
        if budget.has(draw=draw, scale=scale):
            continue
        if draw and not budget.left:
            return
        budget.say(f"draw {draw + 1} of {budget.seeds}, scale {scale:g}")
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
    for estimator, m in itertools.product(PUBLISHED, FEATURES):
        bound = Bound(estimator.mechanism(m), Shape(1, WIDTH, LENGTH))
        rows.append({"estimator": estimator.label, "features": m, "mse": error(bound(q, k, v))})
    return rows


# What it says


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


def measured_scales(record: Reproduced) -> list[float]:
    """The standard deviations that the record has."""
    return [scale for scale in SCALES if record.of(scale=scale)]


def trigonometric_ratio(record: Reproduced, scale: float) -> float:
    """The error of orthogonal trigonometric features over that of positive ones, at the most features."""
    most = max(FEATURES)
    return medians(record, scale, TRIGONOMETRIC.label)[most] / medians(record, scale, POSITIVE.label)[most]


def uniform_ratio(record: Reproduced, scale: float) -> float:
    """The error of positive features over that of uniform weights."""
    return medians(record, scale, POSITIVE.label)[COMPARED] / medians(record, scale, UNIFORM)[0]


def claims(record: Reproduced) -> list[Claim]:
    """What Fig. 4 shows."""
    scales = measured_scales(record)
    lines = {(scale, each): medians(record, scale, each.label) for scale in scales for each in PUBLISHED}
    won = [s for s in scales if all(lines[s, POSITIVE][m] < x for m, x in lines[s, TRIGONOMETRIC].items())]
    lost = [scale for scale in scales if scale not in won]
    ours = f"so for queries and keys of standard deviation {_listed(won)}" if won else "never so"
    if lost:
        ratios = [trigonometric_ratio(record, scale) for scale in lost]
        ours += (
            f", and not at {_listed(lost)}, where trigonometric ones have {_listed(ratios)} times their error "
            f"at {max(FEATURES)} features"
        )
    slopes = {scale: slope(lines[scale, POSITIVE]) for scale in scales}
    falls = ", ".join(f"m^{value:.2f} at {scale:g}" for scale, value in slopes.items())
    ratios = {scale: uniform_ratio(record, scale) for scale in scales}
    beside = ", ".join(f"{digits(ratio)} at {scale:g}" for scale, ratio in ratios.items())
    return [
        _orthogonal(lines, "positive"),
        _orthogonal(lines, "trigonometric"),
        Claim("positive features err less than trigonometric ones", ours, not lost),
        Claim(
            "the error falls with the number of features m", f"that of positive orthogonal ones as {falls}",
            all(value < -0.5 for value in slopes.values()),
        ),
        Claim(
            "positive features estimate attention accurately",
            f"the error of {COMPARED} of them over that of uniform weights is {beside}",
            all(ratio < 1 for ratio in ratios.values()),
        ),
    ]  # fmt: skip


def _orthogonal(lines: dict[tuple[float, Estimator], dict[int, float]], features: str) -> Claim:
    pairs = [
        (value, lines[scale, each._replace(orthogonal=False)][m])
        for (scale, each), points in lines.items() if each == Estimator(features, True)
        for m, value in points.items()
    ]  # fmt: skip
    won = sum(ours < other for ours, other in pairs)
    paper = f"{features} features err less with orthogonal directions than with independent ones"
    return Claim(paper, f"in {won} of {len(pairs)} medians", won > MOSTLY * len(pairs))


def _listed(values: Iterable[float]) -> str:
    *others, last = [digits(value) for value in values]
    return f"{', '.join(others)} and {last}" if others else last


def draw(record: Reproduced) -> tuple[Figure, str]:
    """Error against features, a panel for each scale; dotted: uniform weights."""
    scales = measured_scales(record)
    figure, panels = common.figure(4.2, len(scales))
    for axes, scale in zip(panels, scales, strict=True):
        common.logarithmic(axes, 2)
        for each in PUBLISHED:
            colour, dash = COLOURS[each.features == "trigonometric"], "-" if each.orthogonal else "--"
            common.line(axes, medians(record, scale, each.label), dash, color=colour, label=each.label)
        axes.axhline(medians(record, scale, UNIFORM)[0], color=INK, linestyle=":", label=UNIFORM)
        axes.set_title(f"standard deviation {scale:g}")
        common.labelled(axes, "rows of the projection", "mean squared error of the output" * (axes is panels[0]))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    draws = len(record.of(scale=scales[0]))
    words = f"medians of {draws} draws, L = {LENGTH}, d = {WIDTH}, by the standard deviation of queries and keys"
    return figure, f"Mean squared error of the output against features: {words}"


def tables(record: Reproduced) -> list[Table]:
    """The medians, beside what the paper says in words, since it prints no numbers."""
    heads = ["estimator", *(f"{m} features" for m in FEATURES), "slope", "published"]
    shown = []
    for scale in measured_scales(record):
        uniform = medians(record, scale, UNIFORM)[0]
        rows = []
        for each, published in PUBLISHED.items():
            points = medians(record, scale, each.label)
            cells = [f"**{points[m]:.1e}**" if points[m] < uniform else f"{points[m]:.1e}" for m in FEATURES]
            rows.append([each.label, *cells, f"{slope(points):.2f}", published])
        rows.append([UNIFORM, *[f"{uniform:.1e}"] * len(FEATURES), "0", "not shown"])
        title = f"Mean squared error, queries and keys of standard deviation {scale:g}; bold: below uniform weights"
        shown.append(Table(title, heads, rows))
    return shown


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    useful = [scale for scale in measured_scales(record) if uniform_ratio(record, scale) < 1]
    won = [scale for scale in useful if trigonometric_ratio(record, scale) > 1]
    both = f"at {_listed(won)}" if won else "at none of these scales"
    return [
        f"Positive features beat both uniform weights and trigonometric features {both}.",
        f"{COMPARED} positive features beat uniform weights at {_listed(useful) if useful else 'none'}.",
        "The paper says of its inputs only that they are suitably normalised. The errors depend most on their scale. "
        "Those of positive features grow with |q + k|. Those of trigonometric ones grow with |q - k|, and where "
        "attention weights are small. So the scale decides which line is lower.",
        "The paper draws means over 15 draws. Here they are medians: at 1 a mean would be that of its worst draw. Flat "
        "lines there are no mistake: with fewer features than about e^(|q + k|^2) nothing averages out.",
        "The paper does not draw uniform weights. An error above theirs is worse than not looking at the queries.",
        "Trigonometric features are counted by rows of the projection. Each row gives a sine and a cosine.",
        "Our orthogonal directions have the signs of their QR decomposition corrected, or they would not be uniform on "
        "the sphere. The official code leaves that out. At these numbers of features it does not show.",
    ]


REPRODUCTION = Reproduction(
    "performer", "Error of random features against their number", "Choromanski et al. 2020, arXiv 2009.14794, Fig. 4",
    minutes=5, seeds=15, measure=measure, claims=claims, draw=draw, tables=tables, why=why,
)  # fmt: skip

if __name__ == "__main__":
    common.start(REPRODUCTION)
