"""FNet, AFT, gMLP, MLP-Mixer and the Synthesizers beside exact attention: masked bytes, equal parameters and steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from matplotlib.figure import Figure

from fast_attention import catalogue
from fast_attention.lab import hover, measure
from fast_attention.lab.drawing import COLOURS, INK, PALE, figure_grid, labelled, number, picture
from fast_attention.lab.measure import Setting
from fast_attention.lab.numbers import bytes_of, milliseconds
from fast_attention.lab.records import EXACT, Cell, Timed
from fast_attention.lab.reproducing.reproduction import Budget, Claim, Published, Reproduced, Reproduction, Row
from fast_attention.lab.reproducing.runs import equal_steps, trained
from fast_attention.lab.study.plan import ALONE, label, matched
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
CONTEXT = 32  # in training: so short that few steps suffice to find a byte's neighbours
MODEL = {"width": 64, "heads": 2, "layers": 2, "positions": "learned"}
SETTINGS = TrainingSettings(batch_size=32, lr=5e-3, evaluation_batches=16, save_seconds=0.0)
MOST = 2000  # steps
TIMING = 0.1  # of the time is for time and memory
MASK, SHARE = 256, 0.15  # the token in place of a byte, and how many of them are


@dataclass(frozen=True, repr=False)
class MaskedBytes(ByteLM):
    """Predict masked bytes from both sides: 15 % of them, all replaced by a token of their own, no padding.

    Every mixer can learn it, whether it is causal or takes a key mask or not.
    """

    context: int = CONTEXT

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


TASK = MaskedBytes()


def run(budget: Budget) -> Iterator[Row]:
    """Time and memory of every mixer, then training runs: all mixers with one seed before the next."""
    for length in LENGTHS:
        if not budget.has(length=length):
            yield from _costs(length, TIMING * budget.seconds / len(LENGTHS), budget)
    configs = [matched(TASK, name, MODEL) for name in MIXERS]
    rest = replace(budget, seconds=(1 - TIMING) * budget.seconds / budget.seeds, rows=_trainings(budget.rows))
    count = equal_steps(rest, TASK, configs, SETTINGS, MOST)
    settings = replace(SETTINGS, steps=count, evaluate_every=count)
    for seed, name in itertools.product(range(budget.seeds), MIXERS):
        if budget.has(mechanism=name, seed=seed):
            continue
        if seed and not budget.left:
            return
        budget.watch(f"{name}, seed {seed}, {count} steps")
        result = trained(TASK, name, seed, settings, MODEL)
        yield {"mechanism": name, "seed": seed, "steps": count, "result": result.__dict__}


def _trainings(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of training runs, which beside those of time and memory have a seed."""
    return tuple(row for row in rows if "seed" in row)


def _costs(length: int, seconds: float, budget: Budget) -> Iterator[Row]:
    """Milliseconds and bytes of a layer's mixing at one length, in turns with exact attention."""
    timed, setting = Timed({}), Setting(2, 32, torch.device("cpu"), torch.float32, False, True)
    competitors = measure.against_exact([catalogue.parse(name) for name in MIXERS[1:]])
    TimingGroup(setting, competitors, timed, length, seconds, budget.watch).run()
    for cell in timed.cells:
        name = SOFTMAX if cell.mechanism == EXACT else cell.mechanism
        yield {"mechanism": name, "length": length, "cell": cell.__dict__}


def study(record: Reproduced) -> Study:
    """The training runs as a study, whose means and intervals these are."""
    return Study({"equal": "steps"}, [Result(**row["result"]) for row in _trainings(record.rows)])


def summaries(record: Reproduced) -> dict[str, Summary]:
    """The means of every mixer that was trained, the best first."""
    runs = study(record)
    held = {name: summary for name in MIXERS if (summary := runs.summary(name)) is not None}
    return dict(sorted(held.items(), key=lambda pair: pair[1].mean))


def cell(record: Reproduced, name: str, length: int) -> Cell:
    """Time and memory of a mixer at one length."""
    rows = record.of(mechanism=name, length=length)
    return Cell(**rows[0]["cell"]) if rows else Cell(name, length)


def interval(summary: Summary) -> str:
    """A mean and half of its interval, where there are several seeds."""
    return f"{summary.mean:.3f}" + ("" if summary.spread is None else f" ± {summary.spread:.3f}")


