"""Reports of both kinds of swap, layer by layer, their messages, and a check of results."""

from __future__ import annotations

import csv
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention import clock
from fast_attention.integrations import calls
from fast_attention.integrations.modules import evaluating
from fast_attention.mechanism import Mechanism
from fast_attention.mechanisms.dense.softmax import Softmax
from fast_attention.mechanisms.hybrid.adapted import Adapted
from fast_attention.mechanisms.hybrid.by_length import ByLength
from fast_attention.mechanisms.hybrid.hybrid import Hybrid
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.local import Local

UNNAMED = "no pattern names it"  # why a layer stays for which nothing was asked
MANY = 6  # layers that an error lists
ROUNDS, PATIENCE = 5, 10.0  # of timing a model before and after; seconds after which no further round begins
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12}  # of outputs, relative to the largest; others: of rounding
EXACT, ESTIMATE, NOTHING = "exact", "an estimate", "nothing before training"  # how what ``quality`` returns begins
# Cosines of MiniLM's embeddings to its own, by length in tokens: a table of the newest records; a test compares.
TABLE = Path(__file__).with_name("untrained.csv")


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model.

    Attributes:
        name: Its module's name, as in ``model.named_modules()``.
        kind: Its module's class.
        heads: Heads of queries.
        head_dim: The width of a head.
        is_causal: Whether a query sees earlier tokens only.
    """

    name: str
    kind: str
    heads: int
    head_dim: int
    is_causal: bool


@dataclass(frozen=True)
class Layer(AttentionLayer):
    """An attention layer that was swapped for a mechanism, or left unchanged.

    Attributes:
        mechanism: What it runs after the swap, as an expression.
        why: For a layer that was left unchanged the reason; for a swapped one remarks.
        replaced: Whether it was swapped.
        parameters: How many learned parameters came with the mechanism.
        untrained: What its outputs are worth before training; empty for a layer that was left unchanged.
    """

    mechanism: str
    why: str = ""
    replaced: bool = True
    parameters: int = 0
    untrained: str = ""


@dataclass(frozen=True)
class Report:
    """The result of ``swap``: ``model`` with the mechanisms in it, and every layer. Print it."""

    model: nn.Module = field(repr=False)
    layers: tuple[Layer, ...]
    refused: tuple[str, ...] = ()  # parts of the model of which nothing could be replaced, and why

    @property
    def replaced(self) -> tuple[Layer, ...]:
        """The layers that run another mechanism now."""
        return tuple(layer for layer in self.layers if layer.replaced)

    @property
    def unchanged(self) -> tuple[Layer, ...]:
        """The layers that stayed exact, each with its reason."""
        return tuple(layer for layer in self.layers if not layer.replaced)

    @property
    def parameters(self) -> int:
        """Learned numbers that were added."""
        return sum(layer.parameters for layer in self.layers)

    def __str__(self) -> str:
        """A paragraph for equal layers: their class, the mechanism, what it does untrained, remarks."""
        lines = []
        for layer, names in grouped((replace(layer, name=""), layer.name) for layer in self.layers).items():
            lines.append(f"{span(names)}: {layer.heads} heads of {layer.head_dim}{', causal' * layer.is_causal}")
            outcome = f"-> {layer.mechanism}" if layer.replaced else f"unchanged, {layer.mechanism}"
            lines += wrapped(f"{layer.kind} {outcome}", layer.untrained and f"untrained: {layer.untrained}", layer.why)
        total = f"{len(self.replaced)} of {len(self.layers)} attention layers replaced"
        total += f", {self.parameters:,} parameters added"
        if useless := sum(layer.untrained.startswith(NOTHING) for layer in self.layers):
            total += f"; {useless} of them worth {NOTHING}"
        return "\n".join([*lines, total, *self.refused])


@dataclass(frozen=True)
class ExactLayer(AttentionLayer):
    """An attention layer that computes what it did.

    Attributes:
        computes: What the layer computes, in words.
        runs: What runs it now, in words.
        faster_from: The number of tokens from which it is faster; None where it runs what it ran at any length.
        padded_from: The number of tokens in padded or packed rows from which each text is computed by itself.
    """

    computes: str
    runs: str
    faster_from: int | None = None
    padded_from: int | None = None


@dataclass(frozen=True)
class ExactReport:
    """The result of ``swap(model)``: what each layer computes and what runs it now. Print it."""

    model: nn.Module = field(repr=False)
    layers: tuple[ExactLayer, ...]
    skips_padding: bool = False
    notes: tuple[str, ...] = ()

    @property
    def faster(self) -> tuple[ExactLayer, ...]:
        """The layers that are faster from some length on, on any input."""
        return tuple(layer for layer in self.layers if layer.faster_from is not None)

    @property
    def padded(self) -> tuple[ExactLayer, ...]:
        """The layers that are faster from some length on where rows are padded or packed."""
        return tuple(layer for layer in self.layers if layer.padded_from is not None)

    @property
    def gains(self) -> bool:
        """Whether anything was changed."""
        return bool(self.faster or self.padded) or self.skips_padding

    def verify(self, batch: Any) -> Verified:
        """Compare the model with what it was before the swap, on a batch of yours.

        Outputs of padding are not compared. In training mode gradients are compared too, of the outputs' sum, or of
        the loss where the model gives one; dropout is off meanwhile.

        Args:
            batch: Arguments of the model by name, as a tokenizer gives them; or a tensor of token numbers; or texts,
                for a model with ``encode`` (a SentenceTransformer).

        Raises:
            TypeError: It is none of these.
        """
        trains = self.model.training and not _is_texts(batch)
        weights = [p for p in self.model.parameters() if p.requires_grad] if trains else []

        def run() -> tuple[list[Tensor], list[Tensor | None]]:
            with evaluating(self.model), torch.set_grad_enabled(trains):
                outputs = _outputs(self.model, batch)
                if not trains:
                    return outputs, []
                total = outputs[0] if outputs[0].ndim == 0 else torch.stack([x.float().sum() for x in outputs]).sum()
                return [x.detach() for x in outputs], [*torch.autograd.grad(total, weights, allow_unused=True)]

        def before() -> Any:
            with calls.original():
                return run()

        like = next(self.model.parameters())
        (wanted, wanted_gradients), (got, gradients) = before(), run()
        seconds = clock.in_turns({0: before, 1: run}, like.device, ROUNDS, PATIENCE)
        pairs = [(a, b) for a, b in zip(wanted_gradients, gradients, strict=True) if a is not None and b is not None]
        differences, norm = [(a - b).double() for a, b in pairs], torch.nn.utils.get_total_norm
        slopes = float(norm(differences) / norm([a.double() for a, _ in pairs]).clamp(min=1e-30)) if trains else None
        tolerance = TOLERANCES.get(like.dtype, 4 * torch.finfo(like.dtype).eps if like.is_floating_point() else 2e-5)
        medians = statistics.median(seconds[0]), statistics.median(seconds[1])
        return Verified(largest_difference(wanted, got), slopes, medians, tolerance)

    def __str__(self) -> str:
        """A paragraph for equal layers, and what is gained in all."""
        lines: list[str] = []
        for layer, names in grouped((replace(layer, name=""), layer.name) for layer in self.layers).items():
            lines.append(f"{span(names)}: {layer.heads} heads of {layer.head_dim}")
            start = "" if layer.faster_from is None else f" from {layer.faster_from:,} tokens on"
            lines += wrapped(f"{layer.kind}: {layer.computes}", f"-> {layer.runs}{start}")
        if not self.gains:
            return "\n".join([*lines, "Nothing to gain without changing results: the model is as it was.", *self.notes])
        total = textwrap.wrap(f"Same results. Faster: {'; '.join(self._gains())}.", 100)
        return "\n".join([*lines, *total, *self.notes])

    def _gains(self) -> Iterator[str]:
        """Say what is faster, and from how many tokens on."""
        if self.faster:
            start = min(layer.faster_from or 0 for layer in self.faster)
            yield f"{len(self.faster)} of {len(self.layers)} attention layers from {start:,} tokens on"
        if self.skips_padding:
            yield "padded batches, without their padding"
        elif self.padded:
            start = min(layer.padded_from or 0 for layer in self.padded)
            number = len(self.padded)
            yield f"padded or packed rows of {start:,} tokens or more in {number} layers, each text by itself"


def grouped(named: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """The names of equal values, in the order of the first of each."""
    groups: dict[Any, list[str]] = {}
    for value, name in named:
        groups.setdefault(value, []).append(name)
    return groups


def chosen(name: str, wanted: Mechanism[Any, Any] | dict[str, Any]) -> Any:
    """The mechanism for a layer, by the first pattern that fits its name; None where none does."""
    if not isinstance(wanted, dict):
        return wanted
    return next((mechanism for pattern, mechanism in wanted.items() if fnmatchcase(name, pattern)), None)


def nothing_swapped(model: nn.Module, layers: Sequence[Layer]) -> str:
    """The message that no layer of a model was swapped, with the reasons."""
    reasons = dict.fromkeys(layer.why for layer in layers)
    names = f"; {listed(layers)}" if UNNAMED in reasons else ""
    return f"no attention layer of {type(model).__name__} was swapped: {'; '.join(reasons)}{names}"


def listed(layers: Sequence[Layer]) -> str:
    """The names of the layers, for messages about patterns."""
    more = f" and {len(layers) - MANY} more" if len(layers) > MANY else ""
    return f"there are {', '.join(layer.name for layer in layers[:MANY])}{more}"


def no_queries(mechanism: object) -> str:
    """The reason why a mixer cannot replace an attention."""
    return f"{mechanism!r} mixes whole tokens and takes no queries"


def crossing_refusal(mechanism: Any) -> str:
    """The reason why a mechanism cannot attend to another sequence; empty if it can."""
    if not mechanism.traits.cross:
        return f"the layer attends to another sequence, and {mechanism!r} cannot (traits.cross)"
    if counts_from_the_query(mechanism):
        return f"the layer attends to another sequence, in which {mechanism!r} has no place to begin"
    return ""


def counts_from_the_query(mechanism: Any) -> bool:
    """Whether a mechanism's keys are those near the query's own position, which has no meaning in another sequence."""
    parts = [part for part in vars(mechanism).values() if isinstance(part, Mechanism)]
    return isinstance(mechanism, Local | BlockLocal) or any(map(counts_from_the_query, parts))


def dropout_note(p: float) -> str:
    """The remark that attention weights are not dropped in training though the model asks for it."""
    return f"in training its attention weights are not dropped (the model drops {p:g})"


def wrapped(*texts: str) -> list[str]:
    """Each of the texts in indented lines of at most 100 columns."""
    wrap = textwrap.TextWrapper(100, initial_indent="    ", subsequent_indent="      ").wrap
    return [line for text in texts for line in wrap(text)]


def span(names: list[str]) -> str:
    """One name for layers in a row: ``encoder.layer.0-4.attention (5 layers)`` where only a number counts up."""
    first, last = (re.split(r"(\d+)", name) for name in (names[0], names[-1]))
    if len(names) == 1:
        return names[0]
    differing = [i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b]
    text = f"{names[0]} ... {names[-1]}"
    if len(first) == len(last) and len(differing) == 1 and differing[0] % 2 == 1:
        low, high = first[differing[0]], last[differing[0]]
        if int(high) - int(low) + 1 == len(names):
            text = "".join([*first[: differing[0]], f"{low}-{high}", *first[differing[0] + 1 :]])
    return f"{text} ({len(names)} layers)"


# Before training ------------------------------------------------------------------------------------------------------


@cache
def cosines() -> dict[str, dict[int, str]]:
    """The table of cosines: by expression, by length."""
    table: dict[str, dict[int, str]] = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            table.setdefault(row["mechanism"], {})[int(row["length"])] = row["cosine"]
    return table


def quality(
    mechanism: Mechanism[Any, Any], parameters: int, *, window: int | None = None, is_causal: bool = False
) -> str:
    """Quality of a mechanism's outputs, untrained, in a layer that was trained with exact attention.

    Args:
        mechanism: As it was asked for, before it was given a layer's own positions.
        parameters: Numbers of its weights that training would change.
        window: Of the layer's own, as transformers counts it: a query's token and those before it.
        is_causal: Whether the layer is.
    """
    if isinstance(mechanism, ByLength):
        short, long = (quality(m, parameters, window=window, is_causal=is_causal)
                       for m in (mechanism.short, mechanism.long))  # fmt: skip
        return short if short == long else f"{short} for queries that see at most {mechanism.above:,} keys, then {long}"
    if isinstance(mechanism, Adapted):
        return f"{quality(mechanism.mechanism, parameters, window=window, is_causal=is_causal)}; deltas begin at zero"
    if mechanism == Softmax() or _is_window(mechanism, window, is_causal):
        return EXACT
    measured = ", ".join(f"{cosine} at {length:,}" for length, cosine in cosines().get(repr(mechanism), {}).items())
    known = f"; cosine to MiniLM's own embeddings {measured} tokens" if measured else ""
    traits = mechanism.traits
    if traits.approximates is not None:
        return f"{ESTIMATE} of exact attention{known or ', of which no record has the error'}"
    if isinstance(mechanism, Hybrid) and mechanism.bias is None and not mechanism.near.needs_weights:
        return f"{EXACT} near each query, of far keys {NOTHING}: {parameters:,} new numbers{known}"
    why = f"{parameters:,} new numbers, drawn at random" if traits.learned else "another function than the layer's own"
    return f"{NOTHING}: {why}{known}"


def _is_window(mechanism: Any, window: int | None, is_causal: bool) -> bool:
    """Whether a mechanism is the window that the layer had."""
    if window is None or not isinstance(mechanism, Local) or mechanism != Local(window=mechanism.window):
        return False
    left, right = mechanism.sides
    return left == window - 1 and (is_causal or right == window - 1)


# Results before and after an exact swap -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verified:
    """The model before and after the swap on one batch. Print it.

    Attributes:
        difference: The largest difference of outputs, over the largest output.
        gradients: The same of all gradients together; None where none were computed.
        seconds: Before and after, medians of forward passes (and backward passes, in training mode).
        tolerance: What rounding may make of equal results.
    """

    difference: float
    gradients: float | None
    seconds: tuple[float, float]
    tolerance: float

    @property
    def same(self) -> bool:
        """Whether the results are the same up to rounding."""
        return self.difference <= self.tolerance and (self.gradients or 0.0) <= 5 * self.tolerance

    def __str__(self) -> str:
        """One sentence of results, one of time."""
        before, after = self.seconds
        verdict = "Same results" if self.same else "OTHER RESULTS"
        text = f"{verdict}: outputs differ by at most {self.difference:.1e} of the largest"
        text += "" if self.gradients is None else f", gradients by {self.gradients:.1e}"
        times = f"{before * 1e3:,.1f} ms before, {after * 1e3:,.1f} ms now"
        return f"{text}.\nTime: {times} ({before / after:.2f} times as fast)."


def tensors(outputs: Any, mask: Tensor | None = None) -> list[Tensor]:
    """The floating tensors of a model's outputs, without the rows of padding and without caches."""
    if isinstance(outputs, Tensor):
        if not outputs.is_floating_point():
            return []
        is_by_token = mask is not None and mask.ndim == 2 and outputs.ndim > 2 and outputs.shape[:2] == mask.shape
        return [outputs[mask.bool()] if is_by_token and mask is not None else outputs]
    if isinstance(outputs, Mapping):
        values: Any = [x for name, x in outputs.items() if name not in ("cache", "past_key_values")]
    else:
        values = outputs if isinstance(outputs, tuple | list) else []
    return [x for value in values for x in tensors(value, mask)]


def _outputs(model: Any, batch: Any) -> list[Tensor]:
    if _is_texts(batch):
        if getattr(model, "encode", None) is None:
            raise TypeError(
                "verify(texts) needs a model with encode, such as a SentenceTransformer: give token numbers"
            )
        return [torch.as_tensor(model.encode(batch, show_progress_bar=False))]
    if isinstance(batch, Tensor):
        return tensors(model(batch))
    if not isinstance(batch, Mapping):
        raise TypeError(f"verify({type(batch).__name__}): give the model's arguments by name, a tensor, or texts")
    return tensors(model(**batch), batch.get("attention_mask"))


def _is_texts(batch: Any) -> bool:
    return isinstance(batch, str) or (isinstance(batch, Sequence) and all(isinstance(x, str) for x in batch))


def largest_difference(wanted: list[Tensor], got: list[Tensor]) -> float:
    """The largest difference of tensors, over the largest number of each."""
    differences = [
        float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-30))
        for a, b in zip(wanted, got, strict=True) if a.numel()
    ]  # fmt: skip
    return max(differences, default=0.0)
