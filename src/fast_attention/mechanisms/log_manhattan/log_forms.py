"""Log attention in plain operations and fast paths of a CPU: linear attention, a softmax pool or three sums."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fast_attention.engine import advancing, dispatch
from fast_attention.engine.precision import in_float32
from fast_attention.engine.scan import prefix_sums
from fast_attention.feature_maps.positive import Positive
from fast_attention.mechanism import Attention
from fast_attention.mechanisms.aft import reference as pool
from fast_attention.mechanisms.aft.reference import Pool, same_width
from fast_attention.mechanisms.linear import in_range, linear_state
from fast_attention.mechanisms.linear import reference as linear
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.log_manhattan import fast_log, reference
from fast_attention.mechanisms.log_manhattan.reference import KeySums, LogSettings

Score = Literal["channel", "sum", "logdot"]
Normalize = Literal["sum", "softmax", "none"]
States = Pool | KeySums | LinearState
EPS = 1e-6  # added to the denominators of logdot, as in linear attention


class LogForms(Attention[tuple[()], States]):
    """What ``LogAttention`` computes where no kernel does, and its states."""

    score: Score
    normalize: Normalize
    feature_map: Positive
    temperature: float

    @in_float32
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """Linear attention, a softmax pool or three sums, as the settings have it."""
        if is_causal and self.normalize == "softmax" and advancing.worthwhile(q, k, v):
            return self._advance(q, k, v, w, None, key_mask=key_mask)[0]
        if self.score == "logdot":
            dispatch.record("linear attention's plain form", "its fast passes take no map of this family")
            keys = linear.masked_keys(self.feature_map.features, k, key_mask)
            return in_range.attend(self.feature_map.features(q), keys, v, is_causal=is_causal, eps=EPS)
        if self.normalize == "softmax":
            path = "a sum for each past" if is_causal else "one sum for all queries"
            dispatch.record(path, "the softmax cancels the queries")
            rows = (pool.running if is_causal else pool.pooled)(*self._pool_terms(k, v, key_mask)).sums
            means = pool.mean(rows, v.shape[-1])
            return pool.last_rows(means, q.shape[-2]) if is_causal else means.expand(*q.shape[:-1], -1).contiguous()
        if self.score != "sum":
            for z in (q, k):
                same_width(self, z, v, or_one=True)
        settings = LogSettings(self._score, self.normalize == "sum", is_causal)
        return fast_log.log_attention(q, k, v, key_mask, settings, fixed=self.feature_map.fixed)

    @advancing.in_chunks
    @in_float32
    def _advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: States | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, States]:
        """Outputs of new tokens, and the sums over all keys up to the last."""
        if self.score == "logdot":
            assert state is None or isinstance(state, LinearState)
            keys = linear.masked_keys(self.feature_map.features, k, key_mask)
            sums, after = linear.advance(self.feature_map(q), keys, v, state)
            return linear_state.normalise(sums, EPS), after
        if self.normalize == "softmax":
            assert state is None or isinstance(state, Pool)
            rows = pool.running(*pool.prepended(state, *self._pool_terms(k, v, key_mask)))
            last = Pool(rows.log_scale[..., -1:, :], rows.sums[..., -1:, :])
            return pool.mean(rows.sums[..., 1:, :], v.shape[-1]), last
        assert state is None or isinstance(state, KeySums)
        sums = prefix_sums(reference.terms(self._scores(k, v), v, key_mask))
        sums = sums if state is None else sums + state.sums
        out = reference.read(self._scores(q, v), sums, v.shape[-1], normalized=self.normalize == "sum")
        return out, KeySums(sums[..., -1:, :])

    @advancing.summed_in_chunks
    @in_float32
    def summary(self, k: Tensor, v: Tensor, w: tuple[()], *, key_mask: Tensor | None = None) -> States:
        """The sums over the keys of a chunk."""
        if self.score == "logdot":
            return linear_state.summarise(linear.masked_keys(self.feature_map.features, k, key_mask), v)
        if self.normalize == "softmax":
            return pool.pooled(*self._pool_terms(k, v, key_mask))
        return KeySums(reference.terms(self._scores(k, v), v, key_mask).sum(-2, keepdim=True))

    def merged(self, earlier: States, later: States) -> States:
        """The sums over two neighbouring chunks."""
        match earlier, later:
            case LinearState(), LinearState():
                return linear_state.combine(earlier, later)
            case Pool(), Pool():
                return pool.combined(earlier, later)
        assert isinstance(earlier, KeySums)
        assert isinstance(later, KeySums)
        return KeySums(earlier.sums + later.sums)

    @in_float32
    def _scores(self, z: Tensor, v: Tensor) -> Tensor:
        """The scores of queries or keys, a and b, where their width fits the values."""
        if self.score != "sum":
            same_width(self, z, v, or_one=True)
        return self._score(z)

    def _score(self, z: Tensor) -> Tensor:
        logs = self.feature_map.log1p(z) if self.normalize == "sum" else self.feature_map.log(z)
        return logs.sum(-1, keepdim=True) if self.score == "sum" else logs

    def _pool_terms(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return pool.terms(self._scores(k, v) / self.temperature, v, key_mask)
