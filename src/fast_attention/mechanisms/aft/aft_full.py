"""AFT-full (Zhai et al. 2021): keys weighed by a learned bias for every pair of positions, channel by channel.

The values of all sequences lie side by side, so that a chunk of queries is one wide product of exp(w) with exp(k) v and
exp(k). Causal chunks multiply with the keys up to their end only. There all queries share one log scale per channel,
for keys that never rise far above the first (``one_scale_is_enough``); others take ``reference_biased.full_causal``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fast_attention.engine import masks
from fast_attention.engine.blocks import narrow
from fast_attention.engine.operation import Fast, Operation, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.aft import fast, reference, reference_biased
from fast_attention.mechanisms.aft.reference import same_width
from fast_attention.traits import SCORES
from fast_attention.value import at_least

ROWS = 256  # queries per product
RANGE = 40.0  # keys may rise by this, and biases differ by this: sums stay above exp(-80), float32 ends at exp(-87)


def one_scale_is_enough(k: Tensor, bias: Tensor, *, any_masked: bool) -> bool:
    """Whether one log scale per channel serves every causal query, and the biases need none beside it."""
    rise = (k.amax(-2) - (fast.smallest(k) if any_masked else k[..., 0, :])).amax()
    low, high = bias.detach().aminmax()
    return bool((rise <= RANGE) & (high - low <= RANGE))


def products(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, is_causal: bool, any_masked: bool, longest: int
) -> Tensor:
    """AFT-full of as many queries as keys where causal; masked keys at ``scan.FLOOR``, masked values zero.

    ``longest`` as in ``reference_biased.full_causal``.
    """
    values_and_ones = reference.with_ones(k, v)
    if is_causal:
        sums = reference_biased.full_causal(bias, k, values_and_ones, longest=longest)
    else:
        sums = reference_biased.full(bias, k, values_and_ones)
    return q.sigmoid() * reference.mean(sums, v.shape[-1])


def _in_rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, is_causal: bool, any_masked: bool, longest: int
) -> Tensor:
    """``products`` in one log scale per channel, of a chunk of queries with the keys that it sees."""
    weights = (k - fast.log_scale(k)).exp()
    terms = torch.cat([x.movedim(-2, 0) for x in (weights * v, weights)], -1)
    flat, parts, end = terms.flatten(1), list[Tensor](), 0
    for rows in bias.split(max(ROWS, -(-len(bias) // 8)) if torch.is_grad_enabled() else ROWS):
        start, end = end, end + len(rows)
        rows = rows[:, :end] if is_causal else rows
        weights = (rows - rows.detach().amax(-1, keepdim=True)).exp()
        parts.append((weights.tril(start) if is_causal else weights) @ flat[: weights.shape[1]])
    numerators, n = torch.cat(parts).unflatten(1, terms.shape[1:]).movedim(0, -2).split(v.shape[-1], -1)
    return q.sigmoid() * (reference.quotient(numerators, n) if any_masked else numerators / n)


def _serves(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, is_causal: bool, any_masked: bool, longest: int) -> str:
    fits = not is_causal or one_scale_is_enough(k, bias, any_masked=any_masked)
    return "" if fits else "causal, and keys or biases lie too far apart for one log scale"


_FAST = Fast(
    _in_rows, None, serves=_serves, path="products of chunks of queries with all that they see",
    why="every pair has a bias", sizes=lambda *tensors, **settings: {"rows": ROWS},
)  # fmt: skip
full = Operation(
    products, cpu=_FAST, cuda=_FAST, empty=like_queries,
    path=lambda *tensors, is_causal, **settings:
        "triangles of products by halving" if is_causal else "products of all pairs",
)  # fmt: skip


@in_float32
def aft_full(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys width"],
    bias: Float[Tensor, "rows columns"],
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length width"]:
    """``sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)`` per channel (arXiv 2105.14103, Eq. 2-3).

    ``bias`` w is shared by all heads and channels and holds at least (length, keys) numbers, (keys, keys) for causal
    calls. There the queries are the last of the sequence: query i has row ``i + keys - length``. Two products of
    matrices, time O(length keys width), memory O(length keys). A query that sees nothing gets zeros.
    """
    length, keys = q.shape[-2], k.shape[-2]
    longest, bias = bias.shape[0], narrow(narrow(bias, keys if is_causal else length, axis=0), keys, axis=1)
    k, v = reference.masked_scores(k, key_mask), masks.drop(v, key_mask)
    if is_causal:
        q = reference.last_rows(q, keys)
    out = full(q, k, v, bias, is_causal=is_causal, any_masked=key_mask is not None, longest=longest)
    return reference.last_rows(out, length) if is_causal else out


class PositionBias(NamedTuple):
    """One bias per query and key position, for all heads and channels."""

    bias: Float[Tensor, "max_len max_len"]


class FactoredBias(NamedTuple):
    """Biases as a product ``rows @ columns^T``."""

    rows: Float[Tensor, "max_len rank"]
    columns: Float[Tensor, "max_len rank"]


@dataclass(frozen=True, repr=False)
class AFTFull(Attention[PositionBias | FactoredBias, None]):
    """AFT with a learned bias for every pair of positions: two n x n products, and no n x n x d tensor.

    Keys, queries and values must have the same width. Causal calls with fewer queries than keys take the queries for
    the last of the sequence; other cross attention starts both at position 0.

    Args:
        rank: Width of the two factors of the bias, 2 max_len rank numbers instead of max_len^2; None: no factors. The
            paper's models use 64 to 128.
    """

    rank: int | None = None

    traits = Traits(
        paper="Zhai et al. 2021, arXiv 2105.14103",
        formula="sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)",
        cost="n^2 d",
        complexity_exponent=2.0,
        gpu=SCORES,
        causal=True,
        padding=True,
        cross=True,
        positions="absolute",
        needs_max_len=True,
        matrix=False,  # a matrix for each channel
        learned=True,
    )

    def __post_init__(self) -> None:
        if self.rank is not None:
            at_least(self, "rank", self.rank, 1, nothing="AFTSimple()")

    def weights(self, shape: Shape) -> PositionBias | FactoredBias:
        """Biases, or both factors of them, from N(0, 0.01^2)."""
        if self.rank is None:
            return PositionBias(nn.Parameter(0.01 * torch.randn(shape.max_len, shape.max_len)))
        rows, columns = (nn.Parameter(0.01 * torch.randn(shape.max_len, self.rank)) for _ in range(2))
        return FactoredBias(rows, columns)

    def heads_of(self, w: PositionBias | FactoredBias) -> None:
        """None: the biases are those of all heads, however many."""

    @in_float32
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: PositionBias | FactoredBias,
        *,
        is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor:
        """``aft_full`` with the learned bias."""
        same_width(self, k, v)
        self.within(q.shape[-2], w[0].shape[0])
        self.within(k.shape[-2], w[0].shape[0])
        bias = w.bias if isinstance(w, PositionBias) else w.rows @ w.columns.mT
        return aft_full(q, k, v, bias, is_causal=is_causal, key_mask=key_mask)
