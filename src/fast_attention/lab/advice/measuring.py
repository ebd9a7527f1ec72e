"""Measures what advice needs: errors on real tensors, times and memory at the given length, and beyond if needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fast_attention.lab import measure
from fast_attention.lab.accuracy import Scene, measurable
from fast_attention.lab.advice.ranking import Question, ranked
from fast_attention.lab.capture import Source
from fast_attention.lab.comparison import Comparison
from fast_attention.lab.measure import Setting, against_exact
from fast_attention.lab.records import EXACT
from fast_attention.lab.timing import MOST_ROUNDS, PASSES, TimingGroup, predicted

FRACTIONS = (0.25, 0.6)  # of the time: for errors, and for times at the length asked for; the rest is for greater ones
UNBOUNDED = 4096  # tokens on which errors are measured at most, where a source has no limit of its own


@dataclass(frozen=True)
class Plan:
    """What to measure and how long that may take."""

    source: Source
    mechanisms: list[Any]
    setting: Setting
    question: Question
    seconds: float

    @property
    def steps(self) -> int:
        """How often ``watch`` is called without greater lengths."""
        return 2 * len(self.mechanisms) + 1 + MOST_ROUNDS


def investigate(plan: Plan, record: Comparison, watch: Callable[[str], None]) -> None:
    """Fill ``record``: all mechanisms at the given length; and at twice that, and twice that again, those that are
    accurate enough, as long as none of them is faster and time is left.

    Args:
        plan: What to measure.
        record: Where the numbers go; ``meta["lengths"]`` becomes the lengths measured.
        watch: Called with every step.
    """
    until = time.perf_counter() + plan.seconds

    def at(length: int, mechanisms: list[Any], fraction: float) -> None:
        left = until - time.perf_counter()
        _errors(plan, mechanisms, length, record, watch, time.perf_counter() + FRACTIONS[0] * left)
        seconds = fraction * max(until - time.perf_counter(), 0.0)
        competitors = against_exact(_promising(plan, mechanisms, record))
        TimingGroup(plan.setting, competitors, record, length, seconds, watch).run()
        record.meta.setdefault("lengths", []).append(length)

    length = plan.question.length
    at(length, plan.mechanisms, FRACTIONS[1])
    while (slower := _slower(plan, record)) and _affordable(plan, record, slower, 2 * length, until):
        length *= 2
        at(length, slower, 0.5)


def _errors(
    plan: Plan, mechanisms: list[Any], length: int, record: Comparison, watch: Callable[[str], None], until: float
) -> None:
    """Measure errors at this length, or the greatest that is read, unless known; those beyond the time are left out."""
    read = record.meta.setdefault("error_tensors", {})
    length = min(length, plan.source.context or UNBOUNDED)
    if length in read:
        return
    layers, words = plan.source.layers(length)
    scene = Scene(layers, plan.setting)
    if scene.length in read:
        return
    read[scene.length] = words
    for mechanism in sorted(mechanisms, key=lambda each: each.traits.random):  # random features are the least exact
        watch(f"error at {scene.length:,} tokens: {mechanism!r}")
        if measurable(mechanism) and time.perf_counter() < until:
            record.errors.append(scene.error(mechanism))


def _promising(plan: Plan, mechanisms: list[Any], record: Comparison) -> list[Any]:
    """The order of timing, for the time may end: those within the budget, those beyond it, those of unknown error."""
    errors = {error.mechanism: error.summary() for error in record.errors}

    def rank(mechanism: Any) -> int:
        summary = errors.get(repr(mechanism))
        return 2 if summary is None else int(not summary[0] <= plan.question.budget)

    return sorted(mechanisms, key=rank)


def _slower(plan: Plan, record: Comparison) -> list[Any]:
    """The mechanisms that are accurate enough and not faster, at the greatest length so far; none, once one is both."""
    last = Question(record.meta["lengths"][-1], plan.question.budget, plan.question.which)
    rows = {row.mechanism: row.kind for row in ranked(record, plan.mechanisms, last)}
    if {"use", "unproven"} & {*rows.values()}:
        return []
    return [mechanism for mechanism in plan.mechanisms if rows[repr(mechanism)] == "slower"]


def _affordable(plan: Plan, record: Comparison, mechanisms: list[Any], length: int, until: float) -> bool:
    """Whether a greater length fits the time that is left and half of the memory."""
    costs = [predicted(record.cells, EXACT, 2.0, length)]
    costs += [predicted(record.cells, repr(mechanism), mechanism.traits.order, length) for mechanism in mechanisms]
    fits = max(size for _, size in costs) < measure.memory_at_hand(plan.setting.device) / 2
    return fits and PASSES * sum(seconds for seconds, _ in costs) < until - time.perf_counter()
