"""Draw the pictures of README and docs/use.md from the newest records: ``python docs/pictures.py``."""

from __future__ import annotations

import hashlib
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from fast_attention import files
from fast_attention.lab.bench.record import Benchmark
from fast_attention.lab.drawing import COLOURS, INK, STYLE, svg
from fast_attention.lab.records import EXACT
from fast_attention.lab.study import drawings
from fast_attention.lab.study.record import Study

ROOT = Path(__file__).resolve().parent.parent
TIMES = ROOT / "docs" / "times.svg"
SHOWN = ("FavorPlus()", "BigBird()", "Linformer()", "Local()", "LinearAttention()", "AFTSimple()")


def newest(what: str) -> Path:
    """The last record of a kind, ``bench`` or ``study-mqar``."""
    return sorted((ROOT / "records").glob(f"*-{what}.json"))[-1]


def source(record: Path) -> str:
    """What a picture says of its record: its name and its SHA-256."""
    return f"{record.relative_to(ROOT)} sha256 {hashlib.sha256(record.read_bytes()).hexdigest()}"


def stale() -> bool:
    """Whether the README's picture is of another record than the newest benchmark."""
    return not TIMES.exists() or source(newest("bench")) not in TIMES.read_text(encoding="utf-8")


def times(record: Path) -> str:
    """Time of a forward pass against length, exact attention and a mechanism of each kind, as SVG."""
    held = Benchmark.read(record)
    meta = held.meta
    exact = {cell.length: cell.forward_ms for cell in held.cells if cell.mechanism == EXACT and cell.forward_ms}
    lines = {EXACT: exact}
    for name in SHOWN:
        cells = [cell for cell in held.cells if cell.mechanism == name and cell.forward_ratio]
        lines[name] = {cell.length: cell.forward_ratio * exact[cell.length] for cell in cells}
    longest = max(exact)
    ends = [line[longest] for line in lines.values()]
    told = "; ".join(f"{name} {end:,.0f}" for name, end in zip(lines, ends, strict=True))
    alt = f"Milliseconds of a forward pass against tokens. At {longest:,} tokens: {told}."
    with matplotlib.rc_context(STYLE | {"font.size": 9}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained", facecolor="white")
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for colour, (name, line) in zip((INK, *COLOURS), lines.items(), strict=True):
            axes.plot([*line], [*line.values()], color=colour, linewidth=2.4 if name == EXACT else 1.6)
        axes.margins(x=0.02)
        for name, colour, place in zip(lines, (INK, *COLOURS), _apart(ends), strict=True):
            gain = "" if name == EXACT else f" {exact[longest] / lines[name][longest]:.0f}x"
            beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
            axes.annotate(f"{name}{gain}", (longest, place), color=colour, **beside)
        axes.set_xticks([*exact], [f"{length:,}" for length in exact])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.grid(color="#e4e7eb", linewidth=0.5)
        axes.set_xlabel("tokens")
        axes.set_title(
            f"milliseconds, forward, {meta['heads']} heads of {meta['head_dim']}, {meta['dtype']}, {meta['hardware']}, "
            f"{meta['threads']} threads; {meta['started'][:10]}",
            fontweight="normal",
        )
        return svg(figure, alt).replace("</svg>", f"<!-- {source(record)} -->\n</svg>")


def _apart(heights: list[float], least: float = 1.5) -> list[float]:
    """Where labels stand: at their lines' ends, from the top, each at least a factor below the one before."""
    places: dict[int, float] = {}
    above = float("inf")
    for at in sorted(range(len(heights)), key=lambda at: -heights[at]):
        above = places[at] = min(heights[at], above / least)
    return [places[at] for at in range(len(heights))]


def main() -> None:
    """All pictures, each of its newest record."""
    files.write(TIMES, times(newest("bench")))
    study = Study.read(newest("study-mqar"))
    files.write(ROOT / "docs" / "study-costs.svg", drawings.costs(study).svg)
    files.write(ROOT / "docs" / "study-curves.svg", drawings.curves(study).svg)


if __name__ == "__main__":
    main()
