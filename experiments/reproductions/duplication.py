"""Reformer, Table 2 (Kitaev et al. 2020): models trained with some rounds of hashing, each read with other numbers.

Records: records/*-reproduce-duplication.json. Again: ``python -m experiments.reproductions.duplication --out
out/duplication`` (6 minutes of processor time).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from experiments import models
from experiments.models import Model, ModelConfig
from experiments.reproductions import common
from experiments.reproductions.common import Budget, Claim, Reproduced, Reproduction, Row, Table
from experiments.reproductions.training import Training, equal_steps
from experiments.tasks import Duplicate
from experiments.train import TrainingSettings, config_for, evaluate
from fast_attention import LSH, Bound
from fast_attention.lab.pictures import COLOURS, INK

FULL = 0  # rounds of hashing: none, all tokens in one bucket
TRAINED = (FULL, 8, 4, 2, 1)
READ = (FULL, 8, 4, 2, 1)
TABLE = {  # Table 2: accuracy, by the rounds in training and when read
    FULL: (1.0, 0.948, 0.925, 0.769, 0.525),
    4: (0.008, 1.0, 0.999, 0.994, 0.919),
    2: (0.008, 1.0, 0.999, 0.981, 0.868),
    1: (0.008, 0.999, 0.996, 0.948, 0.779),
}
TASK = Duplicate(words=63)
MODEL = {"width": 64, "heads": 4, "layers": 1, "hidden": 64, "positions": "learned"}
SETTINGS = TrainingSettings(batch_size=16, lr=3e-3, evaluation_batches=8)
BUCKETS, BUCKET_SIZE = 16, 8
LEARNT = 0.75  # accuracy with the rounds of training, from which on a model counts
MOST, DRAWS = 500, 4  # steps that are enough; draws of the rotations that a model is read with


# Measuring


def measure(budget: Budget) -> Iterator[Row]:
    """Train with each number of rounds in turn, and read each model with all."""
    runs = {rounds: Training(TASK, config(rounds), SETTINGS) for rounds in TRAINED}
    steps = equal_steps(budget, runs.values(), MOST)
    settings = replace(SETTINGS, steps=steps, evaluate_every=steps)
    for rounds, each in runs.items():
        if budget.has(trained=rounds):
            continue
        budget.say(f"{name(rounds)}, {steps} steps")
        with tempfile.TemporaryDirectory() as folder:
            with drawing_rotations(rounds):
                outcome, _ = each._replace(settings=settings).run(0, Path(folder))
            weights = models.load(Path(folder) / "model").state_dict()
        read = [accuracy_with(weights, other) for other in READ]
        yield {"trained": rounds, "steps": steps, "seconds": round(outcome.seconds, 1), "read": read}


def name(rounds: int) -> str:
    """What the paper calls it."""
    return f"LSH-{rounds}" if rounds else "full attention"


def config(rounds: int) -> ModelConfig:
    """A model of one layer. Full attention of shared queries and keys is a bucket that holds every token."""
    whole = LSH(num_hashes=1, num_buckets=2, bucket_size=TASK.length)
    hashed = replace(whole, num_hashes=rounds, num_buckets=BUCKETS, bucket_size=BUCKET_SIZE) if rounds else whole
    return config_for(TASK, mechanism=repr(hashed), **MODEL)


@contextmanager
def drawing_rotations(rounds: int) -> Iterator[None]:
    """Draw rotations anew at every pass in the block, as the paper does; zeros put all tokens into one bucket."""

    def redraw(module: nn.Module, _: Any) -> None:
        if isinstance(module, Bound) and isinstance(module.mechanism, LSH):
            module.redraw() if rounds else module.get_buffer("rotations").zero_()

    handle = nn.modules.module.register_module_forward_pre_hook(redraw)
    try:
        yield
    finally:
        handle.remove()


def accuracy_with(weights: dict[str, Any], rounds: int) -> Row:
    """The accuracy of a trained model with another number of rounds: the mean over some draws, lowest and highest."""
    model, accuracies = Model(config(rounds)).eval(), []
    own = {key: x for key, x in model.state_dict().items() if key.endswith("rotations")}
    model.load_state_dict({**weights, **own})
    with torch.random.fork_rng(devices=[]), drawing_rotations(rounds):
        for number in range(DRAWS if rounds else 1):
            torch.manual_seed(number)
            accuracies.append(evaluate(model, TASK, SETTINGS).value)
    of = {"mean": statistics.fmean(accuracies), "low": min(accuracies), "high": max(accuracies)}
    return {"rounds": rounds, **{key: round(value, 5) for key, value in of.items()}}


# What it says


def accuracy(record: Reproduced, trained: int, read: int, which: str = "mean") -> float:
    """Of the model trained with some rounds and read with others."""
    (row,) = record.of(trained=trained)
    return next(each[which] for each in row["read"] if each["rounds"] == read)


def rounds_of(record: Reproduced) -> list[int]:
    """The numbers of rounds that a model was trained with."""
    return [rounds for rounds in TRAINED if record.of(trained=rounds)]


def claims(record: Reproduced) -> list[Claim]:
    """What Table 2 shows."""
    hashed = [rounds for rounds in rounds_of(record) if rounds]
    at = {(a, b): accuracy(record, a, b) for a in rounds_of(record) for b in READ}
    learnt = [rounds for rounds in hashed if at[rounds, rounds] > LEARNT]
    rising = [a for a in learnt if all(at[a, b] <= at[a, c] + 0.01 for b, c in ((1, 2), (2, 4), (4, 8)))]
    wholes = ", ".join(f"{at[a, FULL]:.1%} for {name(a)}" for a in learnt)
    drop = [at[FULL, b] for b in READ if b]
    failed = ", ".join(f"{name(a)} has {at[a, a]:.1%}" for a in hashed if a not in learnt)
    steps = record.rows[0]["steps"]
    return [
        Claim(
            "a model trained with hashing and read with full attention is at chance (0.8 %)",
            f"those that learnt the task then have {wholes or 'no accuracy: there are none'}",
            all(at[a, FULL] < 0.05 for a in learnt) if learnt else None,
        ),
        Claim(
            "models with any number of rounds learn the task",
            f"{len(learnt)} of {len(hashed)} did in {steps} steps" + (f", {failed}" if failed else ""),
            len(learnt) == len(hashed),
        ),
        Claim(
            "a model trained with full attention loses when read with hashing, the more the fewer rounds",
            f"it has {', '.join(f'{value:.1%}' for value in drop)} with 8, 4, 2 and 1 rounds",
            drop == sorted(drop, reverse=True) and drop[-1] < at[FULL, FULL] - 0.01,
        ),
        Claim(
            "more rounds when read are better, whatever the model was trained with",
            f"so for {len(rising)} of the {len(learnt)} that learnt, within 1 %",
            len(rising) == len(learnt) if learnt else None,
        ),
    ]


def draw(record: Reproduced) -> tuple[Figure, str]:
    """Accuracy against the rounds a model is read with: ours, and the paper's beside it."""
    figure, panels = common.figure(3.8, 2, sharey=True)
    for axes, title in zip(panels, ("here", "published"), strict=True):
        for at, rounds in enumerate(rounds_of(record)):
            values = [accuracy(record, rounds, b) for b in READ] if title == "here" else TABLE.get(rounds, ())
            colour = COLOURS[at - 1] if rounds else INK
            common.line(axes, dict(enumerate(values)), color=colour, label=f"trained with {name(rounds)}")
        axes.set_xticks(range(len(READ)), [name(rounds) for rounds in READ])
        axes.set_title(title)
        common.labelled(axes, "read with", "accuracy" if axes is panels[0] else "")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure, f"Accuracy of {len(rounds_of(record))} models against the rounds of hashing they are read with."


