"""``swap`` and ``swap_back``: any model's attention, in one line, with a report of every layer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Any, overload

from torch import nn

from fast_attention import catalogue, checks
from fast_attention.integrations import crossover, modules, report, timm, torch_nn
from fast_attention.integrations.crossover import ExactUpTo
from fast_attention.integrations.modules import MODELS, restored_generators
from fast_attention.integrations.report import ExactReport, Layer, Report, quality
from fast_attention.mechanism import Attention, Mechanism, Unsupported
from fast_attention.nn.multihead import MultiheadAttention
from fast_attention.nn.token_mixer import TokenMixer
from fast_attention.refusals import is_module

OURS = (MultiheadAttention, TokenMixer)
Wanted = Mechanism[Any, Any] | str | dict[str, Mechanism[Any, Any] | str]


@overload
def swap(
    model: nn.Module, mechanism: None = None, *, probe: dict[str, Any] | None = None, skip_padding: bool | None = None
) -> ExactReport: ...


@overload
def swap(
    model: nn.Module, mechanism: Wanted, *, exact_up_to: ExactUpTo | None = None, max_len: int | None = None,
    probe: dict[str, Any] | None = None, skip_padding: bool | None = None,
) -> Report: ...  # fmt: skip


def swap(
    model: nn.Module, mechanism: Wanted | None = None, *, exact_up_to: ExactUpTo | None = None,
    max_len: int | None = None, probe: dict[str, Any] | None = None, skip_padding: bool | None = None,
) -> Report | ExactReport:  # fmt: skip
    """Make a model's attention faster, in place: with the same results, or by another mechanism.

    **Without a mechanism** every layer of a Hugging Face model keeps the function that it has, computed as what it is:
    windows and chunks in tiles, positions in the scores without a tensor of all pairs, padded batches of encoders
    without the padding. Below the length where that pays, a layer runs what it ran. Weights, config, caches and saved
    folders stay those of the original. ``report.verify(batch)`` compares on a batch of yours.

    **With a mechanism** that replaces the attention of a Hugging Face model, of ``nn.Transformer`` and its layers, of
    any model with an ``nn.MultiheadAttention`` in it, or of one of timm's vision transformers. The projections stay,
    with their weights; a mechanism's own weights are drawn here and belong to the model from then on. A small forward
    pass of a Hugging Face model checks that every replaced layer is called. A layer that the mechanism cannot serve
    keeps exact attention, and the report says why. Draws come from torch's generators, which are then set back: for
    other draws, seed by ``torch.manual_seed`` or redraw by ``Bound.redraw``.

    Args:
        model: The model, or a module that holds some.
        mechanism: None for the same results. Else for all layers; or by patterns of layer names such as
            ``{"*layer.[0-3].*": "Local(window=64)"}``, of which the first that fits decides and layers that none fits
            stay exact.
        exact_up_to: Run exact attention for queries that see at most so many tokens, and the mechanism for others:
            ``ByLength`` of both. ``"auto"`` measures, at each layer's heads and widths, from which length on the
            mechanism is faster here, which takes seconds.
        max_len: Longest sequence, for mechanisms with ``traits.needs_max_len``. Default: a Hugging Face model's own.
        probe: Small inputs for the forward pass, by name, where a Hugging Face model is of a kind for which none are
            known (the error says so), or has layers that the known ones do not reach (the report does).
        skip_padding: For Hugging Face's encoders: compute the tokens of a padded batch in one packed row, without the
            padding, and pad the outputs again, with zeros. A forward pass checks that every text gets what it gets
            alone. Saved and loaded with a mechanism. Compiled models and calls for attention matrices stay padded.
            None: wherever the model can, without a mechanism; nowhere, with one.

    Returns:
        The report of every layer; with a mechanism, also of what its outputs are worth before training. Print it.

    Raises:
        Unsupported: Nothing can be swapped. The message names the obstacles and what would work. The model then has
            exact attention, also where it had been swapped before. Or padding cannot be skipped.
        ValueError: ``exact_up_to`` or ``max_len`` without a mechanism; ``mechanism`` names none, one of several
            patterns fits no layer, the model does not take ``probe``, a mechanism needs ``max_len``, or ``exact_up_to``
            is neither a number from 1 on nor ``"auto"``.
        TypeError: ``model`` is no ``nn.Module``, such as a name; or ``mechanism`` is a class, such as ``Local``.
    """
    is_module("model", model)
    if skip_padding is not None:
        checks.flag("skip_padding", skip_padding)
    parsed: Any = mechanism
    if mechanism is None:
        for name, value in (("exact_up_to", exact_up_to), ("max_len", max_len)):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} without a mechanism: swap(model) computes the same results at any length. Leave "
                    f"it out, or name a mechanism, swap(model, 'Local(window=64)', {name}={value!r})"
                )
    elif isinstance(mechanism, dict):
        parsed = {pattern: catalogue.parse(each) for pattern, each in mechanism.items()}
    else:
        parsed = catalogue.parse(mechanism)
    if exact_up_to is not None:
        crossover.check(exact_up_to)
    swap_back(model)
    if MODELS in sys.modules:  # whose own saving would lose mechanisms, also in a part of a model
        import_module("fast_attention.integrations.saving")
    try:
        with restored_generators(model):
            if mechanism is None:
                return _exact(model, probe, skip_padding)
            return _swapped(model, parsed, exact_up_to, max_len, probe, bool(skip_padding))
    except BaseException:
        swap_back(model)
        raise


def _exact(model: nn.Module, probe: dict[str, Any] | None, skip_padding: bool | None) -> ExactReport:
    """Let every Hugging Face model in a model compute what it computes in forms that are faster."""
    layers, notes, skips = [], [], False
    submodels = pretrained(model)
    for name, submodel in submodels.items():
        from fast_attention.integrations import hugging_face

        try:
            found = hugging_face.swap_exactly(submodel, probe, skip_padding)
        except Unsupported as error:
            if skip_padding:
                raise
            hugging_face.swap_back(submodel)
            notes.append(str(error))
            continue
        layers += [_renamed(layer, name) for layer in found.layers]
        notes, skips = [*notes, *found.notes], skips or found.skips_padding
    if not submodels:
        notes.append(
            f"{type(model).__name__} holds no Hugging Face model, whose layers say what they compute. What would work: "
            "a mechanism, swap(model, 'Local(window=64)')"
        )
    return ExactReport(model, tuple(layers), skips, tuple(dict.fromkeys(notes)))


def _swapped(
    model: nn.Module, parsed: Any, exact_up_to: ExactUpTo | None, max_len: int | None, probe: dict[str, Any] | None,
    skip_padding: bool,
) -> Report:  # fmt: skip
    """Swap Hugging Face models first, then torch's and timm's modules wherever they are."""
    submodels = pretrained(model)
    if skip_padding and not submodels:
        raise Unsupported(
            f"skip_padding=True is for Hugging Face's encoders, of which {type(model).__name__} holds none"
        )
    if exact_up_to not in (None, "auto"):
        parsed = crossover.exact_below(parsed, exact_up_to)
    attempts: list[tuple[str, nn.Module, Callable[[Any], Sequence[Layer]], Callable[[], Any]]] = []
    for name, submodel in submodels.items():
        from fast_attention.integrations import hugging_face

        run = partial(hugging_face.swap, submodel, max_len=max_len, probe=probe, skip_padding=skip_padding)
        attempts.append((name, submodel, run, partial(hugging_face.swap_back, submodel)))
    for library in (torch_nn, timm):
        undo = partial(modules.swap_back, model, library.OURS)
        attempts.append(("", model, partial(_exchange, library, model, max_len=max_len), undo))
    layers: list[Layer] = []
    refused: list[str] = []
    names: list[str] = []  # names that a pattern may fit: a Hugging Face model's layers have their names in it
    for name, part, run, undo in attempts:
        try:
            found = crossover.measured(parsed, part, run, undo) if exact_up_to == "auto" else run(parsed)
        except Unsupported as error:
            if skip_padding:
                raise
            undo()
            refused.append(str(error))
            continue
        layers += [_renamed(layer, name) for layer in found]
        names += [layer.name for layer in found]
    if not any(layer.replaced for layer in layers):
        why = report.nothing_swapped(model, layers) if layers else _nothing_found(model)
        raise Unsupported(refused[0] if refused else why)
    for pattern in parsed if isinstance(parsed, dict) else ():
        if not any(fnmatchcase(name, pattern) for name in names + [layer.name for layer in layers]):
            raise ValueError(f"the pattern {pattern!r} fits no attention layer; {report.listed(layers)}")
    return Report(model, tuple(layers), tuple(refused))


def _exchange(library: Any, model: nn.Module, wanted: Any, max_len: int | None) -> tuple[Layer, ...]:
    """Replace every attention module of ``torch_nn`` or ``timm`` that ``wanted`` names; weights are shared, names stay.

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
    for module, names in modules.names_in(model, library.is_attention).items():
        name = next((name for name in names if report.chosen(name, wanted) is not None), names[0])
        mechanism: Any = report.chosen(name, wanted)
        heads, head_dim, shown = library.sizes(module)
        if mechanism is None:
            why = report.UNNAMED
        elif not isinstance(mechanism, Attention):
            why = report.no_queries(mechanism)
        else:
            why = library.unsupported_reason(model, name, module, mechanism)
        sizes = (name, type(module).__name__, heads, head_dim, False)
        layer = Layer(*sizes, shown, why, replaced=False)
        if mechanism is not None and not why:
            new, remarks = library.replacement(name, module, mechanism, max_len or 0)
            if others := [other for other in names if other != name]:
                remarks.append(f"the same module is {', '.join(others)}")
            learned, why = sum(p.numel() for p in new.attention.parameters()), "; ".join(remarks)
            layer = Layer(*sizes, repr(mechanism), why, True, learned, quality(mechanism, learned))
            replacements += [(each, new) for each in names]
        layers.append(layer)
    for name, new in replacements:
        modules.replace_module(model, name, new)
    return tuple(layers)


