"""Draws a study: what is learnt against time and memory, and the learning curves."""

from __future__ import annotations

import math
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fast_attention.lab import hover
from fast_attention.lab.drawing import (
    COLOURS,
    INK,
    PALE,
    FewTicks,
    baselines,
    figure_grid,
    labelled,
    line,
    number,
    picture,
)
from fast_attention.lab.hover import Series
from fast_attention.lab.numbers import exactly
from fast_attention.lab.study.plan import ALONE, EXACT, label
from fast_attention.lab.study.record import Study, Summary
from fast_attention.lab.tradeoff import frontier

MARKERS = "osD^vP*X"
COSTS: dict[str, Callable[[Summary], float]] = {
    "milliseconds for a training step": lambda summary: max(1000 * summary.step_seconds, 1e-3),
    "MiB at the peak of a training step": lambda summary: max(summary.peak_bytes, 1) / 2**20,
}


@picture
def costs(record: Study) -> tuple[Figure, str]:
    """Quality against the time of a step and against its peak memory; what nothing beats in both is joined."""
    summaries = {name: record.summary(name) for name in record.meta["mechanisms"]}
    shown = {name: summary for name, summary in summaries.items() if summary is not None}
    figure, panels = figure_grid(4.6, 1, 2, sharey=True)
    for axes, (words, cost) in zip(panels, COSTS.items(), strict=True):
        _scatter(axes, record, shown, cost, words.split()[0])
        axes.set_xlabel(words)
    panels[0].set_ylabel(_metric(record))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    best = (max if _rising(record) else min)(shown, key=lambda name: shown[name].mean)
    alt = f"{_metric(record)} of {len(shown)} mechanisms against time and memory; the best mean is {label(best)}'s"
    return figure, alt


def _words_of(record: Study, name: str, summary: Summary, cost: float, unit: str) -> str:
    spread = "" if summary.spread is None else f" ± {exactly(summary.spread)}"
    return f"{label(name)}: {record.meta['metric']} {exactly(summary.mean)}{spread}, {exactly(cost)} {unit}"


def _scatter(axes: Axes, record: Study, shown: dict[str, Summary], cost: Callable[[Summary], float], unit: str) -> None:
    least, most = (choose(map(cost, shown.values())) for choose in (min, max))
    low, high = least / (most / least) ** 0.1 / 1.1, most * (most / least) ** 0.1 * 1.1
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.grid()
    for at, (name, summary) in enumerate(shown.items()):
        axes.errorbar(
            cost(summary), summary.mean, _bars(record, summary), color=_colour(name, at),
            marker=MARKERS[at % len(MARKERS)], markersize=7, capsize=3, linewidth=1, linestyle="none",
            label=label(name),
        )  # fmt: skip
        hover.point(axes, cost(summary), summary.mean, _words_of(record, name, summary, cost(summary), unit))
    points = [(cost(summary), summary.mean) for summary in shown.values()]
    best = frontier(points, lambda point: point, rising=_rising(record))
    axes.plot(*zip(*best, strict=True), color=PALE, linewidth=1, zorder=0)
    baselines(axes, record.meta["baselines"], 0.5)
    axes.xaxis.set_major_locator(FewTicks())
    axes.xaxis.set_major_formatter(number)
    if high / low < 2.5:
        axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.minorticks_off()


def _colour(name: str, at: int) -> str:
    return INK if name == EXACT else PALE if name == ALONE else COLOURS[at % len(COLOURS)]


def _bars(record: Study, summary: Summary) -> list[list[float]]:
    """The interval below and above the mean; fractions end at 0 and 1, whatever few seeds say."""
    spread = summary.spread or 0.0
    if not _rising(record):
        return [[spread], [spread]]
    return [[min(spread, summary.mean)], [min(spread, 1.0 - summary.mean)]]


@picture
def curves(record: Study) -> tuple[Figure, str]:
    """The metric against steps, or minutes where these were equal: the mean over the seeds; baselines as lines."""
    figure, (axes,) = figure_grid(4.6)
    timed = record.equal == "minutes"
    across = "minute {:.3g}".format if timed else "step {:,.0f}".format
    for at, name in enumerate(record.meta["mechanisms"]):
        if points := record.curve(name):
            says = Series(label(name), across, lambda value: f"{record.meta['metric']} {exactly(value)}")
            _mean_line(axes, points, name, at, says)
    labelled(axes, "minutes" if timed else "steps", _metric(record))
    baselines(axes, record.meta["baselines"], 0.5)
    _legend(axes)
    alt = f"{_metric(record)} on the validation set while training, {len(record.meta['mechanisms'])} mechanisms"
    return figure, alt


@picture
def by_position(record: Study) -> tuple[Figure, str]:
    """The loss against the position in the context, the mean over the seeds: a point in the middle of each bucket."""
    figure, (axes,) = figure_grid(4.6)
    axes.set_xscale("log", base=2)
    names = [name for name in record.meta["mechanisms"] if record.by_position(name)]
    for name in names:
        points = {math.sqrt((a + 1) * (b + 1)): loss for (a, b), loss in sorted(record.by_position(name).items())}
        says = Series(label(name), "position {:,.0f}".format, lambda loss: f"{record.meta['metric']} {exactly(loss)}")
        _mean_line(axes, points, name, record.meta["mechanisms"].index(name), says, "o")
    axes.xaxis.set_major_formatter(number)
    labelled(axes, "position in the context", _metric(record))
    _legend(axes)
    return figure, f"{_metric(record)} by position in the context, {len(names)} mechanisms"


def _mean_line(axes: Axes, points: dict[float, float], name: str, at: int, says: Series, marker: str = "") -> None:
    dash = "--" if at >= len(COLOURS) else "-"
    line(axes, points, dash, says=says, color=_colour(name, at), linewidth=1.4, marker=marker, label=label(name))


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _rising(record: Study) -> bool:
    return record.meta["metric"] == "accuracy"


def _metric(record: Study) -> str:
    better = "higher" if _rising(record) else "lower"
    return f"{record.meta['metric']} on the validation set ({better} is better)"
