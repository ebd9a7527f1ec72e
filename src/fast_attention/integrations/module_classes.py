"""Exchanges attention modules of transformers that compute in their own code for our subclasses with the same parts."""

from __future__ import annotations

from importlib import import_module

from torch import nn

PACKAGE = __name__.rpartition(".")[0]
# Folders of transformers' models, and our files with subclasses of the modules in them, by the same names. Those of
# ``exact``, and such as are called ``Exact...``, are for exact swaps alone.
FILES = {
    **dict.fromkeys(("bloom", "mpt"), "alibi"),
    **dict.fromkeys(("longt5", "mt5", "pop2piano", "switch_transformers", "t5", "umt5"), "t5"),
    **dict.fromkeys(("parakeet", "wav2vec2_bert", "wav2vec2_conformer"), "conformers"),
    **dict.fromkeys(("led", "longformer"), "exact.longformer"),
    "big_bird": "exact.big_bird",
}
ALIBI = ("bloom", "mpt")  # kinds of models whose masks are made by transformers' functions, and that call no interface


def exchange(model: nn.Module, *, exact: bool) -> None:
    """Exchange the classes of such modules in a model."""
    for module in model.modules():
        kind = type(module)
        folder, _, file = kind.__module__.removeprefix("transformers.models.").partition(".")
        ours = FILES.get(folder, "") if file == f"modeling_{folder}" else ""
        if ours and (exact or not ours.startswith("exact.")):
            kinds = vars(import_module(f"{PACKAGE}.{ours}"))
            same = kinds.get(kind.__name__, kind)
            module.__class__ = kinds.get(f"Exact{kind.__name__}", same) if exact else same


def original(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of transformers that one of ours was made from; any other class as it is."""
    if not kind.__module__.startswith(f"{PACKAGE}."):
        return kind
    return next((base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")), kind)


def restore(model: nn.Module) -> None:
    """Give the modules their own classes back."""
    for module in model.modules():
        if (theirs := original(type(module))) is not type(module):  # a compiled module hands attributes on
            module.__class__ = theirs
