"""What the reproductions share: statements and their verdicts, the record, the command line, figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.arguments import Arguments
from fast_attention import files, keep_memory
from fast_attention.lab import inputs, tables
from fast_attention.lab.environment import begun
from fast_attention.lab.pictures import STYLE, svg
from fast_attention.lab.records import Record
from fast_attention.lab.refusals import InputError

Row = dict[str, Any]


class Claim(NamedTuple):
    """A statement of the paper, what was measured of it here, and whether that bears it out; None: not measured."""

    paper: str
    ours: str
    holds: bool | None


class Table(NamedTuple):
    """A table of the reproduction's page; cells are Markdown."""

    title: str
    heads: list[str]
    rows: list[list[str]]


@dataclass
class Reproduced(Record):
    """The record of a reproduction: a row for everything that was measured, in that reproduction's own columns."""

    kind, noun = "reproduce", "reproduction"
    same = ("reproduction", "seeds", "fast_attention")
    data = "reproduction.json"

    rows: list[Row] = field(default_factory=list)

    def of(self, **columns: Any) -> list[Row]:
        """The rows with these values in these columns."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in columns.items())]


@dataclass
class Budget:
    """What a run may take, and what it need not do again.

    Args:
        seconds: Time for all that is still to be measured, by ``clock``.
        seeds: Draws, or trainings, of each setting.
        rows: What an earlier run, which was stopped, has measured.
        say: Called with what is being done.
        clock: Seconds of wall time, or of processor time.
    """

    seconds: float
    seeds: int = 1
    rows: tuple[Row, ...] = ()
    say: Callable[[str], None] = lambda words: None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(self.seconds - (self.clock() - self.began), 0.0)

    def has(self, **columns: Any) -> bool:
        """Whether a row with these values was measured before."""
        return any(all(row.get(name) == value for name, value in columns.items()) for row in self.rows)


@dataclass(frozen=True)
class Reproduction:
    """A figure or table of a paper, and how it is measured here.

    Args:
        name: Of the script and in the names of records.
        title: What is measured, in one line.
        paper: Authors, year, number.
        minutes: Time that a run takes unless told otherwise, at most 30 on two cores.
        seeds: Draws or trainings of each setting unless told otherwise; 0 where there is nothing to repeat.
        measure: Yields a row for every measurement, without those that the budget has.
        claims: What the paper says, and whether the record bears it out.
        draw: The figure of a record and its alternative text.
        tables: The tables of a record, with the published numbers beside ours.
        why: Why the two differ.
        trains: Whether it trains: its minutes are then processor time of one thread, so that other work on the machine
            costs it no steps.
        source: Who says what the claims are about.
    """

    name: str
    title: str
    paper: str
    minutes: float
    seeds: int
    measure: Callable[[Budget], Iterator[Row]]
    claims: Callable[[Reproduced], list[Claim]]
    draw: Callable[[Reproduced], tuple[Figure, str]]
    tables: Callable[[Reproduced], list[Table]]
    why: Callable[[Reproduced], list[str]]
    trains: bool = False
    source: str = "the paper"

    def sentence(self, record: Reproduced) -> str:
        """How often the record disagrees with the paper and agrees: the first line of the page."""
        claims = self.claims(record)
        wrong = [claim for claim in claims if claim.holds is False]
        unknown = [claim for claim in claims if claim.holds is None]
        right = len(claims) - len(wrong) - len(unknown)
        counts = [f"disagrees with {self.source} in {len(wrong)}"] * bool(wrong) + [f"agrees in {right}"]
        counts += [f"did not measure {len(unknown)}"] * bool(unknown)
        return f"Of {len(claims)} points the record {', and '.join(counts)}."

    def picture(self, record: Reproduced) -> tuple[str, str]:
        """The figure as SVG, and its alternative text."""
        with matplotlib.rc_context(STYLE):
            figure, alt = self.draw(record)
            return svg(figure, alt), alt


def figure(height: float, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A wide figure, and its panels side by side."""
    made = Figure(figsize=(12.5, height), layout="constrained")
    return made, list(made.subplots(1, columns, squeeze=False, **options).flat)


