"""Chosen blocks: softmax over the blocks of keys whose means are nearest to the queries.

Blocks of queries choose by their mean in Sparse-Linear Attention (Zhang et al. 2025, arXiv 2509.24006); every query
chooses for itself in Mixture of Block Attention (Lu et al. 2025, arXiv 2502.13189), which is what can be causal.

Choices are made in float64, whatever the inputs are: two blocks that score alike to the last digit would else be told
apart differently by a pass, by its steps in decoding and by a compiler. A choice has no gradient.

Causally, the queries that chose a block are gathered and multiplied with that block, as MoBA's code does (algorithm 1).
The core adds up a query's sums over its blocks. The reference, in plain differentiable operations, pads to tiles of
``ROWS`` queries: how many there are at most depends on sizes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.biases.sinks import SinksMixin
from fast_attention.engine import masks, operation, tiles
from fast_attention.engine.blocks import count, join, positions, smaller, split, split_mask
from fast_attention.engine.heads import short
from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.engine.operation import Operation, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention, Traits
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.sparse.gathered import gathered_softmax, take
from fast_attention.traits import FLEX
from fast_attention.value import at_least


class SelectedState(NamedTuple):
    """All keys and values, and of every whole block the mean of its visible keys and whether there is one."""

    near: KVCache
    means: Float[Tensor, "*batch heads blocks width"]
    alive: Bool[Tensor, "*batch 1 blocks"]


SCORES = 2**16  # of some queries and all blocks that are held at one time, half a MiB
NEVER = float("-inf")
ROWS = 64  # queries of a tile in the reference


def shown(x: Tensor, key_mask: Tensor | None, size: int) -> Bool[Tensor, "*#batch blocks size"]:
    """Which tokens of every block of ``x`` (..., length, width) are visible."""
    mask = torch.ones(1, x.shape[-2], dtype=torch.bool, device=x.device) if key_mask is None else key_mask
    return split_mask(mask, size)


def pooled(
    x: Float[Tensor, "*batch length width"], counted: Bool[Tensor, "*#batch blocks size"], *, every: bool = False
) -> Float[Tensor, "*batch blocks width"]:
    """The mean over the ``counted`` tokens of each block, ``every`` one of the sequence if so, in float64; or zeros."""
    blocks = split(x.detach(), counted.shape[-1])
    blocks = blocks if every else blocks.masked_fill(~counted[..., None], 0.0)
    return _sums(blocks) / counted.sum(-1, keepdim=True).clamp(min=1)


def _sums(blocks: Float[Tensor, "*batch blocks size width"]) -> Float[Tensor, "*batch blocks width"]:
    """``blocks.sum(-2, dtype=torch.float64)``, which would make a copy of all in float64 on a CPU, head by head."""
    doubles = blocks.dtype == torch.float64
    if operation.unsupported_reason(blocks) or doubles or blocks.dim() < 4 or short(blocks.flatten(-3, -2)):
        return blocks.sum(-2, dtype=torch.float64)
    heads = blocks.flatten(0, -4)
    copy = heads.new_empty(heads.shape[1:], dtype=torch.float64)
    sums = copy.new_empty(len(heads), copy.shape[0], copy.shape[2])
    for head, out in zip(heads, sums, strict=True):
        torch.sum(copy.copy_(head), -2, out=out)
    return sums.view(*blocks.shape[:-2], blocks.shape[-1])


def blocks_of_blocks(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    key_mask: Bool[Tensor, "*#batch2 length"] | None,
    *,
    size: int,
    topk: int,
) -> Int[Tensor, "*batch blocks topk"]:
    """For each block of queries its own block and the ``topk - 1`` others with the largest products of means.

    -1 where there are no more blocks with a visible key. Both means are those of visible tokens; a block of queries
    without any takes all of its own.
    """
    visible, every = shown(k, key_mask, size), key_mask is None
    alive = visible.any(-1, keepdim=True)
    scores = pooled(q, visible | ~alive, every=every) @ pooled(k, visible, every=every).mT
    scores = scores.masked_fill(~alive.mT, NEVER)
    block = torch.arange(scores.shape[-1], device=q.device)
    return _best(scores.masked_fill(block[:, None] == block, float("inf")), topk)


of_blocks = Operation(
    blocks_of_blocks,
    empty=lambda q, *_, size, topk: q.new_empty(*q.shape[:-2], count(q.shape[-2], size), topk, dtype=torch.int64),
)


def blocks_of_tokens(
    q: Float[Tensor, "*batch length width"],
    means: Float[Tensor, "*batch blocks width"],
    alive: Bool[Tensor, "*#batch2 blocks"],
    *,
    size: int,
    start: int,
    number: int,
) -> Int[Tensor, "*batch length number"]:
    """For each query, the first at position ``start``, the ``number`` blocks before its own of the largest products.

    -1 where there are no more such blocks ``alive``, with a visible key.
    """
    q, length = q.detach(), q.shape[-2]
    if symbolic():
        return _of_some(q, means, alive, size=size, start=start, number=number)
    rows, parts = max(SCORES // max(means[..., 0].numel(), 1), 1), []
    for first in range(0, length, rows):
        queries = q[..., first : first + rows, :]
        past = (start + first + queries.shape[-2] - 1) // size  # blocks that the last of them may choose
        some = {"size": size, "start": start + first, "number": number}
        parts.append(_of_some(queries, means[..., :past, :], alive[..., :past], **some))
    return torch.cat(parts, -2)


of_tokens = Operation(
    blocks_of_tokens, empty=lambda q, *_, number, **places: q.new_empty(*q.shape[:-1], number, dtype=torch.int64)
)


def _of_some(q: Tensor, means: Tensor, alive: Tensor, *, size: int, start: int, number: int) -> Tensor:
    block = (torch.arange(q.shape[-2], device=q.device) + start) // size
    past = torch.arange(means.shape[-2], device=q.device) < block[:, None]
    return _best((q.double() @ means.mT).masked_fill(~(alive[..., None, :] & past), NEVER), number)


def _best(scores: Float[Tensor, "*batch rows blocks"], number: int) -> Int[Tensor, "*batch rows number"]:
    """The blocks of the ``number`` largest scores, -1 where fewer are more than minus infinity."""
    if symbolic() or scores.shape[-1] < number:
        scores = pad(scores, (0, number), value=NEVER)
    values, blocks = scores.topk(number, sorted=False)
    return blocks.masked_fill(values == NEVER, -1)


class Tiles(NamedTuple):
    """Tiles of queries that chose the same block of keys; entry ``i * choices + c`` is choice c of query i."""

    block: Int[Tensor, "*batch tiles"]  # of keys
    entry: Int[Tensor, "*batch tiles rows"]  # that each row of the tiles holds; as many as there are for none
    slot: Int[Tensor, "*batch entries"]  # in which each entry lies, counting rows of all tiles; 0 for none
    named: Bool[Tensor, "*batch entries"]  # whether it names a block
    number: Int[Tensor, "*batch"]  # of tiles that hold anything

    @staticmethod
    def of(choices: Int[Tensor, "*batch length choices"], blocks: int) -> Tiles:
        """Sort the entries by block and begin a tile with each block."""
        rows = smaller(ROWS, choices.shape[-2])
        entries = choices.shape[-2] * choices.shape[-1]
        tiles = blocks + entries // rows  # no more are needed: every block leaves at most one of them unfilled
        named = (choices >= 0).flatten(-2)
        block = torch.where(named, choices.flatten(-2), blocks)
        ascending, order = block.sort(-1)
        sizes = torch.zeros_like(block[..., :1]).expand(*block.shape[:-1], blocks + 1)
        sizes = sizes.scatter_add(-1, block, torch.ones_like(block))
        each = ((sizes + (rows - 1)) // rows)[..., :-1]
        ends = each.cumsum(-1)
        first = (sizes.cumsum(-1) - sizes).gather(-1, ascending)
        begin = pad(ends - each, (0, 1)).gather(-1, ascending)
        slot = begin * rows + torch.arange(entries, device=block.device) - first
        slot = torch.where(ascending < blocks, slot, tiles * rows)
        entry = torch.full_like(block[..., :1], entries).expand(*block.shape[:-1], (tiles + 1) * rows)
        tile = torch.zeros_like(block[..., :1]).expand(*block.shape[:-1], tiles + 1)
        return Tiles(
            tile.scatter(-1, slot // rows, ascending.clamp(max=blocks - 1))[..., :-1],
            entry.scatter(-1, slot, order)[..., positions(tiles, rows, rows, 0, block.device)],
            torch.zeros_like(block).scatter(-1, order, slot.masked_fill(ascending == blocks, 0)),
            named,
            ends[..., -1],
        )

    def scores(
        self, q: Float[Tensor, "*batch length width"], keys: Float[Tensor, "*batch blocks size width"]
    ) -> Float[Tensor, "*batch entries size"]:
        """The products of each entry's query with the keys of its block; what an entry for none holds means nothing."""
        number = self.slot.shape[-1] // q.shape[-2]
        queries = rows_of(q, (self.entry // number).clamp(max=q.shape[-2] - 1))
        return rows_of((queries @ take(keys, self.block).mT).flatten(-3, -2), self.slot)

    def outputs(
        self, weights: Float[Tensor, "*batch entries size"], values: Float[Tensor, "*batch blocks size values"]
    ) -> Float[Tensor, "*batch entries values"]:
        """The weighted sums of the values of each entry's block, zeros for none."""
        weights = rows_of(pad(weights, (0, 0, 0, 1)), self.entry)
        out = rows_of((weights @ take(values, self.block)).flatten(-3, -2), self.slot)
        return out.masked_fill(~self.named[..., None], 0.0)


@in_float32
def _chosen_softmax(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: None, vectors: None, sinks: Tensor | None,
    choices: Tensor, *, size: int, start: int, scale: float,
) -> Tensor:  # fmt: skip
    length, number = choices.shape[-2:]
    batch_shape, first, front = q.shape[:-2], start // size, start % size
    keys, values = split(k, size), split(v, size)
    visible = split_mask(key_mask, size).expand(*batch_shape, keys.shape[-3], size)
    queries = split(pad(q, (0, 0, front, 0)), size)
    near = masks.causal(size, size, q.device) & visible[..., first:, None, :]
    near, scores = (
        join(x, front + length)[..., front:, :] for x in (near, scale * queries @ keys[..., first:, :, :].mT)
    )
    if number == 0:
        weights, far = masks.masked_softmax(scores, near, sinks), 0.0
    else:
        gathered = Tiles.of(choices, keys.shape[-3])
        far_scores = gathered.scores(scale * q, keys)
        seen_keys = gathered.named[..., None] & take(visible[..., None], choices.clamp(min=0))[..., 0].flatten(-3, -2)
        visible = torch.cat([near, seen_keys.unflatten(-2, (-1, number)).flatten(-2)], -1)
        far_scores = far_scores.unflatten(-2, (-1, number)).flatten(-2)
        weights = masks.masked_softmax(torch.cat([scores, far_scores], -1), visible, sinks)
        far = gathered.outputs(weights[..., size:].unflatten(-1, (number, size)).flatten(-3, -2), values)
        far = far.unflatten(-2, (-1, number)).sum(-2)
    weights = split(pad(weights[..., :size], (0, 0, front, 0)), size)
    return join(weights @ values[..., first:, :, :], front + length)[..., front:, :] + far


def rows_of(x: Tensor, index: Int[Tensor, "*batch taken"]) -> Tensor:
    """Whole tokens (*batch, n, E) at (*batch, taken)."""
    return take(x[..., None, :], index)[..., 0, :]


chosen_softmax = tiles.operation(
    _chosen_softmax,
    lambda q, k, choices, *, size, start: tiles.Plan.of_choices(choices, size),
    path="softmax in tiles of gathered queries",
    name="softmax in tiles of gathered queries",
    why="every query reads a few blocks of its past",
    sizes=lambda *tensors, **settings: {"choices": tensors[7].shape[-1]},
    empty=like_queries,
)


def block_means(k: Tensor, key_mask: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """The mean of every block's visible keys, in float64, and whether there is one; the last block may be shorter."""
    counted = shown(k, key_mask, size)
    return pooled(k, counted, every=key_mask is None), counted.any(-1)


def attend_past(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, means: Tensor, alive: Tensor,
    sinks: Tensor | None, *, size: int, topk: int, start: int, scale: float | None,
) -> Tensor:  # fmt: skip
    """Softmax of queries from position ``start`` on, the last of which is the last key, over the past blocks that each
    chooses and, causally, over the block that it stands in; zeros where it sees nothing.

    With ``sinks`` normalisers are larger by ``e^sink``.
    """
    choices = of_tokens(q, means, alive, size=size, start=start, number=topk - 1)
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    return chosen_softmax(q, k, v, visible, None, None, sinks, choices, size=size, start=start, scale=factor)


@dataclass(frozen=True, repr=False)
class Selected(SinksMixin, Attention[Any, SelectedState]):  # type: ignore[reportIncompatibleVariableOverride]
    """Chosen blocks: a query sees its own block and the ``topk - 1`` others whose mean key is nearest.

    With I the block of query i, and means over visible tokens (arXiv 2509.24006, equations 3 to 5; 2502.13189,
    equations 2 to 6),

    - noncausal, all queries of block I see block I and the ``topk - 1`` others with the largest
      ``mean(q_I) . mean(k_J)``;
    - causal, query i sees block I up to itself and the ``topk - 1`` of the blocks J < I, all of which are past, with
      the largest ``q_i . mean(k_J)``. Nothing later moves a choice, and decoding in any split is one pass.

    Masked keys are in no mean, and a block without a visible key is not chosen. Masked tokens are in no mean of
    queries either, unless all of a block are; each is a query nevertheless. Gradients go through the softmax over what
    was chosen, not through the choice. Nothing is drawn. What a window leaves out for being far is seen if its mean is
    near; what is near in position only may be left out in turn.

    Args:
        block_size: Tokens per block; the last block may be shorter.
        topk: Blocks that a query sees, its own among them.
        scale: Factor on the dot products; None means 1/sqrt(width).
        sinks: Whether every head has a learned score more, of no value, that takes weight from all keys (gpt-oss).
    """

    block_size: int = 64
    topk: int = 8
    scale: float | None = None
    sinks: bool = False

    base_traits = Traits(
        paper="Lu et al. 2025, arXiv 2502.13189 (causal); Zhang et al. 2025, arXiv 2509.24006 (noncausal)",
        formula="softmax over the blocks of the largest mean(q_I) . mean(k_J), causal q_i . mean(k_J), times v",
        cost="n b c d, and to choose (n / b)^2 d, causal n^2 d / b",
        complexity_exponent=1.0,
        gpu=FLEX,
        causal=True,
        padding=True,
        rotary=True,
        memory="growing",
        positions="absolute",
        approximates="Softmax",
    )

    def __post_init__(self) -> None:
        """Check the settings."""
        at_least(self, "block_size", self.block_size, 1)
        at_least(self, "topk", self.topk, 1)

    def covers(self, length: int, keys: int, *, is_causal: bool) -> bool:
        """Whether every one of ``length`` queries sees all ``keys``, as far as it may."""
        return keys <= self.topk * self.block_size

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Softmax over the chosen blocks; exact attention where these are all."""
        size, sinks = self.block_size, self.sinks_of(w)
        if not symbolic() and self.covers(q.shape[-2], k.shape[-2], is_causal=is_causal):
            return softmax_attention(q, k, v, is_causal=is_causal, key_mask=key_mask, scale=self.scale, sinks=sinks)
        visible = torch.ones(1, k.shape[-2], dtype=torch.bool, device=q.device) if key_mask is None else key_mask
        if is_causal:
            means, alive = block_means(k, key_mask, size)
            settings = {"size": size, "topk": self.topk, "start": 0, "scale": self.scale}
            return attend_past(q, k, v, visible, means, alive, sinks, **settings)
        table = of_blocks(q, k, key_mask, size=size, topk=self.topk)
        return gathered_softmax(q, k, v, table, visible, size=size, scale=self.scale, sinks=sinks)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, state: SelectedState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, SelectedState]:
        """Attend to the blocks that the new tokens choose among all before; blocks that they fill get their means."""
        cache = append(None if state is None else state.near, k, v, key_mask)
        total, size = cache.k.shape[-2], self.block_size
        pooled = 0 if state is None else state.means.shape[-2] * size
        whole = slice(pooled, total // size * size)
        means, alive = block_means(cache.k[..., whole, :], cache.visible[..., whole], size)
        if state is not None:
            means, alive = torch.cat([state.means, means], -2), torch.cat([state.alive, alive], -1)
        start = total - q.shape[-2]
        out = attend_past(
            q, cache.k, cache.v, cache.visible, means, alive, self.sinks_of(w), size=size, topk=self.topk, start=start,
            scale=self.scale,
        )  # fmt: skip
        return out, SelectedState(cache, means, alive)
