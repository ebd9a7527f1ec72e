"""Capacity of associative memories, Fig. 2 of Schlag et al. 2021: what is retrieved of 20 to 600 associations."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fast_attention.lab import hover
from fast_attention.lab.drawing import COLOURS, INK, PALE, PAPER, figure_grid, labelled, line, picture
from fast_attention.lab.hover import Series
from fast_attention.lab.numbers import amount
from fast_attention.lab.reproducing.associations import SIZES, Contender, trained
from fast_attention.lab.reproducing.reproduction import Budget, Claim, Published, Reproduced, Reproduction, Row
from fast_attention.lab.tables import Table, Value

HEAVY = (20, 60)  # for maps of a thousand features
CONTENDERS = (
    Contender("softmax", "Softmax()", sizes=(*SIZES, 600)),
    Contender("elu + 1", "LinearAttention()", sizes=(*SIZES, 600)),
    Contender("DPFP-1", "LinearAttention(feature_map=DPFP())"),
    Contender("DPFP-2", "LinearAttention(feature_map=DPFP(nu=2))"),
    Contender("DPFP-3", "LinearAttention(feature_map=DPFP(nu=3))"),
    Contender("FAVOR+ 64, redrawn", "FavorPlus(num_features=64, features='hyperbolic')", redrawn=True),
    Contender("FAVOR+ 512, redrawn", "FavorPlus(num_features=512, features='hyperbolic')", redrawn=True, sizes=HEAVY),
    Contender("FAVOR+ 64, fixed", "FavorPlus(num_features=64, features='hyperbolic')"),
    Contender("FAVOR+ 512, fixed", "FavorPlus(num_features=512, features='hyperbolic')", sizes=HEAVY),
    Contender("learned features", "LearnedFeatures(num_features=64)"),
    Contender("Hybrid", "Hybrid(near=Local(window=16), far=LearnedFeatures(num_features=64))"),
    Contender("Taylor of 16", "LinearAttention(feature_map=Taylor())", width=16),
    Contender("ABC", "ABC()"),
    Contender("window of 64", "Local(window=64)"),
    Contender("AFT", "AFTSimple()", channels=True),
    Contender("Manhattan", "Manhattan()", channels=True),
)
FEATURES = {"elu + 1": 64, "DPFP-1": 128, "DPFP-2": 256, "DPFP-3": 384}  # of a key of 64 numbers
COSTS = {**FEATURES, "Hybrid": 800}  # of a key in a step, in features of a linear map
LOGS = {
    "softmax": (0.0006, 0.0001, 0.0, 0.0, 0.0, 0.0303),
    "elu + 1": (0.0009, 0.0245, 0.164, 0.342, 0.422, 0.451),
    "DPFP-1": (0.0008, 0.0004, 0.0002, 0.173, 0.342),
    "DPFP-2": (0.0003, 0.0010, 0.0005, 0.0004, 0.164),
    "DPFP-3": (0.0005, 0.0005, 0.0007, 0.0009, 0.036),
    "FAVOR+ 64, redrawn": (0.117, 0.483, 0.496, 0.5, 0.5),
    "FAVOR+ 512, redrawn": (0.024, 0.407),
}
WHERE = "logs of the paper's code, Fig. 2"
PUBLISHED = tuple(
    Published(f"{each.label}, {size}", loss, WHERE)
    for each in CONTENDERS
    for size, loss in zip(each.sizes, LOGS.get(each.label, ()), strict=False)
)
LEAST = 12.0  # seconds that a training may take however small its share of the time is
MANY = 400
FULL = 0.01  # a loss below which all is retrieved
NEAR = 0.03  # two losses this near are the same


def run(budget: Budget) -> Iterator[Row]:
    """Train every contender at every size, small sizes first; the time at hand for each is by what its steps cost."""
    cells = [
        (seed, size, each)
        for seed in range(1, budget.seeds + 1)
        for size in sorted({size for each in CONTENDERS for size in each.sizes})
        for each in CONTENDERS
        if size in each.sizes and not budget.has(contender=each.label, associations=size, seed=seed)
    ]
    for at, (seed, size, each) in enumerate(cells):
        if not budget.left and (at or budget.rows):
            return
        share = _cost(each, size) / sum(_cost(other, many) for _, many, other in cells[at:])  # more, if some end early
        seconds = min(max(share * budget.left, LEAST), budget.left)
        budget.watch(f"{each.label}, {size} associations, seed {seed}")
        row = {"contender": each.label, "mechanism": each.mechanism, "associations": size, "seed": seed}
        yield {**row, **trained(each, size, seed, seconds)}


def _cost(each: Contender, size: int) -> int:
    """Numbers that a step makes of the keys, but for a factor."""
    return size * (COSTS.get(each.label) or (1024 if "512" in each.label else 200))


def losses(record: Reproduced, label: str, *, ended: bool = False) -> dict[int, float]:
    """The loss by the number of associations, the mean over the seeds; ``ended``: without trainings that time ended."""
    known: dict[int, list[float]] = {}
    for row in record.of(contender=label):
        if not ended or row["stopped"] != "time":
            known.setdefault(row["associations"], []).append(row["loss"])
    return {size: statistics.fmean(values) for size, values in sorted(known.items())}


def published(label: str) -> dict[int, float]:
    """The loss of the paper's logs by the number of associations."""
    sizes = next(each.sizes for each in CONTENDERS if each.label == label)
    return dict(zip(sizes, LOGS.get(label, ()), strict=False))


