"""``output_attentions=True`` in a swapped Hugging Face model: who asked, and of which layers.

Some models hand that wish down to their attention function and others keep it to themselves, so that it is heard where
every model hears it: in the call of the model, or of a model inside it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fast_attention.integrations import calls
from fast_attention.integrations.attention import layers_of

HOOKS = "_fast_attention_hooks"


def listen(model: PreTrainedModel) -> None:
    """From now on a call with ``output_attentions=True`` makes the layers below give their matrices."""
    handles = []
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            handles.append(part.register_forward_pre_hook(_asked, with_kwargs=True))
            handles.append(part.register_forward_hook(_answered, always_call=True))
    setattr(model, HOOKS, handles)


def deafen(model: nn.Module) -> None:
    """Undo ``listen``."""
    for handle in model.__dict__.pop(HOOKS, ()):
        handle.remove()


def _asked(model: Any, args: Any, kwargs: Any) -> None:
    wish = kwargs.get("output_attentions")
    asked = model.config.output_attentions if wish is None else wish
    shown = tuple(layers_of(model).values()) if asked else ()
    calls.begin(model, shown=shown, positions=kwargs.get("position_ids") is not None)


def _answered(model: Any, args: Any, output: Any) -> None:
    calls.end(model)
