"""The forward pass of a swapped Hugging Face model: ``output_attentions=True``, packed rows and extra tensors work.

Some models pass such arguments to their attention function and others do not, so that they are noted where the model
is called, or a model inside it: by ``model(...)`` and by ``model.forward(...)``, which passes hooks by.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fast_attention.integrations import calls, packed_rows, unpadding
from fast_attention.integrations.swapped import layers_of
from fast_attention.integrations.visible import Visibility

ENTERED = "_fast_attention_entered"  # where a swapped model, and each one inside it, says that its calls are noted


class Forward:
    """A model's ``forward`` that notes what the call was given.

    Args:
        model: The model, or a model inside it.
        inner: The ``forward`` that another library had put into the model; None: that of its class.
    """

    def __init__(self, model: PreTrainedModel, inner: Any = None) -> None:
        self.model, self.inner = model, inner
        self.names = tuple(inspect.signature(self.own).parameters)  # of arguments that have no keyword

    @property
    def own(self) -> Any:
        """The forward pass without this one around it."""
        return partial(type(self.model).forward, self.model) if self.inner is None else self.inner

    @property
    def __signature__(self) -> inspect.Signature:  # which trainers and ``generate`` read
        return inspect.signature(self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``own`` gives, with the call on the thread's stack."""
        model, own = self.model, self.own
        if args and args[0] is model:  # as accelerate calls what it has unwrapped
            args = args[1:]
        if ENTERED not in model.__dict__:  # swapped back, and another library's forward is around this one
            return own(*args, **kwargs)
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        argument = given.get("output_attentions")
        wanted = model.config.output_attentions if argument is None else argument
        mask = kwargs.get("attention_mask")
        calls.begin(
            model, shown=tuple(layers_of(model).values()) if wanted else (), position_ids=given.get("position_ids"),
            packed=packed_rows.given(given), arguments=frozenset(given),
        )  # fmt: skip
        try:
            if isinstance(mask, Visibility) and not calls.is_part(model):  # a part takes what its model made for it
                kwargs = {**kwargs, "attention_mask": mask.dense()}  # which generate made: the model takes tensors
            return (
                unpadding.run(model, own, args, kwargs) if unpadding.SKIPS in model.__dict__ else own(*args, **kwargs)
            )
        finally:
            calls.end(model)

    def replicate(self) -> Any:
        """A copy of the model for ``nn.DataParallel``, whose forward pass is its own."""
        replica: Any = type(self.model)._replicate_for_data_parallel(self.model)
        replica.forward = Forward(replica, self.inner)
        return replica


def enter_calls(model: PreTrainedModel) -> None:
    """Let a swapped model, and every model inside it, note what its calls are given."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            untyped: Any = part
            untyped.forward = Forward(part, part.__dict__.get("forward"))
            untyped._replicate_for_data_parallel = untyped.forward.replicate
            part.__dict__[ENTERED] = True


def leave_calls(model: nn.Module) -> None:
    """Undo ``enter_calls``."""
    for part in model.modules():
        if part.__dict__.pop(ENTERED, False):
            forward = part.__dict__.get("forward")
            if isinstance(forward, Forward):
                part.__dict__.pop("forward")
                part.__dict__.update({} if forward.inner is None else {"forward": forward.inner})
            part.__dict__.pop("_replicate_for_data_parallel")
