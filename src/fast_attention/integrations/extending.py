"""Lets a pretrained Hugging Face model read longer inputs: more positions, made from those that it learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from fast_attention.integrations.positions import Extension, extend_rotary, extend_tables, no_positions, rotary_modules
from fast_attention.integrations.swapping import pretrained
from fast_attention.mechanism import Unsupported
from fast_attention.nn.bound import Bound
from fast_attention.refusals import is_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def extend(
    model: nn.Module,
    positions: int,
    *,
    method: Literal["auto", "copy", "interpolate", "yarn", "ntk", "linear"] = "auto",
    tokenizer: Any = None,
) -> Extension:
    """Let a pretrained Hugging Face model read inputs of ``positions`` tokens, in place, by more positions.

    Learned positions are copied again and again (Longformer, arXiv 2004.05150): inputs that the model could read before
    give the same outputs, to the bit. Rotary ones are scaled by transformers' own ``rope_parameters``. Nothing is
    trained: measure what the model makes of long inputs; training on them helps. ``save_pretrained`` and
    ``from_pretrained`` keep the extension.

    Args:
        model: The model, or a module that holds one, such as a ``SentenceTransformer``.
        positions: The longest input in tokens.
        method: For learned positions ``"copy"``, or ``"interpolate"`` between neighbours; for rotary ones ``"yarn"``
            (arXiv 2309.00071), ``"ntk"`` (a larger base) or ``"linear"`` (arXiv 2306.15595); ``"auto"``: the first.
        tokenizer: Its ``model_max_length`` is set too; a ``SentenceTransformer``'s is found.

    Returns:
        What was done: print it.

    Raises:
        Unsupported: The positions reach any length already (T5's, ALiBi), are scaled already, or are of no known kind;
            transformers does not take the method for this model (Phi-3 takes ``"ntk"`` only); or a swapped mechanism's
            weights are for fewer tokens. The model is unchanged.
        ValueError: The model reads ``positions`` tokens already, or ``method`` is for another kind of positions.
    """
    is_module("model", model)
    parts = pretrained(model)
    if len(parts) != 1:
        held = f"{len(parts)} Hugging Face models: extend each" if parts else "no Hugging Face model"
        raise Unsupported(f"{type(model).__name__} holds {held}")
    extension = _extend(next(iter(parts.values())), positions, method)
    for part in model.modules():
        if isinstance(getattr(part, "max_seq_length", None), int):
            part.max_seq_length = positions  # type: ignore[assignment]
    for reader in (tokenizer, *(getattr(part, "tokenizer", None) for part in model.modules())):
        if reader is not None and getattr(reader, "model_max_length", None) is not None:
            reader.model_max_length = positions
    return extension


def _extend(model: PreTrainedModel, positions: int, method: str) -> Extension:
    for name, layer in model.named_modules():
        if isinstance(layer, Bound) and layer.mechanism.traits.needs_max_len and layer.shape.max_len < positions:
            raise Unsupported(
                f"{name} runs {layer.mechanism!r}, whose weights are for {layer.shape.max_len} tokens: "
                "swap_back(model), extend, then swap again"
            )
    text = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise Unsupported(no_positions(model))
    rotary = rotary_modules(model)
    if rotary and getattr(text, "rope_parameters", None):
        return extend_rotary(model, positions, method, rotary, longest)
    return extend_tables(model, positions, method, longest)
