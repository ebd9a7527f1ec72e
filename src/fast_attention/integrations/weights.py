"""Makes ``output_attentions=True`` and packed rows work in a swapped Hugging Face model.

Some models pass such arguments to their attention function and others do not, so that hooks read them from the call of
the model, or of a model inside it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fast_attention.integrations import calls, packed_rows
from fast_attention.integrations.swapped import layers_of

HOOKS = "_fast_attention_hooks"


def add_hooks(model: PreTrainedModel) -> None:
    """Add hooks, by which a call with ``output_attentions=True`` makes its layers return their matrices."""
    handles = []
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            handles.append(part.register_forward_pre_hook(_enter, with_kwargs=True))
            handles.append(part.register_forward_hook(_leave, always_call=True))
    setattr(model, HOOKS, handles)


def remove_hooks(model: nn.Module) -> None:
    """Undo ``add_hooks``."""
    for handle in model.__dict__.pop(HOOKS, ()):
        handle.remove()


def _enter(model: Any, args: Any, kwargs: Any) -> None:
    argument = kwargs.get("output_attentions")
    wanted = model.config.output_attentions if argument is None else argument
    shown = tuple(layers_of(model).values()) if wanted else ()
    position_ids = kwargs.get("position_ids")
    calls.begin(model, shown=shown, position_ids=position_ids, packed=packed_rows.given(kwargs))


def _leave(model: Any, args: Any, output: Any) -> None:
    calls.end(model)
