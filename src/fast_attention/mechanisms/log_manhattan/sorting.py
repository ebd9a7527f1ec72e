"""Sums over all pairs of a function of |l_j - l_i|, by sorting instead of pairs.

In ascending order of l the absolute value falls apart into what lies before and what lies after: two scans do for all
tokens what n^2 differences would. Order statistics have no state of constant size, so causal sums divide and conquer:
every right half of a block reads its left half, blocks of 2, 4, 8 ... tokens. Gradients are those of the sums, with the
order held fixed (a subgradient where two l are equal).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine.blocks import join, split
from fast_attention.engine.decay import decayed_sums
from fast_attention.engine.tracing import traced
from fast_attention.mechanisms.log_manhattan import reference

Sums = Callable[[Tensor, Tensor], Tensor]
Distance = Literal["signed", "l1", "laplacian"]


def absolute(
    l: Float[Tensor, "*batch 1 weights length"], x: Float[Tensor, "*batch times weights length"]
) -> Float[Tensor, "*batch times weights length"]:
    """``y_i = sum_j |l_j - l_i| x_j`` for ascending l: ``l_i (2 P_i - P_n) + R_n - 2 R_i``, P and R sum x and l x."""
    middle = l.shape[-1] // 2
    l = l - l[..., middle : middle + 1].detach()  # large l would cancel
    count, first_moment = x.cumsum(-1), (l * x).cumsum(-1)
    return l * (2 * count - count[..., -1:]) + first_moment[..., -1:] - 2 * first_moment


def laplacian(
    l: Float[Tensor, "*batch 1 weights length"], x: Float[Tensor, "*batch times weights length"]
) -> Float[Tensor, "*batch times weights length"]:
    """``y_i = sum_j exp(-|l_j - l_i|) x_j`` for ascending l: a decayed sum from below and one from above."""
    if traced() or not _one_scale_is_enough(l):
        return wide_laplacian(l, x)
    e = (l - (l[..., :1] + l[..., -1:]).detach() / 2).exp()
    return (e * x).cumsum(-1) / e + (x / e).flip(-1).cumsum(-1).flip(-1) * e - x


def wide_laplacian(
    l: Float[Tensor, "*batch 1 weights length"], x: Float[Tensor, "*batch times weights length"]
) -> Float[Tensor, "*batch times weights length"]:
    """``laplacian`` with a running log scale, whatever the l are."""
    times = x.shape[-3]
    l, x = (y.flatten(-3, -2).mT.contiguous() for y in (l, x))
    y = decayed_sums(x, l) + decayed_sums(x.flip(-2), -l.flip(-2)).flip(-2) - x
    return y.mT.unflatten(-2, (times, -1))


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


RANGE = {torch.float32: 60.0, torch.float64: 500.0}  # of l, within which exp(l) / exp(l') is as good as exp(l - l')


def _one_scale_is_enough(l: Tensor) -> bool:
    """Whether the l lie so close together that their exponentials need no log scale."""
    low, high = l.detach().aminmax()
    return bool(high - low < RANGE.get(l.dtype, 0.0))


def _over_all(l: Tensor, x: Tensor, sums: Sums) -> Tensor:
    """One sort of each channel, sums along it, scattered back."""
    channels = l.shape[-1]
    l, x = (y.mT.contiguous().unflatten(-2, (-1, channels)) for y in (l, x))
    ordered, order = l.sort(-1)
    order = order.expand(x.shape)
    y = sums(ordered, x.gather(-1, order))
    return torch.zeros_like(y).scatter(-1, order, y).flatten(-3, -2).mT


def _over_past(l: Tensor, x: Tensor, sums: Sums) -> Tensor:
    """Time O(n log^2 n), memory O(n) for each of log n rounds."""
    length, size = x.shape[-2], 1
    y = x if sums is laplacian else torch.zeros_like(x)  # every token over itself
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
    sums = wide_laplacian if sums is laplacian else sums  # no path chosen by tokens yet to come
    return _over_all(l, x.masked_fill(right, 0.0), sums).masked_fill(~right, 0.0)
