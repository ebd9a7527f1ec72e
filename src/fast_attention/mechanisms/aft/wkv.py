"""WKV (RWKV-4, Peng et al. 2023): AFT whose keys decay with distance, channel by channel, but for the token's own.

Pools of keys that decay, token by token, as a monoid, in plain differentiable operations. Where no key lies far below
the largest of its channel, one log scale serves a call (``fast``): the token before a query has decayed by nothing, so
that every denominator is an ordinary number.

``y_t = e^{-w} y_{t-1} + e^{k_t} v_t``, and the same of ones, read before token t is in it. With c_t visible tokens up
to t, the sum is AFT's of the keys ``k_t + c_t w``, times ``e^{-c_t w}``, which cancels between numerator and
denominator. In float64, where ``c_t w`` of millions of tokens loses nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fast_attention.engine import masks, trace
from fast_attention.engine.advancing import in_chunks, summed_in_chunks
from fast_attention.engine.chunks import visible_counts
from fast_attention.engine.operation import Fast, NotServed, Operation, like_queries
from fast_attention.engine.precision import in_float32, widen
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.aft import fast, reference
from fast_attention.mechanisms.aft.reference import Pool, same_width
from fast_attention.traits import PLAIN


class WKVState(NamedTuple):
    """Sums over all keys so far, ``exp(log_scale)`` times ``sums``, and the decay over all of them."""

    log_scale: Float[Tensor, "*batch 1 width"]
    sums: Float[Tensor, "*batch 1 sums"]  # numerators, then denominators
    log_decay: Float[Tensor, "*batch 1 width"]


def streamed(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: WKVState | None, key_mask: Tensor | None
) -> tuple[Tensor, WKVState]:
    """The means (..., L, D) that new tokens read behind ``state``, and the state after them.

    ``decay`` w and ``bonus`` u are (heads, 1, D). A masked token adds nothing, nothing decays at it, and it reads what
    is there.
    """
    keys = k.double()
    count = visible_counts(key_mask, keys, is_causal=True)
    scores, values_and_ones = reference.terms(keys + count * decay, v.double(), key_mask)
    pool = None if state is None else Pool(state.log_scale.double(), state.sums.double())
    rows = reference.running(*reference.prepended(pool, scores, values_and_ones))
    before = Pool(rows.log_scale[..., :-1, :], rows.sums[..., :-1, :])
    read = reference.combined(before, Pool(scores + (bonus - decay), values_and_ones))
    log_decay = (-count[..., -1:, :] * decay).expand_as(keys[..., :1, :])
    log_scale = rows.log_scale[..., -1:, :] + log_decay
    if state is not None:
        log_decay = log_decay + state.log_decay
    after = WKVState(log_scale, rows.sums[..., -1:, :], log_decay)
    return reference.mean(read.sums, v.shape[-1]).to(v.dtype), WKVState(*(x.to(v.dtype) for x in after))


def summarise(k: Tensor, v: Tensor, decay: Tensor, key_mask: Tensor | None) -> WKVState:
    """The state after some tokens that nothing precedes."""
    keys = k.double()
    count = visible_counts(key_mask, keys, is_causal=True)
    pool = reference.pooled(*reference.terms(keys + count * decay, v.double(), key_mask))
    log_decay = (-count[..., -1:, :] * decay).expand_as(keys[..., :1, :])
    return WKVState(*(x.to(v.dtype) for x in (pool.log_scale + log_decay, pool.sums, log_decay)))


def combine(earlier: WKVState, later: WKVState) -> WKVState:
    """The state of neighbouring tokens; associative."""
    pool = reference.combined(
        Pool(earlier.log_scale + later.log_decay, earlier.sums), Pool(later.log_scale, later.sums)
    )
    return WKVState(*pool, earlier.log_decay + later.log_decay)


def one(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: WKVState, key_mask: Tensor | None
) -> tuple[Tensor, WKVState]:
    """``streamed`` of one token: two sums of a state and a key."""
    scores, values_and_ones = reference.terms(k, v, key_mask)
    read = reference.combined(Pool(*state[:2]), Pool(scores + bonus, values_and_ones))
    log_decay = -decay * reference.visible_ones(k, key_mask)
    return reference.mean(read.sums, v.shape[-1]), combine(state, WKVState(scores, values_and_ones, log_decay))


LARGEST = 15.0  # of a bonus, either way, that sums in one log scale bear


def gated_reads(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, mask: Tensor | None, scale: Tensor | None = None
) -> Tensor:  # fmt: skip
    """``sigmoid(q)`` times what tokens read of those up to them; ``decay`` and ``bonus`` (heads, 1, D)."""
    return q.sigmoid() * streamed(k, v, decay, bonus, None, mask)[0]


_GROUPS = Operation(gated_reads, cpu=Fast(fast.forward, fast.backward))


def _grouped(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, key_mask: Tensor | None) -> Tensor:
    keys = reference.masked_scores(k, key_mask)
    scale, least = fast.log_scale(keys), keys.amin(-2) if key_mask is None else fast.smallest(keys)
    if bool((scale[..., 0, :] - least > fast.RANGE).any()) or bool((bonus.abs() > LARGEST).any()):
        raise NotServed("a key lies far below another, or a bonus is large")
    trace.record("prefix sums over groups of tokens side by side", "causal", group=fast.GROUP)
    return _GROUPS(q, keys, masks.drop(v, key_mask), decay, bonus, key_mask, scale)


causal = Operation(
    gated_reads, cpu=Fast(_grouped, None), compute=torch.float32, empty=like_queries, path="a log scale for every token"
)


def wkv_attention(
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads length width"],
    v: Float[Tensor, "*batch heads length width"],
    decay: Float[Tensor, "heads width"],
    bonus: Float[Tensor, "heads width"],
    *,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
) -> Float[Tensor, "*batch heads length width"]:
    """``sigmoid(q_t) (sum_{i<t} e^{k_i - (t-1-i) w} v_i + e^{k_t + u} v_t) / (the same of ones)``, in each channel.

    RWKV-4's time mixing (arXiv 2305.13048, Eq. 16), causal as it is; ``decay`` w is at least 0, ``bonus`` u any number.
    Exact for keys of any size. A masked token is as if it were not there: it is not summed and nothing decays at it. A
    query that sees nothing gets zeros. Time and memory O(length width).
    """
    return causal(q, k, v, decay[:, None], bonus[:, None], key_mask)


class ChannelDecays(NamedTuple):
    """For every channel the logarithm of w, by which it decays a token, and the bonus u of the token itself."""

    log_decay: Float[Tensor, "heads width"]
    bonus: Float[Tensor, "heads width"]

    def of_heads(self) -> tuple[Float[Tensor, "heads 1 width"], Float[Tensor, "heads 1 width"]]:
        """w and u."""
        return self.log_decay.exp()[:, None], self.bonus[:, None]


@dataclass(frozen=True, repr=False)
class WKV(Attention[ChannelDecays, WKVState]):
    """Causal AFT whose bias falls by a learned w with every token of distance, and is a learned u for the token itself.

    The gate is part of it, as in ``AFTSimple``: queries are RWKV-4's receptance r, and outputs
    ``sigmoid(r_t) * wkv_t``, which the paper's output projection then takes. Its token shift and channel mixing are
    layers around it. w is the exponential of what is trained: RWKV-4's ``time_decay``; u is its ``time_first``. Both
    start as in its first layer, over the channels of all heads. Keys, queries and values must have the same width.
    """

    traits = Traits(
        paper="Peng et al. 2023, arXiv 2305.13048",
        formula="sigmoid(q_t) * (sum_{i<t} exp(k_i - (t-1-i) w) v_i + exp(k_t + u) v_t) / (the same of ones)",
        cost="n d",
        complexity_exponent=1.0,
        gpu=PLAIN,
        causal=True,
        bidirectional=False,
        padding=True,
        memory="constant",
        matrix=False,  # a matrix for each channel
        learned=True,
    )

    def weights(self, shape: Shape) -> ChannelDecays:
        """Channels from slow to fast, ``log w`` from -5 to 3; u about log 0.3, by turns 0.5 more and less."""
        channel = torch.arange(shape.width)
        log_decay = 8.0 * (channel / max(shape.width - 1, 1)) ** 0.7 - 5.0
        bonus = math.log(0.3) + ((channel + 1) % 3 - 1) * 0.5
        sizes = shape.heads, shape.head_dim
        return ChannelDecays(nn.Parameter(log_decay.view(sizes)), nn.Parameter(bonus.view(sizes)))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: ChannelDecays, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """``wkv_attention`` with the learned numbers."""
        same_width(self, k, v)
        return causal(q, k, v, *widen(w).of_heads(), key_mask)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: ChannelDecays, state: WKVState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, WKVState]:
        """Outputs of new tokens, and the sums over all keys up to the last."""
        same_width(self, k, v)
        return self._advance(q, k, v, w, state, key_mask=key_mask)

    @in_chunks
    @in_float32
    def _advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: ChannelDecays, state: WKVState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, WKVState]:
        if state is not None and not symbolic() and k.shape[-2] == 1:
            trace.record("one key added to the sums", "decoding token by token")
            mean, state = one(k, v, *w.of_heads(), state, key_mask)
        else:
            mean, state = streamed(k, v, *w.of_heads(), state, key_mask)
        return q.sigmoid() * mean, state

    @summed_in_chunks
    @in_float32
    def summarise_keys(self, k: Tensor, v: Tensor, w: ChannelDecays, *, key_mask: Tensor | None = None) -> WKVState:
        """The sums over the keys of a chunk."""
        return summarise(k, v, w.of_heads()[0], key_mask)

    def merge_states(self, earlier: WKVState, later: WKVState) -> WKVState:
        """The sums over two neighbouring chunks."""
        return combine(earlier, later)