def claims(record: Reproduced) -> list[Claim]:
    """What Fig. 2 shows, of trainings that ended by the paper's own rules."""
    return [_softmax(record), _order(record), _capacity(record), _numbers(record), _favor(record)]


def _softmax(record: Reproduced) -> Claim:
    known = {size: loss for size, loss in losses(record, "softmax", ended=True).items() if size <= MANY}
    words = f"its loss is at most {max(known.values()):.4f} up to {max(known)}" if known else "not measured"
    holds = max(known.values()) <= FULL if MANY in known else None
    return Claim(f"softmax retrieves everything up to {MANY} associations", words, holds)


def _order(record: Reproduced) -> Claim:
    names, ordered, shared = list(FEATURES), [], []
    for larger, smaller in zip(names[1:], names, strict=False):
        few, many = (losses(record, name, ended=True) for name in (smaller, larger))
        for size in few.keys() & many.keys():
            if max(few[size], many[size]) > FULL:
                shared.append(size)
                ordered += [size] if many[size] < few[size] else []
    words = f"so in {len(ordered)} of {len(shared)} pairs of which either fails" if shared else "not measured"
    holds = len(ordered) == len(shared) if shared else None
    return Claim("a map of more features loses less, from elu + 1 to DPFP-3", words, holds)


def _capacity(record: Reproduced) -> Claim:
    """A map of C features holds fewer than C associations: what is left of them is lost."""
    words, holds = [], []
    for name, count in FEATURES.items():
        known = losses(record, name, ended=True)
        full = [size for size, loss in known.items() if loss <= FULL]
        over = [size for size, loss in known.items() if size > count]
        if full and over:
            words.append(f"{name} ({count} features) holds {max(full)} and not {min(over)}")
            holds.append(max(full) < min(over) and all(known[size] > FULL for size in over))
    return Claim(
        "as many associations are held as there are features",
        "; ".join(words) or "not measured",
        all(holds) if holds else None,
    )


def _numbers(record: Reproduced) -> Claim:
    pairs = {
        f"{label} at {size} ({ours:.3f} for {published(label)[size]:.3f})": abs(ours - published(label)[size])
        for label in ("softmax", *FEATURES)
        for size, ours in losses(record, label, ended=True).items()
        if size in published(label)
    }
    far = [name for name, gap in pairs.items() if gap > NEAR]
    words = f"{len(pairs) - len(far)} of {len(pairs)} losses are within {NEAR} of the paper's"
    words += f", not those of {', '.join(far)}" if far else ""
    return Claim("its losses of softmax, elu + 1 and DPFP are these", words, not far if pairs else None)


def _favor(record: Reproduced) -> Claim:
    names = [f"FAVOR+ {m}, {how}" for m in (64, 512) for how in ("redrawn", "fixed")]
    ours = {name: {n: loss for n, loss in losses(record, name, ended=True).items() if n >= 60} for name in names}
    shown = {name: known for name, known in ours.items() if known}
    words = "; ".join(
        f"{name}: {', '.join(f'{loss:.3f} at {size}' for size, loss in known.items())}" for name, known in shown.items()
    )
    holds = all(loss >= 0.4 for known in shown.values() for loss in known.values()) if shown else None
    return Claim("FAVOR+ learns next to nothing from 60 associations on", words or "not measured", holds)


