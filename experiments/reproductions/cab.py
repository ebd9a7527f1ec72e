"""CAB's efficiency lengths (Zhang et al. 2023): from how many tokens on a mechanism is faster than exact attention.

Records: records/*-reproduce-cab.json. Again: ``python -m experiments.reproductions.cab --out out/cab`` (10 minutes on a
quiet machine). The record also has ABC, LARA and Agent, which the library had then; they are left out now.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from experiments.reproductions import common
from experiments.reproductions.common import Budget, Claim, Reproduced, Reproduction, Row, Table
from fast_attention import Bound, Shape, catalogue, clock
from fast_attention.lab.measure import memory_at_hand
from fast_attention.lab.pictures import COLOURS, INK, PALE
from fast_attention.lab.tables import milliseconds

HEADS, HEAD_DIM, BATCH = 8, 64, 4
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
ROUNDS = 5
UNFUSED, FUSED = "exact, unfused", "exact, fused"
THEIRS = {  # as the paper calls it, and its efficiency length
    "ABC(num_slots=16)": ("ABC", 1877.0),
    "FavorPlus(num_features=64)": ("Performer", 2361.0),
    "CosFormer()": ("cosFormer", 2539.0),
    "LARA(num_landmarks=16)": ("LARA", 2541.0),
    "Nystrom(num_landmarks=16)": ("Nyström", 3045.0),
    "Local(window=16)": ("local", 4195.0),
}
OURS = (
    "LinearAttention()", "FavorPlus()", "Linformer(rank=128)", "BigBird()", "BlockLocal()", "Agent(num_agents=16)",
    "AFTSimple()",
)  # fmt: skip
LIKE = 1.5  # a length within this factor of the paper's bears it out


# Measuring


@torch.no_grad()
def measure(budget: Budget) -> Iterator[Row]:
    """Times of a forward pass, all in turns at one length; a length that does not fit the time is left out."""
    spent: list[float] = []
    for length in LENGTHS:
        if budget.has(length=length):
            continue
        if spent and 4 * spent[-1] > budget.left:
            return
        before, runs = budget.left, competitors(length)
        budget.say(f"{length:,} tokens: {len(runs)} in turns")
        for run in runs.values():
            run()
        for name, samples in clock.in_turns(runs, torch.device("cpu"), ROUNDS, budget.left / 2).items():
            low, _, high = statistics.quantiles(samples * (2 if len(samples) == 1 else 1), n=4, method="inclusive")
            row = {"length": length, "competitor": name, "seconds": statistics.median(samples)}
            yield {**row, "low": low, "high": high, "rounds": len(samples)}
        spent.append(before - budget.left)


def competitors(length: int) -> dict[str, Callable[[], Any]]:
    """What is timed: exact attention in both forms, unless its scores do not fit into memory, and the others."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, BATCH, HEADS, length, HEAD_DIM)
    runs: dict[str, Callable[[], Any]] = {FUSED: lambda: F.scaled_dot_product_attention(q, k, v)}
    if 2.2 * 4 * HEADS * length**2 < memory_at_hand(
        torch.device("cpu")
    ):  # bytes of the scores; the weights are as many again
        runs = {UNFUSED: lambda: unfused(q, k, v), **runs}
    for name in (each for each in (*THEIRS, *OURS) if each.split("(")[0] in catalogue.names()):
        bound = Bound(catalogue.parse(name), Shape(HEADS, HEAD_DIM, length))
        runs[name] = lambda bound=bound: bound(q, k, v)
    return runs


def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact attention in three operations that hold all scores, the paper's baseline, one sequence after the other."""
    scale = 1 / math.sqrt(q.shape[-1])
    return torch.stack([((scale * a) @ b.mT).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)])


# What it says


def times(record: Reproduced, name: str) -> dict[int, float]:
    """Seconds by length."""
    return {row["length"]: row["seconds"] for row in record.of(competitor=name)}


def efficiency_length(record: Reproduced, name: str, baseline: str) -> float | None:
    """From how many tokens on it is faster, up to the longest: between two lengths on logarithmic axes.

    The shortest that was measured where it is faster everywhere, infinity where it is not at the longest; None: not
    measured.
    """
    seconds, exact = times(record, name), times(record, baseline)
    lengths = sorted(seconds.keys() & exact.keys())
    if len(lengths) < 2:
        return None
    gaps = {length: math.log(seconds[length] / exact[length]) for length in lengths}
    if gaps[lengths[-1]] >= 0:
        return math.inf
    for before, after in reversed([*itertools.pairwise(lengths)]):
        if gaps[before] >= 0:
            return before * (after / before) ** (gaps[before] / (gaps[before] - gaps[after]))
    return float(lengths[0])


