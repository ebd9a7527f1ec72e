"""Learned features (Hedgehog, Zhang et al. 2024): linear attention whose positive feature map is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from fast_attention.feature_maps.random_features import draw
from fast_attention.mechanism import Shape, Traits
from fast_attention.mechanisms.linear.kernelised import CoreMap, Kernelised
from fast_attention.traits import KERNELS
from fast_attention.value import at_least


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
        complexity_exponent=1.0,
        gpu=KERNELS,
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

    def core_map(self, w: Maps) -> CoreMap:
        """Hyperbolic features, with rows for queries and rows for keys."""
        return CoreMap.exponential(w.query, w.key, hyperbolic=True)