def line(axes: Axes, points: Mapping[Any, float], style: str = "-", **options: Any) -> None:
    """A line through points with markers."""
    axes.plot([*points], [*points.values()], style, **{"marker": "o", "markersize": 3, **options})


def labelled(axes: Axes, across: str, up: str = "") -> None:
    """Labels of both axes, and a grid."""
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid()


def logarithmic(axes: Axes, base: int = 10) -> None:
    """Logarithmic scales on both axes, of another base along the horizontal one, ticks without exponents."""
    axes.set_xscale("log", base=base)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.minorticks_off()


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in a decoding state."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(map(state_bytes, state)) if isinstance(state, tuple | list) else 0


# The command line


def main(reproduction: Reproduction, arguments: list[str] | None = None) -> int:
    """Measure a reproduction from the command line; 130 where it was interrupted."""
    module = f"experiments.reproductions.{reproduction.name}"
    parser = Arguments(prog=f"python -m {module}", description=f"{reproduction.title}. {reproduction.paper}.")
    parser.add_argument("--minutes", type=float, default=reproduction.minutes, help="Time for all of it.")
    if reproduction.seeds:
        parser.add_argument("--seeds", type=int, default=reproduction.seeds, help="Draws or trainings of each setting.")
    parser.add_argument("--threads", type=int, help="CPU threads. Default: one to train, else all cores.")
    parser.add_argument(
        "--out", type=Path, default=Path("out") / reproduction.name, help="Folder for record and picture."
    )
    parser.add_argument("--resume", action="store_true", help="Measure what the record in the folder lacks.")
    parser.add_argument("--restart", action="store_true", help="Begin anew over the record in the folder.")
    asked = parser.parse_args(arguments)
    inputs.threads(asked.threads or (1 if reproduction.trains else torch.get_num_threads()))
    seeds = asked.seeds if reproduction.seeds else 0
    meta = begun(torch.device("cpu"), reproduction=reproduction.name, minutes=asked.minutes, seeds=seeds)
    meta["command"] = ["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)]
    path = asked.out / Reproduced.data
    with inputs.alone(asked.out):
        inputs.results([path], asked.out, "a reproduction", resume=asked.resume, restart=asked.restart)
        record = Reproduced.resume(path, meta) if asked.resume else Reproduced(meta)
        status = _carry_out(reproduction, record, path)
        files.write(asked.out / f"{reproduction.name}.svg", reproduction.picture(record)[0] if record.rows else "")
    for claim in reproduction.claims(record) if record.rows else ():
        verdict = {True: "agrees", False: "DISAGREES", None: "not measured"}[claim.holds]
        print(f"{verdict}: {claim.paper}; here {claim.ours}")
    print(f"Record: {path}")
    return 130 if status == "interrupted" else 0


def _carry_out(reproduction: Reproduction, record: Reproduced, path: Path) -> str:
    """Measure under a progress bar; every row is written as soon as it is measured, so that a stopped run resumes."""
    clock = time.process_time if reproduction.trains else time.perf_counter
    spent, began, total = record.meta.get("seconds", 0.0), clock(), 60 * record.meta["minutes"]

    def keep() -> None:
        record.meta["seconds"] = round(spent + clock() - began, 1)
        record.save(path)

    with tables.measured(total) as (update, _):

        def say(words: str) -> None:
            update(words, min(spent + clock() - began, total))

        def run() -> None:
            budget = Budget(max(total - spent, 0.0), record.meta["seeds"], tuple(record.rows), say, clock)
            for row in reproduction.measure(budget):
                record.rows.append(row)
                keep()

        status = tables.until_stopped(run)
    record.finish(status)
    keep()
    return status


def start(reproduction: Reproduction) -> None:
    """Run a script, and end it with its exit code, or with one line that says what is wrong."""
    keep_memory()
    try:
        sys.exit(main(reproduction))
    except InputError as problem:
        sys.exit(f"{reproduction.name}: {problem}")