def claims(record: Reproduced) -> list[Claim]:
    """What the papers say of theirs."""
    held = summaries(record)
    if len(held) < len(MIXERS):
        return []
    exact = held[SOFTMAX]
    ahead = [name for name in held if name not in (SOFTMAX, ALONE) and held[name].mean < exact.mean]
    apart = [name for name in ahead if held[name].mean + (held[name].spread or 0) < exact.mean - (exact.spread or 0)]
    learning = [name for name in held if name not in (SOFTMAX, ALONE) and held[name].mean < held[ALONE].mean]
    listed = ", ".join(f"{name} {interval(held[name])}" for name in ahead) or "none"
    fnet, times = held["FNet()"], {n: cell(record, "FNet()", n).training_ratio for n in LENGTHS}
    shown = " and ".join(f"{value:.2f} at {n:,} tokens" for n, value in times.items() if value is not None)
    faster = None if None in times.values() else all(value is not None and value < 1 for value in times.values())
    return [
        Claim(
            "exact attention is the best, and the others are not far behind",
            f"after so few steps {len(ahead)} of {len(held) - 2} are ahead of exact attention, {interval(exact)}, and "
            f"{len(apart)} by more than the intervals: {listed}",
            not apart,
        ),
        Claim(
            "each of them learns from other tokens",
            f"{len(learning)} of {len(held) - 2} predict better than no mixing, {interval(held[ALONE])}",
            len(learning) == len(held) - 2,
        ),
        Claim(
            "FNet trains faster than attention and is less accurate",
            f"it has {interval(fnet)}, and a layer's mixing takes {shown} of the time of fused attention",
            None if faster is None else faster and fnet.mean > exact.mean,
        ),
    ]


@picture
def drawing(record: Reproduced) -> tuple[Figure, str]:
    """Quality with its interval against the time of a pass, at both lengths."""
    figure, panels = figure_grid(4.4, 1, len(LENGTHS), sharey=True)
    held = summaries(record)
    for axes, length in zip(panels, LENGTHS, strict=True):
        axes.set_xscale("log")
        for at, (name, summary) in enumerate(sorted(held.items())):
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
    return figure, f"Bits per masked byte of {len(held)} mixers against the time of a pass, at two lengths."


def tables(record: Reproduced) -> list[Table]:
    """One table: quality, parameters, time and memory at both lengths."""
    costs = [f"{what} at {length:,}" for length in LENGTHS for what in ("time", "peak")]
    rows = []
    for name, summary in summaries(record).items():
        cells = [cell(record, name, length) for length in LENGTHS]
        shown = [text for c in cells for text in (milliseconds(c.training_ms), bytes_of(c.training_bytes))]
        kind = "exact" if name == SOFTMAX else "pale" if name == ALONE else ""
        rows.append(
            TableRow([label(name), interval(summary), str(summary.seeds), f"{summary.parameters:,}", *shown], kind)
        )
    base = ", ".join(f"{value:.3f} by the counts of {name}" for name, value in TASK.baselines().items())
    title = (
        f"Bits per masked byte after {_trainings(record.rows)[0]['steps']} steps, 95 % intervals over the seeds "
        f"({base}); time and peak memory of the mixing of one layer, forward and backward"
    )
    printed = [[each.what, str(each.value), each.where] for each in PUBLISHED]
    return [
        Table(["mixer", "bits", "seeds", "parameters", *costs], rows, title=title),
        Table(["", "published", "where"], printed, left=(1, 2), title="Published", plain=True),
    ]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    rows = _trainings(record.rows)
    seconds = math.fsum(row["result"]["curve"][-1][1] for row in rows) / len(rows)
    return [
        "No paper measures them side by side, so there is no published table. Their numbers are of models a hundred "
        "times as large, trained a thousand times as long.",
        f"Each of {len(rows)} runs had {rows[0]['steps']} steps of {SETTINGS.batch_size} passages of "
        f"{TASK.context} bytes, about {seconds:.0f} s, not ten minutes: in so short a "
        "training what counts is how soon a mixer finds the neighbours of a byte. A mixer with a window is given them; "
        "one with weights for each position must learn them at every position.",
        "Parameters are equal by the width of the feed-forward layers, tables of positions in the mixers included: "
        f"what a mixer spends on {TASK.context} x {TASK.context} positions its feed-forward layers lack.",
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
