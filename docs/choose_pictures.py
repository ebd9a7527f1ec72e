"""Draw the pictures of docs/choose.md from the newest records: gains by length, and quality against speed."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fast_attention import files
from fast_attention.lab.drawing import COLOURS, GOOD, INK, PALE, STYLE, svg

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import choose_learned  # noqa: E402  beside this file, which tests run from elsewhere
import measured  # noqa: E402

LENGTHS, SPREAD, LEARNED = (HERE / f"choose-{what}.svg" for what in ("lengths", "quality", "learned"))


def by_length(record: measured.Record) -> str:
    """A table of colours: how many times exact attention's speed each mechanism has at each length."""
    rows = [row for row in measured.bench_speeds(record) if not row.training and not row.is_causal]
    gains = {(row.expression, row.length): row.gain for row in rows}
    columns = sorted({row.length for row in rows})
    names = sorted({row.expression for row in rows}, key=lambda name: -gains.get((name, columns[-2]), 0.0))
    best = max(gains, key=lambda case: gains[case])
    alt = (
        f"Exact attention's time over that of {len(names)} mechanisms at {columns[0]:,} to {columns[-1]:,} tokens. "
        f"The largest gain is {gains[best]:.0f}x, of {best[0]} at {best[1]:,} tokens."
    )
    with matplotlib.rc_context(STYLE | {"font.size": 8}):
        figure = Figure(figsize=(6.4, 0.27 * len(names) + 0.7), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for y, name in enumerate(names):
            for x, length in enumerate(columns):
                gain = gains.get((name, length))
                if gain is None:
                    continue
                strength = min(abs(math.log2(gain)) / 5, 1.0)
                axes.add_patch(Rectangle(
                    (x - 0.5, y - 0.5), 1, 1, color=GOOD if gain > 1 else PALE, alpha=0.12 + 0.7 * strength, linewidth=0
                ))  # fmt: skip
                axes.text(x, y, measured.times(gain)[:-1], ha="center", va="center", color=INK)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xticks(range(len(columns)), [f"{length:,}" for length in columns])
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        for side in axes.spines.values():
            side.set_visible(False)
        return svg(figure, alt)


def spread(record: measured.Record) -> str:
    """Quality of an untrained swap against the speed of the attention modules, a dot for each mechanism."""
    far = max(row["length"] for row in record.held["prices"])
    gains = measured.attention_gains(record, far)
    rows = {row["mechanism"]: row for row in record.held["rows"] if "sentence_cosine" in row}
    points = {name: (gains[name], row["sentence_cosine"]) for name, row in rows.items() if name in gains}
    nearest = [name for name, (gain, cosine) in points.items() if gain > 1 and cosine > 0.9]
    alt = (
        f"A MiniLM's embeddings after an untrained swap: cosine against the speed of attention at {far:,} tokens. "
        f"Faster than exact attention and above 0.9: {', '.join(nearest)}."
    )
    with matplotlib.rc_context(STYLE | {"font.size": 8}):
        figure = Figure(figsize=(6.4, 4.8), layout="constrained", facecolor="white")
        axes = figure.subplots()
        axes.axvline(1.0, color=PALE, linewidth=0.8)
        for name, (gain, cosine) in points.items():
            face = "white" if rows[name]["learned"] else COLOURS[0]
            axes.plot(gain, cosine, "o", markersize=5, markerfacecolor=face, markeredgecolor=COLOURS[0])
        axes.set_xscale("log", base=2)
        axes.set_xlim(0.5, 20)
        axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.minorticks_off()
        axes.set_xlabel(f"exact attention's time over its own, attention modules at {far:,} tokens")
        axes.set_ylabel(f"cosine to the original, {record.held['meta']['length']} tokens, untrained")
        axes.set_title("open circles have weights to train, which say nothing yet", fontweight="normal")
        _name_points(figure, axes, points)
        return svg(figure, alt)


Box = tuple[float, float, float, float]  # left, bottom, right, top, in points of the figure


def _name_points(figure: Figure, axes: Axes, points: dict[str, tuple[float, float]]) -> None:
    """A name beside each point, where it covers no point and no other name; a line leads to one that is further off."""
    figure.draw_without_rendering()
    at = {name: axes.transData.transform(point) * 72 / figure.dpi for name, point in points.items()}
    taken: list[Box] = [(x - 4, y - 4, x + 4, y + 4) for x, y in at.values()]
    for name, (x, y) in sorted(at.items(), key=lambda item: -item[1][1]):
        label = name.removesuffix("()")
        wide = 3.9 * len(label)
        for far in (0, 9, 18, 27, 36, 45):
            boxes = [
                (left, y + up * far - 4, left + wide, y + up * far + 4)
                for up in (1, -1)
                for left in (x + 7, x - 7 - wide)
            ]
            free = [box for box in boxes if not any(_overlap(box, other) for other in taken)]
            if free:
                break
        box = free[0]
        taken.append(box)
        right = box[0] > x
        axes.annotate(
            label, points[name], ((7 if right else -7), box[1] + 4 - y), textcoords="offset points", va="center",
            ha="left" if right else "right", color=INK, fontsize=7,
            arrowprops={"arrowstyle": "-", "color": PALE, "linewidth": 0.6} if far else None,
        )  # fmt: skip


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def source(record: measured.Record) -> str:
    """What a picture says of its record: its name and its SHA-256."""
    return f"records/{record.name} sha256 {hashlib.sha256((measured.RECORDS / record.name).read_bytes()).hexdigest()}"


class Picture(NamedTuple):
    """What draws a picture, and the records that it is of."""

    draw: Callable[..., str]
    records: tuple[measured.Record, ...]


def drawn() -> dict[Path, Picture]:
    """The pictures of the newest records."""
    return {
        LENGTHS: Picture(by_length, measured.records("bench")[-1:]),
        SPREAD: Picture(spread, measured.records("costs")[-1:]),
        LEARNED: Picture(choose_learned.picture, tuple(group[0] for group in measured.together(measured.RECORDS))),
    }


def stale() -> bool:
    """Whether a picture is of another record than the newest of its kind."""
    return any(
        not path.exists() or any(source(record) not in path.read_text(encoding="utf-8") for record in picture.records)
        for path, picture in drawn().items()
    )


def main() -> None:
    """Draw what is not of the newest record."""
    for path, picture in drawn().items():
        sources = "".join(f"<!-- {source(record)} -->\n" for record in picture.records)
        files.write(path, picture.draw(*picture.records).replace("</svg>", f"{sources}</svg>"))
