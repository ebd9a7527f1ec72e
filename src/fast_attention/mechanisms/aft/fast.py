"""Sums of AFT over past tokens, which may decay, in groups of tokens side by side; and parts that AFT's forms share.

A query reads ``sigmoid(q_t) (sum_{i<t} e^{k_i - (t-1-i) w} v_i + e^{k_t + u} v_t)`` over the same of ones: WKV, and
with w = u = 0 causal AFT-simple. One log scale serves a call, the largest key of every channel; who calls has seen that
no denominator underflows. Masked keys are ``scan.FLOOR`` and their values zeros.

Row t of all groups of ``GROUP`` tokens is contiguous: groups are walked once for their sums, then, from the sums before
each, for what every token reads. Only the sums before the groups are kept, and weights are computed again in the
backward pass. The gradient of w takes no product of pairs: weights are of degree 0 in numerators and denominators
together, so that what a decay moves between two tokens is the gradient of the keys before them (``_decay_vjp``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.chunks import chunks_of
from fast_attention.engine.decay import sums_before
from fast_attention.engine.numerics import exp_
from fast_attention.engine.operation import Tensors
from fast_attention.engine.scan import FLOOR

NUMBERS = 1 << 19  # of one operand that are worked on at a time: a few such operands fit the caches
GROUP, FEW = 16, 4  # tokens of a group, and where there are few
SHORT = 256  # tokens up to which there are few, and fewer calls count more than sums side by side
RANGE = 60.0  # the natural logarithm of the smallest sum that a log scale may leave; float32 ends at 87


def chunk_length(x: Tensor, multiple: int = 1) -> int:
    """Tokens, a multiple of ``multiple``, that make about ``NUMBERS`` numbers in all sequences together."""
    per_token = max(1, x.numel() // max(1, x.shape[-2]))
    return max(1, NUMBERS // (per_token * multiple)) * multiple


def log_scale(k: Tensor) -> Tensor:
    """The largest key of every channel (..., 1, D): above every masked one, also where all are masked."""
    return k.detach().amax(-2, keepdim=True).clamp_(min=FLOOR / 2)


def smallest(k: Tensor) -> Tensor:
    """The smallest visible key of every channel (..., D); infinite where none is."""
    return k.masked_fill(k < FLOOR / 2, float("inf")).amin(-2)


def safe(denominators: Tensor, *, any_masked: bool) -> Tensor:
    """Denominators, in place, infinite where no key is visible (``any_masked``: possible): quotients become zero."""
    return denominators.masked_fill_(denominators == 0, float("inf")) if any_masked else denominators


def weigh(k: Tensor, v: Tensor, scale: Tensor, out: Tensor) -> None:
    """``exp(k - scale)`` times values and ones, into ``out`` (..., S, 2 D)."""
    numerators, denominators = out.split(v.shape[-1], -1)
    torch.mul(exp_(torch.sub(k, scale, out=denominators)), v, out=numerators)


def weigh_vjp(v: Tensor, weights: Tensor, d_terms: Tensor, dk: Tensor, dv: Tensor) -> None:
    """The gradients of ``weigh`` into ``dk`` and ``dv``, which may hold the weights."""
    d_numerators, d_denominators = d_terms.split(v.shape[-1], -1)
    torch.mul(v, d_numerators, out=dk).add_(d_denominators).mul_(weights)
    torch.mul(weights, d_numerators, out=dv)


def gate(q: Tensor, sums: Tensor, out: Tensor, *, any_masked: bool) -> Tensor:
    """``sigmoid(q)`` times numerators over denominators, into ``out``; returns the denominators."""
    numerators, denominators = sums.split(q.shape[-1], -1)
    torch.sigmoid(q, out=out).mul_(numerators).div_(safe(denominators, any_masked=any_masked))
    return denominators


def gate_vjp(q: Tensor, g: Tensor, out: Tensor, denominators: Tensor, dq: Tensor, d_sums: Tensor) -> None:
    """The gradients of ``gate`` into ``dq`` and ``d_sums``."""
    d_numerators, d_denominators = d_sums.split(q.shape[-1], -1)
    torch.sigmoid(q, out=dq)
    torch.div(g, denominators, out=d_denominators)
    torch.mul(d_denominators, dq, out=d_numerators)
    d_denominators.mul_(out).neg_()
    dq.neg_().add_(1.0).mul_(out).mul_(g)


class Groups(NamedTuple):
    """The tokens of a chunk, in groups of ``size`` side by side, and by how much they decay, where they do."""

    at: slice
    size: int
    decays: list[Tensor] | None = None  # of row t of all groups, (..., groups, 2 D) or one that serves all of them
    over_group: Tensor | None = None  # (..., groups, 2 D)
    visible: Tensor | None = None  # 1 or 0 (..., groups, size)

    def rows(self, like: Tensor, width: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Memory: row t of all groups (..., groups, width), each contiguous, and the order of the tokens."""
        count = (self.at.stop - self.at.start) // self.size
        rows = like.new_empty(self.size, *like.shape[:-2], count, width)
        return rows.unbind(0), rows.movedim(0, -2)

    def totals(self, rows: tuple[Tensor, ...], *, backwards: bool = False) -> Tensor:
        """Sums of all tokens of each group; where nothing decays, every row becomes the sum of the rows up to it."""
        order = range(self.size)[::-1] if backwards else range(self.size)
        total = rows[order[0]] if self.decays is None else rows[order[0]].clone()
        for t in order[1:]:
            if self.decays is None:
                total = rows[t].add_(total)
            else:
                torch.addcmul(rows[t], total, self.decays[t], out=total)
        return total

    def sums(self, rows: tuple[Tensor, ...], carry: Tensor, *, backwards: bool = False) -> Tensor:
        """The sums before each group and behind the last, ``carry`` being those before the first; ``backwards`` so."""
        total, over_group = self.totals(rows, backwards=backwards), self.over_group
        total = total.flip(-2) if backwards else total
        if over_group is None and total.shape[-2] == 1:
            return torch.cat([carry, carry + total], -2)
        if over_group is None:  # float64 never rounds to the rows' precision on its way
            return torch.cat([carry, total.double()], -2).mT.contiguous().cumsum(-1).mT
        return sums_before(total, over_group.flip(-2) if backwards else over_group, carry)

    def read(
        self, rows: tuple[Tensor, ...], before: Tensor, gain: Tensor | None, *, backwards: bool = False
    ) -> None:  # fmt: skip
        """Every row becomes the sum of those before it in its group, of ``before``, and of ``gain`` times itself.

        Where nothing decays, ``before`` is added to the sums that ``totals`` made.
        """
        total = before.to(rows[0].dtype, copy=True, memory_format=torch.contiguous_format)
        if self.decays is None or gain is None:
            for row in rows:
                row.add_(total)
            return
        other, gain = torch.empty_like(total), gain.expand_as(total).contiguous()
        for t in range(self.size)[::-1] if backwards else range(self.size):
            torch.addcmul(rows[t], total, self.decays[t][..., : total.shape[-1]], out=other)
            torch.addcmul(total, rows[t], gain, out=rows[t])
            total, other = other, total


