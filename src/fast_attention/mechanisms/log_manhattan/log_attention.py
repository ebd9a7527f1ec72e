"""Log attention (Jiang and Zuo, "Fast Attention"): the logarithm of query times key, so that products become sums.

``o_i = (a_i P + R) / (n a_i + B)``: P, B, R are the sums of v_j, b_j, b_j v_j over the n keys that query i may see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import advancing, trace
from fast_attention.engine.precision import in_float32
from fast_attention.engine.scan import prefix_sums
from fast_attention.feature_maps.positive import Positive, PositiveSoftplus
from fast_attention.mechanism import Attention, Traits
from fast_attention.mechanisms.aft import reference as pool
from fast_attention.mechanisms.aft.reference import Pool, same_width
from fast_attention.mechanisms.linear import linear_state
from fast_attention.mechanisms.linear import sums as linear
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.linear.reference import masked_keys, summarised
from fast_attention.mechanisms.log_manhattan import reference
from fast_attention.mechanisms.log_manhattan.reference import KeySums
from fast_attention.mechanisms.log_manhattan.sums import Maps, score_attention
from fast_attention.traits import KERNELS, SUMS
from fast_attention.value import at_least

Score = Literal["channel", "sum", "logdot"]
Normalize = Literal["sum", "softmax", "none"]
States = Pool | KeySums | LinearState
EPS = 1e-6  # added to the denominators of logdot, as in linear attention


def log_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    score: Score = "channel",
    normalize: Normalize = "sum",
    feature_map: Positive = PositiveSoftplus(),  # noqa: B008
    temperature: float = 1.0,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Weights ``s_ij``, ``s_ij / sum_j s_ij`` or ``softmax_j(s_ij / temperature)`` with ``s_ij = a_i + b_j``.

    "Fast Attention" (Jiang and Zuo), Eqs. 7-10: ``s = log h(q_i) + log h(k_j)``, per channel or summed over channels,
    so that with ``S0 = sum_j v_j``, ``S1 = sum_j b_j v_j``, ``B = sum_j b_j`` over the n keys that query i may see:

    - "sum": ``(a_i S0 + S1) / (n a_i + B)`` with ``a = log(1 + h(q))``, ``b = log(1 + h(k))``: the plain logarithm may
      be negative and its sum vanish;
    - "none": ``a_i S0 + S1``;
    - "softmax": ``sum_j h(k_j)^(1/temperature) v_j / sum_j h(k_j)^(1/temperature)``, where a_i cancels;
    - score "logdot", "softmax": ``s = log(h(q_i) . h(k_j))``, linear attention with the feature map h.

    Keys of "channel" are as wide as the values or 1 wide. A query that sees nothing gets zeros. Raises a ``ValueError``
    for settings that do not go together (see ``LogAttention``).
    """
    m = LogAttention(score, normalize, feature_map, temperature)
    return m.attend(q, k, v, (), is_causal=is_causal, key_mask=key_mask)


