"""Pictures of a conversion: its quality at every stage, its layers, its costs, its training."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fast_attention.lab.converting.record import SPELT, STAGES, Converted
from fast_attention.lab.drawing import COLOURS, INK, line, picture, sheet

COSTS = {
    "milliseconds, whole model": ("seconds", 1000.0),
    "milliseconds, attention": ("attention_seconds", 1000.0),
    "MiB at the peak": ("bytes", 2.0**-20),
}


@picture
def stages(record: Converted) -> tuple[Figure, str]:
    """The first figure of every stage, with the original as a line."""
    found = {when: record.figures(when) for when in record.stages}
    name = next(iter(found["original"]))
    heights = [figures[name] for figures in found.values()]
    figure, (axes,) = sheet(0.6 + 0.42 * len(found))
    bars = axes.barh([STAGES[when] for when in found], heights, color=[INK, *COLOURS][: len(found)], height=0.6)
    axes.bar_label(bars, [f"{height:.4f}" for height in heights], padding=4)
    axes.axvline(heights[0], color=INK, linewidth=1)
    axes.set_xlabel(SPELT[name])
    axes.invert_yaxis()
    said = "; ".join(f"{STAGES[when]} {height:.4f}" for when, height in zip(found, heights, strict=True))
    return figure, f"{SPELT[name]}: {said}"


@picture
def layers(record: Converted) -> tuple[Figure, str]:
    """The error of every layer at every stage; the loss with each single layer as it was."""
    held = record.conversion
    figure, (left, right) = sheet(3.4, 1, 2)
    wide = 0.8 / max(len(held.errors), 1)
    for number, (when, errors) in enumerate(held.errors.items()):
        at = [held.layers.index(name) + (number - len(held.errors) / 2 + 0.5) * wide for name in errors]
        left.bar(at, list(errors.values()), wide, color=COLOURS[number], label=STAGES[when])
    left.legend()
    if held.whole is not None:
        losses = held.put_back
        right.bar([held.layers.index(name) for name in losses], list(losses.values()), color=COLOURS[0])
        right.axhline(held.whole, color=INK, linewidth=1, label=f"none {record.untouched}")
        low = min(losses.values())
        right.set_ylim(low - 0.3 * (held.whole - low) - 1e-6, max(held.whole, *losses.values()) * 1.002)
        if held.limit is not None:
            right.axhline(held.limit, color=COLOURS[1], linewidth=1, linestyle=":", label="budget")
        right.legend()
    for axes, words in ((left, "error of the output"), (right, f"loss with it {record.untouched}")):
        axes.set_xticks(range(len(held.layers)), [str(i) for i in range(len(held.layers))])
        axes.set_xlabel("layer")
        axes.set_ylabel(words)
        axes.grid(axis="y")
    last = list(held.errors.items())[-1:]
    said = ", ".join(f"{name} {error:.3f}" for _, errors in last for name, error in errors.items())
    return figure, f"Errors of the layers' outputs at every stage; in the end {said}"


@picture
def costs(record: Converted) -> tuple[Figure, str]:
    """Time of a pass, of its attention, and memory against the length, before and after."""
    names = list(dict.fromkeys(row["model"] for row in record.costs))
    figure, panels = sheet(3.2, 1, 3)
    for axes, (words, (key, unit)) in zip(panels, COSTS.items(), strict=True):
        for name, colour in zip(names, (INK, COLOURS[0]), strict=False):
            rows = [row for row in record.costs if row["model"] == name and row.get(key)]
            line(axes, {row["length"]: unit * row[key] for row in rows}, color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _named(axes, "tokens", words)
        axes.legend()
    longest = [row for row in record.costs if row.get("seconds")][-len(names) :]
    said = ", ".join(f"{r['model']} {r['seconds']:.3g} s at {r['length']:,} tokens" for r in longest)
    return figure, f"Time and memory against length: {said}"


@picture
def curves(record: Converted) -> tuple[Figure, str]:
    """The training losses of both stages against time."""
    held = record.conversion.curves
    figure, panels = sheet(2.6, 1, len(held))
    for axes, (stage, points) in zip(panels, held.items(), strict=True):
        axes.plot([x[1] for x in points], [x[2] for x in points], color=COLOURS[0], linewidth=1.2)
        axes.set_title(stage)
        axes.set_yscale("log")
        _named(axes, "seconds", "loss")
    ends = "; ".join(f"{stage} {points[-1][2]:.4g}" for stage, points in held.items() if points)
    return figure, f"Training losses, at the end {ends}"


def _named(axes: Axes, across: str, up: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid()