def tables(record: Reproduced) -> list[Table]:
    """Table 2 in its own shape, the paper's numbers beside ours."""
    rows = []
    for rounds in rounds_of(record):
        cells = []
        for other, value in zip(READ, TABLE.get(rounds, (None,) * len(READ)), strict=True):
            published = "not published" if value is None else f"published {100 * value:.1f}"
            cells.append(f"{100 * accuracy(record, rounds, other):.1f} ({published})")
        rows.append([f"trained with {name(rounds)}", *cells])
    title = f"Accuracy in %, {record.rows[0]['steps']} steps each"
    return [Table(title, ["", *(f"read with {name(b)}" for b in READ)], rows)]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    return [
        "Full attention here is LSH with one bucket for all tokens. That is the union of all sets that any rounds "
        "could give, with the same scores. A token attends to itself only where it is alone, as in hashing. So there "
        "is no reason for chance, and none is found.",
        "The paper does not say how its full attention differs. Without the rule a token of shared queries and keys is "
        "nearest to itself, which may be the cause.",
        "The paper has w of 511 symbols, 150,000 steps and width 256. Here w has "
        f"{TASK.words}, there are {record.rows[0]['steps']} steps of {SETTINGS.batch_size} sequences, width "
        f"{MODEL['width']}, and {BUCKETS} buckets in chunks of {BUCKET_SIZE}. The shorter sequence is easier, since "
        "fewer tokens share a bucket.",
        "Rotations are drawn anew at every pass, in training too, as in the paper. "
        f"Cells are means of {DRAWS} draws; full attention draws nothing and is read once.",
        "Ours splits buckets by rank, so that no later token moves a chunk's border. The published layout sorts the "
        "whole sequence.",
    ]


REPRODUCTION = Reproduction(
    "duplication", "Duplication with 1, 2, 4 and 8 rounds of hashing, in training and when read",
    "Kitaev, Kaiser and Levskaya 2020, arXiv 2001.04451, Table 2", minutes=6, seeds=0,
    measure=measure, claims=claims, draw=draw, tables=tables, why=why, trains=True,
)  # fmt: skip

if __name__ == "__main__":
    common.start(REPRODUCTION)
