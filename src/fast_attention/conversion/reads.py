"""Forward passes of Hugging Face models, and means over the tokens of a batch."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from fast_attention.mechanism import Unsupported

Batch = dict[str, Tensor]  # what a Hugging Face model's forward takes


def run(model: Any, batch: Batch, *, hidden_states: bool = False) -> Any:
    """A forward pass without a cache."""
    parameters = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in parameters else {}
    return model(**batch, **options, **({"output_hidden_states": True} if hidden_states else {}))


def hidden(model: Any, batch: Batch) -> tuple[Tensor, ...]:
    """The hidden states before the first block and behind every block, (B, L, D) each.

    Raises:
        Unsupported: The model gives none.
    """
    states = getattr(run(model, batch, hidden_states=True), "hidden_states", None)
    if not states:
        raise Unsupported(
            f"{type(model).__name__} gives no hidden states, which a model that is not a decoder with a head of tokens "
            "is trained and judged by. What would work: one encoder of it"
        )
    return states


def tokens(batch: Batch) -> Tensor | None:
    """Mask (B, L) of the positions that are tokens; None: all."""
    mask = batch.get("attention_mask")
    return None if mask is None or bool(mask.all()) else mask.bool()


def pooled(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the tokens of each sequence, (B, L, D) to (B, D), in float32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        return x.mean(1)
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
