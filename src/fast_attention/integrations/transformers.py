"""Lets ``model.set_attn_implementation`` take mechanisms by name, once ``register()`` was called."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from fast_attention.integrations.attention import NAME
from fast_attention.integrations.hugging_face import swap_back
from fast_attention.integrations.swapping import swap

PREFIX = "fast_attention:"  # before a mechanism, in set_attn_implementation


def register() -> None:
    """Let ``model.set_attn_implementation("fast_attention:FavorPlus(num_features=128)")`` swap a model's attention.

    It does what ``swap(model, "FavorPlus(num_features=128)")`` does, for code that sets implementations by name; any
    other name swaps the model back first. Once called, it holds for this process.
    """
    original = PreTrainedModel.set_attn_implementation
    if getattr(original, "swaps", False):
        return

    def set_attn_implementation(self: PreTrainedModel, attn_implementation: Any, *args: Any, **settings: Any) -> None:
        if isinstance(attn_implementation, str) and attn_implementation.startswith(PREFIX):
            swap(self, attn_implementation.removeprefix(PREFIX))
            return
        if attn_implementation != NAME:
            swap_back(self)
        original(self, attn_implementation, *args, **settings)

    set_attn_implementation.swaps = True  # type: ignore[attr-defined]
    set_attn_implementation.__doc__ = original.__doc__
    PreTrainedModel.set_attn_implementation = set_attn_implementation  # type: ignore[method-assign]
