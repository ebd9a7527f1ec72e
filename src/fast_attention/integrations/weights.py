"""Makes ``output_attentions=True`` and packed rows work in a swapped Hugging Face model.

Some models pass such arguments to their attention function and others do not, so that hooks read them from the call of
the model, or of a model inside it.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fast_attention.integrations import calls, packed_rows
from fast_attention.integrations.swapped import layers_of
from fast_attention.integrations.visible import Visibility

HOOKS = "_fast_attention_hooks"


def add_hooks(model: PreTrainedModel) -> None:
    """Add hooks, by which a call with ``output_attentions=True`` makes its layers return their matrices."""
    handles = []
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            arguments = tuple(inspect.signature(part.forward).parameters)
            handles.append(part.register_forward_pre_hook(partial(_enter, arguments), with_kwargs=True))
            handles.append(part.register_forward_hook(_leave, always_call=True))
    setattr(model, HOOKS, handles)


def remove_hooks(model: nn.Module) -> None:
    """Undo ``add_hooks``."""
    for handle in model.__dict__.pop(HOOKS, ()):
        handle.remove()


def _enter(arguments: tuple[str, ...], model: Any, args: Any, kwargs: Any) -> Any:
    """Note what a call of ``model`` was given; ``arguments``: the names of those that have no keyword."""
    given = {**dict(zip(arguments, args, strict=False)), **kwargs}
    argument = given.get("output_attentions")
    wanted = model.config.output_attentions if argument is None else argument
    shown = tuple(layers_of(model).values()) if wanted else ()
    calls.begin(
        model, shown=shown, position_ids=given.get("position_ids"), packed=packed_rows.given(given),
        arguments=frozenset(given),
    )  # fmt: skip
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Visibility) or calls.is_part(model):  # a part takes what its model made for it
        return None
    return args, {**kwargs, "attention_mask": mask.dense()}  # which generate made: the model takes tensors


def _leave(model: Any, args: Any, output: Any) -> None:
    calls.end(model)
