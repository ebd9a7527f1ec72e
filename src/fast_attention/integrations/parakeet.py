"""Lets Parakeet's encoder, whose attention computes what distances add, leave that to a mechanism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.parakeet import modeling_parakeet

from fast_attention.integrations import attention
from fast_attention.integrations.swapped import adds_positions
from fast_attention.integrations.visible import Visibility


class ParakeetEncoderAttention(modeling_parakeet.ParakeetEncoderAttention):
    """The attention module with the same parts; where its mechanism makes the scores of distances, without them."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Tensor | None, attention_mask: Tensor | None = None,
        **settings: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Run transformers' module. The mask (B, 1, L, L) is one of tokens, as the encoder makes it."""
        tokens = None if attention_mask is None else attention_mask[:, 0].diagonal(dim1=-2, dim2=-1)
        pairs = hidden_states.new_ones(1, 1, 1, 1, dtype=torch.bool) if attention_mask is None else attention_mask
        visibility = Visibility(lambda: pairs, tokens)
        if not adds_positions(self, visibility):
            return super().forward(hidden_states, position_embeddings, attention_mask, **settings)
        q, k, v = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attention.attention(self, q, k, v, visibility, dropout=dropout, scaling=self.scaling, **settings)
        return self.o_proj(out.flatten(2)), weights


KINDS: dict[type, type] = {modeling_parakeet.ParakeetEncoderAttention: ParakeetEncoderAttention}
