"""Signed Manhattan attention in chunks that stay in cache, with a hand-written gradient.

``o_i = h_i x_i + c_i (R - l_i P)``, P and R the sums of x_j and l_j x_j over the keys that token i may see, c_i 1 or 1
over their number, l relative to that of the first visible key. With ``G = sum_i c_i g_i`` and ``M = sum_i l_i c_i g_i``
over the tokens that see a key, its value has the gradient ``h_j g_j + l_j G - M`` and its l ``x_j G``, less
``c_j g_j P_j`` as a query. R and M only shift outputs and gradients: noncausal passes sum them beside the read and add
them last, so that every key is mapped once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import dispatch, summed
from fast_attention.engine.chunks import RunningSum, first_visible, sum_to_width, visible_counts, vjp
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.mechanisms.log_manhattan.reference import ManhattanSettings, manhattan_sums


def manhattan(k: Tensor, v: Tensor, key_mask: Tensor | None, settings: ManhattanSettings, *, fixed: bool) -> Tensor:
    """``reference.manhattan_sums``, ``fixed`` as for ``log_attention``."""
    why = dispatch.obstacle(k, v, even=True) if fixed else "a map with something to learn"
    if why:
        dispatch.record("whole tensors at a time", why)
        return manhattan_sums(k, v, key_mask, settings=settings)
    summed.record(v, is_causal=settings.is_causal)
    return _RULE(k, v, key_mask, settings=settings)


class _Manhattan:
    def __init__(
        self, tensors: tuple[Any, ...], out: Tensor, settings: ManhattanSettings, anchor: Tensor, *gradients: Tensor
    ) -> None:
        (self.k, self.v, self.key_mask), self.out, self.settings, self.anchor = tensors, out, settings, anchor
        self.gradients, self.width = gradients, out.shape[-1]  # of the outputs, keys and values
        self.shift = RunningSum()  # R or M of noncausal passes
        self.factor = self.v.new_ones((1, 1))  # c
        if settings.mean:
            counts = visible_counts(self.key_mask, self.v, is_causal=settings.is_causal)
            self.factor = counts.clamp_(min=1.0).reciprocal_()

    def terms(self, at: slice) -> tuple[Tensor, ...]:
        if not self.settings.is_causal:
            return (summed.visible(self.v, self.key_mask, at),)
        self._map(at, self.settings.both(self.k[..., at, :]))
        return self.x, self.l * self.x

    def read(self, at: slice, sums: Tensor) -> None:
        out, factor = self.out[..., at, :], summed.rows(self.factor, at)
        if self.settings.is_causal:
            total = torch.addcmul(sums[..., self.width :], self.l, sums[..., : self.width], value=-1)
            torch.addcmul(total.mul_(factor), self.h, self.x, out=out)
            return
        self._map(at, self.settings.both(self.k[..., at, :]))
        torch.mul(self.h, self.x, out=out).addcmul_(self.l, sums * factor, value=-1)
        self.shift.add(self.x.mul_(self.l) if self.key_mask is not None else self.x * self.l)

    def terms_again(self, at: slice) -> tuple[Tensor, ...]:
        both, self.pullback = vjp(self.settings.both, self.k[..., at, :])
        self._map(at, both)
        return (self.x,)

    def read_vjp(self, at: slice, sums: Tensor) -> tuple[Tensor, ...]:
        g = self.gradients[0][..., at, :]
        self.plain = sums
        if not self.settings.is_causal:
            return (g,)
        self.g = g * summed.rows(self.factor, at)
        return self.g, self.g * self.l

    def terms_vjp(self, at: slice, d_sums: Tensor) -> None:
        g, dk, dv = (x[..., at, :] for x in self.gradients)
        if self.settings.is_causal:
            d_plain, first_moment = d_sums.split(self.width, -1)
            dl = (self.x * d_plain).addcmul_(self.g, self.plain, value=-1)
            torch.mul(self.h, g, out=dv).addcmul_(self.l, d_plain).sub_(first_moment)
        else:
            d_plain = d_sums * self.factor
            dl = (self.x * d_plain).addcmul_(g, self.plain * self.factor, value=-1)
            torch.mul(self.h, g, out=dv).addcmul_(self.l, d_plain)
            self.shift.add(g * self.l)
        dk.copy_(self.pullback(sum_to_width(self.x * g, self.h.shape[-1]), sum_to_width(dl, self.l.shape[-1])))

    def _map(self, at: slice, both: tuple[Tensor, Tensor]) -> None:
        """h, relative l, and values, zeros where masked."""
        self.h, self.l, self.x = both[0], both[1] - self.anchor, summed.visible(self.v, self.key_mask, at)


def _forward(*tensors: Any, keep: bool, settings: ManhattanSettings) -> tuple[Tensor, tuple[Tensor, ...]]:
    k, v, key_mask = tensors
    out, anchor = summed.empty(v), settings.both(first_visible(k, key_mask))[1]
    one = _Manhattan(tensors, out, settings, anchor)
    sums = summed.forward(one, v, v, is_causal=settings.is_causal)
    if not settings.is_causal:
        out.add_(one.shift.row(v).mul_(one.factor))
    return out, (anchor, sums)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, settings: ManhattanSettings,
) -> tuple[Any, ...]:  # fmt: skip
    k, v, key_mask = inputs
    (anchor, sums), dk, dv = kept, summed.empty(k), summed.empty(v)
    one = _Manhattan(inputs, outputs[0], settings, anchor, gradients[0], dk, dv)
    summed.backward(one, v, v, sums, is_causal=settings.is_causal)
    if not settings.is_causal:
        dv.sub_(one.shift.row(v).mul_(one.factor))
    return dk, dv if key_mask is None else dv.masked_fill_(~key_mask[..., None], 0.0), None


_RULE = CustomGradient(manhattan_sums, _forward, _backward)
