"""Swapping the attention of a Hugging Face model: found by a probe, replaced, and checked by another probe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from fast_attention.integrations import attention, calls, probing, weights
from fast_attention.integrations.attention import CHILD, NAME, Call, Swapped, layers_of
from fast_attention.integrations.report import UNNAMED, Layer, chosen, no_queries, nothing, undropped
from fast_attention.integrations.saving import save_pretrained
from fast_attention.mechanism import Attention, Mechanism, Shape, Unsupported
from fast_attention.mechanisms.dense.softmax import Softmax
from fast_attention.nn.bound import Bound

BEFORE = "_fast_attention_before"  # the implementation that the model had
EXACT = "_fast_attention_exact"  # the name of the exact model


def swap(
    model: PreTrainedModel, wanted: Any, max_len: int | None, probe: dict[str, Any] | None = None
) -> tuple[Layer, ...]:
    """Replace the attention of every layer that ``wanted`` names; the model is unchanged if that fails.

    Raises:
        Unsupported: The model does not call its attention through transformers' interface, or no layer can be swapped.
        ValueError: The model does not take the inputs of ``probe``.
    """
    _check(model)
    _loaded(model)
    swap_back(model)
    before = str(model.config._attn_implementation)
    own_config(model)
    try:
        model.set_attn_implementation(NAME)
        forward, found = probing.found(model, probe)
        layers = [_plan(name, call, chosen(name, wanted), model, max_len) for name, call in found.items()]
        if not any(layer.replaced for layer, _ in layers):
            raise Unsupported(nothing(model, [layer for layer, _ in layers]))
        missed = [_missed(name, *sizes) for name, sizes in probing.uncalled(model, found).items()]
        for layer, bound in (*layers, *missed):
            if bound is not None:
                _install(model.get_submodule(layer.name), Swapped(bound, kept=not layer.replaced))
        _check_called(model, [layer.name for layer, _ in layers], forward)
    except BaseException:
        _remove(model)
        model.set_attn_implementation(before)
        raise
    settle(model, before, model.name_or_path)
    model.name_or_path = ""  # adapters that are trained now must not be put on the exact model of that name
    return tuple(layer for layer, _ in (*layers, *missed))


def restore(model: PreTrainedModel, layers: dict[str, Swapped]) -> None:
    """Put mechanisms, by name, into a model whose weights are about to be loaded; ``settle`` ends it."""
    _check(model)
    model.set_attn_implementation(NAME)
    for name, swapped in layers.items():
        _install(model.get_submodule(name), swapped)


def settle(model: PreTrainedModel, before: str, name: str | None) -> None:
    """Make a model with mechanisms in it a swapped one, which had the implementation ``before`` under ``name``."""
    model.__dict__.update({BEFORE: before, EXACT: name})
    weights.listen(model)
    kept: Any = model
    kept.save_pretrained = partial(save_pretrained, model)  # transformers' own would lose the mechanisms


def swap_back(model: PreTrainedModel) -> bool:
    """The model with the attention that it had; whether there was anything to undo."""
    before = removed(model)
    if before is not None:
        model.set_attn_implementation(before)
    return before is not None


def removed(model: PreTrainedModel) -> str | None:
    """Take the mechanisms out of a model: the implementation that it had before, None where it was not swapped."""
    before = model.__dict__.pop(BEFORE, None)
    if before is not None:
        _remove(model)
    return before


def _check(model: PreTrainedModel) -> None:
    if not model._can_set_attn_implementation():
        raise Unsupported(
            f"{type(model).__name__} does not call its attention through transformers' attention interface, so that "
            "nothing can be put in its place. What would work: BERT, RoBERTa, ESM, ModernBERT, ViT, BART, GPT-2, "
            "Llama, Mistral and other models of the interface, or torch's nn.MultiheadAttention and nn.Transformer"
        )


def _loaded(model: PreTrainedModel) -> None:
    if any(p.is_meta for p in model.parameters()):
        raise Unsupported(
            f"{type(model).__name__} has weights on the meta device, which hold no numbers, so that no probe can run: "
            "load the model first, or model.to_empty(device=...), and swap then"
        )


def own_config(model: PreTrainedModel) -> None:
    """A config that no other model shares, which would otherwise be set to call mechanisms that it has not."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for part in model.modules():
        for name, value in [*vars(part).items()]:
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(part, name, copies[id(value)])


def _missed(name: str, module: nn.Module, heads: int, head_dim: int) -> tuple[Layer, Bound | None]:
    """A layer that the probe did not call, with exact attention for those who will; None where it keeps its own."""
    bound, why = None, "it follows a config of its own, which set_attn_implementation does not reach"
    if getattr(getattr(module, "config", None), "_attn_implementation", NAME) == NAME:
        like, why = next(module.parameters()), "the probe did not call it: give swap(..., probe={...}) inputs that do"
        bound = Bound(Softmax(), Shape(heads, head_dim)).to(device=like.device, dtype=like.dtype)
    causal = bool(getattr(module, "is_causal", False))
    return Layer(name, type(module).__name__, heads, head_dim, causal, "Softmax()", why, replaced=False), bound


