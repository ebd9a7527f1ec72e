"""FNet, AFT, gMLP, MLP-Mixer and the Synthesizers beside exact attention: masked bytes, equal parameters and steps.

Records: records/*-reproduce-mixers.json. Again: ``python -m experiments.reproductions.mixers --out out/mixers``
(30 minutes of processor time).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from matplotlib.figure import Figure

from experiments.reproductions import common
from experiments.reproductions.common import Budget, Claim, Reproduced, Reproduction, Row, Table
from experiments.reproductions.training import Training, equal_steps
from experiments.study import Result, Study, Summary, label, matched
from experiments.tasks import IGNORED, Batch, ByteLM, Split, random_for, text_sides
from experiments.train import TrainingSettings
from fast_attention import Bound, Mixer, Shape, catalogue, clock
from fast_attention.counting import peak_bytes
from fast_attention.lab.pictures import COLOURS, INK, PALE
from fast_attention.lab.tables import bytes_of, milliseconds

SOFTMAX, ALONE = "Softmax()", "Local(window=0)"
CONTROLS = (SOFTMAX, ALONE)  # exact attention, and none at all
MIXERS = (
    *CONTROLS, "FNet()", "AFTSimple()", "AFTLocal()", "AFTConv()", "GMLP()", "MLPMixer()", "DenseSynthesizer()",
    "RandomSynthesizer()", "FactorizedRandomSynthesizer()",
)  # fmt: skip
PUBLISHED = {  # no paper measures them side by side
    "FNet": ("92 to 97 % of BERT's accuracy, trains 80 % faster on GPUs at 512 tokens", "2105.03824, abstract"),
    "AFT": ("competitive with attention", "2105.14103, abstract"),
    "gMLP": ("as good as Transformers in language and vision", "2105.08050, abstract"),
    "MLP-Mixer": ("competitive on images", "2105.01601, abstract"),
    "Synthesizer": ("token-token dot products are not that important", "2005.00743, abstract"),
}
LENGTHS = (512, 2048)
MODEL = {"width": 64, "heads": 2, "layers": 2}
# The others know where a byte stands by their own weights or, as AFT-simple, gain nothing from being told.
POSITIONS = {SOFTMAX: "rotary", ALONE: "rotary", "FNet()": "sinusoidal"}
SETTINGS = TrainingSettings(lr=5e-3, evaluation_batches=16)
TOKENS = 2048  # of a batch, at either length
MOST = 2000  # steps
ROUNDS, LONGEST_TIMING = 5, 180.0  # of the timing of one layer, and its seconds at most
MASK, SHARE = 256, 0.15  # the token in place of a byte, and how many of them are


@dataclass(frozen=True, repr=False)
class MaskedBytes(ByteLM):
    """Predict masked bytes from both sides: 15 % of them, all replaced by a token of their own, no padding.

    Every mixer can learn it, whether it is causal or takes a key mask or not.
    """

    context: int = LENGTHS[0]

    causal = False
    reads = ""
    vocab_size = MASK + 1

    def batch(self, split: Split, number: int, size: int) -> Batch:
        """Passages with masks, and the bytes beneath these."""
        tokens, draws = super().batch(split, number, size).tokens, random_for(self, split, "masks", number)
        hidden = torch.rand(tokens.shape, generator=draws) < SHARE
        return Batch(tokens.masked_fill(hidden, MASK), tokens.masked_fill(~hidden, IGNORED))

    def baselines(self) -> dict[str, float]:
        """Bits of a byte by how often it stands in the text; the others of ``ByteLM`` read from left to right."""
        train, valid = text_sides(self)
        counts = torch.bincount(train, minlength=256) + 1.0
        return {"bytes": -(counts / counts.sum()).log2()[valid[: 1 << 20].long()].mean().item()}


# Measuring


def measure(budget: Budget) -> Iterator[Row]:
    """Time and memory of every mixer, then training runs: all mixers at both lengths with one seed before the next."""
    seconds = min(0.1 * budget.seconds, LONGEST_TIMING)
    for length in LENGTHS:
        if not any("cell" in row and row["length"] == length for row in budget.rows):
            budget.say(f"time and memory at {length:,} tokens")
            yield from costs(length, seconds / len(LENGTHS))
    runs = {(length, name): training(name, length) for length in LENGTHS for name in MIXERS}
    rest = replace(
        budget, seconds=(budget.seconds - seconds) / budget.seeds, rows=tuple(r for r in budget.rows if "seed" in r)
    )
    steps = equal_steps(rest, runs.values(), MOST)
    for seed, ((length, name), each) in itertools.product(range(budget.seeds), runs.items()):
        if rest.has(mechanism=name, length=length, seed=seed):
            continue
        if seed and not budget.left:
            return
        budget.say(f"{name}, {length:,} tokens, seed {seed}, {steps} steps")
        settings = replace(each.settings, steps=steps, evaluate_every=steps)
        outcome, curve = each._replace(settings=settings).run(seed)
        result = Result(
            name, seed, outcome.status, outcome.valid, outcome.best, steps, outcome.seconds / steps, 0,
            outcome.parameters, each.config.hidden, curve,
        )  # fmt: skip
        yield {"mechanism": name, "length": length, "seed": seed, "steps": steps, "result": result.__dict__}


def training(name: str, length: int) -> Training:
    """A mixer at one length, with as many tokens in a batch as at the other."""
    task, settings = MaskedBytes(context=length), replace(SETTINGS, batch_size=max(1, TOKENS // length))
    return Training(task, matched(task, name, {**MODEL, "positions": POSITIONS.get(name, "none")}), settings)


def costs(length: int, seconds: float) -> Iterator[Row]:
    """Milliseconds and bytes of a layer's mixing at one length, forward and backward, in turns with exact attention."""
    cpu = torch.device("cpu")
    runs = {name: mixing(name, length) for name in MIXERS}
    peaks = {name: peak_bytes(run, cpu) for name, run in runs.items()}
    samples = clock.in_turns(runs, cpu, ROUNDS, seconds)
    for name, times in samples.items():
        ratio = statistics.median(a / b for a, b in zip(times, samples[SOFTMAX], strict=True))
        cell = {"training_ms": 1000 * statistics.median(times), "training_ratio": ratio, "training_bytes": peaks[name]}
        yield {"mechanism": name, "length": length, "cell": cell}


