"""Replaces attention modules layer by layer, and leaves the modes and random generators of a model as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fast_attention.integrations.report import UNNAMED, Layer, chosen, no_queries
from fast_attention.integrations.untrained import quality
from fast_attention.mechanism import Attention, Unsupported

BEFORE = "_before_swap"  # where a module of ours keeps the one whose place it took, which shares its parts
PARTS = ("_modules", "_parameters", "_buffers")


def exchange(library: Any, model: nn.Module, wanted: Any, max_len: int | None) -> tuple[Layer, ...]:
    """Replace every attention module of a library's that ``wanted`` names; weights are shared, names stay.

    Args:
        library: ``torch_nn`` or ``timm``: ``is_attention`` of a module; its ``sizes``, which are heads, the width of
            one, and what is known of what it runs; the ``unsupported_reason`` of a mechanism there; the
            ``replacement``, of class ``OURS``, and remarks on it.
        model: The model, changed in place.
        wanted: A mechanism, or one for every pattern of layer names.
        max_len: The longest sequence, for mechanisms with ``traits.needs_max_len``.

    Raises:
        Unsupported: The model is such a module itself.
    """
    if library.is_attention(model):
        raise Unsupported(
            f"{type(model).__name__} is itself an attention, and a swap replaces those inside of what it is given. "
            "What would work: the module that holds it; for an nn.MultiheadAttention also "
            "fast_attention.MultiheadAttention(..., mechanism=...) in its place, which takes its weights by "
            "load_state_dict(..., strict=False)"
        )
    layers, replacements = [], []
    for module, names in names_in(model, library.is_attention).items():
        name = next((name for name in names if chosen(name, wanted) is not None), names[0])
        mechanism, (heads, head_dim, shown) = chosen(name, wanted), library.sizes(module)
        layer = Layer(name, type(module).__name__, heads, head_dim, False, shown, UNNAMED, replaced=False)
        if mechanism is not None and not isinstance(mechanism, Attention):
            layer = replace(layer, why=no_queries(mechanism))
        elif mechanism is not None and (reason := library.unsupported_reason(model, name, module, mechanism)):
            layer = replace(layer, why=reason)
        elif mechanism is not None:
            new, remarks = library.replacement(name, module, mechanism, max_len or 0)
            if others := [other for other in names if other != name]:
                remarks.append(f"the same module is {', '.join(others)}")
            learned = sum(p.numel() for p in new.attention.parameters())
            layer = replace(
                layer, mechanism=repr(mechanism), why="; ".join(remarks), replaced=True, parameters=learned,
                untrained=quality(mechanism, learned),
            )  # fmt: skip
            replacements += [(each, new) for each in names]
        layers.append(layer)
    for name, new in replacements:
        replace_module(model, name, new)
    return tuple(layers)


def take_over(new: Any, old: nn.Module) -> None:
    """Give a new module the parts and the mode of an old one: nothing is copied, and an optimiser keeps them."""
    for parts in PARTS:
        vars(new)[parts].update(vars(old)[parts])
    new._non_persistent_buffers_set.update(old._non_persistent_buffers_set)
    new.training, new.__dict__[BEFORE] = old.training, old


def swap_back(model: nn.Module, kind: type[nn.Module] = nn.Module) -> bool:
    """Put the former modules back in place of ours of a kind, with the present weights; whether there were any."""
    swapped = swapped_in(model, kind)
    for module, names in swapped.items():
        old = module.__dict__[BEFORE]
        for parts in PARTS:
            its = vars(old)[parts]
            its.update({name: part for name, part in vars(module)[parts].items() if name in its})
        old.training = module.training
        for name in names:
            replace_module(model, name, old)
    return bool(swapped)


def swapped_in(model: nn.Module, kind: type[nn.Module] = nn.Module) -> dict[Any, list[str]]:
    """The modules of a kind of ours that took the place of others in a model, with their names."""
    return names_in(model, lambda module: isinstance(module, kind) and BEFORE in module.__dict__)


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
