"""Calls the kernel of decoding from exponential features."""

# pyright: reportCallIssue=false
# As in ``launching``.

from __future__ import annotations

from torch import Tensor

from fast_attention.gpu.configurations import STEP
from fast_attention.gpu.exponential import steps
from fast_attention.gpu.exponential.launching import Weights
from fast_attention.gpu.pointers import power, some, strides


def step(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: Tensor, weights: Weights
) -> tuple[Tensor, Tensor]:
    """The output of one token behind a state, and the state after it; rows in float32."""
    (batch, heads, _, width), E, D = q.shape, v.shape[-1], weights.keys.shape[-2]
    out, following = v.new_empty((batch, heads, 1, E), dtype=q.dtype), state.new_empty(state.shape)
    queries, keys, bias = (some(x, weights.keys).contiguous() for x in weights[:3])
    steps.exponential[(batch * heads * -(-E // STEP),)](
        q, k, v, queries, keys, bias, some(mask, q), state, out, following, heads, D, width, E, width**-0.25,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *strides(mask), HAS_BIAS=weights.bias is not None,
        HAS_MASK=mask is not None, BD=STEP, BW=power(width), BE=STEP, num_warps=4,
    )  # fmt: skip
    return out, following
