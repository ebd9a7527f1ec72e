"""Draws a benchmark: speed against length, bars beside peers, ceilings, memory, decoding."""

from __future__ import annotations

import itertools

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from fast_attention.lab.bench import figures
from fast_attention.lab.bench.competitors import OURS
from fast_attention.lab.bench.figures import percent_of_ceiling
from fast_attention.lab.bench.record import Benchmark, Row
from fast_attention.lab.drawing import (
    COLOURS,
    INK,
    MORE,
    PALE,
    against_length,
    bars,
    figure_grid,
    line,
    number,
    panels,
    picture,
)
from fast_attention.lab.hover import Series
from fast_attention.lab.numbers import exactly
from fast_attention.lab.records import PASSES, Pass

PEERS = (COLOURS[3], COLOURS[5], COLOURS[2], COLOURS[4], *MORE)
COLUMNS = 4


def _legend(axes: Axes) -> None:
    """Put a legend above the lines, extend the axes for it, and number the vertical axis by 1, 2 and 5."""
    count = len(axes.get_legend_handles_labels()[1])
    low, high = axes.get_ylim()
    low, high = low / 1.1, high * 1.1
    axes.set_ylim(low, low * (high / low) ** (1 / (1 - 0.06 * min(count, 10))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 60 else (1.0,)))
    axes.yaxis.set_major_formatter(number)
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=7)
    if count:
        axes.legend(fontsize=6.5, loc="upper left", handlelength=1.6, labelspacing=0.2)


def _families(rows: list[Row], lengths: list[int], height: float, what: str) -> tuple[Figure, dict[str, Axes]]:
    """A panel for every family, its quantity against length."""
    names = list(dict.fromkeys(row.family for row in rows))
    figure, grid = panels(len(names), height, COLUMNS, across="tokens", up=what, sharex=True)
    for axes, name in zip(grid, names, strict=False):
        against_length(axes, lengths, name, 7)
        axes.tick_params(labelbottom=True, labelleft=True)
    return figure, dict(zip(names, grid, strict=False))


@picture
def speeds(record: Benchmark, which: Pass) -> tuple[Figure, str]:
    """A panel per family: speed against length; peers dashed."""
    rows = [row for row in record.rows if figures.speeds(record, row.name, which)]
    lengths = sorted({length for row in rows for length in figures.speeds(record, row.name, which)})
    figure, grid = _families(rows, lengths, 2.7, "times as fast as exact attention")
    for family, axes in grid.items():
        inks = itertools.cycle(PEERS)
        for row in (row for row in rows if row.family == family):
            known, star = figures.speeds(record, row.name, which), " *" if row.check == "faulty" else ""
            says = Series(row.name + star, up=lambda speed: f"{exactly(speed)} times as fast as exact attention")
            if row.owner == OURS:
                colour = COLOURS[int(row.is_causal) + 2 * (row.kind == "module")]
                line(axes, known, says=says, color=colour, label=f"ours{row.name[len(family) :]}{star}", linewidth=1.8)
            else:
                ink, label = next(inks), row.name + star
                line(axes, known, "--", says=says, color=ink, label=label, linewidth=1.1, marker=".")
        axes.axhline(1.0, color=INK, linewidth=1.0)
        _legend(axes)
    alt = "Speed against length, a panel per mechanism; above 1 it is faster than exact attention; peers are dashed."
    return figure, alt


@picture
def beside_peers(record: Benchmark, length: int) -> tuple[Figure, str]:
    """Bars: ours beside the best peer of the same kind and direction; forward on the left."""
    forward = figures.matches(record, length)
    figure, axes = figure_grid(1.2 + 0.42 * len(forward), 1, 2)
    for panel, which, title in zip(axes, PASSES, ("forward", "forward and backward"), strict=True):
        panel.set_title(title, fontweight="normal")
        _matches(panel, figures.matches(record, length, which))
    alt = f"At {length:,} tokens, ours beside the best peer: " + "; ".join(
        f"{name(match)} {match.factor:.2g} times {match.peer}" for match in forward
    )
    return figure, alt


def name(match: figures.Match) -> str:
    """A pair by its mechanism, kind and direction."""
    return match.family + (", projected" if match.kind == "module" else "") + (", causal" if match.is_causal else "")


