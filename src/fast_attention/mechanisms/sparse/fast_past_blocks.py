"""``past_blocks.chosen_softmax`` on a CPU, head by head: unnormalised sums of every tile, combined query by query.

A tile keeps the maximum of each row, as FlashAttention does. The whole normaliser is kept for the backward pass, in
which the weights of a tile are computed again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tiled import flatten
from fast_attention.engine.tiling import shares, sink_gradient
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.sparse import past_blocks
from fast_attention.mechanisms.sparse.past_tiles import Group, Head, heads


class Sums(NamedTuple):
    """What rows add up to: ``sum_j e^(s_j - top) v_j``, ``sum_j e^(s_j - top)`` and ``top``, the largest score."""

    values: Float[Tensor, "rows values"]
    total: Float[Tensor, "rows"]
    top: Float[Tensor, "rows"]

    @staticmethod
    def of(name: str, rows: int, width: int, work: Workspace) -> Sums:
        """Uninitialised memory."""
        return Sums(work(f"{name} values", rows, width), work(f"{name} total", rows), work(f"{name} top", rows))

    def part(self, rows: slice) -> Sums:
        """Those of some rows."""
        return Sums(*(x[rows] for x in self))

    def add_up(self, head: Head, group: Group, work: Workspace) -> None:
        """Write the sums of some tiles; those of a row that sees nothing are zero."""
        scores, queries, _ = head.scores(group, work)
        shape = queries.shape[:2]
        torch.amax(scores, -1, out=self.top.view(shape)).clamp_(min=torch.finfo(scores.dtype).min)
        scores.sub_(self.top.view(*shape, 1)).exp_()
        torch.sum(scores, -1, out=self.total.view(shape))
        torch.bmm(scores, group.blocks(head.v, work, "v"), out=self.values.view(*shape, -1))


class Rows(NamedTuple):
    """What the gradients of scores need of each query: gradients, their products with outputs, log normalisers."""

    grad: Float[Tensor, "length values"]
    inner: Float[Tensor, "length"]
    logs: Float[Tensor, "length"]


def attend(head: Head, out: Float[Tensor, "length values"], logs: Float[Tensor, "length"], work: Workspace) -> None:
    """Write outputs, and the logarithms of the normalisers: infinity where nothing is seen."""
    length, group = len(head.q), head.near()
    near = Sums.of("near", group.queries.numel(), out.shape[-1], work)
    near.add_up(head, group, work)
    values, total, top = near.part(slice(head.front, head.front + length))
    if head.used:
        far = Sums.of("far", head.rows, out.shape[-1], work)
        for rows, group in head.far():
            far.part(rows).add_up(head, group, work)
        for x, value in zip(far, (0.0, 0.0, torch.finfo(out.dtype).min), strict=True):
            x[-1] = value
        slots = head.slots
        tops = torch.cat([top[:, None], far.top[slots].view(length, -1)], 1)
        totals = torch.cat([total[:, None], far.total[slots].view(length, -1)], 1)
        top = tops.amax(1)
        weights = tops.sub_(top[:, None]).exp_()
        total = (totals * weights).sum(1)
        parts = far.values.index_select(0, slots).view(length, -1, out.shape[-1])
        values = torch.baddbmm((weights[:, :1] * values)[:, None], weights[:, None, 1:], parts)[:, 0]
    nothing = total == 0
    torch.div(values, total.masked_fill(nothing, 1.0)[:, None], out=out)
    logs.copy_(total.log().add_(top).masked_fill_(nothing, float("inf")))


def gradients(head: Head, rows: Rows, dq: Tensor, dk: Tensor, dv: Tensor, work: Workspace) -> None:
    """Write the gradient of queries, and add those of keys and values."""
    length, width, group = len(head.q), dq.shape[-1], head.near()
    near = work("near", group.queries.numel(), width)
    _tile_gradients(head, group, rows, (near, dk, dv), work)
    dq.copy_(near[head.front : head.front + length])
    if head.used:
        far = work("far", head.rows, width)
        for part, group in head.far():
            _tile_gradients(head, group, rows, (far[part], dk, dv), work)
        far[-1] = 0.0
        dq.add_(far.index_select(0, head.slots).view(length, -1, width).sum(1))


def _tile_gradients(head: Head, group: Group, rows: Rows, into: tuple[Tensor, Tensor, Tensor], work: Workspace) -> None:
    P, queries, keys = head.scores(group, work)
    grad, inner, logs = group.read(rows.grad, work, "grad"), rows.inner[group.queries], rows.logs[group.queries]
    if group.empty is not None:
        logs.masked_fill_(group.empty, float("inf"))
    P.sub_(logs[..., None]).exp_()
    values, (dq, dk, dv) = group.blocks(head.v, work, "v"), into
    dS = torch.bmm(grad, values.mT, out=work("dS", *P.shape))
    dS.sub_(inner[..., None]).mul_(P)
    torch.baddbmm(dq.view(queries.shape), dS, keys, beta=0, alpha=head.scale, out=dq.view(queries.shape))
    group.add(torch.bmm(P.mT, grad, out=work("dv", *values.shape)), dv)
    d_keys = work("dk", *keys.shape)
    group.add(torch.baddbmm(d_keys, dS.mT, queries, beta=0, alpha=head.scale, out=d_keys), dk)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, choices: Tensor, key_mask: Tensor,
    sinks: Tensor | None, *, keep: bool, size: int, start: int, scale: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    out, logs, work = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1]), Workspace(q)
    each = heads(q, k, v, choices, key_mask, size=size, start=start, scale=scale)
    for head, out_rows, log_rows in zip(each, flatten(out), logs.view(-1, q.shape[-2]), strict=True):
        attend(head, out_rows, log_rows, work)
    if sinks is not None:
        scores = sinks[:, None].to(logs.dtype)
        out.mul_(shares(logs, scores)[..., None])
        torch.logaddexp(logs, scores, out=logs)
    return out, (logs,) if keep else ()


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradient: tuple[Tensor, ...],
    *, size: int, start: int, scale: float,
) -> Tensors:  # fmt: skip
    q, k, v, choices, key_mask, sinks = inputs
    dq, work, length = q.new_empty(q.shape), Workspace(q), k.shape[-2]
    dk, dv = (x.new_zeros(*x.shape[:-2], length + -length % size, x.shape[-1]) for x in (k, v))
    blocks = (flatten(x).unflatten(1, (-1, size)) for x in (dk, dv))
    rows = (flatten(x) for x in (gradient[0], outputs[0], kept[0][..., None]))
    each = heads(q, k, v, choices, key_mask, size=size, start=start, scale=scale)
    for head, grad, out, logs, dq_rows, dk_blocks, dv_blocks in zip(each, *rows, flatten(dq), *blocks, strict=True):
        gradients(head, Rows(grad, (grad * out).sum(-1), logs[:, 0]), dq_rows, dk_blocks, dv_blocks, work)
    d_sinks = None if sinks is None else sink_gradient(sinks, kept[0], gradient[0], outputs[0])
    return dq, dk[..., :length, :], dv[..., :length, :], None, None, d_sinks


_fast = in_float32(CustomGradient(past_blocks.chosen_softmax, _forward, _backward))


@opaque(like_queries)
def chosen_softmax(
    q: Tensor, k: Tensor, v: Tensor, choices: Tensor, key_mask: Tensor, sinks: Tensor | None = None,
    *, size: int, start: int, scale: float,
) -> Tensor:  # fmt: skip
    """``past_blocks.chosen_softmax``, head by head where that serves."""
    why, number = dispatch.obstacle(q, k), choices.shape[-1]
    if why:
        dispatch.record("softmax in tiles of gathered queries", why, rows=past_blocks.ROWS, choices=number)
        return past_blocks.chosen_softmax(q, k, v, choices, key_mask, sinks, size=size, start=start, scale=scale)
    why = "every query reads a few blocks of its past"
    dispatch.record("softmax in tiles of gathered queries, head by head", why, rows=past_blocks.ROWS, choices=number)
    return _fast(q, k, v, choices, key_mask, sinks, size=size, start=start, scale=scale)
