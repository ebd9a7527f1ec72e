"""Attention modules of transformers that compute positions in code of their own: theirs, with the same parts.

Conformers, T5 and its kin, BLOOM and MPT. Where a layer was swapped for a mechanism that makes what positions add to
the scores, they make nothing; in exact swaps it is made where attention runs, in place of a tensor of all pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers.models.bloom import modeling_bloom
from transformers.models.longt5 import modeling_longt5
from transformers.models.mpt import modeling_mpt
from transformers.models.mt5 import modeling_mt5
from transformers.models.parakeet import modeling_parakeet
from transformers.models.pop2piano import modeling_pop2piano
from transformers.models.switch_transformers import modeling_switch_transformers
from transformers.models.t5 import modeling_t5
from transformers.models.umt5 import modeling_umt5
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer

from fast_attention.engine.offsets import Terms
from fast_attention.engine.tracing import traced
from fast_attention.integrations import calls, modules
from fast_attention.integrations.attention import adds_positions, attention
from fast_attention.integrations.exact import attention as exact
from fast_attention.integrations.exact.attention import NAMES, is_long
from fast_attention.integrations.relative import NOTHING, TABLE
from fast_attention.integrations.visible import Visibility
from fast_attention.mechanism import Unsupported

# Conformers -----------------------------------------------------------------------------------------------------------


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


# T5 and its kin -------------------------------------------------------------------------------------------------------


class Relative:
    """Scores that a layer adds for each offset of the key: ``engine.offsets.Positions`` of T5.

    The layers of a model share it, and what ``dense`` made of it.

    Args:
        layer: The layer with the table, ``relative_attention_bias``; None: cross attention, to which nothing is added.
        past: The tokens before the first query.
    """

    def __init__(self, layer: Any, past: Any = 0) -> None:
        self.layer, self.past = layer, past
        self.bias: Tensor | None = None

    def __call__(self, offsets: Int[Tensor, "offsets"]) -> Terms:
        """The numbers of neighbouring offsets, as the layer computes a row of its bias."""
        return Terms(self._computed(1, len(offsets), -int(offsets[0]))[0, :, 0].contiguous())

    def dense(self, q: Tensor, k: Tensor) -> Tensor:
        """The numbers of all queries and keys, as they were before the swap; zeros broadcast where that pays.

        A layer that is computed again has them as it had them then: made outside of it with a gradient, or by itself.
        """
        learns = self.layer is not None and self.layer.relative_attention_bias.weight.requires_grad
        if self.bias is not None and self.bias.requires_grad == (learns and torch.is_grad_enabled()):
            return self.bias.to(q.device)
        if self.layer is None:
            pays = is_long(q.shape[-2], q.dtype)
            bias = q.new_zeros((1, 1, 1, 1) if pays else (1, q.shape[1], q.shape[-2], k.shape[-2]))
        else:
            bias = self._computed(q.shape[-2], k.shape[-2], self.past)
        self.bias = self.bias if calls.computed_again() else bias
        return bias.to(q.device)

    def _computed(self, queries: int, keys: int, past: Any) -> Tensor:
        kind: Any = modules.original_class(type(self.layer))
        return kind.compute_bias(self.layer, queries, keys, past_seen_tokens=past)

    def takes(self, layer: Any, q: Tensor, mask: Any) -> bool:
        """Whether our form runs in a layer: where it pays, and no weights of a table's are dropped.

        The scores of those are held.
        """
        crosses = self.layer is None
        drops = layer.training and layer.dropout > 0.0 and not crosses
        if isinstance(mask, Visibility):
            return mask.packing is not None or not drops
        is_row = mask is None or (mask.shape[1:3] == (1, 1) and not crosses)  # of keys, as Switch Transformers makes it
        return is_row and q.is_cpu and not drops and is_long(q.shape[-2], q.dtype)


def _defers(layer: Any) -> bool:
    """Whether a layer calls an attention function of an exact swap, and no attention matrices may be asked for.

    Where gradient checkpointing computes a layer again, the call that may have asked for them is over.
    """
    named = layer.config._attn_implementation
    computes_again = layer.training and getattr(layer, "gradient_checkpointing", False)
    may_show = named == NAMES["eager"] and (calls.shows() or computes_again)
    return not traced() and named in NAMES.values() and not may_show


class _T5Like:
    """Makes the position scores of T5's attention, and of its kin's, where attention runs."""

    _modules: dict[str, Any]

    @property
    def has_relative_attention_bias(self) -> bool:
        """True also where ``compute_bias`` is called in place of making zeros of all pairs."""
        return TABLE in self._modules or self._adds_positions or _defers(self)

    @property
    def _adds_positions(self) -> bool:
        call: Any = calls.present(cast(Any, self))
        return call is not None and call.adds_positions

    def compute_bias(self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Any:
        """Nothing where the layer's mechanism makes it; our form in exact swaps; else the bias of all pairs."""
        if self._adds_positions:
            return NOTHING
        if _defers(self):
            return Relative(self if TABLE in self._modules else None, past_seen_tokens)
        base: Any = super()
        return base.compute_bias(query_length, key_length, device, past_seen_tokens)


