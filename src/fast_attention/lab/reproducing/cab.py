"""CAB's efficiency lengths (Zhang et al. 2023): from how many tokens on a mechanism is faster than exact attention."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fast_attention import clock
from fast_attention.catalogue import parse
from fast_attention.lab import measure
from fast_attention.lab.drawing import COLOURS, INK, PALE, against_length, figure_grid, labelled, line, picture
from fast_attention.lab.hover import Series
from fast_attention.lab.measure import Setting
from fast_attention.lab.numbers import digits, milliseconds
from fast_attention.lab.reproducing.reproduction import Budget, Claim, Published, Reproduced, Reproduction, Row
from fast_attention.lab.tables import Table, Value

HEADS, HEAD_DIM, BATCH = 8, 64, 4
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
ROUNDS = 5
UNFUSED, FUSED = "exact, unfused", "exact, fused"
THEIRS = {
    "ABC": ("ABC(num_slots=16)", 1877.0),
    "Performer": ("FavorPlus(num_features=64)", 2361.0),
    "cosFormer": ("CosFormer()", 2539.0),
    "LARA": ("LARA(num_landmarks=16)", 2541.0),
    "Nyström": ("Nystrom(num_landmarks=16)", 3045.0),
    "local": ("Local(window=16)", 4195.0),
}
OURS = (
    "LinearAttention()", "FavorPlus()", "Linformer(rank=128)", "BigBird()", "BlockLocal()", "Agent(num_agents=16)",
    "AFTSimple()",
)  # fmt: skip
LIKE = 1.5  # a length within this factor of the paper's bears it out
PUBLISHED = tuple(Published(name, length, "efficiency length, running time") for name, (_, length) in THEIRS.items())


@torch.no_grad()
def run(budget: Budget) -> Iterator[Row]:
    """Times of a forward pass, all in turns at one length; a length that does not fit the time is left out."""
    spent: list[float] = []
    for length in LENGTHS:
        if budget.has(length=length):
            continue
        if spent and 4 * spent[-1] > budget.left:
            return
        before = budget.left
        yield from timed(length, budget)
        spent.append(before - budget.left)


def timed(length: int, budget: Budget) -> Iterator[Row]:
    """Rows of one length: the median and the quartiles of the rounds."""
    runs = competitors(length)
    for name, call in runs.items():
        budget.watch(f"{length:,} tokens: {name} warms up")
        call()
    budget.watch(f"{length:,} tokens: {len(runs)} in turns")
    for name, samples in clock.in_turns(runs, torch.device("cpu"), ROUNDS, budget.left / 2).items():
        low, _, high = statistics.quantiles(samples * (2 if len(samples) == 1 else 1), n=4, method="inclusive")
        row = {"length": length, "competitor": name, "seconds": statistics.median(samples)}
        yield {**row, "low": low, "high": high, "rounds": len(samples)}


def competitors(length: int) -> dict[str, Callable[[], Any]]:
    """What is timed: exact attention in both forms, unless its scores do not fit into memory, and the others."""
    setting = Setting(HEADS, HEAD_DIM, torch.device("cpu"), torch.float32, False, False, batch=BATCH)
    tensors = setting.tensors(length)
    runs: dict[str, Callable[[], Any]] = {FUSED: measure.exact(setting, tensors).forward}
    scores = 4 * HEADS * length**2  # bytes; the weights are as many again
    if 2.2 * scores < measure.memory_at_hand(setting.device):
        runs = {UNFUSED: lambda: unfused(*tensors), **runs}
    for name in (*(expression for expression, _ in THEIRS.values()), *OURS):
        runs[name] = measure.competitor(parse(name), setting, tensors).forward
    return runs


def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact attention in three operations that hold all scores, the paper's baseline, one sequence after the other."""
    scale = 1 / math.sqrt(q.shape[-1])
    return torch.stack([((scale * a) @ b.mT).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)])


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
            part = gaps[before] / (gaps[before] - gaps[after])
            return before * (after / before) ** part
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
    for name, (expression, published) in THEIRS.items():
        ours = efficiency_length(record, expression, UNFUSED)
        holds = None if ours is None else max(ours / published, published / ours) <= LIKE
        fused = in_words(record, efficiency_length(record, expression, FUSED))
        words = f"{in_words(record, ours)}, and {fused} where exact attention is fused"
        listed.append(Claim(f"{name} is faster than exact attention from {published:,.0f} tokens on", words, holds))
    return listed


