"""Swaps the attention of a Hugging Face model, for a mechanism or for faster forms of what it computes, and back.

A probe forward finds the layers, and a second one checks the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from fast_attention import core
from fast_attention.biases.sinks import SINKS_ARE_TAKEN, TakesSinks
from fast_attention.integrations import (
    calls,
    forward_pass,
    fresh,
    modules,
    probing,
    relative,
    report,
    visible,
)
from fast_attention.integrations.attention import CHILD, NAME, SINKS, Swapped, keeps_state, layers_of
from fast_attention.integrations.exact import attention as exact
from fast_attention.integrations.exact.attention import BIAS, CAP, NAMES, POSITIONS, SUPPORTED
from fast_attention.integrations.fresh import BEFORE, SWAPPED
from fast_attention.integrations.probing import AttentionCall
from fast_attention.integrations.report import ExactLayer, ExactReport, Layer, quality
from fast_attention.mechanism import Attention, Mechanism, Shape, Unsupported
from fast_attention.mechanisms.dense.softmax import Softmax
from fast_attention.nn.bound import Bound

WITHOUT_CORE = "what ran before: tiles need the compiled core"
DEVIATES = 1e-4  # of a probe's outputs, relative to the largest, beyond which a form is not what the model computes
NAMED = {SINKS: "sinks", CAP: "a soft cap", BIAS: "positions in the scores", POSITIONS: "positions in the scores"}


def swap(
    model: PreTrainedModel, wanted: Any, max_len: int | None, probe: dict[str, Any] | None = None,
    skip_padding: bool = False,
) -> tuple[Layer, ...]:  # fmt: skip
    """Replace the attention of every layer that ``wanted`` names; a caller undoes what is left where that fails.

    Raises:
        Unsupported: The model does not call its attention through transformers' interface, no layer can be swapped, or
            the model cannot skip padding.
        ValueError: The model does not take the inputs of ``probe``.
    """
    _check(model)
    probing.check_loaded(model)
    fresh.own_configs(model)
    _call_ours(model)
    forward, called, run = probing.find_layers(model, probe)
    layers = [_plan(name, call, report.chosen(name, wanted), model, max_len) for name, call in called.items()]
    if not any(layer.replaced for layer, _ in layers):
        raise Unsupported(report.nothing_swapped(model, [layer for layer, _ in layers]))
    uncalled = [_uncalled(name, call, model, run) for name, call in probing.uncalled(model, called).items()]
    for layer, bound in (*layers, *uncalled):
        if bound is not None:
            swapped = Swapped(bound, unchanged=not layer.replaced, positions=relative.of(model, layer.name))
            _install(model.get_submodule(layer.name), swapped)
    _check_called(model, [layer.name for layer, _ in layers], forward)
    forward_pass.enter_calls(model)
    if skip_padding:
        if others := [layer.name for layer, bound in uncalled if bound is None]:
            raise Unsupported(
                f"skip_padding=True: {others[0]} keeps attention of its own, to which a packed row is one text"
            )
        forward_pass.try_skipping(model)
    model.name_or_path = ""  # adapters that are trained now must not be put on the exact model of that name
    return tuple(layer for layer, _ in (*layers, *uncalled))


def restore(model: PreTrainedModel, layers: dict[str, Swapped]) -> None:
    """Put mechanisms, by name, into a model whose weights are about to be loaded."""
    _check(model)
    _call_ours(model)
    for name, swapped in layers.items():
        _install(model.get_submodule(name), swapped)


def swap_back(model: PreTrainedModel) -> bool:
    """Restore a model's own attention, after either kind of swap; whether it had been swapped."""
    if SWAPPED not in model.__dict__:
        return False
    model.name_or_path = model.__dict__.pop(SWAPPED)
    forward_pass.set_skipping(model, False)
    forward_pass.leave_calls(model)
    modules.restore_classes(model)
    for name, swapped in layers_of(model).items():
        for hook in swapped.hooks:
            hook.remove()
        del model.get_submodule(name)._modules[CHILD]
    for config in fresh.configs(model):
        named = config._attn_implementation
        config._attn_implementation_internal = vars(config).pop(BEFORE, exact.FORMER.get(named, named))
    return True


