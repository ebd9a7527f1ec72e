"""Lets BLOOM and MPT compute attention with ALiBi in tiles, where the mask is a ``Visibility``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt

from fast_attention.engine.offsets import Terms
from fast_attention.integrations import alibi as shared
from fast_attention.integrations.exact.attention import attention
from fast_attention.integrations.visible import Visibility


class Slopes(NamedTuple):
    """ALiBi's numbers for each offset of the key: ``engine.offsets.Positions``.

    A query's own position cancels. BLOOM and MPT leave it out, and so does ``by_key``: it rounds as they do.
    """

    layer: Any
    slopes: Float[Tensor, "heads"]

    def __call__(self, offsets: Int[Tensor, "offsets"]) -> Terms:
        """The slope of each head, times the offset."""
        return Terms(self.slopes[:, None] * offsets)

    def by_key(self, keys: int) -> Float[Tensor, "heads keys"]:
        """The numbers of all keys of a text, 0 for the last."""
        return self.slopes[:, None] * torch.arange(1 - keys, 1, device=self.slopes.device)

    def takes(self, module: Any, q: Tensor, mask: Any) -> bool:
        """Whether our form runs in a module: the module has asked before it made this."""
        return True


def _attend(layer: Any, slopes: Tensor, mask: Visibility) -> shared.Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Any]:
        return attention("eager", layer, q, k, v, mask, position_bias=Slopes(layer, slopes), **given)

    return attend


def _in_tiles(layer: Any, mask: Any, dropout: float) -> bool:
    """Whether a layer computes in tiles: not where weights are dropped, whose scores are held."""
    return isinstance(mask, Visibility) and not (layer.training and dropout)


class BloomAttention(modeling_bloom.BloomAttention):
    """BLOOM's attention module with the same parts."""

    is_causal = True

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, layer_past: Any = None,
        *args: Any, **settings: Any,
    ) -> Any:  # fmt: skip
        """Run transformers' module; in tiles where the mask is a ``Visibility``."""
        dropout = self.attention_dropout.p
        if _in_tiles(self, attention_mask, dropout) and not (self.pretraining_tp > 1 and self.slow_but_exact):
            attend = _attend(self, shared.bloom_slopes(self.num_heads, hidden_states.device), attention_mask)
            return shared.bloom(self, attend, hidden_states, residual, layer_past)
        mask = attention_mask.dense() if isinstance(attention_mask, Visibility) else attention_mask
        return super().forward(hidden_states, residual, alibi, mask, layer_past, *args, **settings)


class MptAttention(modeling_mpt.MptAttention):
    """MPT's attention module with the same parts."""

    is_causal = True

    def forward(
        self, hidden_states: Tensor, position_bias: Tensor, cache: Any = None, attention_mask: Any = None,
        **settings: Any,
    ) -> Any:  # fmt: skip
        """Run transformers' module; in tiles where the mask is a ``Visibility``."""
        if _in_tiles(self, attention_mask, self.attn_dropout_p):
            attend = _attend(self, shared.mpt_slopes(self.n_heads, hidden_states.device), attention_mask)
            return shared.mpt(self, attend, hidden_states, cache)
        mask = attention_mask.dense().bool() if isinstance(attention_mask, Visibility) else attention_mask
        return super().forward(hidden_states, position_bias, cache, attention_mask=mask, **settings)


KINDS: dict[type, type] = {modeling_bloom.BloomAttention: BloomAttention, modeling_mpt.MptAttention: MptAttention}