@picture
def drawing(record: Reproduced) -> tuple[Figure, str]:
    """Times over those of exact attention, unfused and fused; below the line they are faster."""
    figure, panels = figure_grid(4.8, 1, 2, sharey=True)
    names = [*(expression for expression, _ in THEIRS.values()), *OURS]
    for axes, baseline in zip(panels, (UNFUSED, FUSED), strict=True):
        exact = times(record, baseline)
        against_length(axes, LENGTHS, f"time over that of {baseline}")
        axes.axhline(1.0, color=INK, linewidth=1.2)
        for at, name in enumerate(names):
            seconds = times(record, name)
            points = {length: seconds[length] / exact[length] for length in sorted(seconds.keys() & exact.keys())}
            colour, dash = (*COLOURS, PALE)[at % 7], "-" if at < 7 else "--"
            line(axes, points, dash, Series(name, up=_times), color=colour, label=name)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        labelled(axes, "tokens", "")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure, f"Time of a forward pass over that of exact attention, {len(names)} mechanisms against length."


def _times(ratio: float) -> str:
    return f"{digits(ratio, 3)} times"


def tables(record: Reproduced) -> list[Table]:
    """The lengths beside the paper's, and all times."""
    rows = []
    published = {expression: (name, length) for name, (expression, length) in THEIRS.items()}
    for name in (*published, *OURS):
        theirs, length = published.get(name, ("", None))
        lengths = [efficiency_length(record, name, baseline) for baseline in (UNFUSED, FUSED)]
        rows.append(
            [name, theirs or "-", "-" if length is None else f"{length:,.0f}", *(in_words(record, n) for n in lengths)]
        )
    heads = ["", *(f"{length:,}" for length in LENGTHS)]
    every = [
        [name, *(_time(record, name, length) for length in LENGTHS)] for name in (UNFUSED, FUSED, *published, *OURS)
    ]
    return [
        Table(["mechanism", "the paper calls it", "published", "against unfused", "against fused"], rows, left=(1,),
              title="Efficiency length: tokens from which it is faster"),
        Table(heads, every, title="Time of a forward pass"),
    ]  # fmt: skip


def _time(record: Reproduced, name: str, length: int) -> Value:
    seconds, exact = times(record, name).get(length), times(record, UNFUSED).get(length)
    kind = "" if seconds is None or exact is None or name == UNFUSED else "fast" if seconds < exact else "slow"
    return Value(milliseconds(None if seconds is None else 1000 * seconds), kind)


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    longest = max(times(record, UNFUSED), default=0)
    return [
        "Their script reads the clock around calls on a GPU without waiting for the GPU, so that short calls take "
        "what starting kernels takes; it fits a parabola to exact attention and a line to the others, and takes where "
        "they meet. Here every call ends before the clock is read, and the length is where measured times cross.",
        "They timed on a GPU, where scores of short sequences cost little beside starting kernels; here it is a CPU, "
        "on which exact attention without fusion is bound by memory from some hundred tokens on.",
        f"Unfused attention holds two matrices of scores, {HEADS} n^2 numbers each for one sequence of the batch; they "
        f"go one after the other. It was measured up to {longest:,} tokens. Fused is torch's own, the one to beat.",
        "Shapes are theirs (512 wide, 8 heads, batches of 4, 16 landmarks or slots, windows of 16 to each side). Their "
        "projections, the same for all, do not move the crossing and are left out; so is dropout. The number of "
        "random features is not in their script: 64 here.",
    ]


CAB = Reproduction(
    name="cab",
    title="Tokens from which mechanisms are faster than exact attention",
    paper="Zhang et al. 2023, CAB, arXiv 2210.07661, efficiency lengths",
    minutes=10,
    seeds=0,
    published=PUBLISHED,
    run=run,
    claims=claims,
    drawing=drawing,
    tables=tables,
    why=why,
)
