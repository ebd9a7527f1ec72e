"""Sums over all pairs by sorting, tokens along the last axis: forward and backward pass of ``sorting.py``.

Both sums are symmetric in the two tokens, so that values get from the gradients g what tokens get from the values. A
sorted order gives ``y`` and the slope ``s`` with ``dy_i / dl_i = s_i``, and the gradient of l is ``g s(x) + x s(g)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

NUMBERS = 1 << 18  # sorted at a time
RANGE = {torch.float32: 60.0, torch.float64: 500.0}  # of l, within which exp(l) / exp(l') is as good as exp(l - l')

Kind = Literal["absolute", "laplacian"]
Pair = tuple[Tensor, Tensor]


def in_range(l: Tensor) -> bool:
    """Whether the l lie so close together that their exponentials need no log scale."""
    low, high = l.detach().aminmax()
    return bool(high - low < RANGE.get(l.dtype, 0.0))


def forward(l: Tensor, x: Tensor, *, keep: bool, kind: Kind) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The sums; kept: the order of every channel's tokens."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    views, orders, sums = (_rows(l, l), _rows(x, l), _rows(out, l)), [], _sums(kind)
    for group in _groups(views[0]):
        ls, xs, os = (view[group] for view in views)
        ordered, order = ls.contiguous().sort(-1)
        _scatter(os, order, sums(ordered, _gather(xs, order))[0])
        if keep:
            orders.append(order)
    return out, tuple(orders)


def backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, kind: Kind,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of l and x."""
    l, x = inputs
    dl, dx = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (l, x))
    views, sums = tuple(_rows(y, l) for y in (l, x, gradients[0], dl, dx)), _sums(kind)
    for group, order in zip(_groups(views[0]), kept, strict=True):
        ls, xs, gs, dls, dxs = (view[group] for view in views)
        ordered, xo, go = (_gather(y, order) for y in (ls, xs, gs))
        slope = sums(ordered, xo)[1].mul_(go)
        y, d_slope = sums(ordered, go)
        _scatter(dls, order, slope.addcmul_(xo, d_slope).sum(-3, keepdim=True))
        _scatter(dxs, order, y)
    return dl, dx


def _fast_absolute(l: Tensor, x: Tensor) -> Pair:
    """``sum_j |l_j - l_i| x_j`` and ``sum_j sign(l_i - l_j) x_j`` along ascending l."""
    middle = l.shape[-1] // 2
    l = l - l[..., middle : middle + 1]  # large l would cancel
    count, first_moment = x.cumsum(-1), (l * x).cumsum_(-1)
    slope = count.mul_(2.0).sub_(count[..., -1:] / 2)
    y = (slope * l).add_(first_moment[..., -1:]).sub_(first_moment, alpha=2.0)
    return y, slope.sub_(x)


def _fast_laplacian(l: Tensor, x: Tensor) -> Pair:
    """``sum_j exp(-|l_j - l_i|) x_j`` and ``sum_j sign(l_j - l_i) exp(-|l_j - l_i|) x_j`` along ascending l."""
    e = (l - (l[..., :1] + l[..., -1:]) / 2).exp_()
    below = (e * x).cumsum_(-1).div_(e)
    above = (x / e).flip(-1).cumsum_(-1).flip(-1).mul_(e)
    return (below + above).sub_(x), above.sub_(below)


def _sums(kind: Kind) -> Callable[[Tensor, Tensor], Pair]:
    return _fast_absolute if kind == "absolute" else _fast_laplacian


def _rows(x: Tensor, l: Tensor) -> Tensor:
    """(..., L, E) -> (all the batch, E / channels of l, channels of l, L)."""
    return x.reshape(-1, *x.shape[-2:]).mT.unflatten(-2, (-1, l.shape[-1]))


def _groups(l: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """As many sequences, or channels of one, as fit a core's cache."""
    batch, _, channels, length = l.shape
    rows = max(NUMBERS // max(length, 1), 1)
    sequences, width = max(rows // channels, 1), min(rows, channels)
    for start in range(0, batch, sequences):
        for first in range(0, channels, width):
            yield slice(start, start + sequences), slice(None), slice(first, first + width)


def _gather(x: Tensor, order: Tensor) -> Tensor:
    return x.contiguous().gather(-1, order.expand(x.shape))


def _scatter(out: Tensor, order: Tensor, y: Tensor) -> None:
    out.copy_(torch.empty_like(y).scatter_(-1, order.expand(y.shape), y))
