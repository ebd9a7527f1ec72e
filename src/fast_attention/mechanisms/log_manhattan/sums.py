"""Sums over keys whose scores are ``a_i + b_j``, in chunks that stay in cache, with gradients written by hand.

``o_i = (a_i P + R) / D_i``, P and R the sums of x_j and b_j x_j over the keys that query i may see, n of them. Log
attention has ``D_i = n a_i + B``, the sum of all scores, or 1. In Manhattan attention tokens are queries and keys at
once: ``a = -b``, D_i is n or 1, and ``h_i x_i`` is added.

With ``d = g / D`` the gradients of P, R and B are the sums of ``a d``, ``d`` and ``-o d`` over the queries. Causal
queries read prefix sums: one row of sums is carried from chunk to chunk, in float64. Others all read the same totals.
Where nothing is trained, tokens are mapped to a, b and h chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.chunks import RunningSum, chunks, sum_to_width, visible_counts
from fast_attention.engine.operation import Fast, Operation, Tensors
from fast_attention.engine.scan import accumulate_, prefix_sums
from fast_attention.mechanisms.aft.reference import last_rows, quotient

Divisor = Literal["scores", "count", "none"]


Keys = tuple[Tensor, Tensor, Tensor | None]  # b, x and h


class Maps(NamedTuple):
    """``queries`` maps queries to a, None for Manhattan attention; ``keys`` maps keys to b and, there, h."""

    queries: Callable[[Tensor], Tensor] | None
    keys: Callable[[Tensor], tuple[Tensor, Tensor | None]]


def score_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None,
    maps: Maps,
    *,
    divisor: Divisor,
    is_causal: bool,
) -> Float[Tensor, "*batch length values"]:
    """The outputs o."""
    count, settings = visible_counts(key_mask, v, is_causal=is_causal), {"divisor": divisor, "is_causal": is_causal}
    if torch.is_grad_enabled() and (
        any(x.requires_grad for x in (q, k, v)) or maps.keys(k[..., :1, :])[0].requires_grad
    ):
        b, x, h = _Pass(q, k, v, None, key_mask, count, divisor, maps).keys(slice(None))
        return _SUMS(b if maps.queries is None else maps.queries(q), b, x, h, None, count, maps=None, **settings)
    return _SUMS(q if maps.queries else k, k, v, None, key_mask, count, maps=maps, **settings)


class _Pass(NamedTuple):
    a: Tensor
    b: Tensor
    x: Tensor
    h: Tensor | None
    key_mask: Tensor | None
    number: Tensor  # n, for every query or one row for all
    divisor: Divisor
    maps: Maps | None  # None: a, b and h are mapped, and nothing is masked

    def queries(self, at: slice) -> Tensor:
        """The a of some queries."""
        a = self.a[..., at, :]
        return a if self.maps is None or self.maps.queries is None else self.maps.queries(a)

    def keys(self, at: slice) -> Keys:
        """b, x and h of some keys."""
        b, x = self.b[..., at, :], self.x[..., at, :]
        if self.maps is None:
            return b, x, None if self.h is None else self.h[..., at, :]
        mask, (b, h) = None if self.key_mask is None else self.key_mask[..., at], self.maps.keys(b)
        return masks.drop(b, mask if h is None else None), masks.drop(x, mask), h  # with h, b is that of a query too

    def counts(self, at: slice) -> Tensor:
        """How many keys some queries see."""
        return self.number if self.number.shape[-2] == 1 else self.number[..., at, :]

    def terms(self, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """The summands of P, and of B where it is read, side by side."""
        return (x, b) if self.divisor == "scores" else (x,)

    def divided(self, y: Tensor, at: slice, a: Tensor, sums: Tensor, out: Tensor | None = None) -> Tensor:
        """``y`` over D, for some queries and the sums that they read."""
        if self.divisor == "none":
            return y
        if self.divisor == "count":
            return torch.div(y, self.counts(at).clamp(min=1.0), out=out)
        width = self.x.shape[-1]
        total = torch.addcmul(sums[..., width : width + a.shape[-1]], a, self.counts(at))
        torch.threshold_(total, torch.finfo(total.dtype).tiny, float("inf"))  # quotients are zero where it vanishes
        return torch.div(y, total, out=out)

    def read(self, at: slice, sums: Tensor, out: Tensor, keys: Keys | None) -> None:
        """Write the outputs of some queries, which are these keys in Manhattan attention."""
        width, out, (b, x, h) = self.x.shape[-1], out[..., at, :], keys or (None, None, None)
        a, sign = (self.queries(at), 1) if b is None or h is None else (b, -1)
        self.divided(torch.addcmul(sums[..., -width:], a, sums[..., :width], value=sign, out=out), at, a, sums, out=out)
        if x is not None and h is not None:
            out.addcmul_(h, x)

    def read_vjp(self, at: slice, sums: Tensor, o: Tensor, g: Tensor, da: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the sums that some queries read: P's, R's, and B's where it is read; writes those of a."""
        a, plain = self.a[..., at, :], sums[..., : self.x.shape[-1]]
        a = a if self.h is None else -a
        d = self.divided(g[..., at, :], at, a, sums)
        if self.divisor != "scores":
            da[..., at, :] = sum_to_width(d * plain, a.shape[-1])
            return a * d, d
        o = o[..., at, :]
        slopes = torch.addcmul(plain, o, self.counts(at), value=-1).mul_(d)  # d (P - n o)
        da[..., at, :] = sum_to_width(slopes, a.shape[-1])
        return a * d, d, sum_to_width(o * d, a.shape[-1]).neg_()

    def keys_vjp(self, at: slice, d_sums: Tensor, g: Tensor, da: Tensor, db: Tensor, dh: Any, dx: Tensor) -> None:
        """Write the gradients of some keys, ``d_sums`` being added up over the queries that see them."""
        (b, x, h), width = self.keys(at), self.x.shape[-1]
        d_plain, d_weighted, d_scores = d_sums.tensor_split([width, 2 * width], -1)
        dx = torch.addcmul(d_plain, b, d_weighted, out=dx[..., at, :])
        slopes = sum_to_width(x * d_weighted, b.shape[-1])
        db[..., at, :] = slopes.add_(d_scores) if d_scores.shape[-1] else slopes
        if h is not None:
            g = g[..., at, :]
            dx.addcmul_(h, g)
            dh[..., at, :] = sum_to_width(x * g, h.shape[-1])
            db[..., at, :] -= da[..., at, :]


