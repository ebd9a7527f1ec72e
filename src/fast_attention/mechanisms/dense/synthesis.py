"""Computes the Synthesizers' scores from their weights, and attends under them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import pad

from fast_attention.engine import dispatch, masks
from fast_attention.engine.blocks import narrow
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.fused import flash_backward, flash_forward, takes_flash
from fast_attention.engine.opaque import opaque
from fast_attention.mechanisms.dense import rows
from fast_attention.mechanisms.dense.reference import synthesizer_attention
from fast_attention.mechanisms.dense.scores import Scores


def attend(
    v: Float[Tensor, "*batch keys values"],
    scores: Scores,
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch length values"]:
    """``synthesizer_attention`` for scores in summands: a block of queries at a time where long, else all at once."""
    if attn_mask is None and dropout == 0.0:
        return _in_blocks(v, key_mask, *scores, is_causal=is_causal)
    keys = v.shape[-2]
    dispatch.record("all scores at once", "an attn_mask or dropout", keys=keys)
    return synthesizer_attention(
        v, scores.whole(keys), is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout
    )


def _like_scores(v: Tensor, key_mask: Tensor | None, *parts: Tensor | None, is_causal: bool) -> Tensor:
    return v.new_empty(*v.shape[:-2], Scores(*parts).length(), v.shape[-1])


@opaque(_like_scores)
def _in_blocks(v: Tensor, key_mask: Tensor | None, *parts: Tensor | None, is_causal: bool) -> Tensor:
    scores, keys = Scores(*parts), v.shape[-2]
    if why := rows.against(v, scores.length()):
        dispatch.record("all scores at once", why, keys=keys)
        return synthesizer_attention(v, scores.whole(keys), is_causal=is_causal, key_mask=key_mask)
    return rows.attend(v, scores, is_causal=is_causal, key_mask=key_mask)


class Layer(NamedTuple):
    """A linear layer per head: W (H, E, outputs) and b (H, outputs)."""

    W: Tensor
    b: Tensor


class LayerPair(NamedTuple):
    """Two layers, of a and b outputs."""

    A: Layer
    B: Layer


class Table(NamedTuple):
    """Scores R (H, max_len, max_len) of every position for every position."""

    R: Tensor


class Factors(NamedTuple):
    """Two thin tables (H, max_len, rank), whose product are the scores."""

    R1: Tensor
    R2: Tensor


class Mixed(NamedTuple):
    """Logits (H, parts) of the mixture and the weights of its parts."""

    alpha: Tensor
    parts: tuple[Any, ...]


def normal(*size: int, std: float = 1.0) -> nn.Parameter:
    """A parameter drawn from N(0, std^2)."""
    return nn.Parameter(torch.randn(size) * std)


def zeros(*size: int) -> nn.Parameter:
    """A parameter that starts at zero."""
    return nn.Parameter(torch.zeros(size))


def layer(heads: int, width: int, outputs: int) -> Layer:
    """A layer whose outputs have variance about one half for rectified unit inputs; biases start at zero."""
    return Layer(normal(heads, width, outputs, std=width**-0.5), zeros(heads, outputs))


def dense_scores(q: Float[Tensor, "*batch length width"], w: Layer, keys: int) -> Scores:
    """``relu(q_i) W + b`` for the first keys: the dense Synthesizer's two layers, the projection to q being the first.

    As products of one more column: ``[relu(q_i), 1] . [W_j, b_j]``, with keys that all sequences share.
    """
    table = torch.cat([narrow(w.W, keys, axis=-1), narrow(w.b, keys, axis=-1)[:, None]], 1)
    return Scores(Q=F.pad(q.relu(), (0, 1), value=1.0), K=table.mT)


_MULTIPLE = 8  # of the wider columns


def serves(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> bool:
    """Whether the kernel takes these four-dimensional tensors, and outputs and gradients need no other form."""
    if dispatch.obstacle(q, k, v) or q.ndim != 4:
        return False
    if torch.is_autocast_enabled("cpu") or (is_causal and q.shape[-2] != k.shape[-2]):
        return False
    return q.shape[-1] == v.shape[-1] and takes_flash(q, k, v, is_causal=is_causal)


def with_key_bias(
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


def dense_attention(
    q: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch keys values"],
    w: Layer,
    *,
    is_causal: bool,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``softmax(relu(q_i) W + b) v``: long and without a mask by torch's fused kernel."""
    if key_mask is None and not rows.against(v, q.shape[-2]):
        k, b = narrow(w.W, v.shape[-2], axis=-1).mT, narrow(w.b, v.shape[-2], axis=-1)
        k, b = k.contiguous().expand(*v.shape[:-2], *k.shape[-2:]), b.expand(v.shape[:-1])
        if serves(q, k, v, is_causal=is_causal):
            return with_key_bias(q.relu(), k, v, b, is_causal=is_causal)
    return attend(v, dense_scores(q, w, v.shape[-2]), is_causal=is_causal, key_mask=key_mask)


def outer_scores(q: Float[Tensor, "*batch length width"], w: LayerPair) -> Scores:
    """``A_i,(j // b) B_i,(j mod b)`` for key j: a row of a b scores out of a + b numbers, from two dense layers."""
    A, B = (q.relu() @ each.W + each.b[..., None, :] for each in w)
    return Scores(X=A, Y=B)
