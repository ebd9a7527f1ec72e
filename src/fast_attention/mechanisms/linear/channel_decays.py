"""Scores of tokens whose features each decay by themselves (GLA, Yang et al. 2023): no exponent above zero is taken.

Between the halves of a block, queries decay from the middle on and keys up to it: a product. Triangles fall into such
squares by halving, down to single tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def pairs(
    q: Float[Tensor, "*batch size C"],
    k: Float[Tensor, "*batch size C"],
    reached: Float[Tensor, "*batch size C"],
    *,
    strict: bool,
) -> Float[Tensor, "*batch size size"]:
    """``sum_c q_ic k_jc exp(reached_ic - reached_jc)`` for j <= i (``strict``: j < i), else 0; size is a power of two.

    ``reached``, which falls from token to token, may be of higher precision.
    """
    size = q.shape[-2]
    if size == 1:
        return torch.zeros_like(q[..., :1]) if strict else (q * k).sum(-1, keepdim=True)
    q, k, reached = (x.unflatten(-2, (2, size // 2)) for x in (q, k, reached))
    first, second = pairs(q, k, reached, strict=strict).unbind(-3)
    middle = reached[..., 0, -1:, :]
    queries = q[..., 1, :, :] * (reached[..., 1, :, :] - middle).to(q.dtype).exp()
    keys = k[..., 0, :, :] * (middle - reached[..., 0, :, :]).to(k.dtype).exp()
    upper = torch.cat([first, torch.zeros_like(first)], -1)
    return torch.cat([upper, torch.cat([queries @ keys.mT, second], -1)], -2)
