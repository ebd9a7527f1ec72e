"""Pictures of a benchmark as inline SVG: speed against length, bars beside peers, ceilings, memory, decoding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from fast_attention.lab.bench import figures
from fast_attention.lab.bench.entrants import OURS
from fast_attention.lab.bench.figures import Pass
from fast_attention.lab.bench.record import Benchmark, Row
from fast_attention.lab.bench.run import percent_of_ceiling
from fast_attention.lab.pictures import COLOURS, INK, PALE, STYLE, Picture, svg

GRID = "#e4e7eb"
PEERS = ("#b7791f", "#718096", "#8d5fd3", "#2f855a", "#9b2c5e", "#5a4a2f")
COLUMNS = 4


def _grid(count: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Panels in rows of ``COLUMNS``; what is too many is hidden."""
    columns = min(COLUMNS, max(count, 1))
    rows = max(math.ceil(count / columns), 1)
    figure = Figure(figsize=(12.5, 0.5 + height * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels


def _by_length(axes: Axes, lengths: list[int], title: str) -> None:
    axes.set_title(title, fontsize=9, fontweight="bold", loc="left")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=6.5)
    axes.minorticks_off()
    axes.grid(color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelbottom=True, labelleft=True)


def _legend(axes: Axes) -> None:
    """Name the lines above them, in room made for it, and number the vertical axis by 1, 2 and 5."""
    count = len(axes.get_legend_handles_labels()[1])
    low, high = axes.get_ylim()
    low, high = low / 1.1, high * 1.1
    axes.set_ylim(low, low * (high / low) ** (1 / (1 - 0.05 * min(count, 10))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 60 else (1.0,)))
    axes.yaxis.set_major_formatter(_number)
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=6.5)
    axes.legend(fontsize=5.5, frameon=False, loc="upper left", handlelength=1.6, labelspacing=0.2)


def _number(value: float, _: Any = None) -> str:
    return f"{value:g}"


def speeds(record: Benchmark, which: Pass) -> Picture:
    """A panel per family: speed against length; peers dashed."""
    families = [f for f in dict.fromkeys(row.family for row in record.rows) if _timed(record, f, which)]
    lengths = sorted({length for row in record.rows for length in figures.speeds(record, row.name, which)})
    alt = "Speed against length, a panel per mechanism; above 1 it is faster than exact attention; peers are dashed."
    with matplotlib.rc_context(STYLE):
        figure, panels = _grid(len(families), 2.7, sharex=True)
        for axes, family in zip(panels, families, strict=False):
            _by_length(axes, lengths, family)
            rows = [row for row in record.rows if row.family == family]
            inks = {True: itertools.cycle(COLOURS[:2]), False: itertools.cycle(PEERS)}
            for row in rows:
                known = figures.speeds(record, row.name, which)
                if not known:
                    continue
                mine = row.owner == OURS
                style: Any = (
                    {"linewidth": 1.8, "marker": "o", "markersize": 3}
                    if mine
                    else {"linewidth": 1.1, "marker": ".", "markersize": 3}
                )
                colour = COLOURS[_shade(row)] if mine else next(inks[False])
                dash = "-" if mine else "--"
                axes.plot(list(known), list(known.values()), dash, color=colour, label=_label(row, record), **style)
            axes.axhline(1.0, color=INK, linewidth=1.0)
            _legend(axes)
        figure.supxlabel("tokens", fontsize=9)
        figure.supylabel("times as fast as exact attention", fontsize=9)
        return Picture(svg(figure, alt), alt)


def _timed(record: Benchmark, family: str, which: Pass) -> bool:
    return any(figures.speeds(record, row.name, which) for row in record.rows if row.family == family)


def _shade(row: Row) -> int:
    return int(row.is_causal) + (2 if row.kind == "module" else 0)


def _label(row: Row, record: Benchmark) -> str:
    words = row.name if row.owner != OURS else "ours" + row.name[len(row.family) :]
    return words + (" *" if row.check == "faulty" else "")


def beside_peers(record: Benchmark, length: int) -> Picture:
    """Bars: ours beside the best peer of the same kind and direction; forward on the left."""
    found = {which: figures.matches(record, length, which) for which in figures.PASSES}
    names = [f"{m.family}{_words(m)}" for m in found["forward"]]
    alt = f"At {length:,} tokens, ours beside the best peer: " + "; ".join(
        f"{name} {match.factor:.2g} times {match.peer}" for name, match in zip(names, found["forward"], strict=True)
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 1.2 + 0.42 * len(names)), layout="constrained")
        panels = list(figure.subplots(1, 2, squeeze=False).flat)
        for axes, which in zip(panels, figures.PASSES, strict=True):
            _bars(axes, found[which], which)
        return Picture(svg(figure, alt), alt)


def _words(match: figures.Match) -> str:
    return (", projected" if match.kind == "module" else "") + (", causal" if match.is_causal else "")


