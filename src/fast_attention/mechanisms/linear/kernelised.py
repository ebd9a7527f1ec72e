"""Kernelised attention: the weight of a pair is a product of features, so that keys are summed once.

Exponential random features with one log scale for each token serve sums in which products of features stand beside
other weights, as in Hybrid.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fast_attention.engine.advancing import in_chunks, summed_in_chunks
from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.feature_map import FeatureMap, Features
from fast_attention.feature_maps.feature_map import Map as Map
from fast_attention.mechanism import Attention, W
from fast_attention.mechanisms.linear import compiled, gpu, linear_state, reference, sums
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap

TokenMap = Callable[[Tensor], Features]  # features with one log scale for each token


class CoreMap(NamedTuple):
    """A pair of maps as the compiled core makes them: number by number, or exponentials of products with rows."""

    map: FeatureMap | None  # None: exponentials
    rows: Tensor | None = None  # (..., H, C, d), of queries
    key_rows: Tensor | None = None
    bias: Tensor | None = None  # (..., H, 1, C), added to exponents


class Kernelised(Attention[W, LinearState]):
    """An attention with weights ``phi_q(q_i) . phi_k(k_j)``: linear time, a state of constant size.

    A subclass defines ``maps``; it overrides ``attend`` and ``advance`` where it has faster forms of the same sums.
    """

    @abstractmethod
    def maps(self, w: W) -> tuple[Map, Map]:
        """The maps of queries and of keys, (..., H, n, d) to features (..., H, n, C), with weights ``w``.

        Where the mechanism estimates softmax, ``phi_q(q) . phi_k(k)`` stands for ``exp(q . k / sqrt(d))``, factors that
        its own normaliser would cancel included; other kernels have their own scale.
        """

    def per_token(self, w: W) -> tuple[TokenMap, TokenMap]:
        """``maps`` over each token's largest feature, for sums with other weights than products of features."""
        queries, keys = self.maps(w)
        return (lambda x: queries(x).per_token()), (lambda x: keys(x).per_token())

    def core_map(self, w: W) -> CoreMap | None:
        """``maps`` as the compiled core makes them; None where it does not."""
        return None

    @property
    def signed(self) -> bool:
        """Whether a weight can be negative."""
        return False

    @in_float32
    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Attention with this mechanism's maps."""
        queries, keys = self.maps(w)
        return sums.of_features(queries(q), reference.masked_keys(keys, k, key_mask), v, is_causal=is_causal)

    @in_chunks
    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, state: LinearState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """Outputs of the new tokens, and the sums over all keys up to their end."""
        queries, keys = self.maps(w)
        return sums.advance_features(queries(q), reference.masked_keys(keys, k, key_mask), v, state)

    @summed_in_chunks
    @in_float32
    def summarise_keys(self, k: Tensor, v: Tensor, w: W, *, key_mask: Tensor | None = None) -> LinearState:
        """``sum_j phi(k_j) v_j^T`` and ``sum_j phi(k_j)`` of some tokens, over their largest features."""
        return reference.summarised(reference.masked_keys(self.maps(w)[1], k, key_mask), v)

    def merge_states(self, earlier: LinearState, later: LinearState) -> LinearState:
        """The sums over two neighbouring chunks."""
        return linear_state.combine(earlier, later)


class RandomKernelised(Kernelised[W]):
    """A kernelised attention whose features are those of a ``RandomFeatureMap``, unless its settings say otherwise."""

    @abstractmethod
    def features_of(self, w: W) -> tuple[RandomFeatureMap, Heads] | None:
        """The map, and its weights for every head; None for features of another kind, which ``maps`` makes."""

    def maps(self, w: W) -> tuple[Map, Map]:
        """The maps of queries and of keys; the factors that the normaliser cancels are with the queries."""
        random = self.features_of(w)
        assert random is not None
        phi, heads = random
        return (lambda x: phi.unbiased(x, heads)), (lambda x: phi.plain(x, heads.keys))

    def core_map(self, w: W) -> CoreMap | None:
        """Exponentials."""
        random = self.features_of(w)
        if random is None or not random[0].exponential:
            return None
        return CoreMap(None, *random[0].rows(random[1]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Attention from these features."""
        random = self.features_of(w)
        if random is None:
            return super().attend(q, k, v, w, is_causal=is_causal, key_mask=key_mask)
        return sums.of_random_features(*random, q, k, v, is_causal=is_causal, key_mask=key_mask)

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, lengths: tuple[int, ...], *, is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """Causal, by kernels: every sequence begins a chunk, and sums with it."""
        exponentials = self.core_map(w)
        if not is_causal or exponentials is None:
            return None
        rows: Any = exponentials[1:]
        if gpu.serves(q, k, v, key_mask, *rows, number=compiled.EXPONENTIAL):
            return None
        return gpu.packed(q, k, v, key_mask, lengths, *rows)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, state: LinearState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """Outputs of the new tokens, and the sums over all keys up to their end."""
        random = self.features_of(w)
        if random is None:
            return super().advance(q, k, v, w, state, key_mask=key_mask)
        return sums.advance_random_features(*random, q, k, v, state, key_mask)
