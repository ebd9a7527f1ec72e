"""Sums over keys whose scores are ``a_i + b_j``, in chunks that stay in cache, with gradients written by hand.

``o_i = (a_i P + R) / D_i``, P and R the sums of v_j and b_j v_j over the keys that query i may see. Log attention has
``D_i = n a_i + B``, the sum of all scores, or 1. In Manhattan attention tokens are queries and keys at once: ``b = l``
is relative to that of the first visible key, ``a = -b``, D_i is the number of keys or 1, and ``h_i v_i`` is added.

With ``d = g / D`` the gradients of P, R and B are the sums of ``a d``, ``d`` and ``-o d`` over the queries. Causal
queries read prefix sums: one row of sums is carried from chunk to chunk, in float64. Others all read the same totals.
The backward pass maps queries and keys again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.chunks import RunningSum, chunks, first_visible, sum_to_width, visible_counts, vjp
from fast_attention.engine.operation import Fast, Tensors
from fast_attention.engine.scan import accumulate_


class Settings(NamedTuple):
    """``score`` maps queries to a and keys to b, or, in Manhattan attention, tokens to h and l."""

    score: Callable[[Tensor], Any]
    divisor: Literal["scores", "count", "none"]
    is_causal: bool
    manhattan: bool = False


class Keys(NamedTuple):
    """The mapped keys of a chunk, with values, zeros where masked; ``pullback`` gives the gradients of keys."""

    h: Tensor | None
    b: Tensor
    x: Tensor
    pullback: Callable[..., Tensor] | None


class _Pass:
    def __init__(self, tensors: tuple[Any, ...], settings: Settings, out: Tensor, anchor: Tensor | None) -> None:
        (self.q, self.k, self.v, self.key_mask), self.settings, self.out = tensors, settings, out
        self.anchor, self.width = anchor, out.shape[-1]
        self.count = visible_counts(self.key_mask, self.v, is_causal=settings.is_causal)

    def keys(self, at: slice, *, again: bool = False) -> Keys:
        """Maps the keys of a chunk."""
        k, mask = self.k[..., at, :], None if self.key_mask is None else self.key_mask[..., at]
        mapped, pullback = vjp(self.settings.score, k) if again else (self.settings.score(k), None)
        x = masks.drop(self.v[..., at, :], mask)
        if self.anchor is None:
            return Keys(None, masks.drop(mapped, mask), x, pullback)
        return Keys(mapped[0], mapped[1] - self.anchor, x, pullback)

    def terms(self, keys: Keys) -> tuple[Tensor, ...]:
        """The summands of P, of B where it is read, and of R, side by side."""
        return (*self.read_again(keys), keys.b * keys.x)

    def read_again(self, keys: Keys) -> tuple[Tensor, ...]:
        """The summands of P, and of B where it is read: gradients need no more."""
        return (keys.x, keys.b) if self.settings.divisor == "scores" else (keys.x,)

    def counts(self, at: slice) -> Tensor:
        """How many keys the queries of a chunk see."""
        return self.count if self.count.shape[-2] == 1 else self.count[..., at, :]

    def divided(self, y: Tensor, at: slice, a: Tensor, sums: Tensor, out: Tensor | None = None) -> Tensor:
        """``y`` over D."""
        if self.settings.divisor == "none":
            return y
        if self.settings.divisor == "count":
            return torch.div(y, self.counts(at).clamp(min=1.0), out=out)
        total = torch.addcmul(sums[..., self.width : self.width + a.shape[-1]], a, self.counts(at))
        torch.threshold_(total, torch.finfo(total.dtype).tiny, float("inf"))  # quotients are zero where it vanishes
        return torch.div(y, total, out=out)

    def read(self, at: slice, sums: Tensor, keys: Keys | None) -> None:
        """Writes the outputs of a chunk of queries, which are ``keys`` in Manhattan attention."""
        out, plain, weighted = self.out[..., at, :], sums[..., : self.width], sums[..., -self.width :]
        if keys is None or keys.h is None:
            a = self.settings.score(self.q[..., at, :])
            self.divided(torch.addcmul(weighted, a, plain, out=out), at, a, sums, out=out)
            return
        self.divided(torch.addcmul(weighted, keys.b, plain, value=-1, out=out), at, keys.b, sums, out=out)
        out.addcmul_(keys.h, keys.x)

    def read_vjp(self, at: slice, sums: Tensor, keys: Keys | None, g: Tensor, dq: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the sums that a chunk of queries read: P's, in Manhattan attention its negative, R's and B's.

        Writes those of the queries.
        """
        if keys is not None and keys.h is not None:
            d = self.divided(g, at, keys.b, sums)
            return keys.b * d, d
        plain = sums[..., : self.width]
        a, pullback = vjp(self.settings.score, self.q[..., at, :])
        d = self.divided(g, at, a, sums)
        if self.settings.divisor != "scores":
            dq.copy_(pullback(sum_to_width(d * plain, a.shape[-1])))
            return a * d, d
        o = self.out[..., at, :]
        da = torch.addcmul(plain, o, self.counts(at), value=-1).mul_(d)  # d (P - n o)
        dq.copy_(pullback(sum_to_width(da, a.shape[-1])))
        return a * d, d, sum_to_width(o * d, a.shape[-1]).neg_()

    def keys_vjp(
        self, at: slice, sums: Tensor, d_sums: Tensor, keys: Keys, g: Tensor, dk: Tensor, dv: Tensor
    ) -> None:  # fmt: skip
        """Writes the gradients of a chunk of keys, ``d_sums`` being added up over the queries that see them."""
        d_plain, d_weighted, d_scores = d_sums.tensor_split([self.width, 2 * self.width], -1)
        db, wide = keys.x * d_weighted, keys.b.shape[-1]
        assert keys.pullback is not None
        if keys.h is None:
            torch.addcmul(d_plain, keys.b, d_weighted, out=dv)
            db = sum_to_width(db, wide)
            dk.copy_(keys.pullback(masks.drop(db.add_(d_scores) if d_scores.shape[-1] else db, self.mask(at))))
            return
        torch.mul(keys.h, g, out=dv).addcmul_(keys.b, d_weighted).sub_(d_plain)
        db.addcmul_(g, self.divided(sums[..., : self.width], at, keys.b, sums), value=-1)  # as a query it has a = -b
        dk.copy_(keys.pullback(sum_to_width(keys.x * g, wide), sum_to_width(db, wide)))

    def mask(self, at: slice) -> Tensor | None:
        """The mask of a chunk of keys."""
        return None if self.key_mask is None else self.key_mask[..., at]