def mixing(name: str, length: int) -> Callable[[], Any]:
    """A pass forward and backward of one layer's mixing, without projections."""
    torch.manual_seed(0)
    mechanism: Any = catalogue.parse(name)
    heads, width = MODEL["heads"], MODEL["width"] // MODEL["heads"]
    bound = Bound(mechanism, Shape(heads, width, length))
    inputs = list(torch.randn(3, 1, heads, length, width).unbind())
    if isinstance(mechanism, Mixer):
        inputs = [torch.randn(1, length, heads * width)]
    wanted = [*(x.requires_grad_() for x in inputs), *bound.parameters()]

    def run() -> Any:
        out = bound(*inputs)
        return torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    return run


# What it says


def trainings(rows: Iterable[Row]) -> list[Row]:
    """The rows of training runs, which have a seed."""
    return [row for row in rows if "seed" in row]


def summaries(record: Reproduced, length: int) -> dict[str, Summary]:
    """The means of every mixer that was trained at a length, the best first."""
    runs = Study({"equal": "steps"}, [Result(**row["result"]) for row in trainings(record.of(length=length))])
    held = {name: summary for name in MIXERS if (summary := runs.summary(name)) is not None}
    return dict(sorted(held.items(), key=lambda pair: pair[1].mean))


def cell(record: Reproduced, name: str, length: int, what: str) -> Any:
    """Time or memory of a mixer at one length: ``training_ms``, ``training_ratio``, ``training_bytes``."""
    return next((row["cell"][what] for row in record.of(mechanism=name, length=length) if "cell" in row), None)


def interval(summary: Summary) -> str:
    """A mean and half of its interval, where there are several seeds."""
    return f"{summary.mean:.3f}" + ("" if summary.spread is None else f" ± {summary.spread:.3f}")


def apart(one: Summary, other: Summary) -> bool:
    """Whether the first is better by more than both intervals."""
    return one.mean + (one.spread or 0.0) < other.mean - (other.spread or 0.0)


def claims(record: Reproduced) -> list[Claim]:
    """What the papers say of theirs, at each length."""
    return [claim for length in LENGTHS for claim in _claims(record, summaries(record, length), length)]


def _claims(record: Reproduced, held: dict[str, Summary], length: int) -> list[Claim]:
    if len(held) < len(MIXERS):
        return []

    def named(names: list[str]) -> str:
        return ", ".join(f"{name} {interval(held[name])}" for name in names) or "none"

    others = [name for name in held if name not in CONTROLS]
    near = [name for name in others if not apart(held[SOFTMAX], held[name])]
    learning = [name for name in others if apart(held[name], held[ALONE])]
    ratio, fnet = cell(record, "FNet()", length, "training_ratio"), held["FNet()"]
    times = "an unknown share" if ratio is None else f"{ratio:.2f}"
    return [
        Claim(
            f"the others are not far behind exact attention at {length:,} tokens",
            f"{len(near)} of {len(others)} are as good within the intervals or better than exact attention, "
            f"{interval(held[SOFTMAX])}: {named(near)}; behind it: "
            f"{named([name for name in others if name not in near])}",
            len(near) == len(others),
        ),
        Claim(
            f"each of them learns from other tokens at {length:,}",
            f"{len(learning)} of {len(others)} predict better than no mixing, {interval(held[ALONE])}, by more than "
            "the intervals",
            len(learning) == len(others),
        ),
        Claim(
            f"FNet trains faster than attention and is less accurate at {length:,} tokens",
            f"it has {interval(fnet)} for {interval(held[SOFTMAX])}, and a layer's mixing takes {times} of the time of "
            "fused attention",
            None if ratio is None else ratio < 1 and fnet.mean > held[SOFTMAX].mean,
        ),
    ]


