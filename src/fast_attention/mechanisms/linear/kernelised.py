"""Kernelised attention: the weight of a pair is a product of features, so that keys are summed once.

Exponential random features with one log scale for each token serve sums in which products of features stand beside
other weights, as in Hybrid.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fast_attention.engine.advancing import in_chunks, summed_in_chunks
from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.feature_map import Features
from fast_attention.feature_maps.feature_map import Map as Map
from fast_attention.mechanism import Attention, Traits, W
from fast_attention.mechanisms.linear import gpu, linear_state, reference, sums
from fast_attention.mechanisms.linear.core_map import CoreMap as CoreMap
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.traits import KERNELS

TRAITS = Traits(
    paper="Katharopoulos et al. 2020, arXiv 2006.16236",
    formula="phi(q) (sum_j phi(k_j) v_j^T) / (phi(q) . sum_j phi(k_j) + eps)",
    cost="n m d",
    complexity_exponent=1.0,
    gpu=KERNELS,
    causal=True,
    padding=True,
    cross=True,
    memory="constant",
)
TokenMap = Callable[[Tensor], Features]  # features with one log scale for each token


def per_token(maps: tuple[Map, Map]) -> tuple[TokenMap, TokenMap]:
    """Maps of queries and keys, each over a token's largest feature."""
    queries, keys = maps
    return (lambda x: queries(x).per_token()), (lambda x: keys(x).per_token())


class Kernelised(Attention[W, LinearState]):
    """An attention with weights ``phi_q(q_i) . phi_k(k_j)``: linear time, a state of constant size.

    A subclass defines ``core_map``, or ``maps`` where it gives None; and ``eps``, added to the denominators.
    """

    eps: float = 0.0

    @abstractmethod
    def core_map(self, w: W) -> CoreMap | None:
        """The maps as operations make them; None where they do not."""

    def maps(self, w: W) -> tuple[Map, Map]:
        """The maps of queries and of keys, (..., H, n, d) to features (..., H, n, C), with weights ``w``.

        Where the mechanism estimates softmax, ``phi_q(q) . phi_k(k)`` stands for ``exp(q . k / sqrt(d))``, factors that
        its own normaliser would cancel included, which are with the queries; other kernels have their own scale.
        """
        core_map = self.core_map(w)
        assert core_map is not None
        return core_map.maps(unbiased=True)

    @property
    def signed(self) -> bool:
        """Whether a weight can be negative."""
        return False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Attention with this mechanism's maps."""
        core_map = self.core_map(w)
        if core_map is None:
            return self._of_features(q, k, v, w, is_causal=is_causal, key_mask=key_mask)
        return sums.of_map(core_map, q, k, v, key_mask, eps=self.eps, is_causal=is_causal)

    @in_float32
    def _of_features(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:  # fmt: skip
        return sums.of_features(q, k, v, key_mask, self.maps(w), eps=self.eps, is_causal=is_causal)

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, lengths: tuple[int, ...], *, is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """Causal and from exponentials, by kernels: every sequence begins a chunk, and sums with it."""
        core_map = self.core_map(w)
        if not is_causal or core_map is None or core_map.rows is None:
            return None
        rows: Any = core_map[2:]
        if gpu.serves(q, k, v, key_mask, *rows, number=core_map.number):
            return None
        return gpu.packed(q, k, v, key_mask, lengths, *rows)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, state: LinearState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """Outputs of the new tokens, and the sums over all keys up to their end."""
        core_map = self.core_map(w)
        if core_map is None:
            return self._advance_features(q, k, v, w, state, key_mask=key_mask)
        return sums.advance_map(core_map, q, k, v, key_mask, state, eps=self.eps)

    @in_chunks
    @in_float32
    def _advance_features(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, state: LinearState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        return sums.advance_features(q, k, v, key_mask, self.maps(w), state, eps=self.eps)

    @summed_in_chunks
    @in_float32
    def summarise_keys(self, k: Tensor, v: Tensor, w: W, *, key_mask: Tensor | None = None) -> LinearState:
        """``sum_j phi(k_j) v_j^T`` and ``sum_j phi(k_j)`` of some tokens, over their largest features."""
        return reference.summarised(reference.masked_keys(self.maps(w)[1], k, key_mask), v)

    def merge_states(self, earlier: LinearState, later: LinearState) -> LinearState:
        """The sums over two neighbouring chunks."""
        return linear_state.combine(earlier, later)