def _call_ours(model: PreTrainedModel) -> None:
    """Let a model, and all models in it, call our attention function; configs keep what they named before."""
    model.__dict__[SWAPPED] = model.name_or_path
    former = {id(config): config._attn_implementation for config in fresh.configs(model)}
    modules.exchange_classes(model, exact=False)
    if model.config.model_type in modules.ALIBI:
        model.config._attn_implementation = NAME
    else:
        model.set_attn_implementation(NAME)
    for config in fresh.configs(model):
        vars(config).pop(BEFORE, None)
        if config._attn_implementation == NAME and id(config) in former:
            vars(config)[BEFORE] = former[id(config)]


def _check(model: PreTrainedModel) -> None:
    if model.config.model_type not in modules.ALIBI and not model._can_set_attn_implementation():
        own = probing.own_attention(model)
        raise Unsupported(
            f"{type(model).__name__} does not call its attention through transformers' attention interface"
            f"{own and f': it has {own}'}, and nothing can be put in its place. What would work: BERT, RoBERTa, ESM, "
            "ModernBERT, ViT, BART, T5, GPT-2, Llama, Mistral and other models of the interface, BLOOM and MPT, or "
            "torch's nn.MultiheadAttention and nn.Transformer"
        )


def _check_called(model: PreTrainedModel, names: list[str], forward: Callable[..., None]) -> None:
    """Run a forward pass of a swapped model, and raise ``Unsupported`` unless it called every one of the layers.

    A second one has padding, of which some models make masks of their own.
    """
    ran: set[nn.Module] = set()  # a layer raises itself where other attention ran
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: ran.add(module))
    try:
        forward()
    except Unsupported:
        raise
    except Exception as error:  # of a layer whose masks or shapes are other than the interface's
        layer = next((name for name in names if model.get_submodule(name) not in ran), "a part behind its attention")
        raise Unsupported(
            f"{type(model).__name__} does not run with the layers swapped: {layer} raised {type(error).__name__}: "
            f"{error}. What would work: the attention of its own, which it has again"
        ) from error
    finally:
        handle.remove()
    if uncalled_layers := [name for name in names if model.get_submodule(name) not in ran]:
        raise Unsupported(f"after the swap these layers were not called: {', '.join(uncalled_layers)}")
    try:
        forward(padded=True)
    except Unsupported as error:
        raise Unsupported(
            f"{type(model).__name__} does not run on a padded batch with the layers swapped: {error}"
        ) from error
    except Exception:  # of a model that reads such a mask in another way, swapped or not
        return


def _uncalled(
    name: str, call: AttentionCall, model: PreTrainedModel, run: set[nn.Module]
) -> tuple[Layer, Bound | None]:
    """The report of a layer that called no attention in the probe, and exact attention for it; None: it keeps its own.

    ``run``: the modules whose forward pass the probe ran.
    """
    layer, bound = _plan(name, call, None, model, None)
    if call.module in run:
        why = "it forms attention itself, not through transformers' interface"
        return replace(layer, mechanism="its own attention", why=why), None
    if getattr(getattr(call.module, "config", None), "_attn_implementation", NAME) == NAME:
        return replace(layer, why="the probe did not call it: give swap(..., probe={...}) inputs that do"), bound
    why = "it follows a config of its own, which set_attn_implementation does not reach"
    return replace(layer, why=why), None


