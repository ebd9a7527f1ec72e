"""What Hybrid is made of: a near part and a far part, and the weights, the sinks and the bias that are theirs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from fast_attention.biases.bias import Bias
from fast_attention.engine.offsets import Positions
from fast_attention.mechanism import Attention, Shape
from fast_attention.mechanisms.linear.kernelised import Kernelised
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.mechanisms.sparse.selected import Selected

State = TypeVar("State")


class HybridWeights(NamedTuple):
    """The weights of the far part, and those of the near part's bias and sinks."""

    far: Any
    near: Any


class NearFar(Attention[Any, State]):
    """Two parts under one normaliser."""

    near: Local | BlockLocal | Selected
    far: Kernelised[Any]

    @property
    def needs_weights(self) -> bool:
        """Whether ``far``, or the bias or the sinks of ``near`` need weights."""
        return self.far.needs_weights or self.near.needs_weights

    def weights(self, shape: Shape) -> Any:
        """The weights of ``far``; with a learned bias or sinks those of both parts."""
        far = self.far.weights(shape)
        return HybridWeights(far, self.near.weights(shape)) if self.near.needs_weights else far

    def heads_of(self, w: Any) -> int | None:
        """The heads that a learned bias or sinks, or else ``far``, have weights for."""
        return self.near.heads_of(w.near) if self.near.needs_weights else self.far.heads_of(w)

    @property
    def takes_sinks(self) -> bool:
        """Whether another module may hold the sinks' scores: ``near`` has none of its own."""
        return self.near.takes_sinks

    def with_sinks(self, sinks: Tensor, w: Any) -> tuple[Any, Any]:
        """The sinks are those of ``near``."""
        far, near = w if self.near.needs_weights else (w, ())
        mechanism, near = self.near.with_sinks(sinks, near)
        changed: Any = self
        return replace(changed, near=mechanism), HybridWeights(far, near)

    def parts(self, w: Any, q: Tensor) -> tuple[Any, Positions | None, Tensor | None]:
        """The weights of ``far``, the bias of ``near`` and its sinks' scores."""
        far, near = w if self.near.needs_weights else (w, ())
        bias = None if self.bias is None else self.window.positions(q, near, self.near.scale)[1]
        return far, bias, self.near.sinks_of(near)

    def calibrated(self, q: Tensor, k: Tensor, w: Any, *, key_mask: Tensor | None = None) -> Any:
        """The weights of ``far`` suited to these queries and keys."""
        far = self.far.calibrated(self.scaled(q), k, self.parts(w, q)[0], key_mask=key_mask)
        return w._replace(far=far) if self.near.needs_weights else far

    def scaled(self, q: Tensor) -> Tensor:
        """Queries whose products, over the root of the width, are those of the near part."""
        return q if self.near.scale is None else q * (self.near.scale * math.sqrt(q.shape[-1]))

    @property
    def window(self) -> Local | BlockLocal:
        """``near`` where it goes by positions; where it is chosen, nothing asks."""
        assert not isinstance(self.near, Selected)
        return self.near

    @property
    def bias(self) -> Bias | None:
        """What scores of near keys gain by their distance."""
        return None if isinstance(self.near, Selected) else self.near.bias
