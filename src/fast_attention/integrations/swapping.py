"""``swap`` and ``swap_back``: any model's attention, in one line, with a report of every layer."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fast_attention import catalogue
from fast_attention.integrations import timm, torch_nn
from fast_attention.integrations.randomness import kept
from fast_attention.integrations.report import Layer, Report, listed
from fast_attention.mechanism import Mechanism, Unsupported

Wanted = Mechanism[Any, Any] | str | dict[str, Mechanism[Any, Any] | str]


def swap(
    model: nn.Module, mechanism: Wanted, *, max_len: int | None = None, probe: dict[str, Any] | None = None
) -> Report:
    """Replace the attention of a model, in place: a Hugging Face model, ``nn.Transformer`` and its layers, any model
    with an ``nn.MultiheadAttention`` in it, or one of timm's vision transformers.

    The projections stay, with their weights; a mechanism's own weights are drawn here and belong to the model from then
    on. Afterwards a small forward pass has called every layer. A layer that the mechanism cannot serve keeps exact
    attention, and the report says why. Draws come from torch's generators as they stand, and these are left as they
    were: for other draws, seed anew by ``torch.manual_seed`` or redraw by ``Bound.redraw``.

    Args:
        model: The model, or a module that holds some.
        mechanism: For all layers; or by patterns of layer names such as ``{"*layer.[0-3].*": "Local(window=64)"}``, of
            which the first that fits decides and layers that none fits stay exact.
        max_len: The longest sequence, for mechanisms with ``traits.bounded``; a Hugging Face model's own if not given.
        probe: Small inputs for the forward pass, by name, where a Hugging Face model is of a kind for which none are
            known (the error says so), or has layers that the known ones do not reach (the report does).

    Returns:
        What was done: print it.

    Raises:
        Unsupported: Nothing can be swapped. The message says what was found and what would work. The model then has
            exact attention, also where an earlier swap had put something else.
        ValueError: ``mechanism`` names none, a pattern fits no layer, the model does not take ``probe``, or a mechanism
            needs ``max_len``.
    """
    parsed: Any = mechanism
    if isinstance(mechanism, dict):
        parsed = {pattern: catalogue.parse(each) for pattern, each in mechanism.items()}
    else:
        parsed = catalogue.parse(mechanism)
    swap_back(model)
    try:
        with kept(model):
            return _swapped(model, parsed, max_len, probe)
    except BaseException:
        swap_back(model)
        raise


def _swapped(model: nn.Module, parsed: Any, max_len: int | None, probe: dict[str, Any] | None) -> Report:
    """Hugging Face models first, then torch's and timm's modules wherever they are."""
    layers: list[Layer] = []
    refused: list[str] = []
    known: list[str] = []  # names that a pattern may fit: a Hugging Face model's layers have their names in it
    for name, part in pretrained(model).items():
        from fast_attention.integrations import hugging_face

        try:
            found = hugging_face.swap(part, parsed, max_len, probe)
        except Unsupported as error:
            refused.append(str(error))
        else:
            layers += [_renamed(layer, name) for layer in found]
            known += [layer.name for layer in found]
    for library in (torch_nn, timm):
        try:
            layers += library.swap(model, parsed, max_len)
        except Unsupported as error:
            refused.append(str(error))
    if not any(layer.replaced for layer in layers):
        raise Unsupported(refused[0] if refused else _nothing(model))
    for pattern in parsed if isinstance(parsed, dict) else ():
        if not any(fnmatchcase(name, pattern) for name in known + [layer.name for layer in layers]):
            raise ValueError(f"the pattern {pattern!r} fits no attention layer; {listed(layers)}")
    return Report(model, tuple(layers), tuple(refused))


def swap_back(model: nn.Module) -> bool:
    """The model with exact attention as it was before ``swap``, its weights as they are now.

    Returns:
        Whether anything had been swapped.
    """
    with kept(model):
        undone = torch_nn.swap_back(model) | timm.swap_back(model)
        for part in pretrained(model).values():
            from fast_attention.integrations import hugging_face

            undone = hugging_face.swap_back(part) or undone
    return undone


def from_pretrained(folder: str | os.PathLike[str], *, architecture: type | None = None, **settings: Any) -> Any:
    """The swapped Hugging Face model that its ``save_pretrained`` wrote: the same layers, weights, random features.

    transformers' own ``AutoModel.from_pretrained(folder)`` gives it too, once this package was imported; this one takes
    the class that was saved, and no file whose weights are not all of that model.

    Args:
        folder: Where it lies, or its name on the hub.
        architecture: The model's class, where it is none of transformers' own.
        settings: What transformers' ``from_pretrained`` takes: ``dtype``, ``device_map``, ``revision`` and the like.

    Raises:
        FileNotFoundError: There is no swapped model in the folder.
        ValueError: Its files do not belong together, or are damaged.
    """
    from fast_attention.integrations import saving

    with kept():
        return saving.from_pretrained(folder, architecture=architecture, **settings)


def pretrained(model: nn.Module) -> dict[str, Any]:
    """The Hugging Face models in a model, the outermost of each, by name."""
    library = sys.modules.get("transformers.modeling_utils")  # where it was never imported, none of its models is
    if library is None:
        return {}
    found: dict[str, Any] = {}
    for name, part in model.named_modules():
        inside = any(name.startswith(f"{other}.") or other == "" for other in found)
        if isinstance(part, library.PreTrainedModel) and not inside:
            found[name] = part
    return found


def _renamed(layer: Layer, prefix: str) -> Layer:
    return replace(layer, name=f"{prefix}.{layer.name}") if prefix else layer


def _nothing(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} holds no Hugging Face model, no nn.MultiheadAttention and no attention of timm's: "
        "nothing was swapped. In a model of your own, put fast_attention.MultiheadAttention or TokenMixer in place of "
        "its attention"
    )
