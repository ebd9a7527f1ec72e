"""Zoology and Based (Arora et al. 2023, 2024): recall against the size of the state: windows, linear, both.

Records: records/*-reproduce-recall.json. Again: ``python -m experiments.reproductions.recall --out out/recall``
(30 minutes of processor time).
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.models import Model
from experiments.reproductions import common
from experiments.reproductions.common import Budget, Claim, Reproduced, Reproduction, Row, Table
from experiments.reproductions.training import Training, equal_steps
from experiments.study import matched
from experiments.tasks import MQAR
from experiments.train import TrainingSettings
from fast_attention.lab.pictures import COLOURS, INK, PALE

WINDOW, LINEAR, BOTH, ALL = "window", "linear", "window and linear", "exact attention"
FAMILIES = {
    WINDOW: tuple(f"Local(window={w})" for w in (2, 4, 8, 16, 24)),
    LINEAR: ("LinearAttention()", *(f"LinearAttention(feature_map={m})" for m in ("DPFP()", "DPFP(nu=2)", "Taylor()"))),
    BOTH: (
        *(f"Hybrid(near=BlockLocal(block_size={w}), far=LinearAttention())" for w in (4, 8)),
        "Hybrid(near=BlockLocal(block_size=4), far=LinearAttention(feature_map=DPFP()))",
    ),
    ALL: ("Softmax()",),
}
CURVES = {  # Based, Fig. 2, read off: numbers of state, accuracy
    "sliding window": {
        9_700: 0.08, 17_900: 0.145, 34_000: 0.31, 67_000: 0.515, 133_000: 0.655, 263_000: 0.797, 523_000: 0.937,
        1_050_000: 1.0,
    },
    "Based": {9_400: 0.667, 12_400: 0.72, 24_700: 0.84, 40_000: 0.912, 80_000: 0.985, 160_000: 0.99},
}  # fmt: skip
TASK = MQAR(vocab=32, pairs=8, context=32)
MODEL = {"width": 32, "heads": 2, "layers": 2, "conv": 4, "positions": "none", "tied": False}
SETTINGS = TrainingSettings(batch_size=64, lr=1e-2, evaluation_batches=16)
MOST = 2000  # steps that are enough


# Measuring


def measure(budget: Budget) -> Iterator[Row]:
    """Train all mechanisms with one seed before the next, all with equal steps and parameters."""
    runs = {
        (family, name): Training(TASK, matched(TASK, name, MODEL), SETTINGS)
        for family, names in FAMILIES.items() for name in names
    }  # fmt: skip
    steps = equal_steps(replace(budget, seconds=budget.seconds / budget.seeds), runs.values(), MOST)
    settings = replace(SETTINGS, steps=steps, evaluate_every=steps)
    for seed, ((family, name), each) in itertools.product(range(budget.seeds), runs.items()):
        if budget.has(mechanism=name, seed=seed):
            continue
        if seed and not budget.left:
            return
        budget.say(f"{name}, seed {seed}, {steps} steps")
        outcome, _ = each._replace(settings=settings).run(seed)
        yield {
            "family": family, "mechanism": name, "seed": seed, "steps": steps, "state": state_size(each),
            "accuracy": outcome.valid, "parameters": outcome.parameters, "step_seconds": outcome.seconds / steps,
        }  # fmt: skip


@torch.no_grad()
def state_size(training: Training) -> int:
    """The numbers that a model's decoding state holds at the end of a sequence: of all layers, convolutions too."""
    with torch.random.fork_rng(devices=[]):
        model = Model(training.config).eval()
    return numbers(model.decode(TASK.batch("valid", 0, 1).tokens)[1].layers)


def numbers(state: Any) -> int:
    """The numbers in a state, without positions and counts."""
    if isinstance(state, Tensor):
        return state.numel() if state.is_floating_point() else 0
    return sum(map(numbers, state)) if isinstance(state, tuple | list) else 0


# What it says


def points(record: Reproduced, family: str) -> dict[int, float]:
    """The mean accuracy over the seeds by the size of the state."""
    held: dict[int, list[float]] = {}
    for row in record.of(family=family):
        held.setdefault(row["state"], []).append(row["accuracy"])
    return {size: statistics.fmean(values) for size, values in sorted(held.items())}


