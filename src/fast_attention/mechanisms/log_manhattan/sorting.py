"""Sums over all pairs of a function of |l_j - l_i|, by sorting instead of pairs.

In ascending order of l the absolute value falls apart into what lies before and what lies after: two scans do for all
tokens what n^2 differences would. Order statistics have no state of constant size, so causal sums divide and conquer:
every right half of a block reads its left half, blocks of 2, 4, 8 ... tokens. Gradients are those of the sums, with the
order held fixed (a subgradient where two l are equal).

Sums over all pairs by sorting, tokens along the last axis: forward and backward pass of ``sorting.py``.

Both sums are symmetric in the two tokens, so that values get from the gradients g what tokens get from the values. A
sorted order gives ``y`` and the slope ``s`` with ``dy_i / dl_i = s_i``, and the gradient of l is ``g s(x) + x s(g)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine.blocks import join, split
from fast_attention.engine.decay import decayed_sums, spread
from fast_attention.engine.operation import Fast, Operation, always
from fast_attention.engine.scan import prefix_sums
from fast_attention.mechanisms.log_manhattan import reference

Sums = Callable[[Tensor, Tensor], Tensor]
Distance = Literal["signed", "l1", "laplacian"]


def absolute(
    l: Float[Tensor, "*batch length #weights"], x: Float[Tensor, "*batch length width"]
) -> Float[Tensor, "*batch length width"]:
    """``y_i = sum_j |l_j - l_i| x_j`` for ascending l: ``l_i (2 P_i - P_n) + R_n - 2 R_i``, P and R sum x and l x."""
    middle = l.shape[-2] // 2
    wide = spread(l - l[..., middle : middle + 1, :].detach(), x.shape[-1])  # large l would cancel
    count, first_moment = prefix_sums(x), prefix_sums(wide * x)
    return wide * (2 * count - count[..., -1:, :]) + first_moment[..., -1:, :] - 2 * first_moment


def laplacian(
    l: Float[Tensor, "*batch length #weights"], x: Float[Tensor, "*batch length width"]
) -> Float[Tensor, "*batch length width"]:
    """``y_i = sum_j exp(-|l_j - l_i|) x_j`` for ascending l: a decayed sum from below and one from above."""
    return decayed_sums(x, l) + decayed_sums(x.flip(-2), -l.flip(-2)).flip(-2) - x


SUMS: dict[Distance, Sums | None] = {"signed": None, "l1": absolute, "laplacian": laplacian}


def over(
    l: Float[Tensor, "*batch length #weights"], x: Float[Tensor, "*batch length width"], sums: Sums, *, is_causal: bool
) -> Float[Tensor, "*batch length width"]:
    """``sums`` over all pairs of tokens in any order, time O(n log n); causal, over the tokens up to each."""
    return _over_past(l, x, sums) if is_causal else _over_all(l, x, sums)


def vector_absolute(
    l: Float[Tensor, "*batch length width"], x: Float[Tensor, "*batch length values"], *, is_causal: bool
) -> Float[Tensor, "*batch length values"]:
    """``y_i = sum_j (sum_a |l_ja - l_ia|) x_j``: the L1 distance of whole vectors, one sort for each channel."""
    y = torch.zeros_like(x)
    for channel in l.unbind(-1):
        y = y + over(channel[..., None], x, absolute, is_causal=is_causal)
    return y


class PastKeys(NamedTuple):
    """State for decoding: all keys so far, for order statistics have no smaller one."""

    logs: Float[Tensor, "*batch keys weights"]
    values: Float[Tensor, "*batch keys values"]  # zeros for masked keys
    ones: Float[Tensor, "*batch keys weights"]  # likewise


def appended(past: PastKeys | None, logs: Tensor, values: Tensor, ones: Tensor) -> PastKeys:
    """All keys, new ones included."""
    new = PastKeys(logs, values, ones)
    return new if past is None else PastKeys(*(torch.cat(pair, -2) for pair in zip(past, new, strict=True)))


def pair_sums(
    l: Float[Tensor, "*batch length weights"],
    x: Float[Tensor, "*batch length values"],
    ones: Float[Tensor, "*batch length weights"],
    past: PastKeys | None,
    *,
    distance: Distance,
    sizes: bool,
    is_causal: bool,
) -> tuple[Float[Tensor, "*batch length values"], Float[Tensor, "*batch length sizes"]]:
    """``sum_j w_ij x_j`` and ``sum_j |w_ij|`` over past and new tokens, w of ``distance``.

    Without ``sizes`` the second is empty where it would cost more.
    """
    sums = SUMS[distance]
    y = (torch.cat([x, ones], -1) if sizes else x) if sums else ones
    out = over(l, y, sums or absolute, is_causal=is_causal)
    if past is not None:
        y = (torch.cat([past.values, past.ones], -1) if sizes else past.values) if sums else past.ones
        out = out + _over_others(past.logs, y, l, sums or absolute)
    if sums:
        return out[..., : x.shape[-1]], out[..., x.shape[-1] :]
    keys = appended(past, l, x, ones)
    signed = reference.signed(keys.logs, keys.values, keys.ones[..., 0] > 0, is_causal=is_causal)
    return signed[..., -l.shape[-2] :, :], out


def _over_all(l: Tensor, x: Tensor, sums: Sums) -> Tensor:
    return (_ABSOLUTE if sums is absolute else _LAPLACIAN)(l, x)


NUMBERS = 1 << 18  # sorted at a time
RANGE = {torch.float32: 60.0, torch.float64: 500.0}  # of l, within which exp(l) / exp(l') is as good as exp(l - l')

Kind = Literal["absolute", "laplacian"]
Pair = tuple[Tensor, Tensor]


def one_scale_is_enough(l: Tensor) -> bool:
    """Whether the l lie so close together that their exponentials need no log scale."""
    low, high = l.detach().aminmax()
    return bool(high - low < RANGE.get(l.dtype, 0.0))


def sorted_forward(l: Tensor, x: Tensor, *, keep: bool, kind: Kind) -> tuple[Tensor, tuple[Tensor, ...]]:
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


def sorted_backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, kind: Kind,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of l and x."""
    l, x = inputs
    dl, dx = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (l, x))
    views, sums = tuple(_rows(y, l) for y in (l, x, gradients[0], dl, dx)), _sums(kind)
    for group, order in zip(_groups(views[0]), saved, strict=True):
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
    lower = (e * x).cumsum_(-1).div_(e)
    upper = (x / e).flip(-1).cumsum_(-1).flip(-1).mul_(e)
    return (lower + upper).sub_(x), upper.sub_(lower)


