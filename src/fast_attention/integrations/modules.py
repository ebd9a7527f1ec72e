"""Replaces a library's attention modules by ours, layer by layer: shared by the swaps of torch's and timm's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fast_attention.integrations.report import Layer, chosen, nothing_swapped
from fast_attention.mechanism import Unsupported

Plan = Callable[[str, Any, Any], tuple[Layer, nn.Module | None]]


def exchange(model: nn.Module, wanted: Any, is_attention: Callable[[nn.Module], bool], plan: Plan) -> tuple[Layer, ...]:
    """Replace every attention module that ``wanted`` names; the report of each.

    Args:
        model: The model, changed in place.
        wanted: A mechanism, or one for every pattern of layer names.
        is_attention: Whether a module is an attention of this kind.
        plan: From a layer's name, its module and its mechanism or None: its report, and the new module or None.

    Raises:
        Unsupported: There are such layers, and none can be swapped.
    """
    layers, replacements = [], {}
    for name, module in model.named_modules():
        if is_attention(module):
            layer, new = plan(name, module, chosen(name, wanted))
            layers.append(layer)
            if new is not None:
                replacements[name] = new
    if layers and not replacements:
        raise Unsupported(nothing_swapped(model, layers))
    for name, new in replacements.items():
        replace_module(model, name, new)
    return tuple(layers)


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put ``new`` in place of the module called ``name``."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)
