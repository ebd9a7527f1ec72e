"""Log attention in chunks that stay in cache: ``o_i = (a_i P + R) / (n a_i + B)``, with a hand-written gradient.

P, B, R are the sums of v_j, b_j, b_j v_j over the n keys that query i may see. With ``d = g / (n a + B)`` their
gradients are the sums of ``a d``, ``-o d`` and ``d`` over the queries. The backward pass maps queries and keys again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import dispatch, masks, summed
from fast_attention.engine.chunks import sum_to_width, visible_counts, vjp
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.mechanisms.log_manhattan.reference import LogSettings, log_sums


def log_attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, settings: LogSettings, *, fixed: bool
) -> Tensor:
    """``reference.log_sums``; ``fixed`` scores hold nothing to learn, so that the backward pass may map again."""
    why = dispatch.obstacle(q, k, v, even=True) if fixed else "a map with something to learn"
    if not why and settings.is_causal and q.shape[-2] != k.shape[-2]:
        why = "causal, and not as many queries as keys"
    if why:
        dispatch.record("whole tensors at a time", why)
        return log_sums(q, k, v, key_mask, settings=settings)
    summed.record(v, is_causal=settings.is_causal)
    return _RULE(q, k, v, key_mask, settings=settings)


class _Log:
    def __init__(self, tensors: tuple[Any, ...], out: Tensor, settings: LogSettings, *gradients: Tensor) -> None:
        (self.q, self.k, self.v, self.key_mask), self.out, self.settings = tensors, out, settings
        self.gradients, self.width = gradients, out.shape[-1]  # of the outputs, queries, keys and values
        self.count = visible_counts(self.key_mask, self.v, is_causal=settings.is_causal)

    def terms(self, at: slice) -> tuple[Tensor, ...]:
        v, b = self._visible(at, self.settings.score(self.k[..., at, :]))
        return v, b, b * v

    def read(self, at: slice, sums: Tensor) -> None:
        a, out = self.settings.score(self.q[..., at, :]), self.out[..., at, :]
        torch.addcmul(sums[..., -self.width :], a, sums[..., : self.width], out=out)
        if self.settings.normalized:
            out.div_(self._denominator(at, a, sums[..., self.width : -self.width]))

    def terms_again(self, at: slice) -> tuple[Tensor, ...]:
        b, self.pullback = vjp(self.settings.score, self.k[..., at, :])
        self.values, self.b = self._visible(at, b)
        return self.values, self.b

    def read_vjp(self, at: slice, sums: Tensor) -> tuple[Tensor, ...]:
        o, g, dq = (x[..., at, :] for x in (self.out, self.gradients[0], self.gradients[1]))
        scores = sums[..., self.width : sums.shape[-1] - (0 if self.settings.is_causal else self.width)]
        plain = sums[..., : self.width]
        a, pullback = vjp(self.settings.score, self.q[..., at, :])
        if not self.settings.normalized:
            dq.copy_(pullback(sum_to_width(g * plain, a.shape[-1])))
            return a * g, g, torch.zeros_like(scores).expand(*g.shape[:-1], -1)
        d = g / self._denominator(at, a, scores)
        da = torch.addcmul(plain, o, summed.rows(self.count, at), value=-1).mul_(d)  # d (P - n o)
        dq.copy_(pullback(sum_to_width(da, a.shape[-1])))
        return a * d, d, sum_to_width(o * d, scores.shape[-1]).neg_()

    def terms_vjp(self, at: slice, d_sums: Tensor) -> None:
        dk, dv = (x[..., at, :] for x in self.gradients[2:])
        d_plain, d_weighted, d_scores = d_sums.split([self.width, self.width, self.b.shape[-1]], -1)
        db = sum_to_width(self.values * d_weighted, self.b.shape[-1]).add_(d_scores)
        torch.addcmul(d_plain, self.b, d_weighted, out=dv)
        if self.key_mask is not None:
            masked = ~self.key_mask[..., at][..., None]
            db.masked_fill_(masked, 0.0)
            dv.masked_fill_(masked, 0.0)
        dk.copy_(self.pullback(db))

    def _visible(self, at: slice, b: Tensor) -> tuple[Tensor, Tensor]:
        """Values and scores of the keys, zeros where masked."""
        mask = None if self.key_mask is None else self.key_mask[..., at]
        return masks.drop(self.v[..., at, :], mask), masks.drop(b, mask)

    def _denominator(self, at: slice, a: Tensor, scores: Tensor) -> Tensor:
        """``n a + B``; infinite where it vanishes, so that quotients are zero."""
        total = torch.addcmul(scores, a, summed.rows(self.count, at))
        return torch.threshold_(total, torch.finfo(total.dtype).tiny, float("inf"))


def _forward(*tensors: Any, keep: bool, settings: LogSettings) -> tuple[Tensor, tuple[Tensor, ...]]:
    q, _, v, _ = tensors
    out = v.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, (summed.forward(_Log(tensors, out, settings), q, v, is_causal=settings.is_causal),)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, settings: LogSettings,
) -> tuple[Any, ...]:  # fmt: skip
    q, k, v, _ = inputs
    d_inputs = [summed.empty(x) for x in (q, k, v)]
    one = _Log(inputs, outputs[0], settings, gradients[0], *d_inputs)
    summed.backward(one, q, v, kept[0], is_causal=settings.is_causal)
    return *d_inputs, None


_RULE = CustomGradient(log_sums, _forward, _backward)
