"""Sums over all pairs of a function of |l_j - l_i|, by sorting instead of pairs.

In ascending order of l the absolute value falls apart into what lies before and what lies after: two scans do for all
tokens what n^2 differences would. Order statistics have no state of constant size, so causal sums divide and conquer:
every right half of a block reads its left half, blocks of 2, 4, 8 ... tokens. Gradients are those of the sums, with the
order held fixed (a subgradient where two l are equal).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.blocks import join, split
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.decay import decayed_sums, spread
from fast_attention.engine.scan import prefix_sums
from fast_attention.mechanisms.log_manhattan import fast_sorted, reference

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
    why = _against(l, x, sums)
    if not why:
        dispatch.record("one sort of each channel, sums along it, scattered back", "closed form in sorted order")
        return (_ABSOLUTE if sums is absolute else _LAPLACIAN)(l, x)
    dispatch.record("sorted and sorted back", why)
    return _plain(l, x, sums)


def _against(l: Tensor, x: Tensor, sums: Sums) -> str:
    """Why there is no closed form; empty where there is one."""
    why = dispatch.obstacle(l, x, even=True)
    if why or sums is absolute or fast_sorted.in_range(l):
        return why
    return "log keys so far apart that sums need a running log scale"


def _plain(l: Tensor, x: Tensor, sums: Sums) -> Tensor:
    order = l.detach().argsort(-2)
    back = spread(order.argsort(-2), x.shape[-1]).expand(x.shape)
    there = spread(order, x.shape[-1]).expand(x.shape)
    return sums(l.gather(-2, order), x.gather(-2, there)).gather(-2, back)


def _rule(sums: Sums, kind: fast_sorted.Kind) -> CustomGradient:
    forward, backward = partial(fast_sorted.forward, kind=kind), partial(fast_sorted.backward, kind=kind)
    return CustomGradient(partial(_plain, sums=sums), forward, backward)


_ABSOLUTE, _LAPLACIAN = _rule(absolute, "absolute"), _rule(laplacian, "laplacian")


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