def whole(
    q: Tensor, k: Tensor, v: Tensor, h: Tensor | None, key_mask: Tensor | None, count: Tensor, *, maps: Maps | None,
    divisor: Divisor, is_causal: bool,
) -> Tensor:  # fmt: skip
    """The outputs of whole tensors, mapped already where there are no ``maps``."""
    one, every = _Pass(q, k, v, h, key_mask, count, divisor, maps), slice(None)
    b, x, h = one.keys(every)
    a = one.queries(every) if h is None else -b
    plain, weighted, scores = (
        last_rows(prefix_sums(y), q.shape[-2]) if is_causal else y.sum(-2, keepdim=True) for y in (x, b * x, b)
    )
    count, out = last_rows(count, q.shape[-2]) if is_causal else count, a * plain + weighted
    if divisor != "none":
        out = out / count.clamp(min=1.0) if divisor == "count" else quotient(out, count * a + scores)
    return out if h is None else torch.addcmul(out, h, x)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, h: Tensor | None, key_mask: Tensor | None, count: Tensor, *, keep: bool,
    maps: Maps | None, divisor: Divisor, is_causal: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    one, total, before = _Pass(q, k, v, h, key_mask, count, divisor, maps), RunningSum(), list[Tensor]()
    out, mapped = v.new_empty((*q.shape[:-1], v.shape[-1])), dict[int, Keys]()
    for at in chunks(v):
        keys = b, x, h = one.keys(at)
        if is_causal:
            sums = torch.cat((*one.terms(b, x), b * x), -1)
            before.append(total.carry_(sums))
            one.read(at, sums, out, keys)
        else:
            total.add(*one.terms(b, x), b * x)
            if h is not None:  # the queries are these keys
                mapped[at.start] = keys
    if is_causal:
        return out, (torch.cat(before, -2),)
    sums = total.row(v)
    for at in chunks(out):
        one.read(at, sums, out, mapped.pop(at.start, None))
    return out, (sums,)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *,
    maps: None, divisor: Divisor, is_causal: bool,
) -> Tensors:  # fmt: skip
    (a, b, x, h, _, count), (sums,), (g,), (o,) = inputs, saved, gradients, outputs
    da, db, dx = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (a, b, x))
    dh = None if h is None else torch.empty_like(h)
    one, total = _Pass(a, b, x, h, None, count, divisor, None), RunningSum()
    if is_causal:
        for i, at in reversed(list(enumerate(chunks(x)))):
            rows = torch.cat(one.terms(b[..., at, :], x[..., at, :]), -1)
            rows[..., :1, :] += sums[..., i : i + 1, : rows.shape[-1]]
            d_sums = torch.cat(one.read_vjp(at, accumulate_(rows), o, g, da), -1)
            total.carry_(d_sums, backwards=True)
            one.keys_vjp(at, d_sums, g, da, db, dh, dx)
    else:
        for at in chunks(o):
            total.add(*one.read_vjp(at, sums, o, g, da))
        d_sums = total.row(x)
        for at in chunks(x):
            one.keys_vjp(at, d_sums, g, da, db, dh, dx)
    return da if h is None else None, db, dx, dh, None, None


def _serves(q: Tensor, k: Tensor, *others: Any, is_causal: bool, **settings: Any) -> str:
    return "causal, and not as many queries as keys" if is_causal and q.shape[-2] != k.shape[-2] else ""


_SUMS = Operation(
    whole,
    cpu=Fast(
        _forward, _backward, serves=_serves, even=3,
        path=lambda *tensors, is_causal, **settings:
            f"{'prefix sums' if is_causal else 'sums over all keys'}, chunk by chunk",
        why=lambda *tensors, is_causal, **settings: "causal" if is_causal else "every query sees the same keys",
        sizes=lambda q, k, v, *others, **settings: {"chunk": chunks(v)[0].stop},
    ),
    path="whole tensors at a time",
)  # fmt: skip
