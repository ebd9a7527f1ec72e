"""Learned features (Hedgehog, Zhang et al. 2024): linear attention whose positive feature map is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.random_features import draw
from fast_attention.mechanism import Shape, Traits
from fast_attention.mechanisms.linear import fast_favor
from fast_attention.mechanisms.linear.kernelised import Kernelised, Map
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap
from fast_attention.value import at_least

FEATURES = RandomFeatureMap("hyperbolic")


class Maps(NamedTuple):
    """Rows of the maps of queries and keys (H, m, d); learned."""

    query: Float[Tensor, "heads rows width"]
    key: Float[Tensor, "heads rows width"]


@dataclass(frozen=True, repr=False)
class LearnedFeatures(Kernelised[Maps]):
    """Linear attention with ``phi(x) = [exp(W x), exp(-W x)] exp(-||x||^2 / 2)``, W of queries and of keys trained.

    W starts as FAVOR+ draws it, the same for both, so that the untrained map estimates softmax as
    ``FavorPlus(features="hyperbolic")`` does; trained on the attention of a model, it follows that. The factor of
    ||x||^2, which Hedgehog does without, keeps weights in the units of softmax.

    Args:
        num_features: Rows m of W; there are 2m features.
        scale: What FAVOR+'s draws are multiplied by at the start. At 1 the untrained map estimates softmax; a smaller
            map is smoother and no estimate, and was measured to train faster on a pretrained model (0.5).
    """

    num_features: int = 64
    scale: float = 1.0

    traits = Traits(
        paper="Zhang et al. 2024, arXiv 2402.04347",
        formula="linear attention, phi(x) = [exp(W x), exp(-W x)] exp(-|x|^2 / 2) with W learned",
        cost="n m d",
        order=1.0,
        causal=True,
        padding=True,
        cross=True,
        memory="constant",
        learned=True,
    )

    def __post_init__(self) -> None:
        at_least(self, "num_features", self.num_features, 1)
        at_least(self, "scale", self.scale, 0.0)

    def weights(self, shape: Shape) -> Maps:
        """The maps of every head, equal at the start."""
        W = self.scale * draw(shape.heads, self.num_features, shape.head_dim)
        return Maps(nn.Parameter(W), nn.Parameter(W.clone()))

    def maps(self, w: Maps) -> tuple[Map, Map]:
        """One map for queries and one for keys; the factors that its own normaliser cancels are with the queries."""
        heads = Heads(w.query, key_rows=w.key)
        return (lambda x: FEATURES.whole(x, heads)), (lambda x: FEATURES.plain(x, heads.keys))

    @in_float32
    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Maps, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """As FAVOR+ with two projections; both are trained."""
        heads = Heads(w.query, key_rows=w.key)
        return fast_favor.attend(FEATURES, q, k, v, heads, is_causal=is_causal, key_mask=key_mask)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Maps, state: LinearState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """Outputs of the new tokens, and the sums over all keys up to their end."""
        return fast_favor.advance(FEATURES, q, k, v, Heads(w.query, key_rows=w.key), state, key_mask)
