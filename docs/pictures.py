"""Draw the pictures of README and docs/guides/train.md from the newest records: ``python docs/pictures.py``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from statistics import fmean

import matplotlib
from fast_attention.lab.study import drawings
from fast_attention.lab.study.plan import label
from fast_attention.lab.study.record import Study
from matplotlib.figure import Figure

from fast_attention import Softmax, files
from fast_attention.lab.drawing import COLOURS, INK, STYLE, svg
from fast_attention.lab.records import EXACT

ROOT = Path(__file__).resolve().parent.parent
TIMES, LEARNED = ROOT / "docs" / "times.svg", ROOT / "docs" / "learned.svg"
STUDIES = ("study-byte-lm", "study-byte-lm-learned")
ALSO = ("WKV()",)  # of the second study: it takes no rotary positions
SHOWN = ("FavorPlus()", "BigBird()", "Linformer()", "Local()", "LinearAttention()", "AFTSimple()")


def newest(what: str) -> Path:
    """The last record of a kind, ``bench`` or ``study-mqar``."""
    return sorted((ROOT / "records").glob(f"*-{what}.json"))[-1]


def source(record: Path) -> str:
    """What a picture says of its record: its name and its SHA-256."""
    return f"{record.relative_to(ROOT)} sha256 {hashlib.sha256(record.read_bytes()).hexdigest()}"


def stale() -> bool:
    """Whether a picture of the README is of another record than the newest of its kind."""
    pairs = ((TIMES, "bench"), *((LEARNED, kind) for kind in STUDIES))
    return any(
        not path.exists() or source(newest(kind)) not in path.read_text(encoding="utf-8") for path, kind in pairs
    )


def times(record: Path) -> str:
    """Time of a forward pass against length, exact attention and a mechanism of each kind, as SVG."""
    held = json.loads(record.read_text(encoding="utf-8"))
    meta, timed = held["meta"], [cell for cell in held["cells"] if cell["forward_ratio"]]
    exact = {cell["length"]: cell["forward_ms"] for cell in timed if cell["mechanism"] == EXACT}
    lines = {EXACT: exact}
    for name in SHOWN:
        cells = [cell for cell in timed if cell["mechanism"] == name]
        lines[name] = {cell["length"]: cell["forward_ratio"] * exact[cell["length"]] for cell in cells}
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


def learned(record: Path, *others: Path) -> str:
    """What language models learn of bytes in equal time, bits per byte against minutes, as SVG.

    ``others`` are records of the same task and time, of which the mechanisms of ``ALSO`` are shown.
    """
    study = Study.read(record)
    meta, lines, steps = study.meta, {}, {}
    studies = [study, *map(Study.read, others)]
    for held in studies:
        assert all(held.meta[name] == meta[name] for name in ("task", "training", "seeds", "threads"))
        for name in held.meta["mechanisms"] if held is study else ALSO:
            assert len(held.of(name)) == meta["seeds"]
            lines[name], steps[name] = _line(held, name), held.summary(name).steps  # type: ignore[union-attr]
    lines = dict(sorted(lines.items(), key=lambda line: -line[1][-1][1]))
    ends = [line[-1] for line in lines.values()]
    told = "; ".join(
        f"{label(name)} {y:.2f} after {steps[name]:,} steps" for name, (_, y) in zip(lines, ends, strict=True)
    )
    longest = max(x for x, _ in ends)
    with matplotlib.rc_context(STYLE | {"font.size": 9}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained", facecolor="white")
        axes = figure.subplots()
        colours = iter(COLOURS)
        places = _apart([y for _, y in ends], least=1.02)
        for (name, line), place in zip(lines.items(), places, strict=True):
            exact = name == repr(Softmax())
            colour = INK if exact else next(colours)
            axes.plot(*zip(*line, strict=True), color=colour, linewidth=2.4 if exact else 1.6)
            text = f"{label(name)}: {line[-1][1]:.2f}, {steps[name]:,} steps".replace(", far", ",\n  far")
            beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
            axes.annotate(text, (longest, place), color=colour, **beside)
        axes.margins(x=0.02)
        axes.grid(color="#e4e7eb", linewidth=0.5)
        axes.set_xlabel("minutes of training, the same for all")
        axes.set_title(
            f"bits per byte of unseen text, lower is better; {meta['task']}, {meta['model']['layers']} layers of "
            f"{meta['model']['width']}, {meta['hardware']}, {meta['threads']} "
            f"thread{'s' * (meta['threads'] > 1)}; {', '.join(held.meta['started'][:10] for held in studies)}",
            fontweight="normal",
        )
        return svg(figure, f"Bits per byte after {longest:.0f} minutes: {told}.").replace(
            "</svg>", "".join(f"<!-- {source(each)} -->\n" for each in (record, *others)) + "</svg>"
        )


def _line(study: Study, name: str) -> list[tuple[float, float]]:
    """Minutes and values of a mechanism, means over its seeds at steps that all of them have, and at their ends."""
    runs = [{step: (seconds / 60, value) for step, seconds, value in run.curve} for run in study.of(name)]
    steps = sorted(set.intersection(*map(set, runs)))[1:] if runs else []  # an untrained model is off the scale
    points = [[run[step] for run in runs] for step in steps]
    points += [[(run.curve[-1][1] / 60, run.curve[-1][2]) for run in study.of(name)]]
    return [(fmean(x for x, _ in each), fmean(y for _, y in each)) for each in points]


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
    files.write(LEARNED, learned(*map(newest, STUDIES)))
    study = Study.read(newest("study-mqar"))
    files.write(ROOT / "docs" / "study-costs.svg", drawings.costs(study).svg)
    files.write(ROOT / "docs" / "study-curves.svg", drawings.curves(study).svg)


if __name__ == "__main__":
    main()