def groups_of(k: Tensor, decay: Tensor | None, mask: Tensor | None) -> list[Groups]:
    """The chunks of all tokens."""
    length, most = k.shape[-2], GROUP if k.shape[-2] > SHORT else FEW
    size, grouped = chunk_length(k, most), length // most * most
    places = [*chunks_of(size, grouped), *([slice(grouped, length)] if grouped < length else [])]
    if decay is None:
        return [Groups(at, min(most, at.stop - at.start)) for at in places]
    logs, cuts = -torch.cat([decay, decay], -1), list[Groups]()
    for at in places:
        group = min(most, at.stop - at.start)
        sizes = *k.shape[:-2], (at.stop - at.start) // group, logs.shape[-1]
        if mask is not None:
            visible = mask[..., at].unflatten(-1, (-1, group)).to(k.dtype)
            decays = [(one[..., None] * logs).exp().expand(sizes) for one in visible.unbind(-1)]
            cuts.append(Groups(at, group, decays, (visible.sum(-1)[..., None] * logs).exp().expand(sizes), visible))
        elif cuts and cuts[-1].size == group and cuts[-1].decays and cuts[-1].decays[0].shape == sizes:
            cuts.append(cuts[-1]._replace(at=at))
        else:
            decays = [logs.exp().expand(sizes).contiguous()] * group
            cuts.append(Groups(at, group, decays, (group * logs).exp().expand(sizes), k.new_ones(sizes[-2], group)))
    return cuts


def forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, bonus: Tensor | None, mask: Tensor | None, scale: Tensor,
    *, keep: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Outputs of all queries, and sums before every group; ``decay`` w and ``bonus`` u are (heads, 1, D) or None."""
    width, out, saved = v.shape[-1], torch.empty_like(q), list[Tensor]()
    carry = k.new_zeros(*k.shape[:-2], 1, 2 * width, dtype=torch.float64 if decay is None else k.dtype)
    gain = None if bonus is None else torch.cat([bonus, bonus], -1).exp()
    for groups in groups_of(k, decay, mask):
        rows, tokens = groups.rows(k, 2 * width)
        queries, keys, values, results = (x[..., groups.at, :].unflatten(-2, (-1, groups.size)) for x in (q, k, v, out))
        weigh(keys, values, scale[..., None, :], tokens)
        sums = groups.sums(rows, carry)
        before, carry = sums[..., :-1, :].to(k.dtype), sums[..., -1:, :]
        groups.read(rows, before, gain)
        gate(queries, tokens, results, any_masked=mask is not None)
        saved.append(before)
    return out, (torch.cat(saved, -2),) if keep else ()


def backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> Tensors:
    """The gradients of queries, keys, values, decay and bonus."""
    (q, k, v, decay, bonus, mask, scale), (sums,) = inputs, saved
    d_inputs, width, last = [torch.empty_like(x) for x in (q, k, v)], v.shape[-1], sums.shape[-2]
    d_carry = torch.zeros_like(sums[..., :1, :], dtype=torch.float64 if decay is None else None)
    gain = None if bonus is None else bonus.exp()
    d_decay, d_bonus = (torch.zeros_like(scale, dtype=torch.float64) for _ in range(2))
    for groups in reversed(groups_of(k, decay, mask)):
        chunk = (x[..., groups.at, :] for x in (q, k, v, *gradients, *outputs, *d_inputs))
        queries, keys, values, g, out, dq, dk, dv = (x.unflatten(-2, (-1, groups.size)) for x in chunk)
        first = last - queries.shape[-3]
        before, last = sums[..., first:last, :], first
        denominators, in_order = groups.rows(k, width)
        weights = exp_(torch.sub(keys, scale[..., None, :], out=dv))
        in_order.copy_(weights)
        if gain is None:
            groups.totals(denominators)
        groups.read(denominators, before[..., width:], gain)
        d_rows, d_terms = groups.rows(k, 2 * width)
        gate_vjp(queries, g, out, safe(in_order, any_masked=mask is not None), dq, d_terms)
        if gain is not None:
            products = torch.addcmul(d_terms[..., width:], d_terms[..., :width], values, out=dk).mul_(weights)
            d_gain = products.flatten(-3, -2).sum(-2, keepdim=True) * gain
            d_bonus += d_gain
            d_decay -= d_gain
        later = groups.sums(d_rows, d_carry, backwards=True)
        twice = None if gain is None else torch.cat([gain, gain], -1)
        groups.read(d_rows, later[..., :-1, :].flip(-2), twice, backwards=True)
        weigh_vjp(values, weights, d_terms, dk, dv)
        if decay is not None:
            d_decay -= _decay_vjp(dk, groups, later[..., 1:, :].flip(-2) * before)
        d_carry = later[..., -1:, :]
    if decay is None:
        return *d_inputs, None, None, None, None
    learned = (x.sum_to_size(decay.shape).to(decay.dtype) for x in (d_decay, d_bonus))
    return *d_inputs, *learned, None, None


def _decay_vjp(dk: Tensor, groups: Groups, products: Tensor) -> Tensor:
    """Gradient of the decay from the sums before the tokens of a chunk, added up over its visible tokens.

    ``products`` (..., groups, 2 D) is that before each group. A token changes it by the gradient of its key.
    """
    assert groups.visible is not None
    later = groups.visible.flip(-1).cumsum(-1).flip(-1) - groups.visible  # the visible tokens of a group behind each
    starts = groups.visible.sum(-1)[..., None, :] @ sum(products.split(dk.shape[-1], -1))
    return starts + later.flatten(-2)[..., None, :] @ dk.flatten(-3, -2)
