"""Kernelised attention: the weight of a pair is a product of features, so that keys are summed once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fast_attention.engine import dispatch
from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.feature_map import Features
from fast_attention.feature_maps.feature_map import Map as Map
from fast_attention.mechanism import Attention, W
from fast_attention.mechanisms.linear import feature_chunks, in_range, linear_state, reference
from fast_attention.mechanisms.linear.linear_state import LinearState

TokenMap = Callable[[Tensor], Features]


def feature_attention(
    maps: feature_chunks.Maps, weights: Sequence[Any], q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool,
    key_mask: Tensor | None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attention with weights ``phi_q(q_i) . phi_k(k_j)`` for any two maps made of ``weights``: chunk after chunk."""
    why = feature_chunks.against(maps, weights, q, k, v)
    if not why:
        dispatch.record(
            "features chunk by chunk, with a running state", "autograd follows any map through one chunk at a time"
        )
        return feature_chunks.attend(maps, weights, q, k, v, is_causal=is_causal, key_mask=key_mask, eps=eps)
    dispatch.record("features, then two products", why)
    queries, keys = maps(*weights)
    return in_range.attend(queries(q), reference.masked_keys(keys, k, key_mask), v, is_causal=is_causal, eps=eps)


class Kernelised(Attention[W, LinearState]):
    """An attention with weights ``phi_q(q_i) . phi_k(k_j)``: linear time, a state of constant size.

    A subclass owes ``maps``; it overrides ``attend`` and ``advance`` where it has faster forms of the same sums.
    """

    @abstractmethod
    def maps(self, w: W) -> tuple[Map, Map]:
        """The maps of queries and of keys, (..., H, n, d) to features (..., H, n, C), with weights ``w``.

        Where the mechanism estimates softmax, ``phi_q(q) . phi_k(k)`` stands for ``exp(q . k / sqrt(d))``, factors that
        its own normaliser would cancel included; other kernels are in units of their own.
        """

    def per_token(self, w: W) -> tuple[TokenMap, TokenMap]:
        """``maps`` in units of each token's largest feature, for sums with other weights than products of features."""
        queries, keys = self.maps(w)
        return (lambda x: queries(x).per_token()), (lambda x: keys(x).per_token())

    @property
    def signed(self) -> bool:
        """Whether a weight can be negative."""
        return False

    @in_float32
    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """``feature_attention`` with this mechanism's maps."""
        weights, layout = tree_flatten(w)

        def maps(*leaves: Any) -> tuple[Map, Map]:
            return self.maps(tree_unflatten(leaves, layout))

        return feature_attention(maps, weights, q, k, v, is_causal=is_causal, key_mask=key_mask)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, state: LinearState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """Outputs of the stretch, and the sums over all keys up to its end."""
        queries, keys = self.maps(w)
        return in_range.advance(queries(q), reference.masked_keys(keys, k, key_mask), v, state)

    @in_float32
    def summary(self, k: Tensor, v: Tensor, w: W, *, key_mask: Tensor | None = None) -> LinearState:
        """``sum_j phi(k_j) v_j^T`` and ``sum_j phi(k_j)`` of a stretch, in units of its largest features."""
        return in_range.summarise(reference.masked_keys(self.maps(w)[1], k, key_mask), v)

    def merged(self, earlier: LinearState, later: LinearState) -> LinearState:
        """The sums over two neighbouring stretches."""
        return linear_state.combine(earlier, later)
