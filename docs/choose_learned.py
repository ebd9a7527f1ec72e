"""What mechanisms learn from scratch in equal time, by the newest studies: tables of docs/choose.md, and a picture."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fast_attention.lab.drawing import COLOURS, INK, PALE, STYLE, svg

sys.path.insert(0, str(Path(__file__).resolve().parent))
import measured

LONG = 28  # characters of a label's line
CONTROLS = {"Softmax()": "exact attention", "Local(window=0)": "no mixing"}


def table(folder: Path = measured.RECORDS) -> str:
    """What mechanisms learn from scratch in the same time: a table for each task, with a column for each study."""
    parts = []
    for studies in measured.together(folder):
        meta = studies[0].held["meta"]
        values = [measured.study_values(study) for study in studies]
        means = [measured.study_means(study) for study in studies]
        widest = max(max(each) - min(each) for column in values for each in column.values())
        titles = [f"{', '.join(measured.around(study.held['meta']))} ({measured.link(study)})" for study in studies]
        parts += [
            f"`{meta['task']}`, {measured.time(meta)} of one core each, {meta['model']['layers']} layers of width "
            f"{meta['model']['width']}: {meta['metric']} of unseen data, less is better. Means; in brackets of how "
            f"many seeds, where of more than one, which are {widest:.3f} apart at most.",
            "",
        ]
        parts += [f"| | {' | '.join(titles)} |", "|---" * (1 + len(studies)) + "|"]
        names = sorted({name for column in means for name in column},
                       key=lambda name: [column.get(name, math.inf) for column in means])  # fmt: skip
        for name in names:
            cells = [_of_seeds(column.get(name, [])) for column in values]
            parts.append(
                f"| {f'**{CONTROLS[name]}**' if name in CONTROLS else measured.linked(name)} | {' | '.join(cells)} |"
            )
        parts.append("")
    return "\n".join(parts[:-1])


def _of_seeds(values: list[float]) -> str:
    """A mean, and of how many values."""
    return f"{fmean(values):.3f}{f' ({len(values)})' * (len(values) > 1)}" if values else "-"


def picture(*studies: measured.Record) -> str:
    """A dot for every run of every mechanism, a panel for each study, the best mechanism on top."""
    best = []
    for study in studies:
        means = measured.study_means(study)
        first, *_ = sorted(means, key=lambda name: means[name])
        best.append(f"{measured.subject(study)}: {first} {means[first]:.3f}, exact attention {means['Softmax()']:.3f}")
    rows = max(len(measured.study_means(study)) for study in studies)
    with matplotlib.rc_context(STYLE | {"font.size": 7.5}):
        figure = Figure(figsize=(9.0, 0.22 * rows + 0.9), layout="constrained", facecolor="white")
        for axes, study in zip(figure.subplots(1, len(studies)), studies, strict=True):
            _panel(axes, study)
        return svg(figure, f"What each mechanism learnt in the same time, a dot a run. {'; '.join(best)}.")


def _panel(axes: Axes, study: measured.Record) -> None:
    values, means, meta = measured.study_values(study), measured.study_means(study), study.held["meta"]
    names = sorted(values, key=lambda name: means[name])
    best = min(min(each) for each in values.values())
    edge = best + 1.6 * (max(means[name] for name in CONTROLS) - best)  # what lies beyond is told as a number
    for name in CONTROLS:
        axes.axvline(means[name], color=PALE, linewidth=0.8)
    for y, name in enumerate(names):
        colour = INK if name in CONTROLS else COLOURS[0]
        if means[name] < edge:
            axes.plot(values[name], [y] * len(values[name]), "o", markersize=3.2, color=colour, alpha=0.75)
        else:
            axes.text(edge, y, f"{means[name]:.2f} \N{RIGHTWARDS ARROW}", ha="right", va="center", color=INK)
    axes.set_xlim(best - 0.04 * (edge - best), edge)
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.4)
    around = ", ".join(measured.around(meta))
    axes.set_title(f"{measured.subject(study)}, {measured.time(meta)}, {around}:\n{meta['metric']}, less is better",
                   fontweight="normal", loc="right", fontsize=8)  # fmt: skip


def _label(name: str) -> str:
    """A mechanism's name, in two lines where it is long."""
    words = CONTROLS.get(name, name.removesuffix("()")).replace("num_features=", "")
    return words if len(words) < LONG else words.replace("(), ", "(),\n")
