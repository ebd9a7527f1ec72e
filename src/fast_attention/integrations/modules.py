"""Puts modules and classes of ours in the place of others, and back; keeps modes and random generators as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn

NAME = "fast_attention"  # by which transformers calls our attention function
MODELS = "transformers.modeling_utils"  # whatever loads a model has imported it before
BEFORE = "_before_swap"  # where a module of ours keeps the one whose place it took, which shares its parts
IS_EXACT = "is_exact"  # where a module of a class of ours says whether the swap is
PARTS = ("_modules", "_parameters", "_buffers")
PACKAGE = __name__.rpartition(".")[0]
# Folders of transformers' models, and our files with subclasses of the modules in them, by the same names. Those of
# ``exact`` are for exact swaps alone.
FILES = {
    **dict.fromkeys((
        "bloom", "longt5", "mpt", "mt5", "parakeet", "pop2piano", "switch_transformers", "t5", "umt5", "wav2vec2_bert",
        "wav2vec2_conformer",
    ), "own_code"),
    **dict.fromkeys(("led", "longformer"), "exact.longformer"),
    "big_bird": "exact.big_bird",
}  # fmt: skip
ALIBI = ("bloom", "mpt")  # kinds of models whose masks are made by transformers' functions, and that call no interface


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


def exchange_classes(model: nn.Module, *, exact: bool) -> None:
    """Exchange modules of transformers that compute attention in code of their own for our subclasses of them."""
    for module in model.modules():
        kind = type(module)
        folder, _, file = kind.__module__.removeprefix("transformers.models.").partition(".")
        ours = FILES.get(folder, "") if file == f"modeling_{folder}" else ""
        if not ours or (ours.startswith("exact.") and not exact):
            continue
        if kind.__name__ in (kinds := vars(import_module(f"{PACKAGE}.{ours}"))):
            module.__class__ = kinds[kind.__name__]
            vars(module)[IS_EXACT] = exact


def original_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of transformers that one of ours was made from; any other class as it is."""
    if not kind.__module__.startswith(f"{PACKAGE}."):
        return kind
    return next((base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")), kind)


def restore_classes(model: nn.Module) -> None:
    """Give the modules their own classes back."""
    for module in model.modules():
        if (theirs := original_class(type(module))) is not type(module):  # a compiled module hands attributes on
            module.__class__ = theirs
            vars(module).pop(IS_EXACT, None)


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