def _plan(
    name: str, call: Call, mechanism: Mechanism[Any, Any] | None, model: PreTrainedModel, max_len: int | None
) -> tuple[Layer, Bound]:
    """What a layer will run: the mechanism, or exact attention where that cannot serve, with the reason."""
    reason = UNNAMED if mechanism is None else _obstacle(mechanism, call)
    runs: Any = Softmax() if mechanism is None or reason else mechanism
    longest = max_len or getattr(model.config, "max_position_embeddings", None) or 0
    shape = Shape(call.heads, call.head_dim, longest if runs.traits.bounded else 0)
    like = next(model.get_submodule(name).parameters())
    bound = Bound(runs, shape).to(device=like.device, dtype=like.dtype)
    learned = sum(p.numel() for p in bound.parameters())
    notes = [] if reason else _notes(runs, call, _dropout(model.get_submodule(name)))
    kind = type(model.get_submodule(name)).__name__
    made = Layer(
        name,
        kind,
        call.heads,
        call.head_dim,
        call.is_causal,
        repr(runs),
        reason or "; ".join(notes),
        not reason,
        learned,
    )
    return made, bound


def _obstacle(mechanism: Mechanism[Any, Any], call: Call) -> str:
    """Why a mechanism cannot serve a layer; empty if it can."""
    traits = mechanism.traits
    if not isinstance(mechanism, Attention):
        return no_queries(mechanism)
    if call.is_causal and not traits.causal:
        return f"the layer is causal, and {mechanism!r} is not (traits.causal)"
    if call.crosses and not traits.cross:
        return f"the layer attends to another sequence, and {mechanism!r} cannot (traits.cross)"
    if call.extra and not (call.extra == ("position_bias",) and traits.mask):
        return f"the layer adds {', '.join(call.extra)} to its scores, which {mechanism!r} does not form (traits.mask)"
    if not traits.padding:
        return f"{mechanism!r} takes no padded batches (traits.padding)"
    if not (traits.mask or attention.narrower(mechanism, call.back, call.ahead)):
        return attention.window_words(mechanism, call.back, call.ahead)
    return ""


def _notes(mechanism: Mechanism[Any, Any], call: Call, dropped: float) -> list[str]:
    """What to know about a layer that was swapped."""
    notes, free = [], mechanism.traits.mask
    if dropped and not free:
        notes.append(undropped(dropped))
    if call.window and not attention.narrower(mechanism, call.window - 1, call.window - 1):
        beyond = "takes a mask of every pair" if free else "refuses"
        notes.append(f"beyond {call.window:,} tokens, the layer's window, it {beyond}")
    return notes


def _dropout(module: nn.Module) -> float:
    """The fraction of attention weights that a module drops in training."""
    for name in ("attention_dropout", "attn_dropout", "dropout"):
        found = getattr(module, name, None)
        if isinstance(found, nn.Dropout):
            return found.p
        if isinstance(found, float):
            return found
    return 0.0


def _install(module: nn.Module, swapped: Swapped) -> None:
    module.add_module(CHILD, swapped)
    swapped.hooks = (
        module.register_forward_pre_hook(_enter, with_kwargs=True),
        module.register_forward_hook(_leave, always_call=True),
    )


def _enter(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Keep transformers' cache for the attention function, which does not get it."""
    found = [x for x in (*args, *kwargs.values()) if isinstance(x, Cache)]
    cache = found[0] if found else kwargs.get("past_key_values")
    swapped = module._modules.get(CHILD)
    if isinstance(swapped, Swapped):
        calls.begin(module, cache=swapped.state_in(cache, module))


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    """Forget the cache, and see to it that no other attention ran; there is no output where an error is on its way."""
    call, swapped = calls.end(module), module._modules.get(CHILD)
    if isinstance(swapped, Swapped) and call is not None and output is not None and not call.attended:
        raise RuntimeError(
            f"{type(module).__name__} was swapped for {swapped.bound.mechanism!r}, and other attention ran: "
            "the model's implementation was set meanwhile. Call swap_back(model) first, or swap it again"
        )


def _remove(model: PreTrainedModel) -> None:
    model.__dict__.pop("save_pretrained", None)
    model.name_or_path = model.__dict__.pop(EXACT, model.name_or_path)
    weights.deafen(model)
    for name, swapped in layers_of(model).items():
        for hook in swapped.hooks:
            hook.remove()
        del model.get_submodule(name)._modules[CHILD]


def _check_called(model: PreTrainedModel, names: list[str], forward: Callable[[], None]) -> None:
    """Run a forward pass, and raise ``Unsupported`` unless it called every one of the layers."""
    called: set[str] = set()

    def watch(name: str, part: Swapped) -> Any:
        return part.bound.register_forward_hook(lambda module, args, out: called.add(name))

    handles = [watch(name, part) for name, part in layers_of(model).items()]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    silent = [name for name in names if name not in called]
    if silent:
        raise Unsupported(f"after the swap these layers were not called: {', '.join(silent)}")