def _plan(
    name: str, call: AttentionCall, mechanism: Mechanism[Any, Any] | None, model: PreTrainedModel, max_len: int | None
) -> tuple[Layer, Bound]:
    """The report of a layer, and its mechanism: the wanted one, or exact attention where that cannot serve."""
    positions = relative.of(model, name)
    reason = report.UNNAMED if mechanism is None else _unsupported_reason(mechanism, call, positions)
    chosen_mechanism: Any = Softmax() if mechanism is None or reason else mechanism
    if positions is not None and positions.bias is not None:
        chosen_mechanism = relative.with_bias(chosen_mechanism, positions.bias) or chosen_mechanism
    longest = max_len or getattr(model.config, "max_position_embeddings", None) or 0
    shape = Shape(call.heads, call.head_dim, longest if chosen_mechanism.traits.needs_max_len else 0)
    like = _like(call, model)
    bound = relative.bound(chosen_mechanism, shape, positions).to(device=like.device, dtype=like.dtype)
    learned, why, untrained = sum(p.numel() for p in bound.parameters()), reason, ""
    if mechanism is not None and not reason:
        why = "; ".join(_notes(chosen_mechanism, call, positions))
        untrained = quality(mechanism, learned, window=call.window, is_causal=call.is_causal)
    kind, sizes = type(call.module).__name__, (call.heads, call.head_dim, call.is_causal)
    return Layer(name, kind, *sizes, repr(chosen_mechanism), why, not reason, learned, untrained), bound


def _like(call: AttentionCall, model: nn.Module) -> Tensor:
    """A tensor of a layer's device and dtype, or of its model's: a quantized layer may have no numbers."""
    weights = (*call.module.parameters(), *model.parameters())
    return next((p for p in weights if p.is_floating_point()), torch.empty(()))


def _unsupported_reason(
    mechanism: Mechanism[Any, Any], call: AttentionCall, positions: relative.Positions | None
) -> str:
    """The reason why a mechanism cannot serve a layer; empty if it can."""
    traits = mechanism.traits
    if not isinstance(mechanism, Attention):
        return report.no_queries(mechanism)
    if call.is_causal and not traits.causal:
        return f"the layer is causal, and {mechanism!r} is not (traits.causal)"
    if not call.is_causal and not traits.bidirectional:
        return f"the layer sees later tokens, and {mechanism!r} is causal only (traits.bidirectional)"
    if call.crosses and (reason := report.crossing_refusal(mechanism)):
        return reason
    if call.is_causal and call.times > 1 and keeps_state(mechanism):
        return (
            f"the layer attends {call.times} times in one pass of the model, and {mechanism!r} would take every token "
            "into its one state as often (what would work: mechanisms that keep keys and values, such as Softmax())"
        )
    if SINKS in call.changes and not (isinstance(mechanism, TakesSinks) and mechanism.takes_sinks):
        return f"the layer has sinks (s_aux), which {mechanism!r} does not take: {SINKS_ARE_TAKEN}"
    if reason := relative.unsupported_reason(mechanism, tuple(x for x in call.changes if x != SINKS), positions):
        return reason
    if not traits.padding:
        return f"{mechanism!r} takes no padded batches (traits.padding)"
    assert call.visibility is not None
    sides = call.visibility.keys_left, call.visibility.keys_right
    return "" if traits.mask or visible.within_window(mechanism, *sides) else visible.window_refusal(mechanism, *sides)


def _notes(mechanism: Mechanism[Any, Any], call: AttentionCall, positions: relative.Positions | None) -> list[str]:
    """Remarks on a layer that was swapped, for the report."""
    notes, takes_masks = relative.notes(mechanism, call.changes, positions), mechanism.traits.mask
    if (dropout := _dropout(call.module)) and not takes_masks:
        notes.append(report.dropout_note(dropout))
    if call.window and not visible.within_window(mechanism, call.window - 1, call.window - 1):
        outcome = "takes a mask of every pair" if takes_masks else "refuses"
        notes.append(f"beyond {call.window:,} tokens, the layer's window, it {outcome}")
    return notes


def _dropout(module: nn.Module) -> float:
    """The fraction of attention weights that a module drops in training."""
    for name in ("attention_dropout", "attn_dropout", "attn_dropout_p", "dropout"):
        dropout = getattr(module, name, None)
        if isinstance(dropout, nn.Dropout):
            return dropout.p
        if isinstance(dropout, float):
            return dropout
    return 0.0


def _install(module: nn.Module, swapped: Swapped) -> None:
    module.add_module(CHILD, swapped)
    swapped.hooks = (
        module.register_forward_pre_hook(_enter, with_kwargs=True),
        module.register_forward_hook(_leave, always_call=True),
    )


