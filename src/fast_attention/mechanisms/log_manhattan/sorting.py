"""Sums over all pairs of a function of |l_j - l_i|, by sorting instead of pairs.

In ascending order of l the absolute value falls apart into what lies before and what lies after: two scans do for all
tokens what n^2 differences would. Order statistics have no state of constant size, so causal sums divide and conquer:
every right half of a block asks its left half, blocks of 2, 4, 8 ... tokens. Gradients are those of the sums, with the
order held fixed (a subgradient where two l are equal).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.blocks import join, split
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.decay import decayed_sums, spread
from fast_attention.engine.scan import prefix_sums
from fast_attention.engine.tracing import traced
from fast_attention.mechanisms.log_manhattan import sorted_passes

Sums = Callable[[Tensor, Tensor], Tensor]


def absolute(
    l: Float[Tensor, "*batch length #weights"], x: Float[Tensor, "*batch length width"]
) -> Float[Tensor, "*batch length width"]:
    """``y_i = sum_j |l_j - l_i| x_j`` for ascending l: ``l_i (2 P_i - P_n) + R_n - 2 R_i``, P and R sum x and l x."""
    middle = l.shape[-2] // 2
    wide = spread(l - l[..., middle : middle + 1, :].detach(), x.shape[-1])  # large l would cancel
    count, moment = prefix_sums(x), prefix_sums(wide * x)
    return wide * (2 * count - count[..., -1:, :]) + moment[..., -1:, :] - 2 * moment


def laplacian(
    l: Float[Tensor, "*batch length #weights"], x: Float[Tensor, "*batch length width"]
) -> Float[Tensor, "*batch length width"]:
    """``y_i = sum_j exp(-|l_j - l_i|) x_j`` for ascending l: a decayed sum from below and one from above."""
    return decayed_sums(x, l) + decayed_sums(x.flip(-2), -l.flip(-2)).flip(-2) - x


def over_all(
    l: Float[Tensor, "*batch length #weights"], x: Float[Tensor, "*batch length width"], sums: Sums
) -> Float[Tensor, "*batch length width"]:
    """``sums`` over all pairs of tokens in any order; time O(n log n), memory O(n)."""
    if _known(l, x, sums):
        dispatch.record("one sort of each channel, sums along it, scattered back", "closed form in sorted order")
        return (_ABSOLUTE if sums is absolute else _LAPLACIAN)(l, x)
    dispatch.record("sorted and sorted back", "no CPU, causal, or log keys so far apart that sums need a running unit")
    return _all_plain(l, x, sums)


def _known(l: Tensor, x: Tensor, sums: Sums) -> bool:
    if traced():
        return False
    if l.device.type != "cpu" or x.numel() == 0 or l.shape[:-2] != x.shape[:-2]:
        return False
    return sums is absolute or (sums is laplacian and sorted_passes.near(l))


def _all_plain(l: Tensor, x: Tensor, sums: Sums) -> Tensor:
    order = l.detach().argsort(-2)
    back = spread(order.argsort(-2), x.shape[-1]).expand(x.shape)
    there = spread(order, x.shape[-1]).expand(x.shape)
    return sums(l.gather(-2, order), x.gather(-2, there)).gather(-2, back)


def _rule(sums: Sums, kind: sorted_passes.Kind) -> CustomGradient:
    forward, backward = partial(sorted_passes.forward, kind=kind), partial(sorted_passes.backward, kind=kind)
    return CustomGradient(partial(_all_plain, sums=sums), forward, backward)


_ABSOLUTE, _LAPLACIAN = _rule(absolute, "absolute"), _rule(laplacian, "laplacian")


def over_past(
    l: Float[Tensor, "*batch length #weights"], x: Float[Tensor, "*batch length width"], sums: Sums
) -> Float[Tensor, "*batch length width"]:
    """``sums`` over the tokens up to each; time O(n log^2 n), memory O(n) for each of log n rounds."""
    length, size = x.shape[-2], 1
    y = sums(l[..., None, :], x[..., None, :])[..., 0, :]
    while size < length:
        size *= 2
        y = y + join(_from_left(split(l, size), split(x, size), sums), length)
    return y


def over(
    l: Float[Tensor, "*batch length #weights"], x: Float[Tensor, "*batch length width"], sums: Sums, *, is_causal: bool
) -> Float[Tensor, "*batch length width"]:
    """``over_past`` or ``over_all``."""
    return over_past(l, x, sums) if is_causal else over_all(l, x, sums)


def over_others(
    l: Float[Tensor, "*batch past #weights"],
    x: Float[Tensor, "*batch past width"],
    queries: Float[Tensor, "*batch length #weights"],
    sums: Sums,
) -> Float[Tensor, "*batch length width"]:
    """``sums`` over the tokens of ``l`` for other tokens, those of ``queries``; time O(n log n)."""
    silent = x.new_zeros((*x.shape[:-2], queries.shape[-2], x.shape[-1]))
    return over_all(torch.cat([l, queries], -2), torch.cat([x, silent], -2), sums)[..., l.shape[-2] :, :]


def vector_absolute(
    l: Float[Tensor, "*batch length width"], x: Float[Tensor, "*batch length values"], *, is_causal: bool
) -> Float[Tensor, "*batch length values"]:
    """``y_i = sum_j (sum_a |l_ja - l_ia|) x_j``: the L1 distance of whole vectors, one sort for each channel."""
    y = torch.zeros_like(x)
    for channel in l.unbind(-1):
        y = y + over(channel[..., None], x, absolute, is_causal=is_causal)
    return y


def _from_left(l: Tensor, x: Tensor, sums: Sums) -> Tensor:
    """In every block, what the right half gathers from the left half; zeros in the left half."""
    right = torch.arange(l.shape[-2], device=l.device)[:, None] >= l.shape[-2] // 2
    halves = over_all if sums is absolute else _all_plain  # no path chosen by tokens yet to come
    return halves(l, x.masked_fill(right, 0.0), sums).masked_fill(~right, 0.0)