def draw(record: Reproduced) -> tuple[Figure, str]:
    """Quality with its interval against the time of a pass, at each length."""
    figure, panels = common.figure(4.4, len(LENGTHS), sharey=True)
    for axes, length in zip(panels, LENGTHS, strict=True):
        axes.set_xscale("log")
        for at, (name, summary) in enumerate(sorted(summaries(record, length).items())):
            if ms := cell(record, name, length, "training_ms"):
                colour = INK if name == SOFTMAX else PALE if name == ALONE else COLOURS[at % len(COLOURS)]
                axes.errorbar(
                    ms, summary.mean, summary.spread or 0.0, color=colour, marker="osD^vP*X"[at % 8], linestyle="none",
                    capsize=3, label=label(name),
                )  # fmt: skip
        axes.set_title(f"{length:,} tokens")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        common.labelled(axes, "milliseconds of a layer's mixing, forward and backward")
    panels[0].set_ylabel("bits per masked byte (lower is better)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    return figure, f"Bits per masked byte of {len(MIXERS)} mixers against the time of a pass, at two lengths."


def tables(record: Reproduced) -> list[Table]:
    """Quality, parameters, time and memory at both lengths; what the papers say."""
    held = {length: ranked for length in LENGTHS if (ranked := summaries(record, length))}
    rows = []
    for name in next(iter(held.values()), {}):
        cells = []
        for length, ranked in held.items():
            quality = [interval(ranked[name]), f"{ranked[name].parameters:,}"] if name in ranked else ["", ""]
            ms, size = (cell(record, name, length, f"training_{what}") for what in ("ms", "bytes"))
            cells += [*quality, milliseconds(ms), bytes_of(size)]
        rows.append([label(name) if name in CONTROLS else f"`{name}`", *cells])
    runs = trainings(record.rows)
    base = ", ".join(f"{value:.3f} by the counts of {name}" for name, value in MaskedBytes().baselines().items())
    title = (
        f"Bits per masked byte after {runs[0]['steps'] if runs else 'no'} steps, 95 % intervals over "
        f"{len({row['seed'] for row in runs})} seeds ({base}); time and peak memory of the mixing of one layer, "
        "forward and backward"
    )
    heads = [f"{what} at {length:,}" for length in held for what in ("bits", "parameters", "time", "peak")]
    published = [[name, *words] for name, words in PUBLISHED.items()]
    return [Table(title, ["mixer", *heads], rows), Table("Published", ["", "published", "where"], published)]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    rows = trainings(record.rows)
    seconds = math.fsum(row["result"]["curve"][-1][1] for row in rows) / max(len(rows), 1)
    return [
        "No paper measures them side by side, so there is no published table. Their models are a hundred times as "
        "large, and trained a thousand times as long.",
        f"Each of {len(rows)} runs had {rows[0]['steps'] if rows else 'no'} steps of {TOKENS:,} bytes, about "
        f"{seconds:.0f} s. In so short a training it counts how soon a mixer finds the neighbours of a byte. A window "
        "and rotary positions say where they are. Weights for each position must learn it at every position.",
        "Parameters are made equal by the width of the feed-forward layers. Weights of L x L positions alone exceed a "
        "whole model's. Such mixers keep feed-forward layers of one unit; the table has their parameters.",
        f"Times are taken in turns with exact attention in the same rounds, on {record.meta['cores']} cores. Where the "
        "load below is more than the cores, only the order of times means something.",
    ]


REPRODUCTION = Reproduction(
    "mixers", "FNet, AFT, gMLP, MLP-Mixer, Synthesizers: masked bytes, time, memory",
    "arXiv 2105.03824, 2105.14103, 2105.08050, 2105.01601, 2005.00743", minutes=30, seeds=3,
    measure=measure, claims=claims, draw=draw, tables=tables, why=why, trains=True, source="the papers",
)  # fmt: skip

if __name__ == "__main__":
    common.start(REPRODUCTION)
