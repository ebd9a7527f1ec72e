"""Log-linear attention (Guo et al. 2025): linear attention that weighs the past by levels of a Fenwick tree.

Sums over a Fenwick split of the past (Guo et al. 2025): what ``LogLinearAttention`` computes.

The query at t weighs a key at j by the level of the pair, the bits of ``t xor j``: 0 for its own, l for the keys whose
aligned block of ``2^(l-1)`` tokens lies just before the query's own such block. Blocks of ``BLOCK`` tokens take their
pairs; beyond, level by level, queries in the right halves of blocks read the sums over the left halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.engine import masks, trace
from fast_attention.engine.blocks import pad_length
from fast_attention.engine.heads import by_head
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import exporting
from fast_attention.feature_maps.features import FeatureMap, Identity, as_feature_map
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.traits import PLAIN
from fast_attention.value import at_least

BLOCK = 64  # tokens whose pairs are taken: a power of two


class FenwickState(NamedTuple):
    """For every bit that is set in the number of tokens the sum over a block of so many; zeros for the others."""

    sums: Float[Tensor, "*batch bits C values"]
    position: Int[Tensor, ""]  # tokens so far


def levels(rows: Tensor, columns: Tensor, count: int) -> Int[Tensor, "rows columns"]:
    """The level of each pair of positions, the last of ``count`` for all beyond."""
    pairs = [rows[:, None] // 2**bit != columns // 2**bit for bit in range(count - 1)]
    return sum((pair.long() for pair in pairs), torch.zeros(1, 1, dtype=torch.long, device=rows.device))


def attend(
    q: Float[Tensor, "*batch length C"],
    k: Float[Tensor, "*batch length C"],
    v: Float[Tensor, "*batch length values"],
    weights: Float[Tensor, "*batch length levels"],
) -> Float[Tensor, "*batch length values"]:
    """``sum_{j <= t} weights_{t, level(t, j)} (q_t . k_j) v_j``: time O(length log(length) C values).

    While exporting, where the length is open and with it the number of levels, all pairs in one product.
    """
    length = v.shape[-2]
    if exporting():
        return _block(q, k, v, weights)
    if length <= BLOCK:
        return _block(q, k, v, weights)
    q, k, v, weights = (pad_length(x, BLOCK).unflatten(-2, (-1, BLOCK)) for x in (q, k, v, weights))
    out, states, bit = _block(q, k, v, weights[..., : BLOCK.bit_length()]), k.mT @ v, BLOCK.bit_length()
    while states.shape[-3] > 1:
        half = 1 << (bit - BLOCK.bit_length())  # blocks
        out = out + _across(q, states, weights[..., min(bit, weights.shape[-1] - 1)], half)
        states = _even(states)[..., ::2, :, :] + _even(states)[..., 1::2, :, :]
        bit += 1
    return out.flatten(-3, -2)[..., :length, :]


def _block(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    """All pairs of a block that starts at a multiple of its size."""
    position = torch.arange(v.shape[-2], device=q.device)
    level = levels(position, position, weights.shape[-1])
    one_hot = (level[:, None] == torch.arange(weights.shape[-1], device=q.device)[:, None]).to(v.dtype)
    one_hot = one_hot.masked_fill((position > position[:, None])[:, None], 0.0)
    by_row = weights.flatten(0, -3).transpose(0, 1) @ one_hot  # of all blocks row t side by side
    return (q @ k.mT * by_row.transpose(0, 1).unflatten(0, weights.shape[:-2])) @ v


def _across(q: Tensor, states: Tensor, weights: Tensor, half: int) -> Tensor:
    """Sums that queries in the right halves of blocks, of ``half`` blocks each, read of the left halves."""
    count = q.shape[-3]
    scaled = (q * weights[..., None]).flatten(-3, -2)
    size = half * q.shape[-2]
    right = pad_length(scaled, 2 * size).unflatten(-2, (-1, 2, size))[..., 1, :, :]
    read = right @ states[..., ::2, :, :][..., : right.shape[-3], :, :]
    padded = F.pad(read[..., None, :, :], (0, 0, 0, 0, 1, 0)).flatten(-4, -2)
    return padded[..., : count * q.shape[-2], :].unflatten(-2, (count, -1))


def _even(states: Tensor) -> Tensor:
    """An even number of states, the last perhaps of nothing."""
    return F.pad(states, (0, 0, 0, 0, 0, states.shape[-3] % 2))


def advance(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, state: FenwickState | None
) -> tuple[Tensor, FenwickState]:
    """The outputs of new tokens behind ``state``, and the state after them.

    From a multiple of ``2^a`` on, ``2^a`` tokens have the levels of a sequence that starts there.
    """
    position = 0 if state is None else int(state.position)
    sums = [] if state is None else list(state.sums.unbind(-3))
    outs, length, start = [], v.shape[-2], 0
    while start < length:
        size = min(length - start, position & -position or length)
        new = slice(start, start + size)
        tokens = [x[..., new, :] for x in (q, k, v, weights)]
        outs.append(attend(*tokens) + _past(tokens[0], tokens[3], sums, position))
        sums = _added(sums, tokens[1], tokens[2], position)
        position, start = position + size, start + size
    state = FenwickState(torch.stack(sums, -3), torch.tensor(position, device=q.device))
    return torch.cat(outs, -2), state


def _past(q: Tensor, weights: Tensor, sums: list[Tensor], position: int) -> Tensor:
    """Sums that tokens from ``position`` on read of the blocks before it."""
    rows = torch.arange(position, position + q.shape[-2], device=q.device)
    total = q.new_zeros(())
    for bit, one in enumerate(sums):
        if position >> bit & 1:
            begin = torch.tensor([position >> (bit + 1) << (bit + 1)], device=q.device)
            level = levels(rows, begin, weights.shape[-1]).expand(*weights.shape[:-1], 1)
            total = total + (q * weights.gather(-1, level)) @ one
    return total


def _added(sums: list[Tensor], k: Tensor, v: Tensor, position: int) -> list[Tensor]:
    """The blocks after new tokens, which are no more than the last bit of ``position`` counts."""
    length, sums = v.shape[-2], list(sums)
    nothing = torch.zeros_like(k[..., :1, :].mT @ v[..., :1, :])
    sums += [nothing] * ((position + length).bit_length() - len(sums))
    start = 0
    for bit in reversed(range(length.bit_length())):
        if length >> bit & 1:
            block = slice(start, start + (1 << bit))
            total = k[..., block, :].mT @ v[..., block, :]
            while (position + start) >> bit & 1:
                total, sums[bit] = total + sums[bit], nothing
                bit += 1
            sums[bit], start = total, block.stop
    return sums


class LevelWeights(NamedTuple):
    """A query weighs level l by ``softplus(bias_l + rows_l . q)``, head by head."""

    bias: Float[Tensor, "heads levels"]
    rows: Float[Tensor, "heads levels width"]

    def of(self, q: Float[Tensor, "*batch heads n width"]) -> Float[Tensor, "*batch heads n levels"]:
        """The weights of every query."""
        return F.softplus(self.bias[:, None].to(q.dtype) + by_head(q, self.rows.mT.to(q.dtype)))


@dataclass(frozen=True, repr=False)
class LogLinearAttention(Attention[LevelWeights, FenwickState]):
    """Linear attention, not normalised, whose query weighs near and far blocks of the past apart; causal only.

    Level 0 is the token itself; level l, where bit l - 1 of the position is set, the ``2^(l-1)`` tokens of a Fenwick
    split of the past: near blocks are short, far ones long. Time O(n log n); decoding keeps a matrix for each power of
    two up to the length, a state that grows by one matrix where the length doubles. At the start all weights are 1,
    which is linear attention. The paper's gates, which decay its states as well, are not in it. A masked token adds
    nothing and keeps its position. Outputs grow with the sums: normalise behind it.

    Args:
        feature_map: The map phi of queries and keys, as in ``LinearAttention``, but taken as it is: ``Exp()`` overflows
            above 88.
        num_levels: Levels with a weight of their own, at least 1; all beyond share the last one's: 16 tell blocks apart
            up to 2^15 tokens.
    """

    feature_map: FeatureMap = Identity()  # noqa: RUF009
    num_levels: int = 16

    traits = Traits(
        paper="Guo et al. 2025, arXiv 2506.04761",
        formula="sum_l softplus(b_l + r_l . q_t) phi(q_t) S_t^(l), S^(l) sums phi(k_j) v_j^T over a Fenwick split",
        cost="n log(n) m d",
        complexity_exponent=1.0,
        gpu=PLAIN,
        causal=True,
        bidirectional=False,
        padding=True,
        memory="growing",
        positions="absolute",
        learned=True,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_map", as_feature_map(self, "feature_map", self.feature_map))
        at_least(self, "num_levels", self.num_levels, 1)

    def weights(self, shape: Shape) -> LevelWeights:
        """All levels weigh 1."""
        bias = torch.full((shape.heads, self.num_levels), 1.0).expm1().log()
        return LevelWeights(nn.Parameter(bias), nn.Parameter(torch.zeros(*bias.shape, shape.head_dim)))

    @in_float32
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: LevelWeights, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """``attend`` of the features."""
        trace.record("pairs in blocks, sums of blocks level by level", "causal", block=BLOCK)
        keys = masks.drop(self.feature_map(k), key_mask)
        return attend(self.feature_map(q), keys, v, w.of(q))

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: LevelWeights, state: FenwickState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, FenwickState]:
        """Outputs of new tokens, and the sums of the blocks up to the last."""
        keys = masks.drop(self.feature_map(k), key_mask)
        return advance(self.feature_map(q), keys, v, w.of(q), state)
