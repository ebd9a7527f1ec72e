"""Softmax of tiles, forward and backward: some queries against the keys they see, with all scores in the cache.

A tile is (heads, rows, width) of queries against (heads, span, width) of keys. The weights are computed anew in the
backward pass instead of being stored. The exponentials are torch's exact softmax, and a tile holds all keys of its
queries, so that nothing is rescaled: the error is that of the plain definition.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine.workspace import Workspace

SCORES = 2**18  # of a tile: 1 MiB in float32, what two cores keep in their second-level caches


def weights(
    q: Float[Tensor, "heads rows width"],
    k: Float[Tensor, "heads span width"],
    bias: Float[Tensor, "*#some span"] | None,
    hidden: Bool[Tensor, "*#some span"] | None,
    *,
    scale: float,
    scratch: Workspace,
) -> Float[Tensor, "heads rows span"]:
    """``softmax(scale q k^T + bias)`` with 0 where ``hidden``, also in rows where everything is.

    Every row must be finite somewhere in ``bias``; what may leave a row empty belongs in ``hidden``.
    """
    scores = scratch("scores", *q.shape[:2], k.shape[1])
    if bias is None:
        torch.baddbmm(scores, q, k.mT, beta=0, alpha=scale, out=scores)
    else:
        torch.baddbmm(bias, q, k.mT, alpha=scale, out=scores)
    if hidden is not None:
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
    torch.softmax(scores, -1, out=scores)
    return scores if hidden is None else scores.masked_fill_(hidden, 0.0)


def attend(
    q: Float[Tensor, "heads rows width"],
    k: Float[Tensor, "heads span width"],
    v: Float[Tensor, "heads span values"],
    bias: Tensor | None,
    hidden: Tensor | None,
    *,
    scale: float,
    scratch: Workspace,
    out: Float[Tensor, "heads rows values"] | None = None,
) -> Float[Tensor, "heads rows values"]:
    """The outputs of a tile, in ``out`` or else in scratch memory."""
    P = weights(q, k, bias, hidden, scale=scale, scratch=scratch)
    return torch.bmm(P, v, out=scratch("out", *q.shape[:2], v.shape[2]) if out is None else out)


def gradients(
    q: Float[Tensor, "heads rows width"],
    k: Float[Tensor, "heads span width"],
    v: Float[Tensor, "heads span values"],
    gradient: Float[Tensor, "heads rows values"],
    bias: Tensor | None,
    hidden: Tensor | None,
    *,
    scale: float,
    scratch: Workspace,
    dq: Float[Tensor, "heads rows width"] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a tile adds to the gradients of its queries (in ``dq`` where given), keys and values, in scratch memory.

    With ``P`` the weights: ``dV = P^T dO``, ``dS = P (dP - sum_j P dP)`` where ``dP = dO V^T``, ``dQ = scale dS K`` and
    ``dK = scale dS^T Q``.
    """
    P = weights(q, k, bias, hidden, scale=scale, scratch=scratch)
    dv = torch.bmm(P.mT, gradient, out=scratch("dv", *v.shape))
    dS = torch.bmm(gradient, v.mT, out=scratch("dS", *P.shape))
    torch.ops.aten._softmax_backward_data.out(dS, P, -1, P.dtype, grad_input=dS)
    dq, dk = scratch("dq", *q.shape) if dq is None else dq, scratch("dk", *k.shape)
    torch.baddbmm(dq, dS, k, beta=0, alpha=scale, out=dq)
    torch.baddbmm(dk, dS.mT, q, beta=0, alpha=scale, out=dk)
    return dq, dk, dv
