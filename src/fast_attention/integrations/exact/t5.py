"""T5's relative positions where attention runs, in place of a tensor of all pairs that every layer would copy.

T5 and its kin make the tensor in their first layer, (1, H, L, S), and zeros of that size for cross attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.models.longt5 import modeling_longt5
from transformers.models.mt5 import modeling_mt5
from transformers.models.pop2piano import modeling_pop2piano
from transformers.models.switch_transformers import modeling_switch_transformers
from transformers.models.t5 import modeling_t5
from transformers.models.umt5 import modeling_umt5

from fast_attention.engine.offsets import Terms
from fast_attention.engine.tracing import traced
from fast_attention.integrations import calls
from fast_attention.integrations.exact import masks
from fast_attention.integrations.visible import Visibility


@dataclass(frozen=True)
class Relative:
    """Scores that a layer adds for each offset of the key: ``engine.offsets.Positions`` of T5.

    Args:
        layer: The layer with the table, ``relative_attention_bias``; None: cross attention, to which nothing is added.
        past: The tokens before the first query.
    """

    layer: Any
    past: Any = None

    def __call__(self, offsets: Int[Tensor, "offsets"]) -> Terms:
        """The numbers of neighbouring offsets, as the layer computes a row of its bias."""
        first = -int(offsets[0])
        row = _own(self.layer).compute_bias(self.layer, 1, len(offsets), device=offsets.device, past_seen_tokens=first)
        return Terms(row[0, :, 0].contiguous())

    def dense(self, q: Tensor, k: Tensor) -> Tensor:
        """The numbers of all queries and keys, as they were before the swap; zeros broadcast where that pays."""
        if self.layer is None:
            is_long = masks.is_long(q.shape[-2], q.dtype)
            return q.new_zeros((1, 1, 1, 1) if is_long else (1, q.shape[1], q.shape[-2], k.shape[-2]))
        return _own(self.layer).compute_bias(
            self.layer, q.shape[-2], k.shape[-2], device=q.device, past_seen_tokens=self.past or 0
        )


class Undecided(Relative):
    """Scores for each offset in a layer that does not know its mask when it makes them."""

    def takes(self, module: Any, q: Tensor, mask: Any) -> bool:
        """Whether our form runs in a module under a mask."""
        return _is_ours(module, q, q.shape[-2], mask, self.layer is None)


def _own(layer: Any) -> Any:
    """Transformers' class of a layer of ours."""
    return type(layer).__bases__[0]


def _relative(layer: Any, hidden_states: Tensor, mask: Any, given: Any, *, crosses: bool) -> Any:
    """The ``position_bias`` argument of a layer: our form where it pays, else what was ``given``."""
    if given is not None or traced():
        return given
    length = hidden_states.shape[1]
    if crosses and isinstance(mask, Tensor):
        return hidden_states.new_zeros(1, 1, 1, 1) if masks.is_long(length, hidden_states.dtype) else None
    if not (crosses or layer.has_relative_attention_bias) or not _is_ours(layer, hidden_states, length, mask, crosses):
        return None
    return Relative(None if crosses else layer)


def _is_ours(layer: Any, like: Tensor, length: int, mask: Any, crosses: bool) -> bool:
    """Whether our form runs: where it pays, and no weights of a table's are dropped, whose scores are held."""
    named, drops = layer.config._attn_implementation, layer.training and layer.dropout > 0.0 and not crosses
    if isinstance(mask, Visibility):
        return mask.packing is not None or not drops
    is_row = mask is None or mask.shape[1:3] == (1, 1)  # of keys alone, as Switch Transformers makes it
    pays = like.is_cpu and not drops and masks.is_long(length, like.dtype)
    return is_row and pays and named in masks.NAMES.values() and not _may_show(layer, named)


def _may_show(layer: Any, named: str) -> bool:
    """Whether attention matrices may be asked for; a mask that is ours says that they are not.

    Where gradient checkpointing computes a layer again, the call that may have asked for them is over.
    """
    computes_again = layer.training and getattr(layer, "gradient_checkpointing", False)
    return named == masks.NAMES["eager"] and (calls.shows_any() or computes_again)


def forward(
    self: Any, hidden_states: Tensor, mask: Any = None, key_value_states: Any = None, position_bias: Any = None,
    *args: Any, **settings: Any,
) -> Any:  # fmt: skip
    """Run transformers' module; ``position_bias`` may be our form."""
    bias = _relative(self, hidden_states, mask, position_bias, crosses=key_value_states is not None)
    return _own(self).forward(self, hidden_states, mask, key_value_states, bias, *args, **settings)


class T5Attention(modeling_t5.T5Attention):
    """T5's attention module with the same parts."""

    forward = forward


class MT5Attention(modeling_mt5.MT5Attention):
    """mT5's attention module with the same parts."""

    forward = forward


class SwitchTransformersAttention(modeling_switch_transformers.SwitchTransformersAttention):
    """Switch Transformers' attention module with the same parts."""

    forward = forward


class LongT5Attention(modeling_longt5.LongT5Attention):
    """The attention module of LongT5's decoder with the same parts."""

    forward = forward


class Pop2PianoAttention(modeling_pop2piano.Pop2PianoAttention):
    """Pop2Piano's attention module with the same parts."""

    forward = forward


class UMT5Attention(modeling_umt5.UMT5Attention):
    """UMT5's attention module with the same parts; every layer has a table of its own."""

    @property
    def has_relative_attention_bias(self) -> bool:  # type: ignore[reportIncompatibleVariableOverride]
        """True, so that a layer without a table calls ``compute_bias`` too, where it would make zeros of all pairs."""
        return True

    def compute_bias(self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Any:
        """Our form, of which the attention function makes the bias of all pairs where that is as fast."""
        has_table = self.__dict__["has_relative_attention_bias"]
        named = self.config._attn_implementation
        if not traced() and named in masks.NAMES.values() and not _may_show(self, named):
            return Undecided(self if has_table else None, past_seen_tokens)
        if has_table:
            return super().compute_bias(query_length, key_length, device, past_seen_tokens)
        return torch.zeros(1, self.n_heads, query_length, key_length, device=device, dtype=self.q.weight.dtype)


EXACT: dict[type, type] = {
    kind.__bases__[0]: kind
    for kind in (
        T5Attention, MT5Attention, UMT5Attention, SwitchTransformersAttention, LongT5Attention, Pop2PianoAttention,
    )
}  # fmt: skip
