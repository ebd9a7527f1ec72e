"""Reformer, Table 2 (Kitaev et al. 2020): models trained with some rounds of hashing, each read with other numbers."""

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

from fast_attention.lab.drawing import COLOURS, INK, figure_grid, labelled, line, picture
from fast_attention.lab.hover import Series
from fast_attention.lab.reproducing.reproduction import Budget, Claim, Published, Reproduced, Reproduction, Row
from fast_attention.lab.reproducing.runs import Training, equal_steps
from fast_attention.lab.tables import Table, Value
from fast_attention.mechanisms import LSH
from fast_attention.nn import saving
from fast_attention.nn.bound import Bound
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.tasks.recall import Duplicate
from fast_attention.training import loop, run_folder, steps
from fast_attention.training.processes import Group
from fast_attention.training.settings import TrainingSettings

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
SETTINGS = TrainingSettings(batch_size=16, lr=3e-3, evaluation_batches=8, save_seconds=0.0)
BUCKETS, BUCKET_SIZE = 16, 8
LEARNT = 0.75  # accuracy with the rounds of training, from which on a model counts
MOST, DRAWS = 500, 4  # steps that are enough; draws of the rotations that a model is read with


def run(budget: Budget) -> Iterator[Row]:
    """Train with each number of rounds in turn, and read each model with all."""
    configs = {rounds: config_for(rounds) for rounds in TRAINED}
    number = equal_steps(budget, [Training(TASK, each, SETTINGS) for each in configs.values()], MOST)
    settings = replace(SETTINGS, steps=number, evaluate_every=number)
    for rounds, config in configs.items():
        if budget.has(trained=rounds):
            continue
        budget.watch(f"{name(rounds)}, {number} steps")
        with tempfile.TemporaryDirectory() as folder:
            with drawing_rotations(rounds):
                outcome = loop.train(TASK, config, settings, folder)
            if outcome.status == "interrupted":
                raise KeyboardInterrupt
            read = [_read(Path(folder) / run_folder.MODEL, other) for other in READ]
        yield {"trained": rounds, "steps": number, "seconds": round(outcome.seconds, 1), "read": read}


def name(rounds: int) -> str:
    """What the paper calls it."""
    return f"LSH-{rounds}" if rounds else "full attention"


def config_for(rounds: int) -> ModelConfig:
    """A model of one layer. Full attention of shared queries and keys is a bucket that holds every token."""
    whole = LSH(num_hashes=1, num_buckets=2, bucket_size=TASK.length)
    hashed = replace(whole, num_hashes=rounds, num_buckets=BUCKETS, bucket_size=BUCKET_SIZE) if rounds else whole
    return steps.config_for(TASK, mechanism=repr(hashed), **MODEL)


@contextmanager
def drawing_rotations(rounds: int) -> Iterator[None]:
    """Draw rotations anew at every pass in the block, as the paper does; zeros put all tokens into one bucket."""

    def draw(module: nn.Module, _: Any) -> None:
        if isinstance(module, Bound) and isinstance(module.mechanism, LSH):
            module.redraw() if rounds else module.get_buffer("rotations").zero_()

    handle = nn.modules.module.register_module_forward_pre_hook(draw)
    try:
        yield
    finally:
        handle.remove()


