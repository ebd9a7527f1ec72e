"""What a bias is: a value that says what the scores of a query and a key gain by their distance."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from fast_attention.biases.sinks import Sunk, learned
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.traits import Shape, Traits
from fast_attention.value import Value


class Bias(Value, ABC):
    """What scores gain by the offset ``j - i`` of key j and query i, which stands at i + S - L of S keys.

    To use your own, subclass it as a ``@dataclass(frozen=True, repr=False)`` with ``terms``; one with weights says
    ``learned`` and has them made by ``weights``.
    """

    paper: ClassVar[str]
    formula: ClassVar[str]
    learned: ClassVar[bool] = False  # it has parameters to train
    rotary: ClassVar[bool] = True  # with rotary positions, too, scores depend on the distance alone

    def weights(self, shape: Shape) -> Any:
        """Fresh weights: a NamedTuple of parameters, the first of which has the heads as its first axis, or ``()``."""
        return ()

    def queries(self, q: Tensor, w: Any) -> Tensor:
        """The queries (..., H, L, E) that keys and vectors meet."""
        return q

    def of_heads(self, first: int, number: int, heads: int) -> Bias:
        """The bias of ``number`` heads from ``first`` on, of ``heads``, whose weights are these heads' own."""
        return self

    @abstractmethod
    def terms(self, offsets: Int[Tensor, "offsets"], w: Any, like: Tensor, *, scale: float) -> Terms:
        """The terms (H, offsets) of these offsets for the heads of ``like`` (..., H, L, E), differentiable."""


class Biased(Sunk):
    """Adds ``bias`` and ``sinks`` to the settings of a mechanism of softmax: its weights are theirs, and its traits
    depend on them.

    A subclass is a frozen dataclass with the fields ``bias`` and ``sinks``, and gives its traits as ``unbiased``.
    """

    bias: Bias | None

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """What the mechanism can do; with a bias it is learned where that is, and approximates nothing unbiased."""
        traits = learned(self.unbiased) if self.sinks else self.unbiased  # torch.compile reads no property of super()
        return traits if self.bias is None else _traits(traits, self.bias)

    @property
    def is_plain(self) -> bool:
        """Whether scores are dot products alone."""
        return self.bias is None and not self.sinks

    @property
    def needs_weights(self) -> bool:
        """Whether there are sinks, or the bias is learned."""
        return self.sinks or (self.bias is not None and self.bias.learned)

    def weights(self, shape: Shape) -> Any:
        """Those of the bias, behind the scores of the sinks."""
        bias = () if self.bias is None else self.bias.weights(shape)
        return super().weights(shape)._replace(bias=bias) if self.sinks else bias

    def positions(self, q: Tensor, w: Any, scale: float | None) -> tuple[Tensor, Positions | None]:
        """The queries that keys meet, and the terms of offsets."""
        return of(self.bias, q, w.bias if self.sinks else w, scale)


def of(bias: Bias | None, q: Tensor, w: Any, scale: float | None) -> tuple[Tensor, Positions | None]:
    """The queries that keys meet, and the terms of offsets; as they came and None without a bias."""
    if bias is None:
        return q, None
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    return bias.queries(q, w), functools.partial(bias.terms, w=w, like=q, scale=factor)


def _traits(traits: Traits, bias: Bias) -> Traits:
    return replace(
        traits,
        paper=f"{traits.paper}; {bias.paper}",
        formula=f"{traits.formula}, with scores + {bias.formula}",
        rotary=traits.rotary and bias.rotary,
        learned=traits.learned or bias.learned,
        approximates=None,
    )


def dtype_of(like: Tensor) -> torch.dtype:
    """The dtype of terms that are computed for ``like``: float32 or better."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32
