"""What a reproduction is: the paper's numbers, the run that measures ours, and what its page says of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fast_attention.lab.drawing import Picture
from fast_attention.lab.progress import nothing
from fast_attention.lab.records import Record
from fast_attention.lab.tables import Table, Value

Row = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """What a paper says of one thing, in its own number or words, and where it says so."""

    what: str
    value: float | str
    where: str


class Claim(NamedTuple):
    """A statement of the paper, what was measured of it here, and whether that bears it out; None: not measured."""

    paper: str
    ours: str
    holds: bool | None


@dataclass
class Reproduced(Record):
    """The record of a reproduction: a row for everything that was measured, in that reproduction's own columns."""

    kind, noun = "reproduce", "reproduction"
    same = ("reproduction", "seeds", "fast_attention")
    data, page = "reproduction.json", "reproduction.html"

    rows: list[Row] = field(default_factory=list)

    def of(self, **columns: Any) -> list[Row]:
        """The rows with these values in these columns."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in columns.items())]


@dataclass(frozen=True)
class Budget:
    """What a run may take, and what it need not do again.

    Args:
        seconds: Time for all that is still to be measured.
        seeds: Draws, or trainings, of each setting.
        rows: What an earlier run, which was stopped, has measured.
        watch: Called with what is being done.
        clock: Seconds of wall time, or of processor time.
    """

    seconds: float
    seeds: int
    rows: tuple[Row, ...] = ()
    watch: Callable[[str], None] = nothing
    clock: Callable[[], float] = time.perf_counter
    began: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "began", self.clock())

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
        name: On the command line and in the names of records.
        title: What is measured, in one line.
        paper: Authors, year, number.
        minutes: Time that a run takes unless told otherwise, at most 30 on two cores.
        seeds: Draws or trainings of each setting unless told otherwise; 0 where there is nothing to repeat.
        published: The paper's numbers.
        run: Yields a row for every measurement; what the budget's rows hold is left out, and so is what does not fit
            its time.
        claims: What the paper says and the record bears out, or does not.
        drawing: The picture of a record.
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
    published: tuple[Published, ...]
    run: Callable[[Budget], Iterator[Row]]
    claims: Callable[[Reproduced], list[Claim]]
    drawing: Callable[[Reproduced], Picture]
    tables: Callable[[Reproduced], list[Table]]
    why: Callable[[Reproduced], list[str]]
    trains: bool = False
    source: str = "the paper"

    @property
    def clock(self) -> Callable[[], float]:
        """What its minutes are measured by."""
        return time.process_time if self.trains else time.perf_counter

    def sentence(self, record: Reproduced) -> str:
        """The first line of the page: where the record disagrees with the paper, then where it agrees."""
        claims = self.claims(record)
        wrong = [claim for claim in claims if claim.holds is False]
        right = [f"{claim.paper} ({claim.ours})" for claim in claims if claim.holds]
        unknown = [claim.paper for claim in claims if claim.holds is None]
        parts = [f"Disagrees with {self.source} in {len(wrong)} of {len(claims)} points."] if wrong else []
        says = "It says" if self.source == "the paper" else "They say"
        parts += [f"{says} that {claim.paper}; here {claim.ours}." for claim in wrong]
        if right:
            head = "Agrees" if wrong or unknown else f"Agrees with {self.source} in all {len(claims)} points"
            parts.append(f"{head}: {'; '.join(right)}.")
        return " ".join([*parts, *([f"Not measured: {'; '.join(unknown)}."] if unknown else [])])


def verdicts(claims: list[Claim]) -> Table:
    """What is said, what is so here, and whether they agree."""
    words = {True: Value("agrees", "fast"), False: Value("disagrees", "slow"), None: Value("not measured", "even")}
    rows = [[claim.paper, claim.ours, words[claim.holds]] for claim in claims]
    return Table(["it is said that", "here", "verdict"], rows, left=(1, 2), plain=True)
