"""The tensors of a call of Hybrid, as flat tuples, which is what operations take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine.operation import Tensors
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.hybrid.far_sums import FarSums
from fast_attention.mechanisms.hybrid.sink_tokens import SinkTokens
from fast_attention.mechanisms.linear.kernelised import TokenMap

Maps = Callable[..., tuple[TokenMap, TokenMap]]  # weights of the far part -> the maps of queries and of keys


class Arguments(NamedTuple):
    """The tensors of a call."""

    q: Float[Tensor, "*batch length width"]
    k: Float[Tensor, "*batch keys width"]
    v: Float[Tensor, "*batch keys values"]
    visible: Bool[Tensor, "*#batch keys"]
    sinks: SinkTokens
    earlier: FarSums  # over all keys before these
    numbers: Float[Tensor, "heads offsets"] | None  # what near keys' scores gain by the offsets of a block's span
    learned_sinks: Float[Tensor, "heads"] | None  # scores in the normaliser without a value
    weights: Tensors  # of the far part

    @staticmethod
    def of(tensors: tuple[Any, ...]) -> Arguments:
        """From a flat tuple."""
        q, k, v, visible = tensors[:4]
        tokens, far, (numbers, learned) = SinkTokens(*tensors[4:7]), FarSums(*tensors[7:9]), tensors[9:11]
        return Arguments(q, k, v, visible, tokens, far, numbers, learned, tensors[11:])


class Inputs(NamedTuple):
    """Queries, the keys around them, the features of both, and the sums of the keys outside every span."""

    q: Float[Tensor, "*batch length width"]
    k: Float[Tensor, "*batch keys width"]
    v: Float[Tensor, "*batch keys values"]
    visible: Bool[Tensor, "*#batch keys"] | None  # None: all
    sinks: SinkTokens
    queries: Features
    keys: Features
    outside: FarSums
    numbers: Float[Tensor, "heads offsets"] | None  # as in ``Arguments``
    learned_sinks: Float[Tensor, "heads"] | None

    def flat(self) -> tuple[Tensor | None, ...]:
        """All tensors in a flat tuple."""
        return (*self[:4], *self.sinks, *self.queries, *self.keys, *self.outside, self.numbers, self.learned_sinks)

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *t: Any) -> Inputs:
        """From a flat tuple."""
        features = Features(*t[3:5]), Features(*t[5:7])
        return Inputs(q, k, v, visible, SinkTokens(*t[:3]), *features, FarSums(*t[7:9]), *t[9:11])
