"""Sums of additive scores stretch by stretch: ``o_i = (a_i P + R) / (n a_i + B)``, P, B, R sums of v_j, b_j, b_j v_j.

Forward and backward pass of ``additive.py`` in stretches that stay in cache. The backward pass maps queries and
keys again. With ``d = g / (n a + B)`` keys get sums over the queries that see them: of ``a d``, of ``d``, of ``-o d``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.chunks import RunningSum, chunks, sum_to_width, visible_counts, vjp
from fast_attention.engine.scan import accumulate_


class How(NamedTuple):
    """The settings of both passes."""

    part: Callable[[Tensor], Tensor]
    normalized: bool
    is_causal: bool


def forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool, how: How
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs; kept: the sums over all keys, or those before every stretch, a row for each."""
    out = v.new_empty((*q.shape[:-1], v.shape[-1]))
    total, befores = RunningSum(), []
    count = visible_counts(key_mask, v, is_causal=how.is_causal)
    if how.is_causal:
        for now in chunks(v):
            rows = torch.cat(_terms(how.part(k[..., now, :]), v, key_mask, now), -1)
            befores.append(total.carry_(rows))
            _read(how.part(q[..., now, :]), rows, count[..., now, :], out[..., now, :], how)
        return out, (torch.cat(befores, -2),) if keep else ()
    for now in chunks(v):
        total.add(*_terms(how.part(k[..., now, :]), v, key_mask, now))
    rows = total.row(v)
    for now in chunks(q):
        _read(how.part(q[..., now, :]), rows, count, out[..., now, :], how)
    return out, (rows,)


def backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, how: How,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of queries, keys and values."""
    q, k, v, key_mask = inputs
    (rows,), total = kept, RunningSum()
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    count = visible_counts(key_mask, v, is_causal=how.is_causal)
    if how.is_causal:
        for place, now in reversed(list(enumerate(chunks(v)))):
            b, back = vjp(how.part, k[..., now, :])
            plain, b, _ = _terms(b, v, key_mask, now, weighed=False)
            sums = torch.cat([plain, b], -1)
            sums[..., :1, :] += rows[..., place : place + 1, : sums.shape[-1]]
            accumulate_(sums)
            o, g = outputs[0][..., now, :], gradients[0][..., now, :]
            sent = torch.cat(_queries(q[..., now, :], o, g, sums, count[..., now, :], dq[..., now, :], how), -1)
            total.carry_(sent, backwards=True)
            _keys(plain, b, sent, back, key_mask, now, (dk, dv))
        return dq, dk, dv, None
    for now in chunks(q):
        o, g = outputs[0][..., now, :], gradients[0][..., now, :]
        total.add(*_queries(q[..., now, :], o, g, rows, count, dq[..., now, :], how))
    sent = total.row(v)
    for now in chunks(v):
        b, back = vjp(how.part, k[..., now, :])
        plain, b, _ = _terms(b, v, key_mask, now, weighed=False)
        _keys(plain, b, sent, back, key_mask, now, (dk, dv))
    return dq, dk, dv, None


def _terms(b: Tensor, v: Tensor, key_mask: Tensor | None, now: slice, *, weighed: bool = True) -> tuple[Tensor, ...]:
    """Values, keys' parts and their products, zeros where masked."""
    v, mask = v[..., now, :], None if key_mask is None else key_mask[..., now]
    v, b = masks.drop(v, mask), masks.drop(b, mask)
    return v, b, b * v if weighed else v


def _divisor(a: Tensor, count: Tensor, parts: Tensor) -> Tensor:
    """``n a + B``; infinite where it vanishes, so that quotients are zero."""
    total = torch.addcmul(parts, a, count)
    return torch.threshold_(total, torch.finfo(total.dtype).tiny, float("inf"))


def _read(a: Tensor, rows: Tensor, count: Tensor, out: Tensor, how: How) -> None:
    width = out.shape[-1]
    torch.addcmul(rows[..., -width:], a, rows[..., :width], out=out)
    if how.normalized:
        out.div_(_divisor(a, count, rows[..., width:-width]))


def _queries(q: Tensor, o: Tensor, g: Tensor, sums: Tensor, count: Tensor, dq: Tensor, how: How) -> tuple[Tensor, ...]:
    """``a d``, ``d`` and ``-o d``; writes the gradient of the queries, that of a being ``d (P - n o)``."""
    width = o.shape[-1]
    plain, parts = sums[..., :width], sums[..., width : sums.shape[-1] - (width if not how.is_causal else 0)]
    a, back = vjp(how.part, q)
    if not how.normalized:
        dq.copy_(back(sum_to_width(g * plain, a.shape[-1])))
        return a * g, g, torch.zeros_like(parts).expand(*g.shape[:-1], -1)
    d = g / _divisor(a, count, parts)
    dq.copy_(back(sum_to_width(torch.addcmul(plain, o, count, value=-1).mul_(d), a.shape[-1])))
    return a * d, d, sum_to_width(o * d, parts.shape[-1]).neg_()


def _keys(
    v: Tensor, b: Tensor, sent: Tensor, back: Callable[..., Tensor], key_mask: Tensor | None, now: slice,
    found: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Writes the gradients of keys and values: ``v D + E`` of b and ``C + b D``, C, D, E the sums of the three."""
    width = v.shape[-1]
    first, second, third = sent.split([width, width, b.shape[-1]], -1)
    db = sum_to_width(v * second, b.shape[-1]).add_(third)
    dk, dv = found[0][..., now, :], torch.addcmul(first, b, second, out=found[1][..., now, :])
    if key_mask is not None:
        hidden = ~key_mask[..., now][..., None]
        db.masked_fill_(hidden, 0.0)
        dv.masked_fill_(hidden, 0.0)
    dk.copy_(back(db))
