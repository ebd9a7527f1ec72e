"""Spreads an adapted mechanism: its low-rank deltas act on single tokens, and the rest is the mechanism's strategy."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fast_attention.mechanisms.hybrid.adapted import Adapted
from fast_attention.parallel.strategy import Call, Sizes, Strategy


def adapted(inner: Strategy) -> Strategy:
    """The strategy of a mechanism, for ``Adapted`` of it."""

    def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert isinstance(call.mechanism, Adapted)
        return inner.attend(_within(call), *call.mechanism.adapted(q, k, v, call.w))

    def sends(call: Call, sizes: Sizes) -> int:
        return inner.sends(_within(call), sizes)

    return replace(inner, attend=attend, sends=sends)


def _within(call: Call) -> Call:
    assert isinstance(call.mechanism, Adapted)
    return call._replace(mechanism=call.mechanism.mechanism, w=call.w.inner if call.w else ())
