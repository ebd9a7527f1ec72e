"""The forward pass of a swapped Hugging Face model: ``output_attentions=True``, packed rows and extra tensors work.

Some models pass such arguments to their attention function and others do not, so that they are noted where the model
is called, or a model inside it: by ``model(...)`` and by ``model.forward(...)``, which passes hooks by.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fast_attention.integrations import calls, packed_rows, unpadding
from fast_attention.integrations import saving as saving  # a model that was pickled saves its mechanisms
from fast_attention.integrations.attention import layers_of
from fast_attention.integrations.exact import attention as attention  # and finds its functions
from fast_attention.integrations.visible import Visibility

ENTERED = "_fast_attention_entered"  # where a swapped model, and each one inside it, says that its calls are noted
MECHANISMS, EXACT = "mechanisms", "exact"  # what it says: by which kind of swap


class Forward(partial[Any]):
    """A model's ``forward`` that notes what the call was given.

    Its code is its own: ``torch.compile`` keeps what it compiled by code, and up to eight forms of each.

    Args:
        model: The model, or a model inside it.
        inner: The ``forward`` that another library had put into the model; None: that of its class.
    """

    def __new__(cls, model: PreTrainedModel, inner: Any = None) -> Forward:
        """The forward pass of a model, with code of its own."""
        run = FunctionType(_noted.__code__.replace(), _noted.__globals__, "forward")
        names = tuple(inspect.signature(_own(model, inner)).parameters)  # of arguments that have no keyword
        return super().__new__(cls, run, model, inner, names)

    def __reduce__(self) -> Any:
        """How a copied or pickled model gets its own."""
        return type(self), self.args[:2]

    @property
    def inner(self) -> Any:
        """The forward pass that this one replaced."""
        return self.args[1]

    @property
    def __signature__(self) -> inspect.Signature:  # which trainers and ``generate`` read
        return inspect.signature(_own(*self.args[:2]))

    def replicate(self) -> Any:
        """A copy of the model for ``nn.DataParallel``, whose forward pass is its own."""
        model = self.args[0]
        replica: Any = type(model)._replicate_for_data_parallel(model)
        replica.forward = Forward(replica, self.inner)
        return replica


def _own(model: PreTrainedModel, inner: Any) -> Any:
    """The forward pass of a model without ours around it."""
    return partial(type(model).forward, model) if inner is None else inner


def _noted(model: Any, inner: Any, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Run ``inner``, or the class's forward pass, with the call on the thread's stack."""
    own = _own(model, inner)
    if args and args[0] is model:  # as accelerate calls what it has unwrapped
        args = args[1:]
    if ENTERED not in model.__dict__:  # swapped back, and another library's forward is around this one
        return own(*args, **kwargs)
    is_exact = model.__dict__[ENTERED] == EXACT
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    argument = given.get("output_attentions")
    wanted = model.config.output_attentions if argument is None else argument
    mask = kwargs.get("attention_mask")
    layers = (model,) if is_exact else tuple(layers_of(model).values()) if wanted else ()
    calls.begin(
        model, shown=layers if wanted else (), position_ids=given.get("position_ids"),
        packed={} if is_exact else packed_rows.borders_in(given), arguments=frozenset(given),
    )  # fmt: skip
    try:
        if isinstance(mask, Visibility) and not calls.is_part(model):  # a part takes what its model made for it
            kwargs = {**kwargs, "attention_mask": mask.dense()}  # which generate made: the model takes tensors
        return unpadding.run(model, own, args, kwargs)
    finally:
        calls.end(model)


def enter_calls(model: PreTrainedModel, kind: str = MECHANISMS) -> None:
    """Let a swapped model, and every model inside it, note what its calls are given."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            untyped: Any = part
            untyped.forward = Forward(part, part.__dict__.get("forward"))
            untyped._replicate_for_data_parallel = untyped.forward.replicate
            part.__dict__[ENTERED] = kind


def leave_calls(model: nn.Module) -> None:
    """Undo ``enter_calls``."""
    for part in model.modules():
        if part.__dict__.pop(ENTERED, False):
            forward = part.__dict__.get("forward")
            if isinstance(forward, Forward):
                part.__dict__.pop("forward")
                part.__dict__.update({} if forward.inner is None else {"forward": forward.inner})
            part.__dict__.pop("_replicate_for_data_parallel")
