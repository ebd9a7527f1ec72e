"""Mechanisms by name in ``model.set_attn_implementation``, once ``register()`` was called."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from fast_attention.integrations.attention import NAME
from fast_attention.integrations.hugging_face import removed
from fast_attention.integrations.saving import save_pretrained as save_pretrained
from fast_attention.integrations.swapping import from_pretrained as from_pretrained
from fast_attention.integrations.swapping import swap

PREFIX = "fast_attention:"  # before a mechanism, in set_attn_implementation


def register() -> None:
    """Let ``model.set_attn_implementation("fast_attention:FavorPlus(num_features=128)")`` swap a model's attention.

    The same as ``swap(model, "FavorPlus(num_features=128)")``, for code that sets implementations by name; any other
    name puts a swapped model back first. Done once, it stays for this process.
    """
    before = PreTrainedModel.set_attn_implementation
    if getattr(before, "swaps", False):
        return

    def set_attn_implementation(self: PreTrainedModel, attn_implementation: Any, *args: Any, **settings: Any) -> None:
        if isinstance(attn_implementation, str) and attn_implementation.startswith(PREFIX):
            swap(self, attn_implementation.removeprefix(PREFIX))
            return
        if attn_implementation != NAME:
            removed(self)
        before(self, attn_implementation, *args, **settings)

    set_attn_implementation.swaps = True  # type: ignore[attr-defined]
    set_attn_implementation.__doc__ = before.__doc__
    PreTrainedModel.set_attn_implementation = set_attn_implementation  # type: ignore[method-assign]
