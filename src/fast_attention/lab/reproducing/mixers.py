"""FNet, AFT, gMLP, MLP-Mixer and the Synthesizers beside exact attention: masked bytes, equal parameters and steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from matplotlib.figure import Figure

from fast_attention import catalogue
from fast_attention.lab import hover, measure
from fast_attention.lab.drawing import COLOURS, INK, PALE, figure_grid, labelled, number, picture
from fast_attention.lab.measure import Setting
from fast_attention.lab.numbers import bytes_of, milliseconds
from fast_attention.lab.records import EXACT, Cell, Timed
from fast_attention.lab.reproducing.reproduction import Budget, Claim, Published, Reproduced, Reproduction, Row
from fast_attention.lab.reproducing.runs import Training, equal_steps, trained
from fast_attention.lab.study.plan import ALONE, CONTROLS, label, matched
from fast_attention.lab.study.plan import EXACT as SOFTMAX
from fast_attention.lab.study.record import Result, Study, Summary
from fast_attention.lab.tables import Row as TableRow
from fast_attention.lab.tables import Table
from fast_attention.lab.timing import TimingGroup
from fast_attention.tasks.bytes import ByteLM
from fast_attention.tasks.task import IGNORED, Batch, Split, random_for
from fast_attention.training.settings import TrainingSettings

MIXERS = (
    SOFTMAX, ALONE, "FNet()", "AFTSimple()", "AFTLocal()", "AFTConv()", "GMLP()", "MLPMixer()", "DenseSynthesizer()",
    "RandomSynthesizer()", "FactorizedRandomSynthesizer()",
)  # fmt: skip
LENGTHS = (512, 2048)
MODEL = {"width": 64, "heads": 2, "layers": 2}
# The others know where a byte stands by their own weights or, as AFT-simple, gain nothing from being told.
POSITIONS = {SOFTMAX: "rotary", ALONE: "rotary", "FNet()": "sinusoidal"}
SETTINGS = TrainingSettings(lr=5e-3, evaluation_batches=16, save_seconds=0.0)
TOKENS = 2048  # of a batch, at either length
MOST = 2000  # steps
TIMING, LONGEST_TIMING = 0.1, 180.0  # of the time is for time and memory, and no more seconds
MASK, SHARE = 256, 0.15  # the token in place of a byte, and how many of them are


@dataclass(frozen=True, repr=False)
class MaskedBytes(ByteLM):
    """Predict masked bytes from both sides: 15 % of them, all replaced by a token of their own, no padding.

    Every mixer can learn it, whether it is causal or takes a key mask or not.
    """

    context: int = LENGTHS[0]

    causal = False
    reads = ""

    @property
    def vocab_size(self) -> int:
        """The bytes and the mask."""
        return MASK + 1

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Passages with masks, and the bytes beneath these."""
        tokens, draws = super().batch(split, index, size).tokens, random_for(self, split, "masks", index)
        hidden = torch.rand(tokens.shape, generator=draws) < SHARE
        return Batch(tokens.masked_fill(hidden, MASK), tokens.masked_fill(~hidden, IGNORED))

    def baselines(self) -> dict[str, float]:
        """Bits of a byte by how often it stands in the text; the others of ``ByteLM`` read from left to right."""
        (name, bits), *_ = super().baselines().items()
        return {name: bits}


def model_of(name: str) -> dict[str, Any]:
    """The settings of a mixer's model."""
    return {**MODEL, "positions": POSITIONS.get(name, "none")}


