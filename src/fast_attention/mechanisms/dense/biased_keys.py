"""Attends with a bias for each key, ``softmax(q_i . k_j + b_j) v``, by torch's fused kernel.

Forward, the biases are a mask of one row. Backward the kernel gives no gradient of a mask, so that they are one more
column of the keys there, against ones in the queries.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine import dispatch, masks
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.fused import flash_backward, flash_forward, takes_flash

_MULTIPLE = 8  # of the wider columns


def serves(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> bool:
    """Whether the kernel takes these four-dimensional tensors, and outputs and gradients need no other form."""
    if dispatch.obstacle(q, k, v) or q.ndim != 4:
        return False
    if torch.is_autocast_enabled("cpu") or (is_causal and q.shape[-2] != k.shape[-2]):
        return False
    return q.shape[-1] == v.shape[-1] and takes_flash(q, k, v, is_causal=is_causal)


def attend(
    q: Float[Tensor, "batch heads length width"],
    k: Float[Tensor, "batch heads keys width"],
    v: Float[Tensor, "batch heads keys width"],
    b: Float[Tensor, "batch heads keys"],
    *,
    is_causal: bool,
) -> Float[Tensor, "batch heads length width"]:
    """``softmax(Q K^T + 1 b^T) V``, causal among as many queries as keys."""
    dispatch.record("torch's fused kernel", "the bias of a key is a mask of one row")
    return _BIASED(q, k, v, b, is_causal=is_causal)


def _plain(q: Tensor, k: Tensor, v: Tensor, b: Tensor, *, is_causal: bool) -> Tensor:
    scores = q @ k.mT + b[..., None, :]
    mask = masks.causal(q.shape[-2], k.shape[-2], q.device) if is_causal else None
    return masks.masked_softmax(scores, mask) @ v


def _forward(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, *, keep: bool, is_causal: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    return flash_forward(q, k, v, b[..., None, :], keep=keep, is_causal=is_causal, scale=1.0)


def _backward(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, is_causal: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    q, k, v, b = inputs
    width = q.shape[-1]
    more = width // _MULTIPLE * _MULTIPLE + _MULTIPLE - width
    ones = pad(q.new_ones(*q.shape[:-1], 1), (0, more - 1))
    wide = torch.cat([q, ones], -1), torch.cat([k, pad(b[..., None], (0, more - 1))], -1), pad(v, (0, more))
    out, gradient = pad(outputs[0], (0, more)), pad(gradients[0], (0, more))
    grads = flash_backward((*wide, None), (out,), kept, (gradient,), is_causal=is_causal, scale=1.0)
    dq, dk, dv = (x for x in grads if x is not None)
    return dq[..., :width], dk[..., :width], dv[..., :width], dk[..., width]


_BIASED = CustomGradient(_plain, _forward, _backward)
