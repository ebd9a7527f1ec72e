"""T5's relative positions where attention runs, in place of a tensor of all pairs that every layer would copy.

T5 and its kin make the tensor in their first layer, (1, H, L, S), and zeros of that size for cross attention. Where a
layer was swapped for a mechanism that makes them, they make nothing.
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
from fast_attention.integrations.attention import adds_positions
from fast_attention.integrations.exact.attention import NAMES, is_long
from fast_attention.integrations.relative import NOTHING, TABLE
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
            pays = is_long(q.shape[-2], q.dtype)
            return q.new_zeros((1, 1, 1, 1) if pays else (1, q.shape[1], q.shape[-2], k.shape[-2]))
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
    if given is None and adds_positions(layer, mask):
        return NOTHING
    if given is not None or traced() or not _is_exact(layer):
        return given
    length = hidden_states.shape[1]
    if crosses and isinstance(mask, Tensor):
        return hidden_states.new_zeros(1, 1, 1, 1) if is_long(length, hidden_states.dtype) else None
    if not (crosses or layer.has_relative_attention_bias) or not _is_ours(layer, hidden_states, length, mask, crosses):
        return None
    return Relative(None if crosses else layer)


def _is_ours(layer: Any, like: Tensor, length: int, mask: Any, crosses: bool) -> bool:
    """Whether our form runs: where it pays, and no weights of a table's are dropped, whose scores are held."""
    drops = layer.training and layer.dropout > 0.0 and not crosses
    if isinstance(mask, Visibility):
        return mask.packing is not None or not drops
    is_row = mask is None or mask.shape[1:3] == (1, 1)  # of keys alone, as Switch Transformers makes it
    pays = like.is_cpu and not drops and is_long(length, like.dtype)
    return is_row and pays and not _may_show(layer)


def _is_exact(layer: Any) -> bool:
    """Whether the layer calls an attention function of an exact swap."""
    return layer.config._attn_implementation in NAMES.values()


def _may_show(layer: Any) -> bool:
    """Whether attention matrices may be asked for; a mask that is ours says that they are not.

    Where gradient checkpointing computes a layer again, the call that may have asked for them is over.
    """
    computes_again = layer.training and getattr(layer, "gradient_checkpointing", False)
    is_eager = layer.config._attn_implementation == NAMES["eager"]
    return is_eager and (calls.shows() or computes_again)


def forward(
    self: Any, hidden_states: Tensor, mask: Any = None, key_value_states: Any = None, position_bias: Any = None,
    *args: Any, **settings: Any,
) -> Any:  # fmt: skip
    """Run transformers' module; ``position_bias`` may be our form, or nothing."""
    bias = _relative(self, hidden_states, mask, position_bias, crosses=key_value_states is not None)
    return _own(self).forward(self, hidden_states, mask, key_value_states, bias, *args, **settings)


for _kind in (
    modeling_t5.T5Attention, modeling_mt5.MT5Attention, modeling_switch_transformers.SwitchTransformersAttention,
    modeling_longt5.LongT5Attention, modeling_pop2piano.Pop2PianoAttention,
):  # fmt: skip
    globals()[_kind.__name__] = type(_kind.__name__, (_kind,), {"forward": forward, "__module__": __name__})


class UMT5Attention(modeling_umt5.UMT5Attention):
    """UMT5's attention module with the same parts; every layer has a table of its own."""

    @property
    def has_relative_attention_bias(self) -> bool:  # type: ignore[reportIncompatibleVariableOverride]
        """True in exact swaps too: without a table ``compute_bias`` is called then, not zeros of all pairs made."""
        return TABLE in self._modules or _is_exact(self)

    def compute_bias(self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Any:
        """Our form, of which the attention function makes the bias of all pairs where that is as fast; or nothing."""
        call, has_table = calls.present(self), TABLE in self._modules
        if call is not None and call.adds_positions:
            return NOTHING
        if not traced() and _is_exact(self) and not _may_show(self):
            return Undecided(self if has_table else None, past_seen_tokens)
        if has_table:
            return super().compute_bias(query_length, key_length, device, past_seen_tokens)
        return torch.zeros(1, self.n_heads, query_length, key_length, device=device, dtype=self.q.weight.dtype)
