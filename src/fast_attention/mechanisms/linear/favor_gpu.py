"""Attention from positive random features by Triton kernels, which make the features themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import operation
from fast_attention.engine.numerics import clamp
from fast_attention.gpu import calls, self_check
from fast_attention.gpu.calls import Chunks, KernelSet
from fast_attention.gpu.configurations import WIDEST, WIDEST_PROJECTED, exponential
from fast_attention.gpu.exponential import operations
from fast_attention.mechanisms.linear import gpu
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.linear.random_feature_map import KINDS, Heads, RandomFeatureMap

MAPS = tuple(map(RandomFeatureMap, KINDS))  # type: ignore[arg-type]


def serves(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: Tensor, bias: Tensor | None,
    key_rows: Tensor | None, *state: Tensor | None, kind: int, **settings: Any,
) -> str:  # fmt: skip
    """Why kernels cannot compute attention from these features; empty where they can."""
    why = operation.gpu_unsupported_reason(q, k, widest=WIDEST_PROJECTED)
    why = why or operation.gpu_unsupported_reason(q, v, widest=WIDEST)
    if why or not MAPS[kind].exponential:
        return why or "features of either sign"
    if bias is not None and bias.requires_grad:
        return "a bias that is trained"
    case = self_check.exponential(MAPS[kind].width(rows), q.shape[-1])
    return self_check.unsupported_reason(case, q, v, masked=key_mask is not None)


def advances(*tensors: Any, **settings: Any) -> str:
    """Why kernels cannot go on from a state; empty where they can."""
    (q, k, v, _, *heads), state = tensors[:7], tensors[7:]
    before = None if state[0] is None else LinearState(*state)
    return serves(*tensors, **settings) or gpu.few(q, k, v, before, *heads)


def attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *heads: Any, kind: int, is_causal: bool
) -> Tensor:  # fmt: skip
    """Outputs (..., L, Ev): see ``fast_favor.attend``."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, heads[0])))
    kernel_set, q = _kernel_set(MAPS[kind], q, k, v, Heads(*heads), lead), q.expand(*lead, *q.shape[-2:])
    return calls.run(kernel_set, clamp(q), clamp(k), v, key_mask, is_causal=is_causal)


def packed(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, lengths: tuple[int, ...],
    key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Causal outputs of sequences of so many tokens, one behind another."""
    chunk = exponential(q.shape[-1], exact=q.dtype == torch.float32).forward.chunk
    rows, lead = Chunks.of(lengths, chunk, q.device), q.shape[:-2]
    kernel_set = _kernel_set(phi, q, k, v, heads, lead, rows.begins)
    q, k, v = (rows.spread(x) for x in (clamp(q), clamp(k), v))
    return rows.gathered(calls.run(kernel_set, q, k, v, rows.visible(key_mask), is_causal=True))


def further(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *others: Any, kind: int, is_causal: bool
) -> tuple[Tensor, ...]:
    """Causal outputs of new tokens behind a state, and the three tensors of the state after them."""
    heads, state = Heads(*others[:3]), others[3:]
    kernel_set, D = _kernel_set(MAPS[kind], q, k, v, heads, q.shape[:-2]), MAPS[kind].width(heads.rows)
    first = None if state[0] is None else torch.cat([state[0].flatten(-2), *state[1:]], -1)
    decodes = calls.steps(q, k, v, first, *heads)
    out, last = calls.advance(kernel_set, clamp(q), clamp(k), v, key_mask, first, decodes=decodes)
    kv, k, log_scale = last.split([D * v.shape[-1], D, D], -1)
    return out, kv.unflatten(-1, (D, -1)), k, log_scale


def _kernel_set(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, lead: torch.Size, begins: Tensor | None = None
) -> KernelSet:  # fmt: skip
    def flat(x: Tensor) -> Tensor:
        return (x if len(lead) == 2 and x.ndim == 3 else x.expand(*lead, *x.shape[-2:]).flatten(0, -3)).float()

    def both(rows: Tensor) -> Tensor:
        return flat(torch.cat([rows, -rows], -2) if phi.kind == "hyperbolic" else rows)

    queries = both(heads.rows)
    keys = queries if heads.key_rows is None else both(heads.key_rows)
    bias = None if heads.bias is None else flat(heads.bias)[:, 0]
    return operations.kernel_set(queries, keys, bias, begins)