def _matches(axes: Axes, matches: list[figures.Match]) -> None:
    series = {"ours": [m.ours for m in matches], "best peer": [m.theirs for m in matches]}
    axes.set_xscale("log")
    bars(axes, [name(match) for match in matches], series, (COLOURS[0], PALE), " times as fast as exact attention")
    for at, match in enumerate(matches):
        ink = INK if match.factor >= 1 else COLOURS[1]
        words, right = f" {match.factor:.2f}x {match.peer}", max(match.ours, match.theirs)
        axes.annotate(words, (right, at), va="center", fontsize=6.5, color=ink)
    low = min((min(m.ours, m.theirs) for m in matches), default=0.1)
    high = max((max(m.ours, m.theirs) for m in matches), default=1.0)
    axes.set_xlim(min(low * 0.7, 0.5), high * (high / low) ** 0.9 * 3)
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.xaxis.set_major_formatter(number)
    axes.minorticks_off()
    axes.set_xlabel("times as fast as exact attention in the same rounds")


def of_ours(row: Row) -> bool:
    """Whether a row is a mechanism of ours by itself."""
    return row.owner == OURS and row.kind != "module"


@picture
def ceilings(record: Benchmark, length: int) -> tuple[Figure, str]:
    """Bars: counted operations per second in percent of the best matrix product."""
    rows = [row for row in record.rows if of_ours(row)]
    names = [*dict.fromkeys(row.reference for row in rows), *(row.name for row in rows)]
    cells = {name: cell for name in names if (cell := record.cell(name, length)) is not None}
    percents = {name: [percent_of_ceiling(record, cell, which) for which in PASSES] for name, cell in cells.items()}
    percents = {name: both for name, both in percents.items() if both[0] is not None}
    series = {"forward": [both[0] or 0.0 for both in percents.values()]}
    if any(both[1] for both in percents.values()):
        series["forward and backward"] = [both[1] or 0.0 for both in percents.values()]
    figure, (axes,) = figure_grid(0.9 + 0.26 * len(percents))
    bars(axes, list(percents), series, (COLOURS[0], COLOURS[2]), " %")
    axes.axvline(100, color=INK, linewidth=0.8)
    axes.set_xlim(0, 1.2 * max(100.0, *(max(each) for each in series.values())))  # the legend stands on the right
    axes.set_xlabel("percent of the rate of one large matrix product in the same run")
    words = "; ".join(f"{name} {both[0]:.0f}" for name, both in percents.items())
    return figure, f"Percent of the matrix product's rate at {length:,} tokens: {words}"


@picture
def memory(record: Benchmark) -> tuple[Figure, str]:
    """Peak memory over the bytes of inputs and output, against length: flat is linear."""
    essential = {(peak.name, peak.length): peak.essential_bytes for peak in record.memory}
    rows = [row for row in record.rows if of_ours(row) and figures.memory_of(record, row.name)]
    lengths = sorted({peak.length for peak in record.memory})
    figure, grid = _families(rows, lengths, 2.1, "peak / bytes of inputs and output")
    for family, axes in grid.items():
        for row, which in itertools.product((r for r in rows if r.family == family), PASSES):
            known = figures.memory_of(record, row.name, which)
            points = {n: size / essential[row.name, n] for n, size in known.items() if size > 0}
            label = ("causal " if row.is_causal else "") + ("" if which == "forward" else "with backward")
            dash = "-" if which == "forward" else ":"
            if points:
                colour = COLOURS[int(row.is_causal)]
                says = Series(f"{row.name}, {label or 'forward'}", up=lambda times: f"{exactly(times)} times the bytes")
                line(axes, points, dash, says=says, color=colour, linewidth=1.4, label=label or "forward")
        _legend(axes)
    alt = "Peak memory over the bytes of inputs and output, against length, a panel per mechanism: flat is linear."
    return figure, alt


@picture
def decoding(record: Benchmark) -> tuple[Figure, str]:
    """Time of one token against its position, a panel per batch."""
    known = [step for step in record.steps if step.seconds is not None]
    batches, positions = sorted({step.batch for step in known}), sorted({step.position for step in known})
    figure, grid = panels(len(batches), 3.4, COLUMNS, across="position", up="milliseconds a token")
    inks = dict(zip(dict.fromkeys(step.name for step in known), itertools.cycle(COLOURS + PEERS), strict=False))
    for axes, batch in zip(grid, batches, strict=True):
        against_length(axes, positions, f"batch {batch}", 6.5)
        for name, colour in inks.items():
            points = {s.position: 1e3 * (s.seconds or 0.0) for s in known if (s.name, s.batch) == (name, batch)}
            says = Series(name, "position {:,}".format, lambda spent: f"{exactly(spent)} ms a token")
            line(axes, points, says=says, color=colour, label=name)
        axes.yaxis.set_major_formatter(number)
    grid[0].legend(fontsize=6, loc="upper left", ncols=2)
    low, high = grid[0].get_ylim()
    for axes in grid:
        axes.set_ylim(min(low, axes.get_ylim()[0]), max(high, axes.get_ylim()[1]) * 4)
    alt = "Time of decoding one token against its position, a panel per batch size: flat lines do not slow down."
    return figure, alt
