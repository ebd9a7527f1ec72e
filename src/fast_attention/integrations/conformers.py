"""Lets Conformers, whose attention computes what positions add to scores itself, leave that to a mechanism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.parakeet import modeling_parakeet
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer

from fast_attention.integrations.attention import adds_positions, attention
from fast_attention.integrations.visible import Visibility


def _wav2vec2(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, relative_position_embeddings: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Run transformers' module; where the layer's mechanism makes the scores of distances, without them."""
    if not adds_positions(self, attention_mask):
        base: Any = type(self).__bases__[0]
        return base.forward(self, hidden_states, attention_mask, relative_position_embeddings, **settings)
    q, k, v = (project(hidden_states).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
               for project in (self.linear_q, self.linear_k, self.linear_v))  # fmt: skip
    dropout = self.dropout.p if self.training else 0.0
    out, weights = attention(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **settings)
    return self.linear_out(out.flatten(2)), weights


class Wav2Vec2ConformerSelfAttention(modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention):
    """The attention module with the same parts."""

    forward = _wav2vec2


class Wav2Vec2BertSelfAttention(modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention):
    """The attention module with the same parts."""

    forward = _wav2vec2


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
        q, k, v = (project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attention(self, q, k, v, visibility, dropout=dropout, scaling=self.scaling, **settings)
        return self.o_proj(out.flatten(2)), weights
