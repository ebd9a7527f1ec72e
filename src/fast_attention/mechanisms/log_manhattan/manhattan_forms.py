"""Manhattan attention in plain operations and fast paths of a CPU: sums of signed differences, or pairs by sorting."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fast_attention.engine import advancing, masks
from fast_attention.engine.precision import in_float32
from fast_attention.engine.scan import prefix_sums
from fast_attention.feature_maps.positive import Positive
from fast_attention.mechanism import Attention
from fast_attention.mechanisms.aft import reference as pool
from fast_attention.mechanisms.log_manhattan import fast_manhattan, reference
from fast_attention.mechanisms.log_manhattan.reference import Differences, ManhattanSettings
from fast_attention.mechanisms.log_manhattan.sorting import Distance, PastKeys, appended, pair_sums

Normalize = Literal["mean", "none", "l1"]
Reference = Literal["self", "first"]
States = Differences | PastKeys


class ManhattanForms(Attention[tuple[()], States]):
    """What ``Manhattan`` computes where no kernel does, and its states."""

    distance: Distance
    normalize: Normalize
    reference: Reference
    feature_map: Positive
    query_dim: Literal[0, 1] | None
    key_dim: Literal[1] | None
    temperature: float

    @property
    def _linear(self) -> bool:
        return self.distance == "signed" and self.normalize != "l1"

    @in_float32
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """Diagonal term plus sum of differences, normalised and gated."""
        if self._linear and self.reference == "self":
            settings = ManhattanSettings(self.feature_map.both, self.normalize == "mean", is_causal)
            out = fast_manhattan.manhattan(self._keys(k, v), v, key_mask, settings, fixed=self.feature_map.fixed)
            return self._gated(q, out)
        if is_causal:
            return self._advance(q, k, v, w, None, key_mask=key_mask)[0]
        l, x, ones, diagonal, weight = self._terms(k, v, key_mask)
        if self._linear:
            return self._of_sums(q, l, diagonal, reference.summarised(l, x, diagonal, key_mask))
        l1 = self.normalize == "l1"
        total, size = pair_sums(l, x, ones, None, distance=self.distance, sizes=l1, is_causal=False)
        return self._out(q, diagonal, total, weight + size if l1 else ones[..., :1].sum(-2, keepdim=True))

    @advancing.in_chunks
    @in_float32
    def _advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: Any, *, key_mask: Tensor | None
    ) -> tuple[Tensor, States]:
        """Outputs of new tokens, and the sums over all keys up to the last, or the keys themselves."""
        l, x, ones, diagonal, weight = self._terms(k, v, key_mask)
        if self._linear:
            sums = reference.running(l, x, diagonal, key_mask, state)
            return self._of_sums(q, l, diagonal, sums), reference.last(sums)
        l1, keys = self.normalize == "l1", appended(state, l, x, ones)
        total, size = pair_sums(l, x, ones, state, distance=self.distance, sizes=l1, is_causal=True)
        divisor = weight + size if l1 else prefix_sums(keys.ones[..., :1])[..., -l.shape[-2] :, :]
        return self._out(q, diagonal, total, divisor), keys

    @advancing.summed_in_chunks
    @in_float32
    def summary(self, k: Tensor, v: Tensor, w: tuple[()], *, key_mask: Tensor | None = None) -> States:
        """The sums over the keys of a chunk."""
        l, x, _, diagonal, _ = self._terms(k, v, key_mask)
        return reference.summarised(l, x, diagonal, key_mask)

    @in_float32
    def read_summary(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: Any, *, key_mask: Tensor | None
    ) -> Tensor:
        """Outputs of tokens from the sums over all keys; their own term is that of their key and value."""
        l, *_, diagonal, _ = self._terms(k, v, key_mask)
        return self._of_sums(q, l, diagonal, state)

    def merged(self, earlier: Any, later: Any) -> States:
        """The sums over two neighbouring chunks."""
        return reference.combined(earlier, later)

    @in_float32
    def _terms(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """log h(k), values and ones (zeros where masked), diagonal terms ``k_i v_i`` and their absolute weights."""
        h, l = self.feature_map.both(self._keys(k, v))
        l = l if self.temperature == 1.0 else l / self.temperature
        x, h = masks.drop(v, key_mask), torch.zeros_like(h) if self.distance == "laplacian" else masks.drop(h, key_mask)
        return l, x, pool.visible_ones(l, key_mask), h * x, h

    def _of_sums(self, q: Tensor, l: Tensor, diagonal: Tensor, sums: Differences) -> Tensor:
        if self.reference == "self":
            return self._out(q, diagonal, reference.relative(l, sums), sums.number)
        first = sums.first.masked_fill(sums.number == 0, 0.0)
        return self._out(q, first.expand_as(diagonal), sums.weighted, sums.number)

    def _out(self, q: Tensor, diagonal: Tensor, total: Tensor, divisor: Tensor) -> Tensor:
        if self.normalize == "l1":
            return self._gated(q, pool.quotient(diagonal + total, divisor))
        return self._gated(q, diagonal + (total if self.normalize == "none" else total / divisor.clamp(min=1.0)))

    def _keys(self, k: Tensor, v: Tensor) -> Tensor:
        k = k.mean(-1, keepdim=True) if self.key_dim == 1 else k
        pool.same_width(self, k, v, or_one=True)
        return k

    def _gated(self, q: Tensor, out: Tensor) -> Tensor:
        if self.query_dim == 0:
            return out
        gate = q if self.query_dim is None else q.mean(-1, keepdim=True)
        pool.same_width(self, gate, out, name="queries", or_one=True)
        return gate.sigmoid() * out
