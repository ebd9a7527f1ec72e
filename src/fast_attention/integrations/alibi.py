"""Computes the attention of BLOOM and MPT, whose own code has ALiBi in it: by a mechanism, or the same in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt

from fast_attention.engine.offsets import Terms
from fast_attention.integrations import attention
from fast_attention.integrations.exact import attention as exact
from fast_attention.integrations.visible import Visibility
from fast_attention.mechanism import Unsupported

Attend = Callable[..., tuple[Tensor, Any]]  # (q, k, v, dropout=, scaling=) -> outputs (B, L, H, E) and matrices


# By a mechanism -------------------------------------------------------------------------------------------------------


def _by_mechanism(layer: Any, mask: Any, dropout: float) -> Attend:
    """Attention by the layer's mechanism.

    Raises:
        Unsupported: The mask is one of all pairs, of which MPT's code and ours mean the opposite.
    """
    if isinstance(mask, Tensor) and not layer.by_token:
        raise Unsupported(
            "MPT with a mask of every pair (the caller's own, or that of a cache of a fixed size). What would "
            "work: attention_mask with a number for each token, and generate without cache_implementation"
        )
    tokens = mask.tokens if layer.by_token and isinstance(mask, Visibility) else None

    def attend(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Any]:
        bias = _by_key(layer.slopes(q.device), k.shape[-2], tokens)
        return attention.attention(layer, q, k, v, mask, position_bias=bias, **settings)

    return attend


def _by_key(slopes: Tensor, keys: int, tokens: Tensor | None) -> Tensor:
    """ALiBi as a number for each key, (B or 1, H, 1, keys): a query's own position cancels in its softmax.

    Where ``tokens`` (B, all) says which positions are tokens, only these are counted, as BLOOM does.
    """
    if tokens is None:
        positions = torch.arange(keys, device=slopes.device)[None]
    else:
        positions = ((tokens.long().cumsum(-1) - 1) * tokens)[:, -keys:]
    return slopes[:, None, None] * positions[:, None, None]


# The same in tiles, where the mask is a ``Visibility`` ----------------------------------------------------------------


class Slopes(NamedTuple):
    """ALiBi's numbers for each offset of the key: ``engine.offsets.Positions``.

    A query's own position cancels: BLOOM and MPT leave it out.
    """

    layer: Any
    slopes: Float[Tensor, "heads"]

    def __call__(self, offsets: Int[Tensor, "offsets"]) -> Terms:
        """The slope of each head, times the offset."""
        return Terms(self.slopes[:, None] * offsets)


def _in_tiles(layer: Any, mask: Any, dropout: float) -> Attend | None:
    """Attention in tiles; None where weights are dropped, whose scores are held, or the mask is not ours.

    None also where BLOOM's outputs are projected slice by slice.
    """
    is_sliced = getattr(layer, "pretraining_tp", 1) > 1 and layer.slow_but_exact
    if not isinstance(mask, Visibility) or (layer.training and dropout) or is_sliced:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Any]:
        slopes = Slopes(layer, layer.slopes(q.device))
        return exact.attention("eager", layer, q, k, v, mask, position_bias=slopes, **settings)

    return attend


# The modules ----------------------------------------------------------------------------------------------------------


def _bloom_slopes(self: Any, device: torch.device) -> Float[Tensor, "heads"]:
    """The slope of each head, read from BLOOM's own function."""
    ones = torch.ones(1, 2, dtype=torch.long, device=device)
    return modeling_bloom.build_alibi_tensor(ones, self.num_heads, torch.float32)[:, 0, 1]


def _mpt_slopes(self: Any, device: torch.device) -> Float[Tensor, "heads"]:
    """The slope of each head, read from MPT's own function."""
    return -modeling_mpt.build_mpt_alibi_tensor(self.n_heads, 2, device=device)[:, 0, 0]


class BloomAttention(modeling_bloom.BloomAttention):
    """BLOOM's attention module with the same parts; its softmax is the attention function of a swap."""

    is_causal, by_token = True, True  # positions are counted over the tokens that are there
    slopes, attending = _bloom_slopes, staticmethod(_by_mechanism)

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, layer_past: Any = None,
        *args: Any, **settings: Any,
    ) -> Any:  # fmt: skip
        """Run transformers' module without its ``alibi``, or as it is."""
        attend = self.attending(self, attention_mask, self.attention_dropout.p)
        if attend is None:
            mask = attention_mask.dense() if isinstance(attention_mask, Visibility) else attention_mask
            return super().forward(hidden_states, residual, alibi, mask, layer_past, *args, **settings)
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        dropout = self.attention_dropout.p if self.training else 0.0
        out, weights = attend(q, k, v, dropout=dropout, scaling=self.inv_norm_factor)
        return residual + F.dropout(self.dense(out.flatten(2)), self.hidden_dropout, self.training), weights


class MptAttention(modeling_mpt.MptAttention):
    """MPT's attention module with the same parts; its softmax is the attention function of a swap."""

    is_causal, by_token = True, False
    slopes, attending = _mpt_slopes, staticmethod(_by_mechanism)

    def forward(
        self, hidden_states: Tensor, position_bias: Tensor, cache: Any = None, attention_mask: Any = None,
        past_key_values: Any = None, **settings: Any,
    ) -> Any:  # fmt: skip
        """Run transformers' module without its ``position_bias``, or as it is."""
        cache = past_key_values if cache is None else cache  # its name before transformers 5.20
        attend = self.attending(self, attention_mask, self.attn_dropout_p)
        if attend is None:
            mask = attention_mask.dense().bool() if isinstance(attention_mask, Visibility) else attention_mask
            return super().forward(hidden_states, position_bias, cache, attention_mask=mask, **settings)
        qkv = self.Wqkv(hidden_states)
        qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv) if self.clip_qkv else qkv
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        dropout = self.attn_dropout_p if self.training else 0.0
        out, weights = attend(q, k, v, dropout=dropout, scaling=self.softmax_scale)
        return self.out_proj(out.flatten(2)), weights


class ExactBloomAttention(BloomAttention):
    """BLOOM's attention module with the same parts; in tiles where the mask is a ``Visibility``."""

    attending = staticmethod(_in_tiles)


class ExactMptAttention(MptAttention):
    """MPT's attention module with the same parts; in tiles where the mask is a ``Visibility``."""

    attending = staticmethod(_in_tiles)