def _read(folder: Path, rounds: int) -> Row:
    """The accuracy of a trained model with another number of rounds: the mean over some draws, lowest and highest."""
    _, tensors = saving.read(folder)
    model, accuracies = Model(config_for(rounds)).eval(), []
    tensors |= {key: x for key, x in model.state_dict().items() if key.endswith("rotations")}
    model.load_state_dict(tensors)
    with torch.random.fork_rng(devices=[]), drawing_rotations(rounds):
        for draw in range(DRAWS if rounds else 1):
            torch.manual_seed(draw)
            accuracies.append(steps.evaluate(model, TASK, SETTINGS, Group(0, 1, torch.device("cpu"))).value)
    of = {"mean": statistics.fmean(accuracies), "low": min(accuracies), "high": max(accuracies)}
    return {"rounds": rounds, **{key: round(value, 5) for key, value in of.items()}}


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
    return [
        Claim(
            "a model trained with hashing and read with full attention is at chance (0.8 %)",
            f"those that learnt the task are as good as with hashing: {wholes or 'none'}",
            all(at[a, FULL] < 0.05 for a in learnt) if learnt else None,
        ),
        Claim(
            "models with any number of rounds learn the task",
            f"{len(learnt)} of {len(hashed)} did in {record.rows[0]['steps']} steps"
            + (f", {failed}" if failed else ""),
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


@picture
def drawing(record: Reproduced) -> tuple[Figure, str]:
    """Accuracy against the rounds a model is read with: ours, and the paper's dashed."""
    figure, panels = figure_grid(3.8, 1, 2, sharey=True)
    places, words = range(len(READ)), [name(rounds) for rounds in READ]
    for axes, title in zip(panels, ("here", "published"), strict=True):
        for at, rounds in enumerate(rounds_of(record)):
            values = [accuracy(record, rounds, b) for b in READ] if title == "here" else TABLE.get(rounds)
            if values is not None:
                colour = COLOURS[at - 1] if rounds else INK
                says = Series(f"trained with {name(rounds)}", lambda at: f"reading with {words[at]}", "{:.1%}".format)
                line(axes, dict(zip(places, values, strict=True)), "-", says, color=colour, label=says.name)
        axes.set_xticks(places, words)
        axes.set_title(title)
        labelled(axes, "read with", "accuracy" if axes is panels[0] else "")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure, f"Accuracy of {len(rounds_of(record))} models against the rounds of hashing they are read with."


def tables(record: Reproduced) -> list[Table]:
    """Table 2 in its own shape, every cell above the paper's."""
    rows = []
    for rounds in rounds_of(record):
        published = TABLE.get(rounds, (None,) * len(READ))
        cells = []
        for other, value in zip(READ, published, strict=True):
            low, high = (accuracy(record, rounds, other, which) for which in ("low", "high"))
            below = "not published" if value is None else f"published {100 * value:.1f}"
            words = f"{100 * accuracy(record, rounds, other):.1f}"
            cells.append(Value(words, title=f"{100 * low:.1f} to {100 * high:.1f} over the draws", small=below))
        rows.append([f"trained with {name(rounds)}", *cells])
    steps_each = record.rows[0]["steps"]
    return [
        Table(["", *(f"read with {name(b)}" for b in READ)], rows, title=f"Accuracy in %, {steps_each} steps each"),
        Table(
            ["published, Table 2", *(name(b) for b in READ)],
            [[f"trained with {name(a)}", *(f"{100 * value:.1f}" for value in values)] for a, values in TABLE.items()],
            title="Accuracy in %, published",
        ),
    ]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    return [
        "With one bucket for all tokens our attention is the union of all sets that any rounds could give, with the "
        "same scores and the same rule that a token attends to itself only where it is alone. So there is no reason "
        "for chance, and none is found. The paper does not say what its full attention does otherwise; without that "
        "rule a token of shared queries and keys is nearest to itself, which may be the cause.",
        f"The paper has w of 511 symbols, 150,000 steps, width 256; here w has {TASK.words}, there are "
        f"{record.rows[0]['steps']} steps of {SETTINGS.batch_size} sequences, width {MODEL['width']}, {BUCKETS} "
        f"buckets in chunks of {BUCKET_SIZE}. The shorter sequence is the easier one: fewer tokens share a bucket.",
        f"Rotations are drawn anew at every pass, in training too, as in the paper; cells are means of {DRAWS} draws.",
        "Ours splits buckets by rank, so that nothing later moves a chunk's border; the published layout sorts the "
        "whole sequence.",
    ]


DUPLICATION = Reproduction(
    name="duplication",
    title="Duplication with 1, 2, 4 and 8 rounds of hashing, in training and when read",
    paper="Kitaev, Kaiser and Levskaya 2020, arXiv 2001.04451, Table 2",
    minutes=6,
    seeds=0,
    published=tuple(
        Published(f"trained with {name(a)}, read with {name(b)}, in %", round(100 * value, 1), "Table 2")
        for a, values in TABLE.items()
        for b, value in zip(READ, values, strict=True)
    ),
    run=run,
    claims=claims,
    drawing=drawing,
    tables=tables,
    why=why,
    trains=True,
)
