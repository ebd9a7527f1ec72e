"""Replaces attention modules layer by layer, and leaves the modes and random generators of a model as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fast_attention.integrations.report import Layer, chosen
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
        Unsupported: The model is such a module itself.
    """
    if is_attention(model):
        raise Unsupported(
            f"{type(model).__name__} is itself an attention, and a swap replaces those inside of what it is given. "
            "What would work: the module that holds it; for an nn.MultiheadAttention also "
            "fast_attention.MultiheadAttention(..., mechanism=...) in its place, which takes its weights by "
            "load_state_dict(..., strict=False)"
        )
    layers, replacements = [], []
    for module, names in names_in(model, is_attention).items():
        name = next((name for name in names if chosen(name, wanted) is not None), names[0])
        layer, new = plan(name, module, chosen(name, wanted))
        if new is not None:
            replacements += [(each, new) for each in names]
            if others := [other for other in names if other != name]:
                note = f"the same module is {', '.join(others)}"
                layer = replace(layer, why="; ".join(filter(None, (layer.why, note))))
        layers.append(layer)
    for name, new in replacements:
        replace_module(model, name, new)
    return tuple(layers)


def names_in(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> dict[nn.Module, list[str]]:
    """All names of the modules of a kind inside a model, in the order of ``model.modules()``.

    A module that several others hold has a name in each of them.
    """
    names: dict[nn.Module, list[str]] = {}
    for prefix, parent in model.named_modules():
        for attribute, child in parent._modules.items():
            if child is not None and is_wanted(child):
                names.setdefault(child, []).append(f"{prefix}.{attribute}" if prefix else attribute)
    return {module: names[module] for module in model.modules() if module in names}


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put ``new`` in place of the module called ``name``."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation in the block, and each of its modules back afterwards."""
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@contextmanager
def restored_generators(model: nn.Module | None = None) -> Iterator[None]:
    """Restore torch's generators at the end of the block, which may draw from them.

    So a program continues with the numbers that it had without the swap, and what is drawn depends on ``manual_seed``.

    Args:
        model: The generators of its accelerators are restored too.
    """
    devices = {p.device for p in model.parameters()} if model is not None else set()
    cuda = sorted({d.index for d in devices if d.index is not None and d.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        yield
