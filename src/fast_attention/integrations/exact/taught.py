"""The attention modules of transformers that compute in their own code, and our subclasses with the same parts."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

PACKAGE = __name__.rpartition(".")[0]
TAUGHT: dict[str, str] = {  # files of transformers' models, and ours with subclasses for their modules, KINDS
    "transformers.models.longformer.modeling_longformer": "longformer",
    "transformers.models.led.modeling_led": "longformer",
    "transformers.models.big_bird.modeling_big_bird": "big_bird",
    "transformers.models.bloom.modeling_bloom": "alibi",
    "transformers.models.longt5.modeling_longt5": "t5",
    "transformers.models.mpt.modeling_mpt": "alibi",
    "transformers.models.mt5.modeling_mt5": "t5",
    "transformers.models.pop2piano.modeling_pop2piano": "t5",
    "transformers.models.switch_transformers.modeling_switch_transformers": "t5",
    "transformers.models.t5.modeling_t5": "t5",
    "transformers.models.umt5.modeling_umt5": "t5",
}
MASKED = ("bloom", "mpt")  # kinds of models that make their masks by transformers' functions, and call no interface


def masked(model: Any) -> bool:
    """Whether a model without the interface reads the masks that its config's name gives."""
    return model.config.model_type in MASKED


def kind_of(module: nn.Module) -> type[Any] | None:
    """Our subclass for a module of transformers'; None where there is none."""
    ours = TAUGHT.get(type(module).__module__)
    return None if ours is None else import_module(f"{PACKAGE}.{ours}").KINDS.get(type(module))


def teach(model: nn.Module) -> dict[str, nn.Module]:
    """Exchange the classes of such modules in a model; the modules by name."""
    taught = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None:
            module.__class__ = kind
            taught[name] = module
    return taught


def undo(model: nn.Module) -> bool:
    """Give the modules their own classes back; whether any had another."""
    undone = False
    for module in model.modules():
        kind = type(module)
        if kind.__module__.startswith(f"{PACKAGE}."):
            module.__class__ = kind.__bases__[0]
            undone = True
    return undone
