"""Putting modules of ours in the place of a library's own, layer by layer: what torch's and timm's layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fast_attention.integrations.report import Layer, chosen, nothing
from fast_attention.mechanism import Unsupported

Plan = Callable[[str, Any, Any], tuple[Layer, nn.Module | None]]


def exchange(model: nn.Module, wanted: Any, ours: Callable[[nn.Module], bool], plan: Plan) -> tuple[Layer, ...]:
    """Replace every module that is one of ``ours`` and that ``wanted`` names; what became of each.

    Args:
        model: The model, changed in place.
        wanted: A mechanism, or one for every pattern of layer names.
        ours: Whether a module is an attention of this kind.
        plan: From a layer's name, its module and its mechanism or None: what it will run, and the module for it, None
            where it stays.

    Raises:
        Unsupported: There are such layers, and none can be swapped.
    """
    layers, made = [], {}
    for name, module in model.named_modules():
        if ours(module):
            layer, new = plan(name, module, chosen(name, wanted))
            layers.append(layer)
            if new is not None:
                made[name] = new
    if layers and not made:
        raise Unsupported(nothing(model, layers))
    for name, new in made.items():
        put(model, name, new)
    return tuple(layers)


def put(model: nn.Module, name: str, new: nn.Module) -> None:
    """``new`` in the place of the module called ``name``."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, new)
