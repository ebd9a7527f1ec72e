"""Log attention (Jiang and Zuo, "Fast Attention"): the logarithm of query times key, so that products become sums."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.feature_maps.positive import Positive, PositiveSoftplus
from fast_attention.mechanism import Traits
from fast_attention.mechanisms.log_manhattan import gpu
from fast_attention.mechanisms.log_manhattan.log_forms import LogForms, Normalize, Score, States
from fast_attention.mechanisms.log_manhattan.reference import KeySums
from fast_attention.value import at_least, one_of


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
class LogAttention(LogForms):
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
        one_of(self, "score", self.score, Score)
        one_of(self, "normalize", self.normalize, Normalize)
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
            order=1.0,
            reads="kv" if softmax and not dot else "qkv",
            causal=True,
            padding=True,
            cross=True,
            memory="constant",
            matrix=self.score != "channel",
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """Linear attention, a softmax pool or three sums, as the settings have it."""
        if why := self._obstacle(q, k, v, key_mask):
            dispatch.unserved(q, why)
            return self._attend(q, k, v, w, is_causal=is_causal, key_mask=key_mask)
        a, b = self._both(q, k, v)
        return gpu.attend(a, b, v, key_mask, is_causal=is_causal, divisor=self._divisor, dtype=v.dtype)

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], lengths: tuple[int, ...], *, is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """Causal, by kernels: every sequence begins a chunk, and sums with it."""
        if not is_causal or self._obstacle(q, k, v, key_mask):
            return None
        return gpu.packed(*self._both(q, k, v), v, lengths, key_mask, divisor=self._divisor)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: States | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, States]:
        """Outputs of new tokens, and the sums over all keys up to the last."""
        if why := self._obstacle(q, k, v, key_mask):
            dispatch.unserved(q, why)
            return self._advance(q, k, v, w, state, key_mask=key_mask)
        assert state is None or isinstance(state, KeySums)
        (a, b), first = self._both(q, k, v), gpu.row(state, v.shape[-1])
        out, last = gpu.advance(a, b, v, key_mask, first, divisor=self._divisor, dtype=v.dtype)
        return out, gpu.state(last, b.shape[-1])

    @property
    def _divisor(self) -> int:
        return gpu.divisor(normalized=self.normalize == "sum")

    def _obstacle(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> str:
        """Why no kernel computes this call; empty where one does."""
        if self.normalize == "softmax":
            return "no kernel has this softmax"
        return gpu.obstacle(q, k, v, key_mask=key_mask, divisor=self._divisor)

    def _both(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """a and b in float32."""
        return self._scores(q.float(), v), self._scores(k.float(), v)