for _kind in (
    modeling_t5.T5Attention, modeling_mt5.MT5Attention, modeling_switch_transformers.SwitchTransformersAttention,
    modeling_longt5.LongT5Attention, modeling_pop2piano.Pop2PianoAttention, modeling_umt5.UMT5Attention,
):  # fmt: skip
    globals()[_kind.__name__] = type(_kind.__name__, (_T5Like, _kind), {"__module__": __name__})


# BLOOM and MPT --------------------------------------------------------------------------------------------------------


class Slopes(NamedTuple):
    """ALiBi's numbers for each offset of the key: ``engine.offsets.Positions``.

    A query's own position cancels: BLOOM and MPT leave it out.
    """

    layer: Any
    slopes: Float[Tensor, "heads"]

    def __call__(self, offsets: Int[Tensor, "offsets"]) -> Terms:
        """The slope of each head, times the offset."""
        return Terms(self.slopes[:, None] * offsets)


class _ALiBi:
    """Hands the softmax of BLOOM's and MPT's attention to the attention function of a swap."""

    is_causal = True
    is_exact: bool  # whether the swap is
    by_token: bool  # positions are counted over the tokens that are there
    slopes: Any
    training: bool

    def runs(self, mask: Any, dropout: float) -> bool:
        """Whether a function of ours attends: in tiles, where the mask is ours and no weights are dropped.

        Scores of weights that are dropped are held. BLOOM's outputs may be projected slice by slice.
        """
        is_sliced = getattr(self, "pretraining_tp", 1) > 1 and getattr(self, "slow_but_exact", False)
        in_tiles = isinstance(mask, Visibility) and not (self.training and dropout) and not is_sliced
        return in_tiles or not self.is_exact

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **settings: Any) -> tuple[Tensor, Any]:
        """Outputs (B, L, H, E) and attention matrices, by the layer's mechanism or in tiles.

        To a mechanism ALiBi is a number for each key, (B or 1, H, 1, keys).

        Raises:
            Unsupported: The mask is one of all pairs, of which MPT's code and ours mean the opposite.
        """
        module: Any = self
        slopes, tokens = self.slopes(q.device), None
        if self.is_exact:
            return exact.attention("eager", module, q, k, v, mask, position_bias=Slopes(self, slopes), **settings)
        if isinstance(mask, Tensor) and not self.by_token:
            raise Unsupported(
                "MPT with a mask of every pair (the caller's own, or that of a cache of a fixed size). What would "
                "work: attention_mask with a number for each token, and generate without cache_implementation"
            )
        positions = torch.arange(k.shape[-2], device=q.device)[None]
        if self.by_token and isinstance(mask, Visibility) and (tokens := mask.tokens) is not None:
            positions = ((tokens.long().cumsum(-1) - 1) * tokens)[:, -k.shape[-2] :]
        bias = slopes[:, None, None] * positions[:, None, None]
        return attention(module, q, k, v, mask, position_bias=bias, **settings)


class BloomAttention(_ALiBi, modeling_bloom.BloomAttention):
    """BLOOM's attention module with the same parts."""

    by_token = True

    def slopes(self, device: torch.device) -> Float[Tensor, "heads"]:
        """The slope of each head, read from BLOOM's own function."""
        ones = torch.ones(1, 2, dtype=torch.long, device=device)
        return modeling_bloom.build_alibi_tensor(ones, self.num_heads, torch.float32)[:, 0, 1]

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, layer_past: Any = None,
        *args: Any, **settings: Any,
    ) -> Any:  # fmt: skip
        """Run transformers' module without its ``alibi``, or as it is."""
        if not self.runs(attention_mask, self.attention_dropout.p):
            mask = attention_mask.dense() if isinstance(attention_mask, Visibility) else attention_mask
            return super().forward(hidden_states, residual, alibi, mask, layer_past, *args, **settings)
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        dropout = self.attention_dropout.p if self.training else 0.0
        out, weights = self.attend(q, k, v, attention_mask, dropout=dropout, scaling=self.inv_norm_factor)
        return residual + F.dropout(self.dense(out.flatten(2)), self.hidden_dropout, self.training), weights


class MptAttention(_ALiBi, modeling_mpt.MptAttention):
    """MPT's attention module with the same parts."""

    by_token = False

    def slopes(self, device: torch.device) -> Float[Tensor, "heads"]:
        """The slope of each head, read from MPT's own function."""
        return -modeling_mpt.build_mpt_alibi_tensor(self.n_heads, 2, device=device)[:, 0, 0]

    def forward(
        self, hidden_states: Tensor, position_bias: Tensor, cache: Any = None, attention_mask: Any = None,
        past_key_values: Any = None, **settings: Any,
    ) -> Any:  # fmt: skip
        """Run transformers' module without its ``position_bias``, or as it is."""
        cache = past_key_values if cache is None else cache  # its name before transformers 5.20
        if not self.runs(attention_mask, self.attn_dropout_p):
            mask = attention_mask.dense().bool() if isinstance(attention_mask, Visibility) else attention_mask
            return super().forward(hidden_states, position_bias, cache, attention_mask=mask, **settings)
        qkv = self.Wqkv(hidden_states)
        qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv) if self.clip_qkv else qkv
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        dropout = self.attn_dropout_p if self.training else 0.0
        out, weights = self.attend(q, k, v, attention_mask, dropout=dropout, scaling=self.softmax_scale)
        return self.out_proj(out.flatten(2)), weights