@dataclass(frozen=True, repr=False)
class LogAttention(Attention[tuple[()], States]):
    """Attention whose score is a logarithm: ``log(h(q) h(k)) = log h(q) + log h(k)``, linear in the sequence length.

    A sum of a query's and a key's score leaves little interaction between the two. ``normalize="softmax"`` loses the
    query altogether: all get the same mean of the values, weighted by h(k). ``"sum"``, the normalisation as the source
    prints it and the default, lets the query choose between that mean and the plain one.

    Args:
        score: ``"channel"``: channel by channel (keys as wide as values, or 1 wide); ``"sum"``: summed over the
            channels of the keys, one weight for all values; ``"logdot"``: ``log(h(q) . h(k))``, which under the
            softmax is linear attention with the feature map h and has no linear form without it.
        normalize: ``"sum"``: scores ``log(1 + h(q)) + log(1 + h(k))``, never negative, over their sum (Eq. 8);
            ``"softmax"`` of ``log h(q) + log h(k)``; ``"none"``: these scores as they are.
        feature_map: h, which makes queries and keys positive: ``PositiveSoftplus()``, ``PositiveExp()``,
            ``PositiveElu()`` or ``PositiveRelu()``.
        temperature: Divides the scores before the softmax, which then weighs by ``h(k)^(1/temperature)``; at least
            1e-6. Only for ``normalize="softmax"`` and not for ``"logdot"``.

    Raises:
        ValueError: ``score="logdot"`` without ``normalize="softmax"``, or a temperature where there is none.
    """

    score: Score = "channel"
    normalize: Normalize = "sum"
    feature_map: Positive = PositiveSoftplus()  # noqa: RUF009
    temperature: float = 1.0

    unordered = True

    def __post_init__(self) -> None:
        if not isinstance(self.feature_map, Positive):
            raise ValueError(f"{self!r}: feature_map must be a positive map such as PositiveSoftplus()")
        if self.score == "logdot" and self.normalize != "softmax":
            why = "log(h(q) . h(k)) does not fall apart into a query's and a key's part, so that only"
            raise ValueError(f'{self!r}: {why} normalize="softmax", which undoes the logarithm, takes linear time')
        if self.temperature != 1.0 and (self.score == "logdot" or self.normalize != "softmax"):
            raise ValueError(f'{self!r}: a temperature needs normalize="softmax" and score="channel" or "sum"')
        at_least(self, "temperature", self.temperature, 1e-6)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Queries are not read where the softmax cancels them; one weight for all channels makes a matrix."""
        dot, softmax = self.score == "logdot", self.normalize == "softmax"
        formula = "(a_i S0 + S1) / (n a_i + B), a = log(1 + h(q)), b = log(1 + h(k))"
        if softmax:
            formula = "h(q) . h(k_j) / sum_j h(q) . h(k_j)" if dot else "h(k_j)^(1/t) / sum_j h(k_j)^(1/t)"
        return Traits(
            paper='Jiang and Zuo, "Fast Attention", Eqs. 7-10',
            formula="log h(q_i) S0 + S1, b = log h(k)" if self.normalize == "none" else formula,
            cost="n d^2" if dot else "n d",
            complexity_exponent=1.0,
            gpu=KERNELS if dot else SUMS,
            inputs="kv" if softmax and not dot else "qkv",
            causal=True,
            padding=True,
            cross=True,
            memory="constant",
            matrix=self.score != "channel",
        )

    @in_float32
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """Linear attention, a softmax pool or three sums, as the settings have it."""
        if self.score == "logdot":
            maps = self.feature_map.features, self.feature_map.features
            return linear.of_features(q, k, v, key_mask, maps, is_causal=is_causal, eps=EPS)
        if is_causal and self.normalize == "softmax" and advancing.worthwhile(q, k, v):
            return self.advance(q, k, v, w, None, key_mask=key_mask)[0]
        if self.normalize == "softmax":
            path = "a sum for each past" if is_causal else "one sum for all queries"
            trace.record(path, "the softmax cancels the queries")
            rows = (pool.running if is_causal else pool.pooled)(*self._pool_terms(k, v, key_mask)).sums
            means = pool.mean(rows, v.shape[-1])
            return pool.last_rows(means, q.shape[-2]) if is_causal else means.expand(*q.shape[:-1], -1).contiguous()
        maps = Maps(lambda q: self._scores(q, v), lambda k: (self._scores(k, v), None))
        divisor = "scores" if self.normalize == "sum" else "none"
        return score_attention(q, k, v, key_mask, maps, divisor=divisor, is_causal=is_causal)

    @advancing.in_chunks
    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: States | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, States]:
        """Outputs of new tokens, and the sums over all keys up to the last."""
        if self.score == "logdot":
            assert state is None or isinstance(state, LinearState)
            maps = self.feature_map.features, self.feature_map.features
            return linear.advance_features(q, k, v, key_mask, maps, state, eps=EPS)
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
    def summarise_keys(self, k: Tensor, v: Tensor, w: tuple[()], *, key_mask: Tensor | None = None) -> States:
        """The sums over the keys of a chunk."""
        if self.score == "logdot":
            return summarised(masked_keys(self.feature_map.features, k, key_mask), v)
        if self.normalize == "softmax":
            return pool.pooled(*self._pool_terms(k, v, key_mask))
        return KeySums(reference.terms(self._scores(k, v), v, key_mask).sum(-2, keepdim=True))

    def merge_states(self, earlier: States, later: States) -> States:
        """The sums over two neighbouring chunks."""
        match earlier, later:
            case LinearState(), LinearState():
                return linear_state.combine(earlier, later)
            case Pool(), Pool():
                return pool.combined(earlier, later)
        assert isinstance(earlier, KeySums)
        assert isinstance(later, KeySums)
        return KeySums(earlier.sums + later.sums)

    def _scores(self, z: Tensor, v: Tensor) -> Tensor:
        """The scores of queries or keys, a and b, where their width fits the values."""
        if self.score != "sum":
            same_width(self, z, v, or_one=True)
        logs = self.feature_map.log1p(z) if self.normalize == "sum" else self.feature_map.log(z)
        return logs.sum(-1, keepdim=True) if self.score == "sum" else logs

    def _pool_terms(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return pool.terms(self._scores(k, v) / self.temperature, v, key_mask)
