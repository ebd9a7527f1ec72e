"""Runs a comparison: errors on real tensors, then times at every length; its record is valid at any moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fast_attention import catalogue
from fast_attention.lab import inputs
from fast_attention.lab.accuracy import Scene, measurable, one
from fast_attention.lab.capture import Source
from fast_attention.lab.comparison import Comparison, Error, Matrices
from fast_attention.lab.inputs import InputError
from fast_attention.lab.measure import Setting, against_exact
from fast_attention.lab.progress import nothing
from fast_attention.lab.records import EXACT
from fast_attention.lab.timing import MOST_ROUNDS, TimingGroup
from fast_attention.mechanism import Unsupported

FIXED = 1024  # of the time for a length, what does not depend on it, in tokens
LOOK = 256  # tokens of the matrices to look at, at most
LONGEST_MATRIX = 512  # tokens of the matrices to measure, at most
LONGEST_ERROR = 8192  # tokens: exact attention in float64 takes seconds for each layer there, and four times at twice
FOR_ERRORS = 0.35  # fraction of the budget
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
VARIANTS = (
    "FavorPlus(num_features=64)",
    "FavorPlus(num_features=1024)",
    "FavorPlus(features='hyperbolic')",
    "Local(window=32)",
)


def default_mechanisms() -> list[Any]:
    """Every mechanism of the catalogue but exact attention itself, and a few more settings."""
    return [mechanism for mechanism in inputs.every(VARIANTS) if mechanism != catalogue.default("Softmax")]


@dataclass(frozen=True)
class Plan:
    """What to compare with exact attention, and how long that may take."""

    source: Source
    mechanisms: list[Any]
    lengths: list[int]
    setting: Setting
    budget: float  # seconds
    head: tuple[int, int] | None = None  # layer and head whose matrices are drawn; None: a typical one

    @property
    def steps(self) -> int:
        """How often ``watch`` will be called."""
        errors = (len(self.error_lengths) + 1) * len(self.mechanisms)
        return errors + len(self.lengths) * (len(self.mechanisms) + 1 + MOST_ROUNDS)

    @property
    def error_lengths(self) -> list[int]:
        """The lengths to measure errors at: those that are timed, as far as the model can read."""
        longest = min(self.source.context or LONGEST_ERROR, LONGEST_ERROR)
        return sorted({min(length, longest) for length in self.lengths})


def compare(
    plan: Plan, record: Comparison, watch: Callable[[str], None] = nothing, save: Callable[[], None] = nothing
) -> None:
    """Fill ``record``. Interrupted, it holds what was measured until then.

    Args:
        plan: What to compare.
        record: Where the numbers go.
        watch: Called with every step, ``plan.steps`` times.
        save: Called after the errors and after every length.
    """
    began = time.perf_counter()
    until = began + plan.budget * FOR_ERRORS
    record.matrices = _matrices(plan, watch)
    _errors(plan, record, watch, until)
    record.meta["seconds_for_errors"] = round(time.perf_counter() - began, 1)
    save()
    left = plan.budget - min(time.perf_counter(), until) + began
    for number, length in enumerate(plan.lengths):
        started = time.perf_counter()
        seconds = left * (length + FIXED) / sum(later + FIXED for later in plan.lengths[number:])
        TimingGroup(plan.setting, against_exact(plan.mechanisms), record, length, seconds, watch).run()
        left = max(left - (time.perf_counter() - started), 1.0)
        record.meta["seconds"] = round(time.perf_counter() - began, 1)
        save()


def _errors(plan: Plan, record: Comparison, watch: Callable[[str], None], until: float) -> None:
    """Errors at every length the model can read, the greatest first; what the time does not allow says so."""
    read: dict[int, str] = {}
    record.meta["error_tensors"] = read
    if plan.source.extension:
        record.meta["extension"] = plan.source.extension
    with_matrix = max((length for length in plan.error_lengths if length <= LONGEST_MATRIX), default=0)
    for length in reversed(plan.error_lengths):
        layers, what = plan.source.layers(length)
        scene = Scene(layers, plan.setting)
        fresh = scene.length not in read
        read[scene.length] = what
        record.meta["layers"] = [layer.name for layer in layers]
        for mechanism in plan.mechanisms:
            watch(f"error at {scene.length:,} tokens: {mechanism!r}")
            if not (measurable(mechanism) and fresh):
                continue
            if time.perf_counter() > until and LONGEST_MATRIX < length < plan.error_lengths[-1]:
                note = "over budget: the time for errors was spent"
                record.errors.append(Error(repr(mechanism), scene.length, mechanism.traits.approximates, note=note))
            else:
                record.errors.append(scene.error(mechanism, matrix=length == with_matrix))


def _matrices(plan: Plan, watch: Callable[[str], None]) -> Matrices:
    """The matrices of the chosen head, or of the head whose exact attention has the median entropy.

    Raises:
        InputError: The chosen layer or head is not there.
    """
    layers, _ = plan.source.layers(min(LOOK, plan.error_lengths[-1]))
    scene = Scene(layers, plan.setting)
    number, head = plan.head or scene.typical_head()
    if not (0 <= number < len(layers) and 0 <= head < plan.source.heads):
        raise InputError(
            f"--head {number},{head}: layers go from 0 to {len(layers) - 1}, heads from 0 to {plan.source.heads - 1}"
        )
    shown = {}
    for mechanism in plan.mechanisms:
        watch(f"matrix: {mechanism!r}")
        if measurable(mechanism) and mechanism.traits.matrix:
            with contextlib.suppress(Unsupported, ValueError, RuntimeError):  # the table of errors says why
                shown[repr(mechanism)] = one(scene.ours(mechanism, matrix=True), number, head)
    where = f"{layers[number].name}, head {head}, {scene.length} tokens"
    return Matrices(where, one(scene.truths(matrix=True), number, head), shown)


def finish(plan: Plan, record: Comparison, status: str) -> None:
    """Note how it ended, and every cell that was not reached."""
    record.finish(status)
    names = [EXACT, *map(repr, plan.mechanisms)]
    record.not_reached(names, plan.lengths, f"the comparison was {status} before")