def _bars(axes: Axes, found: list[figures.Match], which: Pass) -> None:
    axes.set_title("forward" if which == "forward" else "forward and backward", fontsize=9, loc="left")
    places = list(range(len(found)))
    axes.barh([at - 0.2 for at in places], [m.ours for m in found], 0.38, color=COLOURS[0], label="ours")
    axes.barh([at + 0.2 for at in places], [m.theirs for m in found], 0.38, color=PALE, label="best peer")
    for at, match in zip(places, found, strict=True):
        right = max(match.ours, match.theirs)
        words = f" {match.factor:.2f}x {match.peer}"
        ink = INK if match.factor >= 1 else COLOURS[1]
        axes.annotate(words, (right, at), va="center", fontsize=6.5, color=ink)
    axes.set_yticks(places, [f"{m.family}{_words(m)}" for m in found])
    axes.set_ylim(len(found) - 0.3, -0.7)
    axes.set_xscale("log")
    low = min((min(m.ours, m.theirs) for m in found), default=0.1)
    high = max((max(m.ours, m.theirs) for m in found), default=1.0)
    axes.set_xlim(min(low * 0.7, 0.5), high * (high / low) ** 0.9 * 3)
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.xaxis.set_major_formatter(_number)
    axes.minorticks_off()
    axes.set_xlabel("times as fast as exact attention in the same rounds")
    axes.legend(fontsize=7, frameon=False, loc="lower right")


def ceilings(record: Benchmark, length: int) -> Picture:
    """Bars: counted operations per second in percent of the best matrix product."""
    rows = [row for row in record.rows if row.owner == OURS and row.kind != "module"]
    names = [*dict.fromkeys(row.reference for row in rows), *(row.name for row in rows)]
    cells = [(name, record.cell(name, length)) for name in names]
    shares = [
        (name, [percent_of_ceiling(record, cell, which) for which in figures.PASSES])
        for name, cell in cells
        if cell is not None and percent_of_ceiling(record, cell) is not None
    ]
    alt = f"Percent of the matrix product's rate at {length:,} tokens: " + "; ".join(
        f"{name} {both[0]:.0f}" for name, both in shares if both[0] is not None
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 0.9 + 0.26 * len(shares)), layout="constrained")
        axes = figure.subplots()
        places = list(range(len(shares)))
        axes.barh(
            [at - 0.2 for at in places], [both[0] or 0.0 for _, both in shares], 0.38, color=COLOURS[0], label="forward"
        )
        if any(both[1] for _, both in shares):
            values = [both[1] or 0.0 for _, both in shares]
            axes.barh([at + 0.2 for at in places], values, 0.38, color=COLOURS[2], label="forward and backward")
        axes.axvline(100, color=INK, linewidth=0.8)
        axes.set_yticks(places, [name for name, _ in shares])
        axes.set_ylim(len(shares) - 0.3, -0.7)
        axes.set_xlabel("percent of the rate of one large matrix product in the same run")
        axes.legend(fontsize=7, frameon=False, loc="lower right")
        return Picture(svg(figure, alt), alt)


def memory(record: Benchmark) -> Picture | None:
    """Peak memory over the bytes of inputs and output, against length: flat is linear."""
    essential = {(weight.name, weight.length): weight.essential_bytes for weight in record.weights}
    rows = [row for row in record.rows if row.owner == OURS and row.kind != "module"]
    rows = [row for row in rows if figures.memory_of(record, row.name)]
    if not rows:
        return None
    lengths = sorted({weight.length for weight in record.weights})
    families = list(dict.fromkeys(row.family for row in rows))
    alt = "Peak memory over the bytes of inputs and output, against length, a panel per mechanism: flat is linear."
    with matplotlib.rc_context(STYLE):
        figure, panels = _grid(len(families), 2.1, sharex=True)
        for axes, family in zip(panels, families, strict=False):
            _by_length(axes, lengths, family)
            for row, which in itertools.product((r for r in rows if r.family == family), figures.PASSES):
                known = figures.memory_of(record, row.name, which)
                points = {n: size / essential[row.name, n] for n, size in known.items() if size > 0}
                if points:
                    label = ("causal " if row.is_causal else "") + ("" if which == "forward" else "with backward")
                    dash = "-" if which == "forward" else ":"
                    colour = COLOURS[int(row.is_causal)]
                    axes.plot(list(points), list(points.values()), dash, color=colour, marker="o", markersize=3,
                              linewidth=1.4, label=label or "forward")  # fmt: skip
            _legend(axes)
        figure.supxlabel("tokens", fontsize=9)
        figure.supylabel("peak / bytes of inputs and output", fontsize=9)
        return Picture(svg(figure, alt), alt)


def decoding(record: Benchmark) -> Picture | None:
    """Time of one token against its position, a panel per batch."""
    known = [step for step in record.steps if step.seconds is not None]
    if not known:
        return None
    batches = sorted({step.batch for step in known})
    positions = sorted({step.position for step in known})
    alt = "Time of decoding one token against its position, a panel per batch size: flat lines do not slow down."
    with matplotlib.rc_context(STYLE):
        figure, panels = _grid(len(batches), 3.4)
        inks = dict(zip(dict.fromkeys(step.name for step in known), itertools.cycle(COLOURS + PEERS), strict=False))
        for axes, batch in zip(panels, batches, strict=False):
            _by_length(axes, positions, f"batch {batch}")
            for name, colour in inks.items():
                points = {s.position: 1e3 * (s.seconds or 0.0) for s in known if (s.name, s.batch) == (name, batch)}
                axes.plot(list(points), list(points.values()), color=colour, marker="o", markersize=3, label=name)
            axes.yaxis.set_major_formatter(_number)
        panels[0].legend(fontsize=6, frameon=False, loc="upper left", ncols=2)
        low, high = panels[0].get_ylim()
        for axes in panels[: len(batches)]:
            axes.set_ylim(min(low, axes.get_ylim()[0]), max(high, axes.get_ylim()[1]) * 4)
        figure.supxlabel("position", fontsize=9)
        figure.supylabel("milliseconds a token", fontsize=9)
        return Picture(svg(figure, alt), alt)
