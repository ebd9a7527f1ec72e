"""Lets BLOOM and MPT, which compute attention with ALiBi themselves, call it through transformers' interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt

from fast_attention.integrations import attention
from fast_attention.integrations.visible import Visibility
from fast_attention.mechanism import Unsupported

Attend = Callable[..., tuple[Tensor, Any]]  # (q, k, v, dropout=, scaling=) -> outputs (B, L, H, E) and matrices


class BloomAttention(modeling_bloom.BloomAttention):
    """BLOOM's attention module with the same parts; its softmax is the attention function of the swap."""

    is_causal = True
    by_token = True  # positions are counted over the tokens that are there

    def slopes(self, device: torch.device) -> Tensor:
        """The slope of each head (H,)."""
        return bloom_slopes(self.num_heads, device)

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Visibility | Tensor,
        layer_past: Any = None, use_cache: bool = False, output_attentions: bool = False, **settings: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Run transformers' module without its ``alibi``."""
        tokens = attention_mask.tokens if isinstance(attention_mask, Visibility) else None

        def attend(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Any]:
            bias = by_key(self.slopes(q.device), k.shape[-2], tokens)
            return attention.attention(self, q, k, v, attention_mask, position_bias=bias, **given)

        return bloom(self, attend, hidden_states, residual, layer_past)


class MptAttention(modeling_mpt.MptAttention):
    """MPT's attention module with the same parts; its softmax is the attention function of the swap."""

    is_causal, by_token = True, False

    def slopes(self, device: torch.device) -> Tensor:
        """The slope of each head (H,)."""
        return mpt_slopes(self.n_heads, device)

    def forward(
        self, hidden_states: Tensor, position_bias: Tensor, cache: Any = None,
        attention_mask: Visibility | Tensor | None = None, past_key_values: Any = None, **settings: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Run transformers' module without its ``position_bias``.

        Raises:
            Unsupported: The mask is one of all pairs, of which MPT's code and ours mean the opposite.
        """
        if isinstance(attention_mask, Tensor):
            raise Unsupported(
                "MPT with a mask of every pair (the caller's own, or that of a cache of a fixed size). What would "
                "work: attention_mask with a number for each token, and generate without cache_implementation"
            )

        def attend(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Any]:
            bias = by_key(self.slopes(q.device), k.shape[-2])
            return attention.attention(self, q, k, v, attention_mask, position_bias=bias, **given)

        cache = past_key_values if cache is None else cache  # its name before transformers 5.20
        return mpt(self, attend, hidden_states, cache)


def bloom_slopes(heads: int, device: torch.device) -> Tensor:
    """The slope of each head (H,), read from BLOOM's own function."""
    ones = torch.ones(1, 2, dtype=torch.long, device=device)
    return modeling_bloom.build_alibi_tensor(ones, heads, torch.float32)[:, 0, 1]


def mpt_slopes(heads: int, device: torch.device) -> Tensor:
    """The slope of each head (H,), read from MPT's own function."""
    return -modeling_mpt.build_mpt_alibi_tensor(heads, 2, device=device)[:, 0, 0]


def bloom(module: Any, attend: Attend, hidden_states: Tensor, residual: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Run BLOOM's attention module with ``attend``; its outputs and matrices."""
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    if cache is not None:
        k, v = cache.update(k, v, module.layer_idx)
    dropout = module.attention_dropout.p if module.training else 0.0
    out, weights = attend(q, k, v, dropout=dropout, scaling=module.inv_norm_factor)
    return residual + F.dropout(module.dense(out.flatten(2)), module.hidden_dropout, module.training), weights


def mpt(module: Any, attend: Attend, hidden_states: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Run MPT's attention module with ``attend``; its outputs and matrices."""
    qkv = module.Wqkv(hidden_states)
    qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv) if module.clip_qkv else qkv
    q, k, v = qkv.unflatten(-1, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    if cache is not None:
        k, v = cache.update(k, v, module.layer_idx)
    dropout = module.attn_dropout_p if module.training else 0.0
    out, weights = attend(q, k, v, dropout=dropout, scaling=module.softmax_scale)
    return module.out_proj(out.flatten(2)), weights


def by_key(slopes: Tensor, keys: int, tokens: Tensor | None = None) -> Tensor:
    """ALiBi as a number for each key, (B or 1, H, 1, keys): a query's own position cancels in its softmax.

    Args:
        slopes: The slope of each head, (H,).
        keys: Their number.
        tokens: Which positions are tokens, (B, all), where only these are counted, as BLOOM does; None: all.
    """
    if tokens is None:
        positions = torch.arange(keys, device=slopes.device)[None]
    else:
        positions = ((tokens.long().cumsum(-1) - 1) * tokens)[:, -keys:]
    return slopes[:, None, None] * positions[:, None, None]


KINDS: dict[type, type] = {modeling_bloom.BloomAttention: BloomAttention, modeling_mpt.MptAttention: MptAttention}
