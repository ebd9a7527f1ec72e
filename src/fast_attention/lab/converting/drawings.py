"""Pictures of a conversion: its worth at every stage, its layers, its price, its training."""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fast_attention.lab.converting.record import SPELT, STAGES, Converted
from fast_attention.lab.pictures import COLOURS, INK, PALE, STYLE, Picture, svg

GRID = {"color": "#e4e7eb", "linewidth": 0.5}


def stages(record: Converted) -> Picture:
    """The first figure of every stage, with the original and the budget as lines."""
    found = {when: record.figures(when) for when in record.stages}
    name = next(iter(found["original"]))
    heights = [figures[name] for figures in found.values()]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 0.6 + 0.42 * len(found)), layout="constrained")
        axes = figure.subplots()
        colours = [INK, *COLOURS][: len(found)]
        bars = axes.barh([STAGES[when] for when in found], heights, color=colours, height=0.6)
        axes.bar_label(bars, [f"{height:.4f}" for height in heights], padding=4)
        axes.axvline(heights[0], color=INK, linewidth=1)
        axes.set_xlabel(SPELT[name])
        axes.invert_yaxis()
    said = "; ".join(f"{STAGES[when]} {height:.4f}" for when, height in zip(found, heights, strict=True))
    return _drawn(figure, f"{SPELT[name]}: {said}")


def layers(record: Converted) -> Picture:
    """The error of every layer at every stage; the loss with each single layer as it was."""
    held = record.conversion
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        wide = 0.8 / max(len(held.errors), 1)
        for number, (when, errors) in enumerate(held.errors.items()):
            at = [held.layers.index(name) + (number - len(held.errors) / 2 + 0.5) * wide for name in errors]
            left.bar(at, list(errors.values()), wide, color=COLOURS[number], label=STAGES[when])
        _numbered(left, len(held.layers), "error of the output")
        left.legend(frameon=False)
        if held.whole is not None:
            right.bar(
                [held.layers.index(name) for name in held.put_back], list(held.put_back.values()), color=COLOURS[0]
            )
            right.axhline(held.whole, color=INK, linewidth=1, label=f"none {record.untouched}")
            low = min(held.put_back.values())
            right.set_ylim(low - 0.3 * (held.whole - low) - 1e-6, max(held.whole, *held.put_back.values()) * 1.002)
            if held.limit is not None:
                right.axhline(held.limit, color=COLOURS[1], linewidth=1, linestyle=":", label="budget")
            right.legend(frameon=False)
        _numbered(right, len(held.layers), f"loss with it {record.untouched}")
    last = list(held.errors.items())[-1:]
    said = ", ".join(f"{name} {error:.3f}" for _, errors in last for name, error in errors.items())
    return _drawn(figure, f"Errors of the layers' outputs at every stage; in the end {said}")


def _numbered(axes: Axes, count: int, label: str) -> None:
    axes.set_xticks(range(count), [str(i) for i in range(count)])
    axes.set_xlabel("layer")
    axes.set_ylabel(label)
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)


def prices(record: Converted) -> Picture:
    """Time of a pass, of its attention, and memory against the length, before and after."""
    quantities: list[tuple[str, str, float]] = [
        ("milliseconds, whole model", "seconds", 1000.0),
        ("milliseconds, attention", "attention_seconds", 1000.0),
        ("MiB at the peak", "bytes", 2.0**-20),
    ]
    names = list(dict.fromkeys(row["model"] for row in record.prices))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 3.2), layout="constrained")
        for axes, (words, key, unit) in zip(figure.subplots(1, 3), quantities, strict=True):
            for name, colour in zip(names, (INK, COLOURS[0]), strict=False):
                rows: list[dict[str, Any]] = [r for r in record.prices if r["model"] == name and r.get(key)]
                axes.plot(
                    [r["length"] for r in rows], [unit * r[key] for r in rows], color=colour, marker="o",
                    markersize=3, label=name,
                )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("tokens")
            axes.set_ylabel(words)
            axes.grid(**GRID)
            axes.legend(frameon=False)
    longest = [row for row in record.prices if row.get("seconds")][-len(names) :]
    said = ", ".join(f"{r['model']} {r['seconds']:.3g} s at {r['length']:,} tokens" for r in longest)
    return _drawn(figure, f"Time and memory against length: {said}")


def curves(record: Converted) -> Picture:
    """The training losses of both stages against time."""
    held = record.conversion.curves
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 2.6), layout="constrained")
        for axes, (stage, points) in zip(figure.subplots(1, len(held), squeeze=False)[0], held.items(), strict=True):
            axes.plot([x[1] for x in points], [x[2] for x in points], color=COLOURS[0], linewidth=1.2)
            axes.set_title(stage, loc="left", fontsize=9, fontweight="bold")
            axes.set_xlabel("seconds")
            axes.set_ylabel("loss")
            axes.set_yscale("log")
            axes.grid(color=PALE, linewidth=0.3)
    ends = "; ".join(f"{stage} {points[-1][2]:.4g}" for stage, points in held.items() if points)
    return _drawn(figure, f"Training losses, at the end {ends}")


def _drawn(figure: Figure, alt: str) -> Picture:
    with matplotlib.rc_context(STYLE):
        return Picture(svg(figure, alt), alt)
