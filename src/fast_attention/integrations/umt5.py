"""Lets UMT5, each layer of which computes the bias of its positions itself, leave that to a mechanism."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.umt5 import modeling_umt5

from fast_attention.integrations import calls
from fast_attention.integrations.relative import NOTHING


class UMT5Attention(modeling_umt5.UMT5Attention):
    """UMT5's attention module with the same parts."""

    def compute_bias(self, *args: Any, **settings: Any) -> Tensor:
        """The bias of all pairs; nothing where the layer's mechanism makes it."""
        call = calls.present(self)
        adds_positions = call is not None and call.adds_positions
        return NOTHING if adds_positions else super().compute_bias(*args, **settings)


KINDS: dict[type, type] = {modeling_umt5.UMT5Attention: UMT5Attention}
