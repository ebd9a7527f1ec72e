"""Compares mechanisms with exact attention: errors on a model's real tensors, head by head, then times."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import catalogue
from fast_attention.integrations import swap
from fast_attention.lab import loading, verdicts
from fast_attention.lab.capture import HuggingFace, Layer, Source
from fast_attention.lab.inputs import InputError
from fast_attention.lab.measure import MOST_ROUNDS, Setting, TimingGroup, against_exact
from fast_attention.lab.records import EXACT, Comparison, Error
from fast_attention.lab.refusals import first_line
from fast_attention.mechanism import Shape, Unsupported
from fast_attention.nn.bound import Bound

FIXED = 1024  # of the time for a length, what does not depend on it, in tokens
LONGEST_ERROR = 8192  # tokens: exact attention in float64 takes seconds for each layer there, and four times at twice
FOR_SAME_RESULTS, FOR_ERRORS = 0.25, 0.4  # fractions of the budget
MARGIN = 1.25  # over the seconds that are estimated to do
SAMPLED_KEYS = 512  # of which it is counted how many queries weigh them
UNKNOWN = 0.9  # the cosine to exact attention that is hoped for where no record has one


def relative_rms(ours: Tensor, truth: Tensor) -> list[list[float]]:
    """``||ours - truth|| / ||truth||`` of every head of every layer of (layers, H, L, E)."""
    difference = (ours.to(truth.device).double() - truth.double()).square().sum((-2, -1))
    return (difference / truth.double().square().sum((-2, -1)).clamp_min(1e-300)).sqrt().tolist()


class Scene:
    """Computes errors on the tensors of all layers at one length, against exact attention in float64, computed once.

    Mechanisms run in the setting's dtype. Layers of equal shape are one batch.
    """

    def __init__(self, layers: list[Layer], setting: Setting) -> None:
        self.layers, self.setting = layers, setting
        self.length = layers[0].q.shape[-2]
        self.batches: list[tuple[Tensor, ...]] = []
        for layer in layers:
            tensors = (layer.q, layer.k, layer.v)
            if self.batches and all(a.shape[1:] == b.shape[1:] for a, b in zip(tensors, self.batches[-1], strict=True)):
                self.batches[-1] = tuple(torch.cat([a, b]) for a, b in zip(self.batches[-1], tensors, strict=True))
            else:
                self.batches.append(tensors)
        self._truths: dict[str, list[Tensor]] = {}

    def error(self, mechanism: Any) -> Error:
        """Relative RMS error of the outputs."""
        against = mechanism.traits.approximates
        error = Error(repr(mechanism), self.length, against)
        try:
            for ours, truth in zip(self.ours(mechanism), self.truths(against), strict=True):
                error.output += relative_rms(ours, truth)
            error.visible_fraction = self.visible_fraction(mechanism)
        except (Unsupported, ValueError, RuntimeError) as problem:
            error.output, error.note = [], first_line(problem)
        return error

    @torch.no_grad()
    def ours(self, mechanism: Any) -> list[Tensor]:
        """The mechanism's outputs of every batch."""
        outputs = []
        for batch in self.batches:
            q, k, v = (x.to(self.setting.device, self.setting.dtype) for x in batch)
            torch.manual_seed(self.setting.seed)
            bound = Bound(mechanism, Shape(q.shape[1], q.shape[3], max_len=self.length))
            bound.to(self.setting.device, self.setting.dtype)
            outputs.append(bound(q, k, v, is_causal=self.setting.is_causal))
        return outputs

    @torch.no_grad()
    def truths(self, against: str = "Softmax") -> list[Tensor]:
        """The exact outputs of every batch, by the mechanism ``against``."""
        if against not in self._truths:
            device = "cpu" if self.setting.device.type == "mps" else self.setting.device  # mps has no float64
            exact: Any = F.scaled_dot_product_attention if against == "Softmax" else catalogue.default(against)
            doubles = [[x.to(device, torch.float64) for x in batch] for batch in self.batches]
            self._truths[against] = [exact(*batch, is_causal=self.setting.is_causal) for batch in doubles]
        return self._truths[against]

    @torch.no_grad()
    def visible_fraction(self, mechanism: Any) -> float | None:
        """The fraction of the visible pairs of a query and a key that it weighs, in the first head, by sampled keys.

        None where the mechanism has no weights of pairs.
        """
        if not mechanism.traits.matrix:
            return None
        torch.manual_seed(self.setting.seed)
        q, k = (x[:1, :1].to(self.setting.device, torch.float64) for x in self.batches[0][:2])
        sampled = torch.arange(0, self.length, max(self.length // SAMPLED_KEYS, 1))
        one_hot = torch.zeros(self.length, len(sampled), dtype=torch.float64)
        one_hot[sampled, torch.arange(len(sampled))] = 1.0
        bound = Bound(mechanism, Shape(1, q.shape[-1], max_len=self.length)).to(q)
        weights = bound(q, k, one_hot[None, None].to(q), is_causal=self.setting.is_causal)
        pairs = int((self.length - sampled).sum()) if self.setting.is_causal else weights.numel()
        return int((weights != 0).sum()) / pairs


def same_results(
    source: Source, lengths: list[int], seconds: float, watch: Callable[[str], None]
) -> dict[str, Any] | None:  # fmt: skip
    """Measure what ``swap(model)`` gains without changing results, for the record; None where no model is read.

    Left out: lengths at which every layer runs what it ran, or beyond its positions, or begun after ``seconds``.
    """
    if not isinstance(source, HuggingFace):
        return None
    began, model = time.perf_counter(), loading.load(source.name, head="none").float()
    report = swap(model)
    rows: list[dict[str, Any]] = []
    least = min((layer.faster_from or 0 for layer in report.faster), default=math.inf)
    for length in sorted(lengths):
        if not least <= length <= (source.own_context or math.inf) or time.perf_counter() - began > seconds:
            continue
        watch(f"same results at {length:,} tokens")
        ids, _ = source.corpus.tokens(source.tokenizer, length)
        inputs = {"input_ids": ids, **({"decoder_input_ids": ids[:, :1]} if model.config.is_encoder_decoder else {})}
        with torch.no_grad():
            measured = report.verify(inputs)
        before, after = measured.seconds
        rows.append({"length": ids.shape[1], "before": before, "after": after, "difference": measured.difference})
    return {"gains": report.gains, "skips_padding": report.skips_padding, "rows": rows}


def default_mechanisms() -> list[Any]:
    """Every mechanism of the catalogue but exact attention itself."""
    return [catalogue.default(name) for name in catalogue.names() if name != "Softmax"]


class Plan(NamedTuple):
    """Mechanisms to compare with exact attention, and how long that may take."""

    source: Source
    mechanisms: list[Any]
    lengths: list[int]
    setting: Setting
    budget: float  # seconds
    asked: float = 0.1  # the largest median error

    @property
    def steps(self) -> int:
        """How often ``watch`` will be called."""
        errors = len(self.error_lengths) * len(self.mechanisms)
        return errors + len(self.lengths) * (len(self.mechanisms) + 2 + MOST_ROUNDS)

    @property
    def error_lengths(self) -> list[int]:
        """The lengths to measure errors at: those that are timed, as far as the model can read."""
        longest = min(self.source.context or LONGEST_ERROR, LONGEST_ERROR)
        return sorted({min(length, longest) for length in self.lengths})


def compare(
    plan: Plan, record: Comparison, watch: Callable[[str], None] = lambda what: None,
    save: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Fill ``record``. Interrupted, it holds what was measured until then.

    ``watch`` is called with every step, at most ``plan.steps`` times; ``save`` after the errors and after every length.
    """
    began = time.perf_counter()
    record.meta["context"] = plan.source.own_context
    if gains := same_results(plan.source, plan.lengths, FOR_SAME_RESULTS * plan.budget, watch):
        record.meta["same_results"] = gains
    enough = _errors(plan, record, watch, began + FOR_ERRORS * plan.budget)
    for_errors = time.perf_counter() - began
    save()
    by_promise = sorted(plan.mechanisms, key=functools.partial(promise, plan, record))
    competitors = against_exact(by_promise)
    for length, seconds in _shares(plan.lengths, began + plan.budget):
        group = TimingGroup(plan.setting, competitors, record, length, seconds, watch)
        group.run()
        if late := verdicts.undecided(record, length, plan.asked):
            enough = max(enough, for_errors + group.enough(late) / _fraction(plan.lengths, length))
        record.meta["seconds"] = round(time.perf_counter() - began, 1)
        save()
    record.meta["would_do"] = 10 * math.ceil(max(MARGIN * enough, 2 * plan.budget) / 10)


def promise(plan: Plan, record: Comparison, mechanism: Any) -> tuple[float, float]:
    """The order of measuring, for the time may end: first what may be the answer, then what must be trained.

    What estimates exact attention closely enough goes first, the closest before others; then what may, as records say;
    then what is known to be too far from it.
    """
    known = [record.error(repr(mechanism), length) for length in reversed(plan.error_lengths)]
    summary = next((error.summary() for error in known if error), None)
    if summary:
        return (0 if summary[0] <= plan.asked else 2), summary[0]
    if verdicts.measurable(mechanism):
        return 1, -recorded(mechanism)
    return 3 if verdicts.learns(mechanism) else 4, mechanism.traits.complexity_exponent


def recorded(mechanism: Any) -> float:
    """The cosine of a MiniLM's embeddings to its own that records have of a mechanism, or of another setting of it."""
    from fast_attention.integrations import report  # torch comes with it

    table, name = report.cosines(), type(mechanism).__name__
    of_class = [row for expression, row in table.items() if expression.split("(")[0] == name]
    row = table.get(repr(mechanism)) or next(iter(of_class), None)
    return UNKNOWN if row is None else float(row[min(row)])


def _shares(lengths: list[int], until: float) -> Iterator[tuple[int, float]]:
    """Every length with the seconds for it, of those that are left until a time, at least one."""
    for number, length in enumerate(lengths):
        share = _fraction(lengths[number:], length)
        yield length, max(share * (until - time.perf_counter()), 1.0)


def _fraction(lengths: list[int], length: int) -> float:
    return (length + FIXED) / sum(each + FIXED for each in lengths)


def _errors(plan: Plan, record: Comparison, watch: Callable[[str], None], until: float) -> float:
    """Errors at every length the model can read; what the time does not allow says so.

    Returns:
        Seconds for the whole comparison that would have been enough for all of them; 0 where these were.
    """
    read: dict[int, str] = {}
    enough = 0.0
    record.meta["error_tensors"] = read
    if plan.source.extension:
        record.meta["extension"] = plan.source.extension
    for length, seconds in _shares(plan.error_lengths, until):
        began, taken, late = time.perf_counter(), [0.0], 0
        try:
            layers, what = plan.source.layers(length)
        except InputError as error:  # of a model with windows, of which only its own forms are known to be the same
            if not record.meta.get("same_results", {}).get("rows"):
                raise
            record.meta["unread"] = f"No errors of mechanisms at {length:,} tokens: {error}."
            continue
        scene = Scene(layers, plan.setting)
        if scene.length in read:  # the text is shorter than both lengths
            continue
        read[scene.length] = what
        by_promise = sorted(plan.mechanisms, key=functools.partial(promise, plan, record))
        for mechanism in filter(verdicts.measurable, by_promise):
            watch(f"error at {scene.length:,} tokens: {mechanism!r}")
            if (start := time.perf_counter()) < began + seconds:
                record.errors.append(scene.error(mechanism))
                taken.append(time.perf_counter() - start)
            else:
                late += 1
                note = "over budget: the time for errors was spent"
                record.errors.append(Error(repr(mechanism), scene.length, mechanism.traits.approximates, note=note))
        if late:
            usual = max(taken[2:] or taken)  # the first computes exact attention, too
            spent = time.perf_counter() - began + late * usual
            enough = max(enough, spent / (FOR_ERRORS * _fraction(plan.error_lengths, length)))
    return enough


def finish(plan: Plan, record: Comparison, status: str) -> None:
    """Note how it ended, and every cell that was not reached."""
    record.finish(status)
    names = [EXACT, *map(repr, plan.mechanisms)]
    record.not_reached(names, plan.lengths, f"the comparison was {status} before")