def in_words(record: Reproduced, length: float | None) -> str:
    """An efficiency length as pages have it."""
    if length is None:
        return "not measured"
    longest, shortest = (choose(row["length"] for row in record.rows) for choose in (max, min))
    if math.isinf(length):
        return f"above {longest:,}"
    return f"below {shortest:,}" if length <= shortest else f"{round(length):,}"


def claims(record: Reproduced) -> list[Claim]:
    """One for every mechanism that is here and there."""
    listed = []
    for expression, (name, published) in THEIRS.items():
        ours = efficiency_length(record, expression, UNFUSED)
        holds = None if ours is None else max(ours / published, published / ours) <= LIKE
        fused = in_words(record, efficiency_length(record, expression, FUSED))
        words = f"{in_words(record, ours)}, and {fused} where exact attention is fused"
        listed.append(Claim(f"{name} is faster than exact attention from {published:,.0f} tokens on", words, holds))
    return listed


def draw(record: Reproduced) -> tuple[Figure, str]:
    """Times over those of exact attention, unfused and fused; below the line they are faster."""
    figure, panels = common.figure(4.8, 2, sharey=True)
    names = [name for name in (*THEIRS, *OURS) if record.of(competitor=name)]
    for axes, baseline in zip(panels, (UNFUSED, FUSED), strict=True):
        common.logarithmic(axes, 2)
        exact = times(record, baseline)
        axes.set_title(f"time over that of {baseline}")
        axes.axhline(1.0, color=INK, linewidth=1.2)
        for at, name in enumerate(names):
            seconds = times(record, name)
            points = {length: seconds[length] / exact[length] for length in sorted(seconds.keys() & exact.keys())}
            common.line(axes, points, "-" if at < 7 else "--", color=(*COLOURS, PALE)[at % 7], label=name)
        common.labelled(axes, "tokens")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    return figure, f"Time of a forward pass over that of exact attention, {len(names)} mechanisms against length."


def tables(record: Reproduced) -> list[Table]:
    """The lengths beside the paper's, and all times."""
    measured = [name for name in (*THEIRS, *OURS) if record.of(competitor=name)]
    rows = []
    for name in measured:
        theirs, length = THEIRS.get(name, ("-", None))
        lengths = [efficiency_length(record, name, baseline) for baseline in (UNFUSED, FUSED)]
        published = "-" if length is None else f"{length:,.0f}"
        rows.append([f"`{name}`", theirs, published, *(in_words(record, each) for each in lengths)])

    def time(name: str, length: int) -> str:
        seconds, exact = times(record, name).get(length), times(record, UNFUSED).get(length, 0.0)
        text = milliseconds(None if seconds is None else 1000 * seconds)
        return f"**{text}**" if seconds is not None and seconds < exact else text

    shown = {UNFUSED: UNFUSED, FUSED: FUSED, **{name: f"`{name}`" for name in measured}}
    every = [[words, *(time(name, length) for length in LENGTHS)] for name, words in shown.items()]
    heads = ["mechanism", "the paper calls it", "published", "against unfused", "against fused"]
    return [
        Table("Efficiency length: tokens from which it is faster", heads, rows),
        Table("Time of a forward pass; bold: faster than unfused", ["", *(f"{n:,}" for n in LENGTHS)], every),
    ]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    longest = max(times(record, UNFUSED), default=0)
    return [
        "Their script reads the clock around calls on a GPU without waiting for the GPU. Short calls then take what "
        "starting kernels takes. Here every call ends before the clock is read.",
        "Their script fits a parabola to exact attention and a line to the others, and takes where they meet. Here the "
        "length is where measured times cross.",
        "They timed on a GPU, where scores of short sequences cost little beside starting kernels. Here it is a CPU. "
        "There exact attention without fusion is bound by memory from short lengths on.",
        f"Unfused attention holds two matrices of scores for one sequence of the batch, {HEADS} n^2 numbers each. The "
        f"sequences go one after the other. It was measured up to {longest:,} tokens.",
        "Fused attention is torch's own, the one to beat.",
        "Shapes are theirs: 512 wide, 8 heads, batches of 4, 16 landmarks or slots, windows of 16 to each side. The "
        "number of random features is not in their script: 64 here.",
        "Projections are the same for all and do not move the crossing. They are left out, and so is dropout.",
        "ABC, LARA and Agent left the library after this record. The script times the others.",
    ]


REPRODUCTION = Reproduction(
    "cab", "Tokens from which mechanisms are faster than exact attention",
    "Zhang et al. 2023, CAB, arXiv 2210.07661, efficiency lengths", minutes=10, seeds=0,
    measure=measure, claims=claims, draw=draw, tables=tables, why=why,
)  # fmt: skip

if __name__ == "__main__":
    common.start(REPRODUCTION)