def claims(record: Reproduced) -> list[Claim]:
    """What the two papers show."""
    if any(not record.of(family=family) for family in FAMILIES):
        return []
    window, linear, both = (points(record, family) for family in (WINDOW, LINEAR, BOTH))
    exact = next(iter(points(record, ALL).values()))
    ours = [*window.values()]
    ends = f"{ours[0]:.2f} with {min(window):,} numbers to {ours[-1]:.2f} with {max(window):,}"
    beside = {size: max((value for at, value in window.items() if at <= size), default=0.0) for size in both}
    ahead = [size for size, value in both.items() if value > beside[size]]
    pairs = ", ".join(f"{value:.2f} ({beside[size]:.2f}) with {size:,} numbers" for size, value in both.items())
    rising = [*linear.values()]
    return [
        Claim(
            "the recall of a window rises with its state, from .08 at 9.7 k numbers to 1.0 at 1.05 M",
            f"from {ends}",
            all(b >= a - 0.02 for a, b in itertools.pairwise(ours)) and ours[-1] > ours[0] + 0.3,
        ),
        Claim(
            "linear attention and a window recall more than a window of the same state",
            f"{len(ahead)} of {len(both)} do; beside the best window of at most as many: {pairs}",
            len(ahead) == len(both),
        ),
        Claim(
            "more features recall more",
            ", ".join(f"{value:.3f} with {size:,} numbers" for size, value in linear.items()),
            all(b >= a - 0.005 for a, b in itertools.pairwise(rising)) and rising[-1] > rising[0],
        ),
        Claim("exact attention recalls everything", f"it has {exact:.3f}", exact > 0.98),
    ]


def draw(record: Reproduced) -> tuple[Figure, str]:
    """Accuracy against numbers of state: ours at the left, read off the papers' figure at the right."""
    figure, (measured, published) = common.figure(4.0, 2, sharey=True)
    for family, colour in zip(FAMILIES, (*COLOURS[:3], INK), strict=True):
        common.line(measured, points(record, family), color=colour, label=family)
        rows = record.of(family=family)
        states, accuracies = [row["state"] for row in rows], [row["accuracy"] for row in rows]
        measured.scatter(states, accuracies, s=6, color=colour, alpha=0.5)
    for (words, held), colour in zip(CURVES.items(), (COLOURS[0], COLOURS[2]), strict=True):
        common.line(published, held, color=colour, label=words)
    for axes, title in ((measured, "here; dotted: guesses"), (published, "published")):
        axes.set_xscale("log")
        axes.set_title(title)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        common.labelled(axes, "numbers of state", "accuracy" if axes is measured else "")
        axes.legend(loc="upper left" if axes is measured else "lower right")
    for value in TASK.baselines().values():
        measured.axhline(value, color=PALE, linewidth=0.8, linestyle=":")
    return figure, "Accuracy of associative recall against the numbers that a decoder keeps, by family of mechanism."


def tables(record: Reproduced) -> list[Table]:
    """Ours and the papers', by numbers of state."""
    rows = []
    for family, name in dict.fromkeys((row["family"], row["mechanism"]) for row in record.rows):
        held = record.of(mechanism=name)
        values = [row["accuracy"] for row in held]
        spread = "" if len(values) < 2 else f"{min(values):.3f} to {max(values):.3f}"
        mean = f"{statistics.fmean(values):.3f}"
        rows.append([f"`{name}`", family, f"{held[0]['state']:,}", mean, spread, str(len(values))])
    printed = [[words, f"{size:,}", f"{value:g}"] for words, held in CURVES.items() for size, value in held.items()]
    heads = ["mechanism of both layers", "family", "numbers of state", "accuracy", "range", "seeds"]
    return [
        Table(f"Recall after {record.rows[0]['steps']} steps", heads, rows),
        Table("Published, read off the figure", ["published", "numbers of state", "accuracy"], printed),
    ]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    chance = ", ".join(f"{value:.2f} for {name}" for name, value in TASK.baselines().items())
    joined = " ".join(row["mechanism"] for row in record.of(family=BOTH))
    near = [f"`{each}`" for each in dict.fromkeys(re.findall(r"near=(\w+\(\w+=\d+\))", joined))]
    return [
        "The papers recall up to 64 pairs among 8,192 kinds of tokens in contexts of up to 1,024. They train 32 epochs "
        "of 180,000 sequences at the best of four rates.",
        f"Here there are {TASK.pairs} pairs among {TASK.vocab} kinds in contexts of {TASK.context}, and one rate for "
        f"{record.rows[0]['steps']} steps of {SETTINGS.batch_size} sequences. Sizes of state are some hundred times "
        "smaller. Only the shape of the curves compares.",
        f"Guesses come to more than with 8,192 kinds: {chance}. What is no better has not begun to look up in so few "
        "steps. That says how slowly it learns here, not what its state can hold.",
        "A window recalls what is asked again within its reach. Two layers and a convolution of four tokens lengthen "
        "the reach. At the length of the context it is everything.",
        "Based alternates layers of linear attention with Taylor features and layers of windows. Here a Hybrid joins "
        f"near tokens ({', '.join(near)}) and features under one normaliser, in both layers.",
        "The script trains blocks: Hybrid takes sliding windows no longer. Learnt features need ten times as many "
        "steps and are left out.",
        "Sizes are counted from the decoding state itself, of both layers and their convolutions.",
    ]


REPRODUCTION = Reproduction(
    "recall", "Associative recall against numbers of state: windows, linear attention, both",
    "Arora et al. 2023, arXiv 2312.04927, and 2024, arXiv 2402.18668, Fig. 2", minutes=30, seeds=3,
    measure=measure, claims=claims, draw=draw, tables=tables, why=why, trains=True,
)  # fmt: skip

if __name__ == "__main__":
    common.start(REPRODUCTION)
