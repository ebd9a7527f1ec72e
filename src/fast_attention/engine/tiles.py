"""Softmax attention of tiles on a CPU, by the compiled core: blocks of queries and the ranges of keys that they see.

A family of mechanisms says which ranges there are, as a ``Plan``, and gives its reference. The core computes scores,
softmax and gradients of a tile at a time, in one parallel region a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fast_attention import core
from fast_attention.engine import masks, offsets, trace
from fast_attention.engine.offsets import Terms
from fast_attention.engine.operation import HALVES, HALVES_AND_SINGLE, Fast, Operation, Tensors, unsupported_reason
from fast_attention.engine.precision import in_float32

ROWS = 48  # queries of a tile whose keys move on with the query: 92 % of the products are of visible pairs
MOST_ROWS = 96  # of any tile
FAR = 2**30  # beyond every offset
# Queries from which attention to all keys is faster than in torch's kernel: in causal order, and without.
CAUSAL, FULL = 64, 128
ALIGNED = 16  # gradients of keys and values have rows of a multiple of this


class Plan(NamedTuple):
    """Keys that the queries of each tile see.

    Attributes:
        tiles: First query, query behind the last, first range, range behind the last; sorted by queries, which every
            tile has no more than ``MOST_ROWS`` of. One list for all batches or heads, or one for each.
        ranges: First key, key behind the last, the least and largest ``j - i`` of the keys j that query i sees, how
            many keys it sees at least, for which the nearer end moves inwards, and how often a key counts. The ranges
            of a tile are sorted and share no key.
        choices, block: Instead of both: blocks of so many keys that each query sees beside the one that it stands in,
            of which it sees what is not behind itself. Only earlier blocks count; the last query is the last key.
    """

    tiles: Int[Tensor, "batch heads number 4"]
    ranges: Int[Tensor, "ranges 6"]
    choices: Int[Tensor, "batch heads length choices"] | None = None
    block: int = 0

    @staticmethod
    def of_choices(choices: Int[Tensor, "*batch length choices"], block: int) -> Plan:
        """The plan of blocks that every query chooses for itself; the core sorts its tiles."""
        tiles, ranges = (torch.empty(sizes, dtype=torch.int32) for sizes in ((1, 1, 0, 4), (0, 6)))
        return Plan(tiles, ranges, four_axes(choices).contiguous(), block)

    def counts(self, length: int, keys: int) -> Int[Tensor, "batch heads length keys"]:
        """How often each key counts for each query, 0 where it is not seen."""
        out = torch.zeros(*self.tiles.shape[:2], length, keys, dtype=torch.int32)
        j = torch.arange(keys)
        for batch, of_batch in enumerate(self.tiles.tolist()):
            for head, of_head in enumerate(of_batch):
                for row, row_end, first_range, range_end in of_head:
                    i = torch.arange(row, row_end)[:, None]
                    for first, end, low, high, least, count in self.ranges[first_range:range_end].tolist():
                        begin = (i + low).clamp(min=first).clamp(max=end - least)
                        stop = (i + high + 1).clamp(max=end).clamp(min=first + least)
                        seen = (j >= begin) & (j < stop)
                        out[batch, head, row:row_end] += count * seen
        return out


@lru_cache(256)
def window(length: int, keys: int, left: int, right: int) -> Plan:
    """The plan of a sliding window: query i, at position i + keys - length, sees ``left`` keys before and ``right``
    behind it.
    """
    row = torch.arange(0, length, ROWS)
    end = (row + ROWS).clamp(max=length)
    low, high = keys - length - min(left, FAR), keys - length + min(right, FAR)
    ranges = [(row + low).clamp(0, keys), (end + high).clamp(0, keys)]
    return _plan(row, end, *ranges, low=low, high=high)


@lru_cache(256)
def blocks(length: int, keys: int, size: int, before: int, after: int, is_causal: bool) -> Plan:
    """The plan of neighbouring blocks of ``size`` keys, counted from the first key."""
    query_offset = keys - length
    parts = -(-size // MOST_ROWS)
    step = -(-size // parts)
    first_block, last_block = query_offset // size, (keys - 1) // size
    starts = torch.arange(first_block, last_block + 1)[:, None] * size + torch.arange(0, size, step)
    ends = torch.minimum(starts + step, (starts // size + 1) * size)
    block = (starts // size).flatten()
    row, end = ((x.flatten() - query_offset).clamp(0, length) for x in (starts, ends))
    some = row < end
    row, end, block = row[some], end[some], block[some]
    first = ((block - before) * size).clamp(0, keys)
    last = ((block + 1 + (0 if is_causal else after)) * size).clamp(0, keys)
    if is_causal:
        last = torch.minimum(last, end + query_offset).clamp(min=0)
    return _plan(row, end, first, last, low=-FAR, high=query_offset if is_causal else FAR)


@lru_cache(256)
def every_key(length: int, keys: int, is_causal: bool) -> Plan:
    """The plan of exact attention."""
    return within(torch.tensor([[[0, keys]]]), length, keys, is_causal)


def within(spans: Int[Tensor, "batch heads 2"], length: int, keys: int, is_causal: bool) -> Plan:
    """The plan of exact attention to the keys from the first of a span up to its end."""
    row = torch.arange(0, length, MOST_ROWS)
    end = (row + MOST_ROWS).clamp(max=length)
    last = (end + (keys - length)).clamp(0, keys) if is_causal else torch.full_like(end, keys)
    first, stop = spans[..., :1].expand(*spans.shape[:-1], len(row)), torch.minimum(last, spans[..., 1:])
    return _plan(row, end, first, stop.maximum(first), low=-FAR, high=keys - length if is_causal else FAR)


def spans(key_mask: Bool[Tensor, "*batch heads keys"]) -> Int[Tensor, "batch heads 2"]:
    """The first key that each sequence's queries may see, and the one behind the last."""
    seen = four_axes(key_mask[..., None])[..., 0].to(torch.int8)
    keys = seen.shape[-1]
    return torch.stack([seen.argmax(-1), (keys - seen.flip(-1).argmax(-1)) * seen.amax(-1)], -1)


