"""Signed differences stretch by stretch: ``o_i = h_i x_i + c_i sum_j (l_j - l_i) x_j``, c_i 1 or 1 over the keys seen.

Forward and backward pass of ``differences.attend`` in stretches that stay in cache, l relative to that of the first key
that was seen. With ``G = sum_i c_i g_i`` and ``M = sum_i l_i c_i g_i`` over the tokens that see a key its value gets
``h_j g_j + l_j G - M`` and its l ``x_j G``, less ``c_j g_j P_j`` for its own part as a reader, P the sum of the x seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.chunks import RunningSum, chunks, first_visible, sum_to_width, visible_counts, vjp
from fast_attention.engine.scan import accumulate_


class How(NamedTuple):
    """The settings of both passes; ``both`` gives h and l."""

    both: Callable[[Tensor], tuple[Tensor, Tensor]]
    mean: bool
    is_causal: bool


def forward(
    k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool, how: How
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs; kept: the l that all others are relative to, and P over all keys or before every stretch."""
    out, anchor = torch.empty_like(v, memory_format=torch.contiguous_format), _anchor(k, key_mask, how)
    total, weighed, befores, width = RunningSum(), RunningSum(), [], v.shape[-1]
    share = _share(key_mask, v, how)
    if how.is_causal:
        for now in chunks(v):
            h, l, x = _terms(how.both(k[..., now, :]), anchor, v, key_mask, now)
            rows = torch.cat([x, l * x], -1)
            befores.append(total.carry_(rows)[..., :width])
            related = torch.addcmul(rows[..., width:], l, rows[..., :width], value=-1)
            torch.addcmul(related.mul_(_at(share, now)), h, x, out=out[..., now, :])
        return out, (anchor, torch.cat(befores, -2)) if keep else ()
    for now in chunks(v):
        total.add(_values(v, key_mask, now))
    plain = total.row(v)
    slope = plain * share
    for now in chunks(v):
        h, l, x = _terms(how.both(k[..., now, :]), anchor, v, key_mask, now)
        o = out[..., now, :]
        torch.mul(h, x, out=o).addcmul_(l, slope, value=-1)
        weighed.add(x.mul_(l) if key_mask is not None else x * l)
    return out.add_(weighed.row(v).mul_(share)), (anchor, plain)


def backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, how: How,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of keys and values."""
    k, v, key_mask = inputs
    (anchor, plain), g, total = kept, gradients[0], RunningSum()
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    share, width = _share(key_mask, v, how), v.shape[-1]
    if how.is_causal:
        for place, now in reversed(list(enumerate(chunks(v)))):
            (h, l), back = vjp(how.both, k[..., now, :])
            h, l, x = _terms((h, l), anchor, v, key_mask, now)
            mine = g[..., now, :] * _at(share, now)
            sent = torch.cat([mine, mine * l], -1)
            total.carry_(sent, backwards=True)
            seen = x.clone()
            seen[..., :1, :] += plain[..., place : place + 1, :]
            accumulate_(seen)
            _write(h, l, x, g[..., now, :], sent[..., :width], mine, seen, back, dk[..., now, :], dv[..., now, :])
            dv[..., now, :].sub_(sent[..., width:])
    else:
        for now in chunks(v):
            total.add(g[..., now, :])
        sent, moment = total.row(v).mul_(share), RunningSum()
        for now in chunks(v):
            (h, l), back = vjp(how.both, k[..., now, :])
            h, l, x = _terms((h, l), anchor, v, key_mask, now)
            g_now = g[..., now, :]
            _write(h, l, x, g_now, sent, g_now, plain * share, back, dk[..., now, :], dv[..., now, :])
            moment.add(g_now * l)
        dv.sub_(moment.row(v).mul_(share))
    return dk, dv if key_mask is None else dv.masked_fill_(~key_mask[..., None], 0.0), None


def _write(
    h: Tensor, l: Tensor, x: Tensor, g: Tensor, sent: Tensor, mine: Tensor, seen: Tensor,
    back: Callable[..., Tensor], dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes the gradients of the keys and of the values, these but for M."""
    torch.mul(h, g, out=dv).addcmul_(l, sent)
    dl = (x * sent).addcmul_(mine, seen, value=-1)
    dk.copy_(back(sum_to_width(x * g, h.shape[-1]), sum_to_width(dl, l.shape[-1])))


def _terms(
    both: tuple[Tensor, Tensor], anchor: Tensor, v: Tensor, key_mask: Tensor | None, now: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """h, relative l, and values, zeros where masked."""
    return both[0], both[1] - anchor, _values(v, key_mask, now)


def _values(v: Tensor, key_mask: Tensor | None, now: slice) -> Tensor:
    return masks.drop(v[..., now, :], None if key_mask is None else key_mask[..., now])


def _anchor(k: Tensor, key_mask: Tensor | None, how: How) -> Tensor:
    return how.both(first_visible(k, key_mask))[1]


def _share(key_mask: Tensor | None, v: Tensor, how: How) -> Tensor:
    """The c, a row for each token or one for all."""
    if not how.mean:
        return v.new_ones((1, 1))
    return visible_counts(key_mask, v, is_causal=how.is_causal).clamp_(min=1.0).reciprocal_()


def _at(share: Tensor, now: slice) -> Tensor:
    return share if share.shape[-2] == 1 else share[..., now, :]
