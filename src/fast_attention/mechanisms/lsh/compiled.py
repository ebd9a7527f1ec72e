"""Attends among hashed tokens by the compiled core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention import core
from fast_attention.engine import trace
from fast_attention.engine.operation import Fast, Operation, unsupported_reason
from fast_attention.engine.tiles import four_axes
from fast_attention.mechanisms.lsh.reference import SHORTEST, Codes, Rules, Tokens, hashed_softmax
from fast_attention.mechanisms.lsh.reference import buckets as reference_buckets

MOST = 2**31 - 1  # tokens of a sequence, buckets of a round and codes are 32-bit integers


def against(q: Tensor, v: Tensor, *others: Tensor, number: int, **settings: Any) -> str:
    """Why the core does not compute a call of ordinary tensors of a CPU; empty where it does."""
    if q.dtype == torch.float64:
        return "float64"
    if 2 * number + q.shape[-2] >= MOST:
        return "too many buckets and tokens for 32-bit integers"
    return core.unavailable()


def buckets(q: Tokens, rotations: Tensor, sizes: tuple[int, ...], number: int) -> Codes:
    """``reference.buckets``, where the core serves in one product and no other operation of torch."""
    if unsupported_reason(q) or against(q, q, number=number):
        return reference_buckets(q, rotations, sizes)
    tokens, rounds = four_axes(q), rotations.shape[1]
    found = torch.empty(*q.shape[:-2], rounds, q.shape[-2], dtype=torch.int32)
    rotations = rotations.detach().to(torch.float32).contiguous()
    torch.ops.fast_attention_core.lsh_hash(tokens.detach(), rotations, sizes, found)
    return found


def forward(q: Tensor, v: Tensor, bucket: Tensor, *, keep: bool, **numbers: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs (..., L, Ev); orders and codes of all rounds, lengths and normalisers of the queries."""
    a, b = four_axes(q), four_axes(v)
    codes = bucket.to(torch.int32).reshape(*a.shape[:2], *bucket.shape[-2:]).contiguous()
    order, arranged = torch.empty_like(codes), torch.empty_like(codes)
    lengths, logs = torch.empty(2, *a.shape[:-1], dtype=torch.float32).unbind()
    out = torch.empty(b.shape, dtype=b.dtype)
    saved = (order, arranged, lengths, logs)
    torch.ops.fast_attention_core.lsh_forward(a, b, codes, *_settings(Rules(**numbers)), *saved, out)
    return out.view(v.shape), saved if keep else ()


def backward(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    **numbers: Any,
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    """Gradients of q and v, from weights computed again."""
    (q, v, _), out, grad_out = inputs, outputs[0], gradients[0]
    a, b, out, grad_out = (four_axes(x) for x in (q, v, out, grad_out))
    dq, dv = torch.empty(a.shape, dtype=a.dtype), torch.empty(b.shape, dtype=b.dtype)
    torch.ops.fast_attention_core.lsh_backward(a, b, *_settings(Rules(**numbers)), *saved, out, grad_out, dq, dv)
    return dq.view(q.shape), dv.view(v.shape), None


def _settings(rules: Rules) -> tuple[int, int, list[int], float, float]:
    flags = [int(x) for x in (rules.ranked, rules.across, rules.is_causal, rules.distinct)]
    return rules.number, rules.size, flags, rules.scale, SHORTEST


hashed_attention = Operation(
    hashed_softmax,
    cpu=Fast(
        forward, backward, serves=against, even=2, path=f"{trace.CORE}: chunks of hashed tokens",
        why="tokens of one bucket stay in cache",
        sizes=lambda q, v, bucket, *, size, **numbers: {"chunk": size, "rounds": bucket.shape[-2]},
    ),
    empty=lambda q, v, *others, **numbers: torch.empty_like(v, memory_format=torch.contiguous_format),
    path="banded products over sorted tokens",
    sizes=lambda *tensors, size, **numbers: {"chunk": size},
)  # fmt: skip
