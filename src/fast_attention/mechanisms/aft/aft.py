"""Attention-free transformer (Zhai et al. 2021): every channel pools the values by its own keys, gated by the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fast_attention.engine import dispatch, masks
from fast_attention.engine.blocks import narrow
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import traced
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.aft import bias_products, pool
from fast_attention.mechanisms.aft.pool import Pool, same_width
from fast_attention.mechanisms.aft.pool_passes import everywhere
from fast_attention.mechanisms.aft.prefix_pool import causal_rows
from fast_attention.value import at_least


@in_float32
def aft_simple(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys width"],
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length width"]:
    """``sigmoid(q_i) * sum_j exp(k_j) v_j / sum_j exp(k_j)``, channel by channel (arXiv 2105.14103, Eq. 5).

    The sums run over the keys that query i may see. Exact for keys of any size: every sum has the running maximum of
    its own past as unit. A query that sees nothing gets zeros.
    """
    holes = key_mask is not None
    k, v = pool.hidden(k, key_mask), masks.drop(v, key_mask)
    if not is_causal:
        dispatch.record("sums over all keys, block by block", "every query sees the same keys")
        return everywhere(q, k, v, holes=holes)
    return causal_rows(q, k, v, holes=holes)


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
    length, keys, holes = q.shape[-2], k.shape[-2], key_mask is not None
    longest, bias = bias.shape[0], narrow(narrow(bias, keys if is_causal else length, axis=0), keys, axis=1)
    k, v = pool.hidden(k, key_mask), masks.drop(v, key_mask)
    if is_causal:
        q = pool.aligned(q, keys)
    made = bias_products.full(q, k, v, bias, is_causal=is_causal, holes=holes, longest=longest)
    return pool.aligned(made, length) if is_causal else made


@dataclass(frozen=True, repr=False)
class AFTSimple(Attention[tuple[()], Pool]):
    """AFT without position biases: the values' mean weighted by exp(key), one for all queries, gated by each.

    Every key is seen from everywhere; what is lost is the interaction of content with position. Keys, queries and
    values must have the same width.
    """

    traits = Traits(
        paper="Zhai et al. 2021, arXiv 2105.14103",
        formula="sigmoid(q_i) * sum_j exp(k_j) v_j / sum_j exp(k_j)",
        cost="n d",
        order=1.0,
        causal=True,
        padding=True,
        cross=True,
        memory="constant",
        matrix=False,  # a matrix for each channel
    )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """``aft_simple``."""
        same_width(self, k, v)
        return aft_simple(q, k, v, is_causal=is_causal, key_mask=key_mask)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: Pool | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, Pool]:
        """Outputs of the stretch, and the pool of all keys up to its end."""
        same_width(self, k, v)
        scores, both = pool.terms(k, v, key_mask)
        if not traced() and k.shape[-2] == 1:
            dispatch.record("one key added to the sums", "decoding token by token")
            row = Pool(scores, both) if state is None else pool.merged(state, Pool(scores, both))
            return q.sigmoid() * pool.mean(row.sums, v.shape[-1]), row
        rows = pool.running(*pool.behind(state, scores, both))
        out = q.sigmoid() * pool.mean(rows.sums[..., 1:, :], v.shape[-1])
        return out, Pool(rows.top[..., -1:, :], rows.sums[..., -1:, :])

    @in_float32
    def summary(self, k: Tensor, v: Tensor, w: tuple[()], *, key_mask: Tensor | None = None) -> Pool:
        """The pool of a stretch."""
        return pool.pooled(*pool.terms(k, v, key_mask))

    def merged(self, earlier: Pool, later: Pool) -> Pool:
        """The pool of two neighbouring stretches."""
        return pool.merged(earlier, later)


class PositionBias(NamedTuple):
    """One bias per query and key position, for all heads and channels."""

    bias: Float[Tensor, "max_len max_len"]


class FactoredBias(NamedTuple):
    """The same as a product ``rows @ columns^T``."""

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
        order=2.0,
        causal=True,
        padding=True,
        cross=True,
        bounded=True,
        matrix=False,  # a matrix for each channel
        learned=True,
    )

    def __post_init__(self) -> None:
        if self.rank is not None:
            at_least(self, "rank", self.rank, 1)

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
