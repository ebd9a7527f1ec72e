"""Pictures of a study: what is learnt against time and memory, and the curves."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fast_attention.lab.pictures import COLOURS, INK, PALE, STYLE, Picture, svg
from fast_attention.lab.study.plan import ALONE, EXACT, label
from fast_attention.lab.study.record import Study, Summary

MARKS = "osD^vP*X"


def prices(record: Study) -> Picture:
    """Quality against the time of a step and against its peak memory; what nothing beats in both is joined."""
    known = [(name, record.summary(name)) for name in record.meta["mechanisms"]]
    shown = [(name, found) for name, found in known if found is not None]
    axes_of: list[tuple[str, Callable[[Summary], float]]] = [
        ("milliseconds for a training step", lambda s: max(1000 * s.step_seconds, 1e-3)),
        ("MiB at the peak of a training step", lambda s: max(s.peak_bytes, 1) / 2**20),
    ]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 4.6), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (words, price) in zip(panels, axes_of, strict=True):
            _scatter(axes, record, shown, price)
            axes.set_xlabel(words)
        panels[0].set_ylabel(_metric(record))
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    best = (max if _rising(record) else min)(shown, key=lambda pair: pair[1].mean)
    alt = f"{_metric(record)} of {len(shown)} mechanisms against time and memory; the best mean is {label(best[0])}'s"
    return Picture(svg(figure, alt), alt)


def _scatter(axes: Axes, record: Study, shown: list[tuple[str, Summary]], price: Callable[[Summary], float]) -> None:
    least, most = (choose(price(found) for _, found in shown) for choose in (min, max))
    low, high = least / (most / least) ** 0.1 / 1.1, most * (most / least) ** 0.1 * 1.1
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.grid(color="#e4e7eb", linewidth=0.5)
    axes.set_axisbelow(True)
    for number, (name, found) in enumerate(shown):
        colour = INK if name == EXACT else PALE if name == ALONE else COLOURS[number % len(COLOURS)]
        axes.errorbar(
            price(found), found.mean, _bars(record, found), color=colour, marker=MARKS[number % len(MARKS)],
            markersize=7, capsize=3, linewidth=1, linestyle="none", label=label(name),
        )  # fmt: skip
    front = frontier([(price(found), found.mean) for _, found in shown], _rising(record))
    axes.plot(*zip(*front, strict=True), color=PALE, linewidth=1, zorder=0)
    _baselines(axes, record)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if high / low < 30 else "")


def _bars(record: Study, found: Summary) -> list[list[float]]:
    """The interval below and above the mean; shares end at 0 and 1, whatever few seeds say."""
    spread = found.spread or 0.0
    if record.meta["metric"] != "accuracy":
        return [[spread], [spread]]
    return [[min(spread, found.mean)], [min(spread, 1.0 - found.mean)]]


def frontier(points: list[tuple[float, float]], rising: bool) -> list[tuple[float, float]]:
    """The points that no other one beats: cheaper and at least as good, by rising price."""
    found: list[tuple[float, float]] = []
    for price, value in sorted(points, key=lambda point: (point[0], -point[1] if rising else point[1])):
        if not found or (value > found[-1][1] if rising else value < found[-1][1]):
            found.append((price, value))
    return found


def curves(record: Study) -> Picture:
    """The metric against steps, the mean over the seeds, with the baselines as lines."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 4.6), layout="constrained")
        axes = figure.subplots()
        for number, name in enumerate(record.meta["mechanisms"]):
            colour = INK if name == EXACT else PALE if name == ALONE else COLOURS[number % len(COLOURS)]
            by_step: dict[int, list[float]] = {}
            for result in record.of(name):
                for step, _, value in result.curve:
                    by_step.setdefault(step, []).append(value)
            if by_step:
                heights = [statistics.fmean(values) for values in by_step.values()]
                dashed = "--" if number >= len(COLOURS) else "-"
                axes.plot(list(by_step), heights, dashed, color=colour, linewidth=1.4, label=label(name))
        axes.set_xlabel("steps")
        axes.set_ylabel(_metric(record))
        axes.grid(color="#e4e7eb", linewidth=0.5)
        _baselines(axes, record)
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    alt = f"{_metric(record)} on the validation set while training, {len(record.meta['mechanisms'])} mechanisms"
    return Picture(svg(figure, alt), alt)


def _baselines(axes: Axes, record: Study) -> None:
    low, high = axes.get_ylim()
    for name, value in record.meta["baselines"].items():
        if low - 0.5 * (high - low) <= value <= high + 0.5 * (high - low):
            axes.axhline(value, color=PALE, linewidth=0.8, linestyle=":")
            axes.annotate(name, (0.005, value), (0, 2), xycoords=("axes fraction", "data"),
                          textcoords="offset points", fontsize=6.5, color=PALE)  # fmt: skip


def _rising(record: Study) -> bool:
    return record.meta["metric"] == "accuracy"


def _metric(record: Study) -> str:
    better = "higher" if _rising(record) else "lower"
    return f"{record.meta['metric']} on the validation set ({better} is better)"
