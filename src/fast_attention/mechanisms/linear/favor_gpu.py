"""Attention from positive random features by Triton kernels, which make the features themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine import operation
from fast_attention.engine.numerics import bounded
from fast_attention.gpu import self_check, walking
from fast_attention.gpu.configurations import WIDEST, WIDEST_PROJECTED, exponential
from fast_attention.gpu.exponential import operations
from fast_attention.gpu.walking import Chunks, Forms
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap


def obstacle(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, masked: bool
) -> str:  # fmt: skip
    """Why kernels cannot compute attention from these features; empty where they can."""
    why = operation.gpu_obstacle(q, k, widest=WIDEST_PROJECTED) or operation.gpu_obstacle(q, v, widest=WIDEST)
    if why or not phi.exponential:
        return why or "features of either sign"
    if heads.bias is not None and heads.bias.requires_grad:
        return "a bias that is trained"
    case = self_check.exponential(phi.width(heads.rows), q.shape[-1])
    return self_check.obstacle(case, q, v, masked=masked)


def attend(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Outputs (..., L, Ev): see ``fast_favor.attend``."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, heads.rows)))
    forms, q = _forms(phi, q, k, v, heads, lead), q.expand(*lead, *q.shape[-2:])
    return walking.walk(forms, bounded(q), bounded(k), v, key_mask, is_causal=is_causal)


def packed(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, lengths: tuple[int, ...],
    key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Causal outputs of sequences of so many tokens, one behind another."""
    chunk = exponential(q.shape[-1], exact=q.dtype == torch.float32).forward.chunk
    rows, lead = Chunks.of(lengths, chunk, q.device), q.shape[:-2]
    forms = _forms(phi, q, k, v, heads, lead, rows.begins)
    q, k, v = (rows.spread(x) for x in (bounded(q), bounded(k), v))
    return rows.gathered(walking.walk(forms, q, k, v, rows.visible(key_mask), is_causal=True))


def advance(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Causal outputs of new tokens behind ``state``, and the state after them."""
    forms, D = _forms(phi, q, k, v, heads, q.shape[:-2]), phi.width(heads.rows)
    first = None if state is None else torch.cat([state.kv.flatten(-2), state.k, state.log_scale], -1)
    decodes = walking.steps(q, k, v, first, *heads)
    out, last = walking.further(forms, bounded(q), bounded(k), v, key_mask, first, decodes=decodes)
    kv, k, log_scale = last.split([D * v.shape[-1], D, D], -1)
    return out, LinearState(kv.unflatten(-1, (D, -1)), k, log_scale)


def _forms(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, lead: torch.Size, begins: Tensor | None = None
) -> Forms:  # fmt: skip
    def flat(x: Tensor) -> Tensor:
        return (x if len(lead) == 2 and x.ndim == 3 else x.expand(*lead, *x.shape[-2:]).flatten(0, -3)).float()

    def both(rows: Tensor) -> Tensor:
        return flat(torch.cat([rows, -rows], -2) if phi.kind == "hyperbolic" else rows)

    queries = both(heads.rows)
    keys = queries if heads.key_rows is None else both(heads.key_rows)
    bias = None if heads.bias is None else flat(heads.bias)[:, 0]
    trained = walking.trains(queries, keys)
    return operations.forms(queries, keys, bias, walking.trains(q, k, v, queries, keys), trained, begins)