def _forward(*tensors: Any, keep: bool, settings: Settings) -> tuple[Tensor, tuple[Tensor, ...]]:
    q, k, v, key_mask = tensors
    anchor = settings.score(first_visible(k, key_mask))[1] if settings.manhattan else None
    out = v.new_empty((*q.shape[:-1], v.shape[-1]))
    one, total = _Pass(tensors, settings, out, anchor), RunningSum()
    saved = () if anchor is None else (anchor,)
    if settings.is_causal:
        before = []
        for at in chunks(v):
            keys = one.keys(at)
            sums = torch.cat(one.terms(keys), -1)
            before.append(total.carry_(sums))
            one.read(at, sums, keys)
        return out, (torch.cat(before, -2), *saved)
    mapped = {}
    for at in chunks(v):
        keys = one.keys(at)
        total.add(*one.terms(keys))
        if settings.manhattan:
            mapped[at.start] = keys
    sums = total.row(v)
    for at in chunks(v if settings.manhattan else q):
        one.read(at, sums, mapped.pop(at.start, None))
    return out, (sums, *saved)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *,
    settings: Settings,
) -> Tensors:  # fmt: skip
    q, k, v, key_mask = inputs
    (sums, *anchor), (g,) = saved, gradients
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    one, total = _Pass(inputs, settings, outputs[0], *anchor or [None]), RunningSum()

    def of(at: slice, *tensors: Tensor) -> list[Tensor]:
        return [x[..., at, :] for x in tensors]

    if settings.is_causal:
        for i, at in reversed(list(enumerate(chunks(v)))):
            keys = one.keys(at, again=True)
            rows = torch.cat(one.read_again(keys), -1)
            rows[..., :1, :] += sums[..., i : i + 1, : rows.shape[-1]]
            d_sums = torch.cat(one.read_vjp(at, accumulate_(rows), keys, *of(at, g, dq)), -1)
            total.carry_(d_sums, backwards=True)
            one.keys_vjp(at, rows, d_sums, keys, *of(at, g, dk, dv))
    else:
        mapped = {at.start: one.keys(at, again=True) for at in chunks(v)} if settings.manhattan else {}
        for at in chunks(v if settings.manhattan else q):
            total.add(*one.read_vjp(at, sums, mapped.get(at.start), *of(at, g, dq)))
        d_sums = total.row(v)
        for at in chunks(v):
            one.keys_vjp(at, sums, d_sums, mapped.pop(at.start, None) or one.keys(at, again=True), *of(at, g, dk, dv))
    return None if settings.manhattan else dq, dk, masks.drop(dv, key_mask), None


def _serves(q: Tensor, k: Tensor, *others: Any, settings: Settings) -> str:
    uneven = settings.is_causal and q.shape[-2] != k.shape[-2]
    return "causal, and not as many queries as keys" if uneven else ""


FAST = Fast(
    _forward, _backward, serves=_serves, even=3,
    path=lambda *tensors, settings: f"{'prefix sums' if settings.is_causal else 'sums over all keys'}, chunk by chunk",
    why=lambda *tensors, settings: "causal" if settings.is_causal else "every query sees the same keys",
    sizes=lambda q, k, v, key_mask, **settings: {"chunk": chunks(v)[0].stop},
)  # fmt: skip
