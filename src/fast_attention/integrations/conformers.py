"""Lets Wav2Vec2-Conformer and Wav2Vec2-BERT, whose attention computes what distances add, leave that to a mechanism."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer

from fast_attention.integrations import attention
from fast_attention.integrations.swapped import adds_positions


def forward(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, relative_position_embeddings: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Run transformers' module; where the layer's mechanism makes the scores of distances, without them."""
    if not adds_positions(self, attention_mask):
        base: Any = type(self).__bases__[0]
        return base.forward(self, hidden_states, attention_mask, relative_position_embeddings, **settings)
    q, k, v = (
        project(hidden_states).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        for project in (self.linear_q, self.linear_k, self.linear_v)
    )
    dropout = self.dropout.p if self.training else 0.0
    out, weights = attention.attention(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **settings)
    return self.linear_out(out.flatten(2)), weights


class Wav2Vec2ConformerSelfAttention(modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention):
    """The attention module with the same parts."""

    forward = forward


class Wav2Vec2BertSelfAttention(modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention):
    """The attention module with the same parts."""

    forward = forward


KINDS: dict[type, type] = {
    modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention: Wav2Vec2ConformerSelfAttention,
    modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention: Wav2Vec2BertSelfAttention,
}
