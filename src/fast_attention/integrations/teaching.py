"""Lets attention modules that compute scores, or what positions add to them, themselves leave that to the swap."""

from __future__ import annotations

import sys
from importlib import import_module

from torch import nn

# The modules of ours that have subclasses, KINDS, for the attention modules of a file of transformers' models.
TAUGHT = {
    "transformers.models.bloom.modeling_bloom": "alibi",
    "transformers.models.mpt.modeling_mpt": "alibi",
    "transformers.models.umt5.modeling_umt5": "umt5",
    "transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer": "conformers",
    "transformers.models.wav2vec2_bert.modeling_wav2vec2_bert": "conformers",
    "transformers.models.parakeet.modeling_parakeet": "parakeet",
}
PACKAGE = __name__.rpartition(".")[0]
ALIBI = ("bloom", "mpt")  # kinds of models which do not call transformers' interface before they are taught to


def teach(model: nn.Module) -> None:
    """Exchange the classes of such attention modules for subclasses with the same parts."""
    for module in model.modules():
        ours = TAUGHT.get(type(module).__module__)
        if ours is not None:
            module.__class__ = import_module(f"{PACKAGE}.{ours}").KINDS.get(type(module), type(module))


def undo(model: nn.Module) -> None:
    """Give the modules their own classes back."""
    for module in model.modules():
        kind = type(module)
        if kind in getattr(sys.modules[kind.__module__], "KINDS", {}).values():
            module.__class__ = kind.__bases__[0]