def swap_back(model: nn.Module) -> bool:
    """Undo ``swap``: restore the model's own attention, with the present weights.

    Returns:
        Whether anything had been swapped.
    """
    is_module("model", model)
    with restored_generators(model):
        any_undone = modules.swap_back(model)
        kind = getattr(sys.modules.get(MODELS), "PreTrainedModel", ())
        submodels: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
        for submodel in submodels:  # a part may have been swapped by itself
            from fast_attention.integrations import hugging_face

            any_undone = hugging_face.swap_back(submodel) or any_undone
    return any_undone


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
        OSError: There is no such folder, and no such model on the hub.
        ValueError: Its files do not belong together, or are damaged.
    """
    from fast_attention.integrations import saving

    with restored_generators():
        return saving.from_pretrained(folder, architecture=architecture, **settings)


def pretrained(model: nn.Module) -> dict[str, Any]:
    """The Hugging Face models in a model, by name, without those inside others."""
    library = sys.modules.get(MODELS)  # where it was never imported, none of its models is
    if library is None:
        return {}
    outermost: dict[str, Any] = {}
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{other}.") or other == "" for other in outermost)
        if isinstance(module, library.PreTrainedModel) and not is_inner:
            outermost[name] = module
    return outermost


def _renamed(layer: Any, prefix: str) -> Any:
    return replace(layer, name=f"{prefix}.{layer.name}") if prefix else layer


def _nothing_found(model: nn.Module) -> str:
    ours = (f"{type(x).__name__} {name}".strip() for name, x in model.named_modules() if isinstance(x, OURS))
    if layer := next(ours, ""):
        return (
            f"{type(model).__name__} runs this library's own layers ({layer}), and swap replaces others': nothing was "
            "swapped. What would work: the same layer, built with the other mechanism, that takes the present one's "
            "weights by load_state_dict(..., strict=False)"
        )
    return (
        f"{type(model).__name__} holds no Hugging Face model, no nn.MultiheadAttention and no attention of timm's: "
        "nothing was swapped. In a model of your own, put fast_attention.MultiheadAttention or TokenMixer in place of "
        "its attention"
    )
