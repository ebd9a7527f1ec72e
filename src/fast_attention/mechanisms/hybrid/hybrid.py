"""Hybrid attention: exact softmax over near keys, a linear estimate of the far remainder, one normaliser.

The window with a linear remainder is that of LoLCATs (Zhang et al. 2024, arXiv 2410.10254); first tokens kept exact are
the attention sinks of StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from fast_attention.biases.transformer_xl import TransformerXL
from fast_attention.engine import dispatch
from fast_attention.engine.kv_cache import KVCache, append, last
from fast_attention.engine.offsets import Positions
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import replaced, symbolic
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.hybrid.fast import near_far_attention
from fast_attention.mechanisms.hybrid.ranges import far_state, plan_of
from fast_attention.mechanisms.hybrid.sink_tokens import SinkTokens
from fast_attention.mechanisms.hybrid.weights import HybridWeights
from fast_attention.mechanisms.linear import linear_state
from fast_attention.mechanisms.linear.favor_plus import FavorPlus
from fast_attention.mechanisms.linear.kernelised import Kernelised
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.linear.reference import masked_keys
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.value import at_least


class HybridState(NamedTuple):
    """What decoding keeps: the sums of far keys, the keys of the window, the first keys (at positions below 0)."""

    far: LinearState
    near: KVCache
    sinks: SinkTokens


@dataclass(frozen=True, repr=False)
class Hybrid(Attention[Any, HybridState]):
    """Exact weights for near keys and for the first and last ones, estimated weights for all others, one normaliser.

    ``out_i = sum_j a_ij v_j / sum_j a_ij`` with ``a_ij = exp(q_i . k_j / sqrt(d))`` where query i sees key j through
    ``near`` or key j is one of the first and last keys (sink tokens), and ``a_ij = phi_q(q_i) . phi_k(k_j)`` with the
    feature maps of ``far`` for the others that query i may see. A ``far`` that estimates or learns softmax has weights
    of the size of the exact ones; the kernels of ``LinearAttention``, such as elu + 1, have a size of their own. A
    window over everything is softmax.

    Args:
        near: The window, or the neighbouring blocks: with ``BlockLocal`` the far keys are whole blocks, which takes
            less time. Its ``scale`` serves both parts; its ``bias`` acts on near keys that are no sink tokens.
        far: The linear attention whose maps estimate the rest; its ``eps`` is not used. Its weights are those of this
            mechanism.
        first: Visible keys at the beginning that every query weighs exactly.
        last: Visible keys at the end that every query weighs exactly; none where causal.
    """

    near: Local | BlockLocal = Local(window=64)  # noqa: RUF009
    far: Kernelised[Any] = FavorPlus()  # noqa: RUF009
    first: int = 1
    last: int = 1

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """The far part decides whether weights are trained or drawn, and what is approximated."""
        far = self.far.traits
        return Traits(
            paper="Zhang et al. 2024, arXiv 2410.10254 (window, linear remainder); Xiao et al. 2023, arXiv 2309.17453",
            formula="softmax over near, first and last keys, phi(q_i) . phi(k_j) for the others, one normaliser",
            cost="n (w + m) d",
            order=1.0,
            causal=True,
            padding=True,
            cross=True,
            rotary=far.rotary,
            memory="window",
            random=far.random,
            learned=far.learned or self.near.needs_weights,
            approximates=far.approximates if self.near.bias is None else None,
        )

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: ``near`` is no window, ``far`` is not linear or its weights may be negative.
        """
        message = f"Hybrid(near={self.near!r}, far={self.far!r})"
        if not isinstance(self.near, Local | BlockLocal):
            raise ValueError(f"{message}: near must be a window such as Local(window=64), or BlockLocal()")
        if isinstance(self.near, Local) and self.near.dilation != 1:
            raise ValueError(f"{message}: near must see every key of its window: leave out its dilation")
        if isinstance(self.near.bias, TransformerXL):
            raise ValueError(f"{message}: near takes ALiBi() or T5Buckets(), as far keys meet no vectors of positions")
        if not isinstance(self.far, Kernelised):
            raise ValueError(f"{message}: far must be linear: LinearAttention, FavorPlus or LearnedFeatures")
        if self.far.signed:
            raise ValueError(
                f"{message}: far may give negative weights, and their sum with the exact ones could be zero: take "
                "FavorPlus() or a feature map that is never negative"
            )
        at_least(self, "first", self.first, 0)
        at_least(self, "last", self.last, 0)

    @property
    def needs_weights(self) -> bool:
        """Whether ``far`` or the bias of ``near`` needs weights."""
        return self.far.needs_weights or self.near.needs_weights

    def weights(self, shape: Shape) -> Any:
        """The weights of ``far``; with a learned bias those of both parts."""
        far = self.far.weights(shape)
        return HybridWeights(far, self.near.weights(shape)) if self.near.needs_weights else far

    def heads_of(self, w: Any) -> int | None:
        """The heads that a learned bias, or else ``far``, has weights for."""
        return self.near.heads_of(w.near) if self.near.needs_weights else self.far.heads_of(w)

    def _parts(self, w: Any, q: Tensor) -> tuple[Any, Positions | None]:
        """The weights of ``far`` and the bias of ``near``."""
        far, near = w if self.near.needs_weights else (w, ())
        return far, self.near.positions(q, near, self.near.scale)[1]

    def calibrated(self, q: Tensor, k: Tensor, w: Any, *, key_mask: Tensor | None = None) -> Any:
        """The weights of ``far`` suited to these queries and keys."""
        scaled = q if self.near.scale is None else q * (self.near.scale * math.sqrt(q.shape[-1]))
        far = self.far.calibrated(scaled, k, self._parts(w, q)[0], key_mask=key_mask)
        return w._replace(far=far) if self.near.needs_weights else far

    def _reads(
        self, q: Tensor, near: KVCache, sinks: SinkTokens, w: Any, *, start: int, is_causal: bool,
        far: LinearState | None = None,
    ) -> Tensor:  # fmt: skip
        """``near_far_attention`` of queries from position ``start`` on, in front of which whole blocks are padded."""
        length, keys = q.shape[-2], near.k.shape[-2]
        front = start % self.near.block_size if isinstance(self.near, BlockLocal) else 0
        q = q if self.near.scale is None else q * (self.near.scale * math.sqrt(q.shape[-1]))
        if symbolic() or front:
            q = pad(q, (0, 0, front, 0))
        plan = plan_of(self.near, length + front, keys, start - front, is_causal=is_causal)
        far_w, bias = self._parts(w, q)
        out = near_far_attention(q, *near, sinks, self.far, far_w, plan, earlier=far, bias=bias)
        return out[..., front:, :] if symbolic() or front else out

    @in_float32
    def attend_within(self, q: Tensor, w: Any, state: HybridState, *, start: int, is_causal: bool) -> Tensor:
        """Outputs of queries over all that a state holds; the first stands at position ``start`` of its near keys.

        The sums of far keys and positions of sink tokens may come from all of a sequence: its parts are computed alone.
        """
        return self._reads(q, state.near, state.sinks, w, start=start, is_causal=is_causal, far=state.far)

    @in_float32
    def far_state(self, k: Tensor, v: Tensor, visible: Tensor, w: Any) -> LinearState:
        """The sums over some keys as far ones, those ``visible`` (..., 1, S)."""
        return far_state(k, v, visible, self.far, w)

    @in_float32
    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """``near_far_attention``, or exact attention where the near part covers everything."""
        covers = self.near.bias is None and self.near.covers(q.shape[-2], k.shape[-2], is_causal=is_causal)
        if covers and not symbolic():
            dispatch.record("exact attention", f"{self.near!r} covers everything")
            return softmax_attention(q, k, v, is_causal=is_causal, key_mask=key_mask, scale=self.near.scale)
        dispatch.record("near keys exact, far ones as sums of features", f"{self.near!r} leaves keys out")
        visible = append(None, k, v, key_mask).visible
        sinks, others = SinkTokens.of(k, v, visible, first=self.first, last=0 if is_causal else self.last)
        return self._reads(q, KVCache(k, v, others), sinks, w, start=k.shape[-2] - q.shape[-2], is_causal=is_causal)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, state: HybridState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, HybridState]:
        """Attend to sink tokens, sums of far keys, near and new tokens; keys that leave ``near`` join the sums."""
        phi = self.far.per_token(self._parts(w, q)[0])[1]
        before = 0 if state is None else state.sinks.present.sum(-1, keepdim=True)
        visible = append(None, k, v, key_mask).visible
        sinks, others = SinkTokens.of(k, v, visible, first=self.first, last=0, before=before)
        far = linear_state.empty(phi(k[..., :1, :]), v) if state is None else state.far
        near = append(None if state is None else state.near, k, v, others)
        start, keys = near.k.shape[-2] - k.shape[-2], near.k.shape[-2]
        sinks = replaced(sinks, position=sinks.position + start)
        if state is not None:
            sinks = state.sinks.append(sinks, self.first)
        out = self._reads(q, near, sinks, w, start=start, is_causal=True, far=far)
        if leaving := self.near.leaving(keys):
            features = masked_keys(phi, near.k[..., :leaving, :], near.visible[..., :leaving])
            far = linear_state.combine(far, linear_state.summarise(features, near.v[..., :leaving, :]))
        sinks = replaced(sinks, position=sinks.position.masked_fill(sinks.present, -1))
        return out, HybridState(far, last(near, keys - leaving), sinks)
