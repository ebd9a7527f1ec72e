"""Log-linear attention (Guo et al. 2025): linear attention that weighs the past by levels of a Fenwick tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.engine import dispatch, masks
from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.features import FeatureMap, Identity, as_feature_map
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.linear import fenwick
from fast_attention.mechanisms.linear.fenwick import FenwickState
from fast_attention.value import at_least


class LevelWeights(NamedTuple):
    """A query weighs level l by ``softplus(bias_l + rows_l . q)``, head by head."""

    bias: Float[Tensor, "heads levels"]
    rows: Float[Tensor, "heads levels width"]

    def of(self, q: Float[Tensor, "*batch heads n width"]) -> Float[Tensor, "*batch heads n levels"]:
        """The weights of every query."""
        return F.softplus(self.bias[:, None].to(q.dtype) + q @ self.rows.mT.to(q.dtype))


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
        order=1.0,
        causal=True,
        bidirectional=False,
        padding=True,
        memory="growing",
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
        """``fenwick.attend`` of the features."""
        dispatch.record("pairs in blocks, sums of blocks level by level", "causal", block=fenwick.BLOCK)
        keys = masks.drop(self.feature_map(k), key_mask)
        return fenwick.attend(self.feature_map(q), keys, v, w.of(q))

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: LevelWeights, state: FenwickState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, FenwickState]:
        """Outputs of new tokens, and the sums of the blocks up to the last."""
        keys = masks.drop(self.feature_map(k), key_mask)
        return fenwick.advance(self.feature_map(q), keys, v, w.of(q), state)
