"""Learned features (Hedgehog, Zhang et al. 2024): linear attention whose positive feature map is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.ops.linear import linear
from fast_attention.ops.linear.linear import LinearState
from fast_attention.ops.maps.features import Features
from fast_attention.ops.maps.random_features import draw, positive
from fast_attention.ops.precision import in_float32
from fast_attention.ops.trail import took
from fast_attention.ops.value import at_least


class Maps(NamedTuple):
    """Rows of the maps of queries and keys (H, m, d); learned."""

    query: Float[Tensor, "heads rows width"]
    key: Float[Tensor, "heads rows width"]


@dataclass(frozen=True, repr=False)
class LearnedFeatures(Attention[Maps, LinearState]):
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

    @in_float32
    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Maps, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Both products at once, or in blocks where causal."""
        took("features, then two products", "the map is learned: plain operations carry its gradient")
        keys = linear.masked_keys(lambda x: _features(x, w.key), k, key_mask)
        return linear.normalise(linear.attend(_features(q, w.query).values, keys, v, is_causal=is_causal))

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Maps, state: LinearState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """Outputs of the stretch, and the sums over all keys up to its end."""
        keys = linear.masked_keys(lambda x: _features(x, w.key), k, key_mask)
        sums, state = linear.advance(_features(q, w.query).values, keys, v, state)
        return linear.normalise(sums), state

    @in_float32
    def summarise(self, k: Tensor, v: Tensor, w: Maps, *, key_mask: Tensor | None = None) -> LinearState:
        """``sum_j phi(k_j) v_j^T`` and ``sum_j phi(k_j)`` of a stretch, in units of its largest feature."""
        return linear.summarise(linear.masked_keys(lambda x: _features(x, w.key), k, key_mask), v)

    def combine(self, earlier: LinearState, later: LinearState) -> LinearState:
        """The sums over two neighbouring stretches."""
        return linear.combine(earlier, later)


def _features(x: Tensor, W: Tensor) -> Features:
    return positive(x * x.shape[-1] ** -0.25, W, hyperbolic=True)
