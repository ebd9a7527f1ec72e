"""Draws a conversion: its quality at every stage, its layers, its costs, its training."""

from __future__ import annotations

from matplotlib.figure import Figure

from fast_attention.lab import hover
from fast_attention.lab.converting.record import FIGURES, STAGES, Converted
from fast_attention.lab.drawing import (
    COLOURS,
    INK,
    FewTicks,
    against_length,
    figure_grid,
    labelled,
    line,
    number,
    picture,
)
from fast_attention.lab.hover import Series
from fast_attention.lab.numbers import exactly

COSTS = {
    "milliseconds, whole model": ("seconds", 1000.0),
    "milliseconds, attention": ("attention_seconds", 1000.0),
    "MiB at the peak": ("bytes", 2.0**-20),
}


@picture
def stages(record: Converted) -> tuple[Figure, str]:
    """The first figure of every stage, with the original as a line."""
    name = next(iter(record.figures("original")))
    heights = {STAGES[when]: record.figures(when)[name] for when in record.stages}
    figure, (axes,) = figure_grid(0.6 + 0.42 * len(heights))
    axes.barh([*heights], [*heights.values()], color=[INK, *COLOURS][: len(heights)], height=0.6)
    axes.axvline(heights[STAGES["original"]], color=INK, linewidth=1)
    for at, (stage, height) in enumerate(heights.items()):
        axes.annotate(
            f"{height:.4f}", (1.0, at), (-4, 0), ("axes fraction", "data"), "offset points", va="center", ha="right"
        )
        hover.box(axes, 0.0, at - 0.3, height, at + 0.3, f"{stage}: {FIGURES[name]} {exactly(height)}")
    axes.set_xlim(0, 1.1 * max(heights.values()))
    axes.set_xlabel(FIGURES[name])
    axes.invert_yaxis()
    return figure, f"{FIGURES[name]}: " + "; ".join(f"{stage} {height:.4f}" for stage, height in heights.items())


@picture
def layers(record: Converted) -> tuple[Figure, str]:
    """The error of every layer at every stage; the loss with each single layer as it was."""
    held = record.conversion
    figure, (left, right) = figure_grid(3.4, 1, 2)
    wide = 0.8 / max(len(held.errors), 1)
    for order, (when, errors) in enumerate(held.errors.items()):
        at = [held.layers.index(name) + (order - len(held.errors) / 2 + 0.5) * wide for name in errors]
        left.bar(at, list(errors.values()), wide, color=COLOURS[order], label=STAGES[when])
        for x, (name, error) in zip(at, errors.items(), strict=True):
            hover.box(left, x - wide / 2, 0.0, x + wide / 2, error, f"{name}, {STAGES[when]}: error {exactly(error)}")
    if held.errors:
        left.legend()
    if held.whole is not None:
        losses = held.put_back
        right.bar([held.layers.index(name) for name in losses], list(losses.values()), color=COLOURS[0])
        for name, loss in losses.items():
            at = held.layers.index(name)
            words = f"{name} {record.untouched}: loss {exactly(loss)}"
            hover.box(right, at - 0.4, right.get_ylim()[0], at + 0.4, loss, words)
        right.axhline(held.whole, color=INK, linewidth=1, label=f"none {record.untouched}")
        low = min(losses.values())
        right.set_ylim(low - 0.3 * (held.whole - low) - 1e-6, max(held.whole, *losses.values()) * 1.002)
        if held.limit is not None:
            right.axhline(held.limit, color=COLOURS[1], linewidth=1, linestyle=":", label="budget")
        right.legend()
    for axes, words in ((left, "error of the output"), (right, f"loss with it {record.untouched}")):
        axes.set_xticks(range(len(held.layers)), [str(i) for i in range(len(held.layers))])
        labelled(axes, "layer", words, grid="y")
    last = [*held.errors.values()][-1:]
    end = ", ".join(f"{name} {error:.3f}" for errors in last for name, error in errors.items())
    return figure, f"Errors of the layers' outputs at every stage; in the end {end}"


@picture
def costs(record: Converted) -> tuple[Figure, str]:
    """Time of a pass, of its attention, and memory against the length, before and after."""
    names = list(dict.fromkeys(row["model"] for row in record.costs))
    figure, panels = figure_grid(3.2, 1, 3)
    for axes, (words, (key, unit)) in zip(panels, COSTS.items(), strict=True):
        for name, colour in zip(names, (INK, COLOURS[0]), strict=False):
            rows = [row for row in record.costs if row["model"] == name and row.get(key)]
            says = Series(name, up=lambda value, words=words: f"{exactly(value)} {words}")
            line(axes, {row["length"]: unit * row[key] for row in rows}, says=says, color=colour, label=name)
        against_length(axes, [*dict.fromkeys(row["length"] for row in record.costs)])
        labelled(axes, "tokens", words)
        axes.legend()
    longest = [row for row in record.costs if row.get("seconds")][-len(names) :]
    times = ", ".join(f"{r['model']} {r['seconds']:.3g} s at {r['length']:,} tokens" for r in longest)
    return figure, f"Time and memory against length: {times}"


@picture
def curves(record: Converted) -> tuple[Figure, str]:
    """The training losses of both stages against time."""
    held = record.conversion.curves
    figure, panels = figure_grid(2.6, 1, len(held))
    for axes, (stage, points) in zip(panels, held.items(), strict=True):
        says = Series(stage, lambda seconds: f"{exactly(seconds)} s", lambda loss: f"loss {exactly(loss)}")
        values = {seconds: loss for _, seconds, loss in points}
        line(axes, values, says=says, color=COLOURS[0], linewidth=1.2, marker="")
        axes.set_title(stage)
        if any(point[2] > 0 for point in points):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(FewTicks())
            axes.yaxis.set_major_formatter(number)
            axes.minorticks_off()
        labelled(axes, "seconds", "loss")
    ends = "; ".join(f"{stage} {points[-1][2]:.4g}" for stage, points in held.items() if points)
    return figure, f"Training losses, at the end {ends}"