def _enter(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Note transformers' cache, which the attention function does not get, and whether the mechanism adds positions."""
    swapped = module._modules.get(CHILD)
    if not isinstance(swapped, Swapped):
        return
    given = (*args, *kwargs.values())
    cache = next((x for x in given if isinstance(x, Cache)), None) if getattr(module, "is_causal", False) else None
    adds_positions = swapped.positions is not None and any(swapped.adds_positions(x) for x in given)
    state = None if cache is None else swapped.state_in(cache, module)
    calls.begin(module, cache=state, adds_positions=adds_positions)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    """Forget the cache, and raise if other attention ran; ``output`` is None where an error was raised."""
    call, swapped = calls.end(module), module._modules.get(CHILD)
    if isinstance(swapped, Swapped) and call is not None and output is not None and not call.attended:
        raise RuntimeError(
            f"{type(module).__name__} was swapped for {swapped.bound.mechanism!r}, and other attention ran: "
            "the model's implementation was set meanwhile. Call swap_back(model) first, or swap it again"
        )


# Faster forms of the same ---------------------------------------------------------------------------------------------


def swap_exactly(model: PreTrainedModel, probe: dict[str, Any] | None, skip_padding: bool | None) -> ExactReport:
    """Let a model compute what it computes in our forms.

    It is as it was where nothing is gained. A caller undoes what is left where that fails.

    Raises:
        Unsupported: ``skip_padding=True`` and the model cannot.
    """
    notes: list[str] = []
    probing.check_loaded(model)
    calls_ours = _call_exact_forms(model)
    layers = _exact_layers(model, probe, notes, probes=calls_ours)
    skips = calls_ours and skip_padding is not False
    if skips:
        try:
            forward_pass.try_skipping(model)
        except Unsupported as error:
            if skip_padding:
                raise
            skips = False
            if forward_pass.can_skip(model):
                why = str(error).removeprefix("skip_padding=True").lstrip(": ")
                notes.append(f"Padding is computed: {why}")
    found = ExactReport(model, tuple(layers), skips, tuple(notes))
    if not found.gains:
        swap_back(model)
    return found


def _call_exact_forms(model: PreTrainedModel) -> bool:
    """Let a model call our functions, which run what it ran where they do not pay; whether it has any to call."""
    fresh.own_configs(model)
    model.__dict__[SWAPPED] = model.name_or_path
    modules.exchange_classes(model, exact=True)
    calls_ours = False
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and (
            part.config.model_type in modules.ALIBI or part._can_set_attn_implementation()
        ):
            named = str(part.config._attn_implementation)
            part.config._attn_implementation_internal = NAMES.get(named, named)
            calls_ours = True
    forward_pass.enter_calls(model, forward_pass.EXACT)
    return calls_ours


def _exact_layers(
    model: PreTrainedModel, probe: dict[str, Any] | None, notes: list[str], *, probes: bool
) -> list[ExactLayer]:
    """The layers of a model, from a probe that our forms are compared on too; of own code alone without one.

    BigBird changes its attention for good where it is given a short text.
    """
    layers: dict[str, ExactLayer] = {}
    refusal = ""
    try:
        if not probes and any(getattr(part, "exact_form", None) for part in model.modules()):
            raise Unsupported("its own code computes attention")
        with calls.forced():
            forward, called, _ = probing.find_layers(model, probe)
    except Unsupported as error:
        refusal = str(error)
    else:
        for name, call in called.items():
            computes, runs, start, padded = _describe(call, model)
            padded = None if model.main_input_name == "pixel_values" else padded  # pictures are never padded
            sizes = (call.heads, call.head_dim, call.is_causal)
            kind = modules.original_class(type(call.module)).__name__
            layers[name] = ExactLayer(name, kind, *sizes, computes, runs, start, padded)
        _compare(model, forward)
    for name, module in model.named_modules():
        if (form := getattr(module, "exact_form", None)) is not None:
            why = core.unavailable()
            runs, start = (f"{WITHOUT_CORE} ({why})", None) if why else form()
            old = layers.get(name)
            sizes = (old.heads, old.head_dim, old.is_causal) if old else (*probing.sizes(module), False)
            computes = old.computes if old else "attention in its own code"
            kind = modules.original_class(type(module)).__name__
            layers[name] = ExactLayer(name, kind, *sizes, computes, runs, start)
    if refusal and not layers:
        notes.append(refusal)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted(layers.values(), key=lambda layer: order[layer.name])


def _describe(call: AttentionCall, model: Any) -> tuple[str, str, int | None, int | None]:
    """Say for a layer that calls the interface what it computes, what runs it, and from how many tokens, padded too."""
    seen, order = call.visibility, "causal " if call.is_causal else ""
    before = "what ran before", None, None
    named = getattr(getattr(call.module, "config", model.config), "_attn_implementation", None)
    dtype = _like(call, model).dtype
    shortest = exact.shortest(dtype)
    extra = "".join(f", with {NAMED.get(name, name)}" for name in call.changes)
    if call.crosses and POSITIONS in call.changes:
        return "attention to another sequence", "torch's kernel, without zeros for all pairs", shortest, None
    if call.crosses:
        return f"attention to another sequence{extra}", *before
    if named not in NAMES.values():
        return f"{order}attention by {named}{extra}", *before
    if not {*call.changes} <= {*SUPPORTED}:
        return f"{order}attention{extra}", *before
    if CAP in call.changes and (why := core.unavailable()):
        return f"{order}attention{extra}", f"{WITHOUT_CORE} ({why})", None, None
    whole = f"{order or 'full '}attention{extra}"
    if POSITIONS in call.changes and (seen is None or seen.is_whole):
        form = "torch's kernel, a block of queries at a time" if core.unavailable() else "in tiles"
        return whole, form, shortest, shortest
    if seen is not None and seen.is_whole and (CAP in call.changes or exact.in_tiles(seen, dtype)):
        return whole, "in tiles", shortest, shortest
    if seen is None or not seen.complete:
        return whole, "torch's kernel, as before", None, None
    if seen.sequences is not None:
        size = int((seen.sequences[0] == 0).sum())
        start = max(size + 1, shortest)
        return f"{order}attention in chunks of {size:,} tokens{extra}", "each chunk by itself", start, shortest
    if seen.keys_left is not None or seen.keys_right is not None:
        window = "a window" if seen.keys_left is None else f"a window of {seen.keys_left:,} tokens back"
        if not call.is_causal:
            window += f" and {'all' if seen.keys_right is None else format(seen.keys_right, ',')} ahead"
        start = shortest if named == NAMES["eager"] else exact.pays_from(seen.keys_left, seen.keys_right, dtype)
        return f"{order}attention in {window}{extra}", "in tiles", start, shortest
    if named == NAMES["eager"]:
        return whole, "torch's fused kernel in place of plain operations", shortest, shortest
    return whole, "torch's kernel, as before", None, shortest


def _compare(model: PreTrainedModel, forward: Any) -> None:
    """Compare our forms with what ran before on the probe, whole and padded.

    Raises:
        Unsupported: They give something else.
    """
    for padded in (False, True):
        try:
            with calls.original():
                wanted = forward(padded)
        except Exception:  # of a model that takes no padding there
            return
        with calls.forced():
            got = forward(padded)
        wanted, got = report.tensors(wanted), report.tensors(got)
        if padded:
            wanted, got = map(_without_padding, wanted), map(_without_padding, got)
        off = report.largest_difference([*wanted], [*got])
        dtype = next(model.parameters()).dtype
        if not off <= max(DEVIATES, 8 * torch.finfo(dtype).eps):
            raise Unsupported(
                f"{type(model).__name__} gives other outputs in our forms (off by {off:.1e} in a probe of "
                f"{probing.PROBE} tokens), so that it was left as it was"
            )


def _without_padding(x: Tensor) -> Tensor:
    """An output (B, L, ...) without that of the last token of the first row, which is padding; others whole."""
    return x if x.ndim < 3 else torch.cat([x[0, :-1], x[1:].flatten(0, 1)])