def _sums(kind: Kind) -> Callable[[Tensor, Tensor], Pair]:
    return _fast_absolute if kind == "absolute" else _fast_laplacian


def _rows(x: Tensor, l: Tensor) -> Tensor:
    """(..., L, E) -> (all the batch, E / channels of l, channels of l, L)."""
    return x.reshape(-1, *x.shape[-2:]).mT.unflatten(-2, (-1, l.shape[-1]))


def _groups(l: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Groups of as many sequences, or channels of one, as fit a core's cache."""
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


def _far_apart(l: Tensor, x: Tensor) -> str:
    """Why there is no closed form; empty where there is one."""
    return "" if one_scale_is_enough(l) else "log keys so far apart that sums need a running log scale"


def _plain(l: Tensor, x: Tensor, sums: Sums) -> Tensor:
    order = l.detach().argsort(-2)
    back = spread(order.argsort(-2), x.shape[-1]).expand(x.shape)
    there = spread(order, x.shape[-1]).expand(x.shape)
    return sums(l.gather(-2, order), x.gather(-2, there)).gather(-2, back)


def _operation(sums: Sums, kind: Kind, serves: Callable[..., str] = always) -> Operation:
    fast = Fast(
        partial(sorted_forward, kind=kind), partial(sorted_backward, kind=kind), even=2,
        path="one sort of each channel, sums along it, scattered back", why="closed form in sorted order",
        serves=serves,
    )  # fmt: skip
    return Operation(partial(_plain, sums=sums), cpu=fast, path="sorted and sorted back")


_ABSOLUTE, _LAPLACIAN = _operation(absolute, "absolute"), _operation(laplacian, "laplacian", serves=_far_apart)


def _over_past(l: Tensor, x: Tensor, sums: Sums) -> Tensor:
    """Time O(n log^2 n), memory O(n) for each of log n rounds."""
    length, size = x.shape[-2], 1
    y = sums(l[..., None, :], x[..., None, :])[..., 0, :]
    while size < length:
        size *= 2
        y = y + join(_from_left(split(l, size), split(x, size), sums), length)
    return y


def _over_others(l: Tensor, x: Tensor, queries: Tensor, sums: Sums) -> Tensor:
    """``sums`` over the tokens of ``l`` for other tokens, whose l are ``queries``; time O(n log n)."""
    zeros = x.new_zeros((*x.shape[:-2], queries.shape[-2], x.shape[-1]))
    return _over_all(torch.cat([l, queries], -2), torch.cat([x, zeros], -2), sums)[..., l.shape[-2] :, :]


def _from_left(l: Tensor, x: Tensor, sums: Sums) -> Tensor:
    """In every block, what the right half sums over the left half; zeros in the left half."""
    right = torch.arange(l.shape[-2], device=l.device)[:, None] >= l.shape[-2] // 2
    halves = _over_all if sums is absolute else _plain  # no path chosen by tokens yet to come
    return halves(l, x.masked_fill(right, 0.0), sums).masked_fill(~right, 0.0)