def _plan(row: Tensor, end: Tensor, first: Tensor, last: Tensor, *, low: int, high: int) -> Plan:
    """One range for every tile; of several lists of tiles ``first`` and ``last`` have two axes more."""
    first, last = (x if x.ndim == 3 else x[None, None] for x in (first, last))
    number = torch.arange(first.numel()).view(first.shape)
    tiles = torch.stack([row.expand_as(number), end.expand_as(number), number, number + 1], -1)
    ranges = torch.stack([first, last, *(torch.full_like(first, x) for x in (low, high, 0, 1))], -1)
    return Plan(tiles.int(), ranges.flatten(0, -2).int())


def chosen(
    table: Int[Tensor, "batch heads blocks choices"], keys: int, full: Int[Tensor, "batch heads 1 ids"] | None = None,
    *, size: int, is_causal: bool,
) -> Plan:  # fmt: skip
    """The plan of blocks of ``size`` queries that see the blocks of keys that a table names; -1 names none.

    A block named twice counts once. The blocks of queries that ``full`` names see all keys.
    """
    number = table.shape[-2]
    ordered = table.sort(-1).values
    alive = (ordered >= 0) & (ordered * size < keys)
    alive[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    block = torch.arange(number)
    if is_causal:
        alive &= ordered <= block[:, None]
    first, end = ordered * size, ((ordered + 1) * size).clamp(max=keys)
    if full is not None:
        sees_all = (block[:, None] == full).any(-1)
        alive = alive & ~sees_all[..., None]
        alive[..., 0] |= sees_all
        first[..., 0].masked_fill_(sees_all, 0)
        end[..., 0].masked_fill_(sees_all, keys)
    count = alive.sum(-1)
    stops = count.flatten().cumsum(0).view(count.shape)
    ranges = torch.stack([first[alive], end[alive]], -1)
    offsets_seen = ranges.new_tensor([-FAR, 0 if is_causal else FAR, 0, 1])
    ranges = torch.cat([ranges, offsets_seen.expand(len(ranges), -1)], -1)
    parts = -(-size // MOST_ROWS)
    step = -(-size // parts)
    row = torch.arange(number)[:, None] * size + torch.arange(0, size, step)
    row_end = torch.minimum(row + step, (torch.arange(number)[:, None] + 1) * size).clamp(max=keys)
    used = (row < row_end).flatten()
    shape = (*count.shape, parts)
    first_range, range_end = (stops - count)[..., None], stops[..., None]
    tiles = torch.stack([x.expand(shape) for x in (row, row_end, first_range, range_end)], -1)
    tiles = tiles.flatten(2, 3)[:, :, used]
    return Plan(tiles.int().contiguous(), ranges.int())


def unsupported(*tensors: Tensor) -> str:
    """Why the core does not serve these tensors; empty where it does."""
    return unsupported_reason(*tensors) or against(*tensors)


def against(*tensors: Tensor | None, **settings: Any) -> str:
    """Why the core does not serve ordinary tensors of a CPU, the first three of which are tokens."""
    if why := core.unavailable():
        return why
    for x in tensors[:3]:
        if x is not None and x.dtype not in HALVES_AND_SINGLE:
            return "numbers of more than 32 bits"
    return ""


@lru_cache
def leads(dtype: torch.dtype, *, is_causal: bool) -> bool:
    """Whether the core, where it serves, takes less time than torch's kernel for attention to all keys.

    In causal order it leaves out more of what is hidden. Else products decide: torch takes them from Intel's library,
    which reaches 80 % of the peak of AMD's processors with AVX-512; the core 95 %. In 16 bits torch has tile registers
    (Intel AMX) for every product.
    """
    cpu = torch.cpu.get_capabilities()
    fast = is_causal or (str(cpu.get("cpu_name")).startswith("AMD") and core.native_width() == 16)
    return fast and (dtype == torch.float32 or (dtype in HALVES and not cpu.get("amx_tile")))


def pays(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> bool:
    """Whether attention of these tokens to all keys is faster in the core; its gradients in 16 bits are not."""
    if unsupported(q, k, v) or q.shape[-2] < (CAUSAL if is_causal else FULL):
        return False
    trains = torch.is_grad_enabled() and q.requires_grad
    return leads(q.dtype, is_causal=is_causal) and (is_causal or q.dtype not in HALVES or not trains)


Plans = Callable[..., Plan]  # (q, k, *tables, **settings)


def operation(
    reference: Callable[..., Tensor] | None, plans: Plans, *, why: str | Callable[..., str] = "",
    path: str | Callable[..., str] = "", name: str = "softmax in tiles",
    sizes: Callable[..., dict[str, int]] | None = None, serves: Callable[..., str] | None = None,
    cuda: Fast | None = None, empty: Callable[..., Tensor] | None = None,
) -> Operation:  # fmt: skip
    """Softmax attention of tiles with a gradient.

    It is called with ``(q, k, v, key_mask, numbers, vectors, sinks, *tables)`` and the keywords ``scale``, ``first``
    (the offset j - i of the first of ``numbers`` and ``vectors``) and those of the plan; ``cap``, ``dropout`` and
    ``seed`` may be given.

    Args:
        reference: The same function in plain operations, which derivatives of higher order take, in float32 or better
            where numbers are added to scores: thousands are no numbers of low precision. None: one that holds all
            scores at once, which serves where nothing else calls it.
        plans: Gives what the queries see, from queries, keys, tables and settings.
        why, path, name, sizes: What ``explain`` says of the core, calls the reference and what the core does, and the
            sizes that it gives; nothing without a ``path``.
        serves: Why else the core does not serve.
        cuda, empty: As ``Operation`` has them.
    """

    def plain(*tensors: Any, dropout: float = 0.0, seed: int = 0, **settings: Any) -> Tensor:
        if reference is not None and not dropout:
            return (reference if tensors[4] is None else in_float32(reference))(*tensors, **settings)
        return _dense(plans, tensors, {"dropout": dropout, "seed": seed, **settings})

    def forward(*tensors: Any, keep: bool, **settings: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, v = tensors[0], tensors[2]
        out, sums = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(*q.shape[:-1], 2, dtype=torch.float32)
        torch.ops.fast_attention_core.tiles_forward(*_arguments(plans, tensors, settings), four_axes(out), sums)
        return out, (sums,)

    def backward(
        inputs: tuple[Any, ...], outputs: Tensors, saved: tuple[Tensor, ...], gradient: tuple[Tensor, ...],
        **settings: Any,
    ) -> Tensors:  # fmt: skip
        (q, k, v, _, numbers, vectors, sinks, *tables), (sums,), out = inputs, saved, outputs[0]
        assert out is not None
        dq, call = q.new_empty(q.shape), _arguments(plans, inputs, settings)
        keys, values = call[1], call[2]
        dk, dv = (
            x.new_zeros(*x.shape[:-1], -(-x.shape[-1] // ALIGNED) * ALIGNED, dtype=torch.float32)
            for x in (keys, values)
        )
        batch = call[0].shape[0]
        d_numbers, d_vectors = (
            None if x is None or not x.requires_grad else x.new_zeros(batch, *x.shape, dtype=torch.float32)
            for x in (numbers, vectors)
        )
        torch.ops.fast_attention_core.tiles_backward(
            *call, four_axes(out), sums, four_axes(gradient[0]), four_axes(dq), dk, dv, d_numbers, d_vectors
        )
        d_terms = (
            None if d is None or x is None else d.sum(0).to(x.dtype)
            for d, x in ((d_numbers, numbers), (d_vectors, vectors))
        )
        d_sinks = None
        if sinks is not None and sinks.requires_grad:
            d_sinks = sink_gradient(sinks, log_normalisers(sums), gradient[0], out)
        dk, dv = (dx[..., : x.shape[-1]].reshape(x.shape).to(x.dtype) for dx, x in ((dk, k), (dv, v)))
        return dq, dk, dv, None, *d_terms, d_sinks, *(None for _ in tables)

    def refused(*tensors: Any, **settings: Any) -> str:
        return against(*tensors) or serves(*tensors, **settings)  # type: ignore[misc]

    if reference is not None:
        plain.__name__, plain.__module__ = reference.__name__, reference.__module__
    named = f"{trace.CORE}: {name}" if path else ""
    fast = Fast(forward, backward, serves=against if serves is None else refused, path=named, why=why, sizes=sizes)
    return Operation(plain, cpu=fast, cuda=cuda, empty=empty, path=path, sizes=sizes)


def four_axes(x: Shaped[Tensor, "*batch length width"]) -> Shaped[Tensor, "batch heads length width"]:
    """A view with four axes, or a copy where there is none, whose tokens' numbers lie side by side."""
    if x.ndim < 4:
        x = x[(None,) * (4 - x.ndim)]
    elif x.ndim > 4:
        x = x.reshape(-1, *x.shape[-3:])
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _of_scores(settings: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the core's tile operations, in its order, and the settings of the plan."""
    others = {"first": 0, "scale": 1.0, "cap": 0.0, "dropout": 0.0, "seed": 0} | settings
    return [others.pop(name) for name in ("first", "scale", "cap", "dropout", "seed")], others


def _arguments(plans: Plans, tensors: tuple[Any, ...], settings: dict[str, Any]) -> list[Any]:
    """The first arguments of the core's operations."""
    q, k, v, key_mask, *terms = tensors[:7]
    numbers, of_plan = _of_scores(settings)
    mask = None
    if key_mask is not None and not bool(key_mask.all()):
        mask = four_axes(key_mask.contiguous().expand(*q.shape[:-2], k.shape[-2])[..., None])[..., 0]
    terms = [None if x is None else x.detach().float().contiguous() for x in terms]
    return [*map(four_axes, (q, k, v)), mask, *terms, *plans(q, k, *tensors[7:], **of_plan), *numbers]


def _dense(plans: Plans, tensors: tuple[Any, ...], settings: dict[str, Any]) -> Tensor:
    """Softmax attention over a plan with all scores at once and the core's random numbers."""
    q, k, v, key_mask, numbers, vectors, sinks, *tables = tensors
    (first, scale, cap, dropout, seed), of_plan = _of_scores(settings)
    length, keys, shape, dtype = q.shape[-2], k.shape[-2], (*q.shape[:-1], v.shape[-1]), q.dtype
    counts = plans(q, k, *tables, **of_plan).counts(length, keys)
    visible = counts > 0
    if key_mask is not None:
        visible = visible & four_axes(key_mask.expand(*q.shape[:-2], keys)[..., None])[..., 0][..., None, :]
    q, k, v = (four_axes(x).to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if numbers is not None:
        place = torch.arange(keys) - torch.arange(length)[:, None] - first
        inside = (place >= 0) & (place < numbers.shape[1])
        place = place.clamp(0, numbers.shape[1] - 1).expand(len(numbers), 1, length, keys)
        terms = Terms(numbers, vectors)
        scores = scores + offsets.gathered(q[..., None, :, :], terms, place, scale=scale)[..., 0, :, :] * inside
    weights = masks.masked_softmax(scores + counts.clamp(min=1).to(scores).log(), visible, sinks)
    if dropout:
        keep = keeps(seed, q.shape[0] * q.shape[1], length, keys, dropout).view(scores.shape)
        weights = weights * keep / (1 - dropout)
    return (weights @ v).view(shape).to(dtype)


def keeps(seed: int, heads: int, length: int, keys: int, dropout: float) -> Bool[Tensor, "heads length keys"]:
    """Which weights the core keeps under dropout, by a hash of the seed, the head, the query and the key."""
    word, golden = 0xFFFFFFFF, 0x9E3779B1

    def mixed(x: Tensor) -> Tensor:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = x ^ (x >> shift)
            low, high = x & 0xFFFF, x >> 16  # so that no product of two words leaves 63 bits
            x = (low * factor + ((high * factor & word) << 16)) & word
        return x ^ (x >> 16)

    seeds, (head, row, key) = (seed & word, seed >> 32 & word), (torch.arange(n) for n in (heads, length, keys))
    of_head = mixed(head * golden & word ^ seeds[0])
    of_row = mixed(mixed(row * golden & word ^ of_head[:, None]) ^ seeds[1])
    return mixed(key * golden & word ^ of_row[..., None]) >> 8 < int((1.0 - dropout) * 2**24)


def log_normalisers(sums: Float[Tensor, "*batch 2"]) -> Float[Tensor, "*batch"]:
    """The logarithms of normalisers, from the core's; infinity where a query sees nothing."""
    logs = (sums[..., 0] + sums[..., 1].log2()).mul_(math.log(2))
    return logs.masked_fill_(sums[..., 1] == 0, float("inf"))


def sink_gradient(
    sinks: Float[Tensor, "heads"],
    log_sums: Float[Tensor, "*batch heads length"],
    gradient: Float[Tensor, "*batch heads length values"],
    outputs: Float[Tensor, "*batch heads length values"],
) -> Float[Tensor, "heads"]:
    """The gradient of sinks, given the logarithms of the normalisers that hold them: a sink's value is zero."""
    weights = (sinks[:, None] - log_sums).exp_()
    return -(weights * (gradient * outputs).sum(-1)).sum(-1).view(-1, len(sinks)).sum(0).to(sinks.dtype)
