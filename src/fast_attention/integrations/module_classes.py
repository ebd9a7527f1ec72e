"""Exchanges attention modules of transformers that compute in their own code for our subclasses with the same parts."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

PACKAGE = __name__.rpartition(".")[0]
# Folders of transformers' models, and our files with subclasses for the modules in them: ``MECHANISMS`` leave scores,
# or what positions add to them, to a mechanism; ``EXACT`` ones compute what the module computes, in forms of ours.
FILES = {
    "bloom": "alibi", "mpt": "alibi", "umt5": "own_positions", "wav2vec2_conformer": "own_positions",
    "wav2vec2_bert": "own_positions", "parakeet": "own_positions",
}  # fmt: skip
EXACT_FILES = {
    "longformer": "exact.longformer", "led": "exact.longformer", "big_bird": "exact.big_bird", "bloom": "alibi",
    "mpt": "alibi", **dict.fromkeys(("longt5", "mt5", "pop2piano", "switch_transformers", "t5", "umt5"), "exact.t5"),
}  # fmt: skip
ALIBI = ("bloom", "mpt")  # kinds of models whose masks are made by transformers' functions, and that call no interface


def exchange(model: nn.Module, *, exact: bool) -> None:
    """Exchange the classes of such modules in a model."""
    for module in model.modules():
        folder, _, file = type(module).__module__.removeprefix("transformers.models.").partition(".")
        ours = (EXACT_FILES if exact else FILES).get(folder) if file == f"modeling_{folder}" else None
        if ours is not None:
            kinds: dict[type, type[Any]] = vars(import_module(f"{PACKAGE}.{ours}"))["EXACT" if exact else "MECHANISMS"]
            module.__class__ = kinds.get(type(module), type(module))


def restore(model: nn.Module) -> None:
    """Give the modules their own classes back."""
    for module in model.modules():
        kind, base = type(module), type(module).__bases__[0]
        if kind.__module__.startswith(f"{PACKAGE}.") and base.__module__.startswith("transformers.models."):
            module.__class__ = base
