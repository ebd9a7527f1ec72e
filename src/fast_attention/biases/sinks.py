"""Learned sinks (OpenAI 2025, arXiv 2508.10925): of every head a score in the normaliser that has no value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fast_attention.traits import Shape, Traits

PAPER = "OpenAI 2025, arXiv 2508.10925"  # gpt-oss
SINKS_ARE_TAKEN = "Softmax(), Local(), BlockLocal(), BigBird(), Hybrid(), Selected() and windows of grids do"


class SinkWeights(NamedTuple):
    """The sinks' scores, and the weights of a bias."""

    sinks: Float[Tensor, "heads"]
    bias: Any = ()


@runtime_checkable
class TakesSinks(Protocol):
    """A mechanism whose sinks' scores another module may hold."""

    @property
    def takes_sinks(self) -> bool:
        """Whether it has none of its own, which would stand in their place."""
        ...

    def with_sinks(self, sinks: Tensor, w: Any) -> tuple[Any, Any]:
        """The mechanism, and with the scores (H,) its weights."""
        ...


class SinksMixin:
    """Adds ``sinks`` to the settings of a mechanism of softmax: one learned score of each head, and its traits.

    A subclass is a frozen dataclass with the field ``sinks``, and gives its traits without them as ``base_traits``.
    Its weights are those of the sinks and of a ``bias``, where there is one.
    """

    sinks: bool = False
    bias: Any = None
    base_traits: ClassVar[Traits]

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits with sinks and a bias, learned where they are, and no approximation of attention without them."""
        traits = learned(self.base_traits) if self.sinks else self.base_traits
        bias = self.bias
        if bias is None:
            return traits
        return _added(traits, bias.paper, f"scores + {bias.formula}", learned=bias.learned, rotary=bias.rotary)

    @property
    def is_plain(self) -> bool:
        """Whether scores are dot products alone."""
        return self.bias is None and not self.sinks

    @property
    def needs_weights(self) -> bool:
        """Whether there are sinks, or the bias is learned."""
        return self.sinks or (self.bias is not None and self.bias.learned)

    def weights(self, shape: Shape) -> Any:
        """Fresh weights of the bias, behind the scores of the sinks, which begin small, as gpt-oss's do."""
        bias = () if self.bias is None else self.bias.weights(shape)
        return SinkWeights(nn.Parameter(torch.randn(shape.heads) * 0.02), bias) if self.sinks else bias

    def sinks_of(self, w: Any) -> Tensor | None:
        """The scores of the sinks; None without."""
        return w.sinks if self.sinks else None

    @property
    def takes_sinks(self) -> bool:
        """Whether another module may hold the sinks' scores, as there are none of its own."""
        return not self.sinks

    def with_sinks(self, sinks: Tensor, w: Any) -> tuple[Any, Any]:
        """The mechanism and its weights with the scores (H,) that another module holds."""
        mechanism: Any = self
        return replace(mechanism, sinks=True), SinkWeights(sinks, w)


def learned(traits: Traits) -> Traits:
    """The traits of a mechanism that has sinks."""
    return _added(traits, PAPER, "a sink's exp(s_h) in every normaliser", learned=True)


def _added(traits: Traits, paper: str, formula: str, *, learned: bool, rotary: bool = True) -> Traits:
    """The traits of a mechanism to which a paper adds something."""
    return replace(
        traits, paper=f"{traits.paper}; {paper}", formula=f"{traits.formula}, with {formula}",
        rotary=traits.rotary and rotary, learned=traits.learned or learned, approximates=None,
    )  # fmt: skip
