"""WKV (RWKV-4, Peng et al. 2023): AFT whose keys decay with distance, channel by channel, but for the token's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fast_attention.engine import dispatch
from fast_attention.engine.advancing import in_chunks, summed_in_chunks
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.aft import fast_wkv
from fast_attention.mechanisms.aft.fast_wkv import WKVState
from fast_attention.mechanisms.aft.reference import same_width


@in_float32
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
    return fast_wkv.causal(q, k, v, decay[:, None], bonus[:, None], key_mask)


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
        order=1.0,
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

    @in_float32
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: ChannelDecays, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """``wkv_attention`` with the learned numbers."""
        same_width(self, k, v)
        return fast_wkv.causal(q, k, v, *w.of_heads(), key_mask)

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
            dispatch.record("one key added to the sums", "decoding token by token")
            mean, state = fast_wkv.one(k, v, *w.of_heads(), state, key_mask)
        else:
            mean, state = fast_wkv.streamed(k, v, *w.of_heads(), state, key_mask)
        return q.sigmoid() * mean, state

    @summed_in_chunks
    @in_float32
    def summary(self, k: Tensor, v: Tensor, w: ChannelDecays, *, key_mask: Tensor | None = None) -> WKVState:
        """The sums over the keys of a chunk."""
        return fast_wkv.summarise(k, v, w.of_heads()[0], key_mask)

    def merged(self, earlier: WKVState, later: WKVState) -> WKVState:
        """The sums over two neighbouring chunks."""
        return fast_wkv.combine(earlier, later)
