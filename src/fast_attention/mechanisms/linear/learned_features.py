"""Linear attention whose feature map is trained: exponentials (Hedgehog, Zhang et al. 2024), or a layer of ReLU (T2R).

Pretrained models are fine-tuned into either; T2R is Kasai et al. 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fast_attention.engine.heads import by_head
from fast_attention.engine.numerics import clamp
from fast_attention.feature_maps.feature_map import Features
from fast_attention.feature_maps.random_features import draw
from fast_attention.mechanism import Shape
from fast_attention.mechanisms.linear.kernelised import TRAITS, CoreMap, Kernelised, Map
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

    traits = replace(
        TRAITS,
        paper="Zhang et al. 2024, arXiv 2402.04347",
        formula="linear attention, phi(x) = [exp(W x), exp(-W x)] exp(-|x|^2 / 2) with W learned",
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


class Layer(NamedTuple):
    """The layer of every head, of queries and of keys; learned."""

    rows: Float[Tensor, "heads features width"]
    bias: Float[Tensor, "heads features"]

    def __call__(self, x: Float[Tensor, "*batch heads n width"]) -> Float[Tensor, "*batch heads n features"]:
        """``W x + b``."""
        return by_head(clamp(x), self.rows.mT.to(x.dtype)) + self.bias[:, None].to(x.dtype)


@dataclass(frozen=True, repr=False)
class T2R(Kernelised[Layer]):
    """Linear attention with ``phi(x) = max(W x + b, 0)``, W and b of each head trained, the same for queries and keys.

    W starts from orthogonal rows, b at zero. Nothing of softmax is in it before training: the authors swap it into a
    pretrained model and fine-tune the whole of it. Fewer features than the heads' width make a state that is smaller
    than that of ``LinearAttention``.

    Args:
        num_features: Features of a token, at least 1; the paper's models take 32.
        eps: Added to the denominators, at least 0. A query without a feature above zero gets zeros.
    """

    num_features: int = 32
    eps: float = 1e-6

    traits = replace(
        TRAITS,
        paper="Kasai et al. 2021, arXiv 2103.13076",
        formula="linear attention, phi(x) = max(W x + b, 0) with W and b learned",
        learned=True,
    )

    def __post_init__(self) -> None:
        at_least(self, "num_features", self.num_features, 1)
        at_least(self, "eps", self.eps, 0.0)

    def weights(self, shape: Shape) -> Layer:
        """Rows of length about 1 and no bias."""
        rows = draw(shape.heads, self.num_features, shape.head_dim) * shape.head_dim**-0.5
        return Layer(nn.Parameter(rows), nn.Parameter(torch.zeros(shape.heads, self.num_features)))

    def core_map(self, w: Layer) -> None:
        """None: operations do not make the layer."""

    def maps(self, w: Layer) -> tuple[Map, Map]:
        """One map for queries and keys, of no scale."""

        def features(x: Tensor) -> Features:
            return Features(w(x).relu())

        return features, features