@picture
def drawing(record: Reproduced) -> tuple[Figure, str]:
    """Loss against associations, ours and the paper's; recall against the size of the state."""
    figure, (left, right) = figure_grid(5.2, 1, 2)
    shown = [each for each in CONTENDERS if record.of(contender=each.label)]
    for at, each in enumerate(shown):
        _line(left, record, each.label, at)
    size = max(
        (n for n in SIZES if len({r["contender"] for r in record.of(associations=n)}) >= len(shown) - 2),
        default=SIZES[0],
    )
    for at, each in enumerate(shown):
        rows = record.of(contender=each.label, associations=size)
        if rows:
            recall = statistics.fmean(r["recall"] for r in rows)
            right.scatter(rows[0]["state"], recall, color=_colour(at), marker=_marker(at), s=42)
            hover.point(right, rows[0]["state"], recall, f"{each.label}: {recall:.3f}, {rows[0]['state']:,} numbers")
    left.set_xticks(SIZES, [str(n) for n in SIZES])
    labelled(left, "associations in a sequence of one layer; dotted: the paper", "loss (0.5: nothing is retrieved)")
    right.set_xscale("log")
    right.xaxis.set_major_formatter(lambda value, _: amount(int(value)))
    labelled(right, f"numbers in the state, {size} associations", "recall: share of queries answered right")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    words = "loss against associations, dotted the paper's, hollow where time ended the training; recall against state"
    return figure, f"Of {len(shown)} mechanisms: {words}"


def _line(axes: Axes, record: Reproduced, label: str, at: int) -> None:
    points, ended = losses(record, label), losses(record, label, ended=True)
    options: Any = {"color": _colour(at), "marker": _marker(at), "markersize": 4}
    line(axes, points, "-", Series(label, _many), linewidth=1.2, label=label, **options)
    late = {size: loss for size, loss in points.items() if size not in ended}
    line(axes, late, "", markerfacecolor=PAPER, **options)
    line(axes, published(label), ":", color=_colour(at), linewidth=1, marker="")


def _many(size: int) -> str:
    return f"{size} associations"


def _colour(at: int) -> str:
    return (INK, *COLOURS, PALE)[at % (len(COLOURS) + 2)]


def _marker(at: int) -> str:
    return "o" if at < len(COLOURS) + 2 else "^"


def tables(record: Reproduced) -> list[Table]:
    """The losses, the paper's below ours, and the share of queries answered right."""
    sizes = sorted({size for each in CONTENDERS for size in each.sizes})
    shown = [each for each in CONTENDERS if record.of(contender=each.label)]
    heads = ["", *(f"{size} associations" for size in sizes)]
    rows = [[each.label, *(_cell(record, each, size) for size in sizes)] for each in shown]
    recall = []
    for each in shown:
        held = {size: record.of(contender=each.label, associations=size) for size in sizes}
        cells = [
            f"{100 * statistics.fmean(r['recall'] for r in rows):.0f} %" if rows else "-" for rows in held.values()
        ]
        state = next((amount(rows[0]["state"]) for rows in reversed(held.values()) if rows), "-")
        recall.append([each.label, *cells, state, each.mechanism])
    most = "numbers in the state at its most"
    return [
        Table(heads, rows, title="Loss here, and below it the paper's; *: time ended the training"),
        Table([*heads, most, "mechanism"], recall, title="Queries answered right", left=(len(heads) + 1,)),
    ]


def _cell(record: Reproduced, each: Contender, size: int) -> Value:
    ours, paper = losses(record, each.label).get(size), published(each.label).get(size)
    late = size not in losses(record, each.label, ended=True)
    text = "-" if ours is None else f"{ours:.4f}{'*' if late else ''}"
    kind = "" if ours is None else "fast" if ours <= FULL else "slow" if ours >= 0.4 else ""
    return Value(text, kind, small="" if paper is None else f"{paper:.4f}")


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    late = sum(row["stopped"] == "time" for row in record.rows)
    return [
        "The task, the sizes of the model, Adam at 0.001, batches of 32, an evaluation every 100 steps and the end at "
        "a loss of 0.001 or after 11 evaluations without progress are theirs; seeds and the order of draws are not.",
        f"Time ended {late} of {len(record.rows)} trainings here, which their rules would have let go on: hollow in "
        "the picture, with a star in the table, and no statement above rests on them.",
        "Their FAVOR+ draws its projection anew in every pass, does not divide queries and keys by the fourth root of "
        "their width, and divides by no largest term: where keys are long, exp(-|k|^2 / 2) is zero in float32 and so "
        "is the output, whose loss is then 0.5. Ours does both; fixed, its queries and keys are trained for it.",
        "Mechanisms that mix channel by channel (AFT, Manhattan) cannot carry one-hot values as wide as the "
        "vocabulary: theirs are projected to 64 numbers and read out by a trained layer. No query picks a key.",
        "The Taylor map has 1 + d + d^2 features: its queries and keys are 16 wide, as in Based, which makes 273.",
    ]


CAPACITY = Reproduction(
    name="capacity",
    title="Associations that one layer retrieves",
    paper="Schlag et al. 2021, arXiv 2102.11174, Fig. 2",
    minutes=30,
    seeds=1,
    published=PUBLISHED,
    run=run,
    claims=claims,
    drawing=drawing,
    tables=tables,
    why=why,
    trains=True,
)
