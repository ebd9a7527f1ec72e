"""``past_blocks.chosen_softmax`` on a CPU, head by head: unnormalised sums of every tile, combined query by query.

A tile keeps the maximum of each row, as FlashAttention does. The whole normaliser is kept for the backward pass, in
which the weights of a tile are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.blocks import pad_length, split_mask
from fast_attention.engine.heads import short
from fast_attention.engine.operation import Fast, Operation, Tensors, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tiles import shares, sink_gradient
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.sparse import past_blocks
from fast_attention.mechanisms.sparse.past_blocks import Tiles

TILES = 64  # that are computed together: a few MiB
SCORES = 8192  # of a head, up to which all of them take less time than calls for each head


def flatten(x: Tensor, block: int = 0) -> Shaped[Tensor, "heads length E"]:
    """(..., length, E) with one axis of heads and neighbouring numbers in the last; in whole ``block``s contiguous."""
    x = pad_length(x, block) if block else x
    x = x.reshape(-1, *x.shape[-2:])
    return x.contiguous() if block or x.stride(-1) != 1 else x


class Group(NamedTuple):
    """Some tiles of one head: the rows of tokens in them, and the blocks of keys that these are multiplied with."""

    queries: Int[Tensor, "tiles rows"]  # any where a row holds none
    keys: Int[Tensor, "tiles"] | slice  # blocks
    masked: Bool[Tensor, "*#tiles size"] | None
    empty: Bool[Tensor, "tiles rows"] | None  # rows that hold no query; None: there are none

    def read(self, x: Float[Tensor, "length E"], work: Workspace, name: str) -> Float[Tensor, "tiles rows E"]:
        """Read the rows of the queries."""
        out = work(name, self.queries.numel(), x.shape[-1])
        return torch.index_select(x, 0, self.queries.flatten(), out=out).view(*self.queries.shape, -1)

    def blocks(self, x: Float[Tensor, "blocks size E"], work: Workspace, name: str) -> Float[Tensor, "tiles size E"]:
        """The blocks of keys, or of values."""
        if isinstance(self.keys, slice):
            return x[self.keys]
        return torch.index_select(x, 0, self.keys, out=work(name, len(self.keys), *x.shape[1:]))

    def add(self, gradient: Float[Tensor, "tiles size E"], into: Float[Tensor, "blocks size E"]) -> None:
        """Add the gradient of what ``blocks`` gave."""
        if isinstance(self.keys, slice):
            into[self.keys] += gradient
        else:
            into.index_add_(0, self.keys, gradient)


class Head(NamedTuple):
    """One head: tokens, keys and values in blocks, and where its tiles lie; the first query is at ``start``."""

    q: Float[Tensor, "length width"]
    k: Float[Tensor, "blocks size width"]
    v: Float[Tensor, "blocks size values"]
    visible: Bool[Tensor, "blocks size"] | None  # None: every key is
    tiles: Tiles | None  # None: no choices
    start: int
    scale: float

    @property
    def front(self) -> int:
        """Positions of the first block before the first query."""
        return self.start % self.k.shape[1]

    @property
    def used(self) -> int:
        """Tiles that hold anything."""
        return 0 if self.tiles is None else int(self.tiles.number)

    @property
    def slots(self) -> Int[Tensor, "entries"]:
        """The row of all tiles in which each choice lies, the last of ``rows`` for none."""
        assert self.tiles is not None
        return self.tiles.slot.masked_fill(~self.tiles.named, self.rows - 1)

    @property
    def rows(self) -> int:
        """Rows of all tiles that are used, and one for what no query chose."""
        return 1 if self.tiles is None else self.used * self.tiles.entry.shape[1] + 1

    def near(self) -> Group:
        """The blocks of queries against the block that they stand in, each query up to itself."""
        size, length = self.k.shape[1], len(self.q)
        blocks = slice(self.start // size, len(self.k))
        ends = (blocks.start * size - self.start, blocks.stop * size - self.start)
        index = torch.arange(*ends, device=self.k.device).view(-1, size)
        empty = None if self.front == 0 and length % size == 0 else (index < 0) | (index >= length)
        masked = ~masks.causal(size, size, self.k.device)[None]
        if self.visible is not None:
            masked = masked | ~self.visible[blocks, None]
        return Group(index.clamp(0, length - 1), blocks, masked, empty)

    def far(self) -> Iterator[tuple[slice, Group]]:
        """The tiles of choices, some at a time, and which rows of all tiles they are."""
        if self.tiles is None:
            return
        entries, rows = len(self.tiles.slot), self.tiles.entry.shape[1]
        for first in range(0, self.used, TILES):
            last = min(first + TILES, self.used)
            entry, block = self.tiles.entry[first:last], self.tiles.block[first:last]
            query = (entry // (entries // len(self.q))).clamp(max=len(self.q) - 1)
            masked = None if self.visible is None else ~self.visible[block][:, None]
            yield slice(first * rows, last * rows), Group(query, block, masked, entry == entries)

    def scores(self, group: Group, work: Workspace) -> tuple[Tensor, Tensor, Tensor]:
        """The scores of some tiles, minus infinity where masked, their queries and their keys."""
        queries, keys = group.read(self.q, work, "q"), group.blocks(self.k, work, "k")
        scores = work("scores", *queries.shape[:2], keys.shape[1])
        torch.baddbmm(scores, queries, keys.mT, beta=0, alpha=self.scale, out=scores)
        return scores if group.masked is None else scores.masked_fill_(group.masked, float("-inf")), queries, keys


def heads(
    q: Tensor, k: Tensor, v: Tensor, choices: Tensor, key_mask: Tensor, *, size: int, start: int, scale: float
) -> Iterator[Head]:
    """Every head of a call, batch by batch."""
    blocks = -(-k.shape[-2] // size)
    visible = None
    if not key_mask.all():
        visible = split_mask(key_mask, size).expand(*k.shape[:-2], blocks, size).reshape(-1, blocks, size)
    tiles = Tiles.of(choices.flatten(0, -3), blocks) if choices.shape[-1] else None
    keys, values = (flatten(x, size).unflatten(1, (-1, size)) for x in (k, v))
    for h, queries in enumerate(flatten(q)):
        each = None if tiles is None else Tiles(*(x[h] for x in tiles))
        yield Head(queries, keys[h], values[h], None if visible is None else visible[h], each, start, scale)


class Sums(NamedTuple):
    """Sums of rows: ``sum_j e^(s_j - top) v_j``, ``sum_j e^(s_j - top)`` and ``top``, the largest score."""

    values: Float[Tensor, "rows values"]
    total: Float[Tensor, "rows"]
    top: Float[Tensor, "rows"]

    @staticmethod
    def of(name: str, rows: int, width: int, work: Workspace) -> Sums:
        """Uninitialised memory."""
        return Sums(work(f"{name} values", rows, width), work(f"{name} total", rows), work(f"{name} top", rows))

    def part(self, rows: slice) -> Sums:
        """Select some rows."""
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
    """Values of each query for gradients of scores: gradients, their products with outputs, log normalisers."""

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


_fast = Operation(past_blocks.chosen_softmax, cpu=Fast(_forward, _backward), compute=torch.float32)


_few = in_float32(past_blocks.masked)


def _all_scores(q: Tensor, k: Tensor, *others: Any, **settings: Any) -> bool:
    """Whether all scores at once are the faster."""
    return short(q) and q.shape[-2] * k.shape[-2] <= SCORES


def _on_cpu(*tensors: Any, **settings: Any) -> Tensor:
    return (_few if _all_scores(*tensors) else _fast)(*tensors, **settings)


def _path(*tensors: Any, **settings: Any) -> str:
    if _all_scores(*tensors):
        return "all scores at once, most of them masked"
    return "softmax in tiles of gathered queries, head by head"


def _why(*tensors: Any, **settings: Any) -> str:
    few = _all_scores(*tensors)
    return "few queries of many sequences" if few else "every query reads a few blocks of its past"


def _sizes(q: Tensor, k: Tensor, v: Tensor, choices: Tensor, *others: Any, **settings: Any) -> dict[str, int]:
    return {"rows": past_blocks.ROWS, "choices": choices.shape[-1]}


def _sizes_on_cpu(*tensors: Any, **settings: Any) -> dict[str, int]:
    return {"keys": tensors[1].shape[-2]} if _all_scores(*tensors) else _sizes(*tensors)


chosen_softmax = Operation(
    past_blocks.chosen_softmax,
    cpu=Fast(_on_cpu, None, path=_path, why=_why, sizes=_sizes_on_cpu),
    empty=like_queries,
    path="softmax in tiles of gathered queries",
    sizes=_sizes,
)