def training(name: str, length: int) -> Training:
    """A mixer at one length, with as many tokens in a batch as at the other."""
    task, settings = MaskedBytes(context=length), replace(SETTINGS, batch_size=max(1, TOKENS // length))
    return Training(task, matched(task, name, model_of(name)), settings)


def run(budget: Budget) -> Iterator[Row]:
    """Time and memory of every mixer, then training runs: all mixers at both lengths with one seed before the next."""
    seconds = min(TIMING * budget.seconds, LONGEST_TIMING)
    for length in LENGTHS:
        if not any(row["length"] == length for row in _costs(budget.rows)):
            yield from _measured(length, seconds / len(LENGTHS), budget)
    plans = {(length, name): training(name, length) for length in LENGTHS for name in MIXERS}
    rest = replace(budget, seconds=(budget.seconds - seconds) / budget.seeds, rows=tuple(_trainings(budget.rows)))
    count = equal_steps(rest, plans.values(), MOST)
    for seed, ((length, name), plan) in itertools.product(range(budget.seeds), plans.items()):
        if rest.has(mechanism=name, length=length, seed=seed):
            continue
        if seed and not budget.left:
            return
        budget.watch(f"{name}, {length:,} tokens, seed {seed}, {count} steps")
        settings = replace(plan.settings, steps=count, evaluate_every=count)
        result = trained(plan.task, name, seed, settings, model_of(name))
        yield {"mechanism": name, "length": length, "seed": seed, "steps": count, "result": result.__dict__}


def _trainings(rows: Iterable[Row]) -> list[Row]:
    """The rows of training runs, which have a seed."""
    return [row for row in rows if "seed" in row]


def _costs(rows: Iterable[Row]) -> list[Row]:
    """The rows of time and memory."""
    return [row for row in rows if "cell" in row]


def _measured(length: int, seconds: float, budget: Budget) -> Iterator[Row]:
    """Milliseconds and bytes of a layer's mixing at one length, in turns with exact attention."""
    timed, setting = Timed({}), Setting(2, 32, torch.device("cpu"), torch.float32, False, True)
    competitors = measure.against_exact([catalogue.parse(name) for name in MIXERS[1:]])
    TimingGroup(setting, competitors, timed, length, seconds, budget.watch).run()
    for cell in timed.cells:
        name = SOFTMAX if cell.mechanism == EXACT else cell.mechanism
        yield {"mechanism": name, "length": length, "cell": cell.__dict__}


def summaries(record: Reproduced, length: int) -> dict[str, Summary]:
    """The means of every mixer that was trained at a length, the best first."""
    runs = Study({"equal": "steps"}, [Result(**row["result"]) for row in _trainings(record.of(length=length))])
    held = {name: summary for name in MIXERS if (summary := runs.summary(name)) is not None}
    return dict(sorted(held.items(), key=lambda pair: pair[1].mean))


def cell(record: Reproduced, name: str, length: int) -> Cell:
    """Time and memory of a mixer at one length."""
    rows = _costs(record.of(mechanism=name, length=length))
    return Cell(**rows[0]["cell"]) if rows else Cell(name, length)


def interval(summary: Summary) -> str:
    """A mean and half of its interval, where there are several seeds."""
    return f"{summary.mean:.3f}" + ("" if summary.spread is None else f" ± {summary.spread:.3f}")


def apart(one: Summary, other: Summary) -> bool:
    """Whether the first is better by more than both intervals."""
    return one.mean + (one.spread or 0.0) < other.mean - (other.spread or 0.0)


def claims(record: Reproduced) -> list[Claim]:
    """What the papers say of theirs, at each length."""
    held = {length: summaries(record, length) for length in LENGTHS}
    return [
        claim
        for length, ranked in held.items()
        if len(ranked) == len(MIXERS)
        for claim in (_competitive(ranked, length), _learning(ranked, length), _fnet(record, ranked, length))
    ]


def _named(names: list[str], held: dict[str, Summary]) -> str:
    return ", ".join(f"{name} {interval(held[name])}" for name in names) or "none"


def _competitive(held: dict[str, Summary], length: int) -> Claim:
    """Whether they come near exact attention."""
    others = [name for name in held if name not in CONTROLS]
    near = [name for name in others if not apart(held[SOFTMAX], held[name])]
    return Claim(
        f"the others are not far behind exact attention at {length:,} tokens",
        f"{len(near)} of {len(others)} are as good within the intervals or better than exact attention, "
        f"{interval(held[SOFTMAX])}: {_named(near, held)}; behind it: "
        f"{_named([name for name in others if name not in near], held)}",
        len(near) == len(others),
    )


def _learning(held: dict[str, Summary], length: int) -> Claim:
    """Whether they learn more than how often each byte is next to none in particular."""
    others = [name for name in held if name not in CONTROLS]
    learning = [name for name in others if apart(held[name], held[ALONE])]
    return Claim(
        f"each of them learns from other tokens at {length:,}",
        f"{len(learning)} of {len(others)} predict better than no mixing, {interval(held[ALONE])}, by more than the "
        "intervals",
        len(learning) == len(others),
    )


def _fnet(record: Reproduced, held: dict[str, Summary], length: int) -> Claim:
    """Whether FNet trades quality for time."""
    ratio, fnet = cell(record, "FNet()", length).training_ratio, held["FNet()"]
    times = "an unknown share" if ratio is None else f"{ratio:.2f}"
    return Claim(
        f"FNet trains faster than attention and is less accurate at {length:,} tokens",
        f"it has {interval(fnet)} for {interval(held[SOFTMAX])}, and a layer's mixing takes {times} of the time of "
        "fused attention",
        None if ratio is None else ratio < 1 and fnet.mean > held[SOFTMAX].mean,
    )


@picture
def drawing(record: Reproduced) -> tuple[Figure, str]:
    """Quality with its interval against the time of a pass, at each length."""
    figure, panels = figure_grid(4.4, 1, len(LENGTHS), sharey=True)
    for axes, length in zip(panels, LENGTHS, strict=True):
        axes.set_xscale("log")
        for at, (name, summary) in enumerate(sorted(summaries(record, length).items())):
            ms = cell(record, name, length).training_ms
            if ms is not None:
                colour = INK if name == SOFTMAX else PALE if name == ALONE else COLOURS[at % len(COLOURS)]
                axes.errorbar(
                    ms, summary.mean, summary.spread or 0.0, color=colour, marker="osD^vP*X"[at % 8], linestyle="none",
                    capsize=3, label=label(name),
                )  # fmt: skip
                hover.point(axes, ms, summary.mean, f"{label(name)}: {interval(summary)} bits, {milliseconds(ms)}")
        axes.set_title(f"{length:,} tokens")
        axes.xaxis.set_major_formatter(number)
        labelled(axes, "milliseconds of a layer's mixing, forward and backward", "")
    panels[0].set_ylabel("bits per masked byte (lower is better)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure, f"Bits per masked byte of {len(MIXERS)} mixers against the time of a pass, at two lengths."


def tables(record: Reproduced) -> list[Table]:
    """One table: quality, parameters, time and memory at both lengths."""
    held = {length: ranked for length in LENGTHS if (ranked := summaries(record, length))}
    heads = [f"{what} at {length:,}" for length in held for what in ("bits", "parameters", "time", "peak")]
    trainings, first = _trainings(record.rows), next(iter(held.values()), {})
    rows = [
        TableRow(
            [label(name), *(text for length in held for text in _cells(record, held[length].get(name), name, length))],
            "exact" if name == SOFTMAX else "pale" if name == ALONE else "",
        )
        for name in first
    ]
    counts = MaskedBytes().baselines()
    base = ", ".join(f"{value:.3f} by the counts of {name}" for name, value in counts.items())
    title = (
        f"Bits per masked byte after {trainings[0]['steps'] if trainings else 'no'} steps, 95 % intervals over "
        f"{len({row['seed'] for row in trainings})} seeds "
        f"({base}); time and peak memory of the mixing of one layer, forward and backward"
    )
    printed = [[each.what, str(each.value), each.where] for each in PUBLISHED]
    return [
        Table(["mixer", *heads], rows, title=title),
        Table(["", "published", "where"], printed, left=(1, 2), title="Published", plain=True),
    ]


def _cells(record: Reproduced, summary: Summary | None, name: str, length: int) -> list[str]:
    """What a mixer's row holds of one length."""
    costs = cell(record, name, length)
    quality = ["", ""] if summary is None else [interval(summary), f"{summary.parameters:,}"]
    return [*quality, milliseconds(costs.training_ms), bytes_of(costs.training_bytes)]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    rows = _trainings(record.rows)
    seconds = math.fsum(row["result"]["curve"][-1][1] for row in rows) / max(len(rows), 1)
    return [
        "No paper measures them side by side, so there is no published table. Their numbers are of models a hundred "
        "times as large, trained a thousand times as long.",
        f"Each of {len(rows)} runs had {rows[0]['steps'] if rows else 'no'} steps of {TOKENS:,} bytes, about "
        f"{seconds:.0f} s: in so short a training what counts is how soon a mixer finds the neighbours of a byte. A "
        "window and rotary positions say where they are; weights for each position must learn it at every position.",
        "Parameters are made equal by the width of the feed-forward layers. Weights of L x L positions alone are more "
        "than a whole model's: such mixers keep feed-forward layers of one unit and have the parameters that the table "
        "says.",
        f"Times are taken in turns with exact attention in the same rounds: load average {record.meta['load_average']} "
        f"before and {record.meta.get('load_average_after')} after on {record.meta['cores']} cores. Where that is more "
        "than the cores, times are those of a busy machine, and only their order means something.",
    ]


PUBLISHED = (
    Published(
        "FNet", "92 to 97 % of BERT's accuracy, trains 80 % faster on GPUs at 512 tokens", "2105.03824, abstract"
    ),
    Published("AFT", "competitive with attention", "2105.14103, abstract"),
    Published("gMLP", "as good as Transformers in language and vision", "2105.08050, abstract"),
    Published("MLP-Mixer", "competitive on images", "2105.01601, abstract"),
    Published("Synthesizer", "token-token dot products are not that important", "2005.00743, abstract"),
)
MIXING = Reproduction(
    name="mixers",
    title="FNet, AFT, gMLP, MLP-Mixer, Synthesizers: masked bytes, time, memory",
    paper="arXiv 2105.03824, 2105.14103, 2105.08050, 2105.01601, 2005.00743",
    minutes=30,
    seeds=3,
    published=PUBLISHED,
    run=run,
    claims=claims,
    drawing=drawing,
    tables=tables,
    why=why,
    trains=True,
    source="the papers",
)
