"""Gives a Hugging Face model exact speed-ups."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from fast_attention import core
from fast_attention.integrations import calls, forward_pass, fresh, module_classes, probing, unpadding
from fast_attention.integrations.exact import masks
from fast_attention.integrations.exact.attention import BIAS, CAP, POSITIONS, SINKS, SUPPORTED
from fast_attention.integrations.fresh import SWAPPED
from fast_attention.integrations.hugging_face import swap_back
from fast_attention.integrations.probing import AttentionCall
from fast_attention.integrations.report import ExactLayer, ExactReport, largest_difference, tensors
from fast_attention.mechanism import Unsupported

WITHOUT_CORE = "what ran before: tiles need the compiled core"
DEVIATES = 1e-4  # of a probe's outputs, relative to the largest, beyond which a form is not what the model computes


def swap(
    model: PreTrainedModel, probe: dict[str, Any] | None, skip_padding: bool | None
) -> tuple[list[ExactLayer], bool, list[str]]:
    """Let a model compute what it computes in our forms: its layers, whether it skips padding, and remarks.

    It is as it was where nothing is gained.

    Raises:
        Unsupported: ``skip_padding=True`` and the model cannot.
    """
    notes: list[str] = []
    probing.check_loaded(model)
    try:
        calls_ours = _enter(model)
        layers = _layers(model, probe, notes, probes=calls_ours)
        skips = calls_ours and skip_padding is not False and _skips(model, wanted=bool(skip_padding), notes=notes)
        if not ExactReport(model, tuple(layers), skips).gains:
            swap_back(model)
    except BaseException:
        swap_back(model)
        raise
    return layers, skips, notes


def _enter(model: PreTrainedModel) -> bool:
    """Let a model call our functions, which run what it ran where they do not pay; whether it has any to call."""
    fresh.own_configs(model)
    model.__dict__[SWAPPED] = model.name_or_path
    module_classes.exchange(model, exact=True)
    calls_ours = False
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and (
            part.config.model_type in module_classes.ALIBI or part._can_set_attn_implementation()
        ):
            named = str(part.config._attn_implementation)
            part.config._attn_implementation_internal = masks.NAMES.get(named, named)
            calls_ours = True
    forward_pass.enter_calls(model, forward_pass.EXACT)
    return calls_ours


def _layers(
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
            kind = module_classes.original(type(call.module)).__name__
            layers[name] = ExactLayer(name, kind, *sizes, computes, runs, start, padded)
        _check(model, forward)
    for name, module in model.named_modules():
        if (form := getattr(module, "exact_form", None)) is not None:
            why = core.unavailable()
            runs, start = (f"{WITHOUT_CORE} ({why})", None) if why else form()
            old = layers.get(name)
            sizes = (old.heads, old.head_dim, old.is_causal) if old else (*probing.sizes(module), False)
            computes = old.computes if old else "attention in its own code"
            kind = module_classes.original(type(module)).__name__
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
    weights = (*call.module.parameters(), *model.parameters())
    dtype = next((p.dtype for p in weights if p.is_floating_point()), torch.float32)
    shortest = masks.shortest(dtype)
    extra = "".join(f", with {NAMED.get(name, name)}" for name in call.changes)
    if call.crosses and POSITIONS in call.changes:
        return "attention to another sequence", "torch's kernel, without zeros for all pairs", shortest, None
    if call.crosses:
        return f"attention to another sequence{extra}", *before
    if named not in masks.NAMES.values():
        return f"{order}attention by {named}{extra}", *before
    if not {*call.changes} <= {*SUPPORTED}:
        return f"{order}attention{extra}", *before
    if CAP in call.changes and (why := core.unavailable()):
        return f"{order}attention{extra}", f"{WITHOUT_CORE} ({why})", None, None
    whole = f"{order or 'full '}attention{extra}"
    if POSITIONS in call.changes and (seen is None or seen.is_whole):
        return whole, "torch's kernel, which reads a number for each offset", shortest, shortest
    if CAP in call.changes and seen is not None and seen.is_whole:
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
        start = shortest if named == masks.NAMES["eager"] else masks.pays_from(seen.keys_left, seen.keys_right, dtype)
        return f"{order}attention in {window}{extra}", "in tiles", start, shortest
    if named == masks.NAMES["eager"]:
        return whole, "torch's fused kernel in place of plain operations", shortest, shortest
    return whole, "torch's kernel, as before", None, shortest


NAMED = {SINKS: "sinks", CAP: "a soft cap", BIAS: "positions in the scores", POSITIONS: "positions in the scores"}


def _check(model: PreTrainedModel, forward: Any) -> None:
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
        wanted, got = tensors(wanted), tensors(got)
        if padded:
            wanted, got = map(_tokens, wanted), map(_tokens, got)
        off = largest_difference([*wanted], [*got])
        dtype = next(model.parameters()).dtype
        if not off <= max(DEVIATES, 8 * torch.finfo(dtype).eps):
            raise Unsupported(
                f"{type(model).__name__} gives other outputs in our forms (off by {off:.1e} in a probe of "
                f"{probing.PROBE} tokens), so that it was left as it was"
            )


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """An output (B, L, ...) without that of the last token of the first row, which is padding; others whole."""
    return x if x.ndim < 3 else torch.cat([x[0, :-1], x[1:].flatten(0, 1)])


def _skips(model: PreTrainedModel, *, wanted: bool, notes: list[str]) -> bool:
    """Whether the model skips padding from now on.

    Raises:
        Unsupported: That was asked for, and it cannot.
    """
    try:
        unpadding.try_skipping(model, unpadding.WHERE_IT_PAYS)
    except Unsupported as error:
        if wanted:
            raise
        if unpadding.can_skip(model):
            notes.append(f"Padding is computed: {str(error).removeprefix('skip_padding=True').lstrip(': ')}")
        return False
    return True
