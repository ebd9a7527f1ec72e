"""``fast-attention advise``: recommends a mechanism for one length, on this machine, for this model.

Exact attention may be the answer. ``lab/advice.py`` turns what is measured here into a ranking.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fast_attention.lab import options
from fast_attention.lab.options import KINDS, at_work

if TYPE_CHECKING or at_work():
    from fast_attention.lab import advice, capture, compare, inputs, measure, progress, sources, tables
    from fast_attention.lab.accuracy import Scene, measurable
    from fast_attention.lab.advice import Advised, Question, ranked
    from fast_attention.lab.comparison import Comparison
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.measure import Setting, against_exact
    from fast_attention.lab.records import EXACT
    from fast_attention.lab.surroundings import begun
    from fast_attention.lab.timing import MOST_ROUNDS, PASSES, TimingGroup, predicted

FOR_ERRORS, FOR_TIMES = 0.25, 0.6  # of the time, at the length asked for; the rest is for greater ones
UNBOUNDED = 4096  # tokens on which errors are measured at most, where a source has no limit of its own


def advise_command(
    model: Annotated[
        str | None, typer.Argument(help=f"What to measure: {KINDS}, gaussian or HEADSxWIDTH. Default: MiniLM.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 2048,
    batch: options.Batch = 1,
    budget: Annotated[
        float, typer.Option(min=0.0, help="The largest median relative error of a head's outputs, zero-shot.")
    ] = 0.1,
    mechanisms: options.Mechanisms = None,
    text: options.Text = None,
    causal: options.Direction = None,
    training: Annotated[bool, typer.Option("--training", help="Rank by forward and backward pass.")] = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    seconds: options.Seconds = 120,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for advice.html and advice.json.")] = Path("out/advise"),
    as_json: options.AsJson = False,
) -> int:
    """Advise what to use at one length: error on a model's real tensors, time and memory here, ranked; or keep exact.

    [dim]fast-attention advise MODEL_DIR --length 4096 --budget 0.05[/dim]
    """
    inputs.threads(threads or measure.useful_threads())
    where, kind = inputs.device(device), inputs.dtype(dtype)
    chosen = inputs.mechanisms(mechanisms) if mechanisms else compare.default_mechanisms()
    inputs.folder(out)
    source = sources.source(model, text, seed, length)
    is_causal = source.is_causal if causal is None else causal
    if source.is_causal and not is_causal:
        raise InputError("--no-causal: the model is a decoder, whose attention is causal")
    setting = Setting(source.heads, source.head_dim, where, kind, is_causal, training, seed, batch)
    question = Question(length, budget, "training" if training else "forward")
    plan = Plan(source, chosen, setting, question, seconds)
    record = Advised(_meta(plan, dtype))
    with progress.counted(plan.steps) as watch:
        investigate(plan, record, watch)
    record.answer(chosen)
    record.finish("complete")
    record.leave(out, advice.html)
    tables.present(record, out, as_json, *advice.shown(record))
    return 0


def _meta(plan: Plan, dtype: str) -> dict[str, Any]:
    source, setting, question = plan.source, plan.setting, plan.question
    gaussian = isinstance(source, capture.Gaussian)
    return begun(
        setting.device, source=source.title,
        quality=advice.STAND_INS if gaussian else "the model's own tensors, zero-shot", heads=setting.heads,
        head_dim=setting.head_dim, length=question.length, batch=setting.batch, causal=setting.is_causal,
        budget=question.budget, dtype=dtype, seed=setting.seed, **{"pass": question.which},
    )  # fmt: skip


class Plan(NamedTuple):
    """What to measure and how long that may take."""

    source: capture.Source
    mechanisms: list[Any]
    setting: Setting
    question: Question
    seconds: float

    @property
    def steps(self) -> int:
        """How often ``watch`` is called without greater lengths."""
        return 2 * len(self.mechanisms) + 1 + MOST_ROUNDS


def investigate(plan: Plan, record: Comparison, watch: Callable[[str], None]) -> None:
    """Fill ``record``: errors, times and memory of all mechanisms at the given length, the most promising timed first.

    Those that are accurate enough are measured at twice that length, and twice that again, as long as none of them is
    faster and time is left.

    Args:
        plan: What to measure.
        record: Where the numbers go; ``meta["lengths"]`` becomes the lengths measured.
        watch: Called with every step.
    """
    until, budget, length = time.perf_counter() + plan.seconds, plan.question.budget, plan.question.length

    def late(mechanism: Any) -> int:
        """The place in the order of timing: within the budget, beyond it, of unknown error."""
        errors = [each.summary() for each in record.errors if each.mechanism == repr(mechanism)]
        return 2 if not errors or errors[-1] is None else int(not errors[-1][0] <= budget)

    def at(length: int, mechanisms: list[Any], fraction: float) -> None:
        left = until - time.perf_counter()
        _errors(plan, mechanisms, length, record, watch, time.perf_counter() + FOR_ERRORS * left)
        seconds = fraction * max(until - time.perf_counter(), 0.0)
        competitors = against_exact(sorted(mechanisms, key=late))
        TimingGroup(plan.setting, competitors, record, length, seconds, watch).run()
        record.meta.setdefault("lengths", []).append(length)

    at(length, plan.mechanisms, FOR_TIMES)
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


def _slower(plan: Plan, record: Comparison) -> list[Any]:
    """The mechanisms that are accurate enough and not faster, at the greatest length so far; none, once one is both."""
    last = plan.question._replace(length=record.meta["lengths"][-1])
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
