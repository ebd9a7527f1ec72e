"""The report of exact speed-ups: what each layer computes, from how many tokens on it is faster, and a check."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention import clock
from fast_attention.integrations import calls
from fast_attention.integrations.modules import evaluating
from fast_attention.integrations.report import AttentionLayer, grouped, span, wrapped

TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12}  # of outputs, relative to the largest; others: of rounding
ROUNDS, PATIENCE = 5, 10.0  # of timing both in turns; seconds after which no further round begins


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
        return verified(self.model, batch)

    def __str__(self) -> str:
        """A paragraph for equal layers, and what is gained in all."""
        lines: list[str] = []
        for group in grouped(self.layers):
            first = group[0]
            lines.append(f"{span([layer.name for layer in group])}: {first.heads} heads of {first.head_dim}")
            lines += wrapped(f"{first.kind}: {first.computes}")
            start = "" if first.faster_from is None else f" from {first.faster_from:,} tokens on"
            lines += wrapped(f"-> {first.runs}{start}")
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


def verified(model: nn.Module, batch: Any) -> Verified:
    """Run a model with and without exact speed-ups on a batch, and compare."""
    trains = model.training and not _is_texts(batch)
    weights = [p for p in model.parameters() if p.requires_grad] if trains else []

    def run() -> tuple[list[Tensor], list[Tensor | None]]:
        with evaluating(model), torch.set_grad_enabled(trains):
            outputs = _outputs(model, batch)
            if not trains:
                return outputs, []
            total = outputs[0].sum() if outputs[0].ndim == 0 else torch.stack([x.float().sum() for x in outputs]).sum()
            return [x.detach() for x in outputs], [*torch.autograd.grad(total, weights, allow_unused=True)]

    def before() -> Any:
        with calls.original():
            return run()

    like = next(model.parameters())
    (wanted, wanted_gradients), (got, gradients) = before(), run()
    seconds = clock.in_turns({0: before, 1: run}, like.device, ROUNDS, PATIENCE)
    difference = _relative(wanted, got)
    slopes = None
    if trains:
        pairs = [(a, b) for a, b in zip(wanted_gradients, gradients, strict=True) if a is not None and b is not None]
        slopes = _norm_relative(pairs)
    tolerance = TOLERANCES.get(like.dtype, 4 * torch.finfo(like.dtype).eps if like.is_floating_point() else 2e-5)
    return Verified(difference, slopes, (statistics.median(seconds[0]), statistics.median(seconds[1])), tolerance)


def compared(wanted: Any, got: Any, mask: Tensor | None) -> float:
    """The largest difference of a model's outputs, over the largest output; those of padding are left out."""
    return _relative(tensors(wanted, mask), tensors(got, mask))


def tensors(outputs: Any, mask: Tensor | None) -> list[Tensor]:
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
        return tensors(model(batch), None)
    if not isinstance(batch, Mapping):
        raise TypeError(f"verify({type(batch).__name__}): give the model's arguments by name, a tensor, or texts")
    return tensors(model(**batch), batch.get("attention_mask"))


def _is_texts(batch: Any) -> bool:
    return isinstance(batch, str) or (isinstance(batch, Sequence) and all(isinstance(x, str) for x in batch))


def _relative(wanted: list[Tensor], got: list[Tensor]) -> float:
    differences = [
        float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-30))
        for a, b in zip(wanted, got, strict=True) if a.numel()
    ]  # fmt: skip
    return max(differences, default=0.0)


def _norm_relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The norm of the differences of gradients over that of the gradients."""
    total = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    norm = sum(float(a.double().square().sum()) for a, _ in pairs)
    return (total / max(norm, 1e-60)) ** 0.5
