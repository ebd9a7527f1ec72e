"""Finds the attention layers of a Hugging Face model by a small forward pass, the probe."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fast_attention.integrations import calls, modules
from fast_attention.integrations.modules import evaluating
from fast_attention.integrations.visible import Visibility
from fast_attention.mechanism import Unsupported

PROBE = 8  # tokens
MEMORY = 5  # tokens of the encoder's sequence, another number than the decoder's, so that cross attention is recognised
HEADS, WIDTHS = (
    ("num_heads", "num_attention_heads", "n_heads"),
    ("head_dim", "attention_head_size", "key_value_proj_dim"),
)
STATES = "encoder_hidden_states"  # the argument of models that may attend to another sequence
STATE_WIDTHS = ("cross_attention_hidden_size", "encoder_hidden_size", "hidden_size", "d_model")  # theirs, in configs
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what the code of a layer names that calls transformers' interface


class AttentionCall(NamedTuple):
    """One call of the attention function by an attention module, as a probe records it."""

    module: nn.Module
    heads: int
    head_dim: int
    visibility: Visibility | None  # what the queries see; None: all, or all up to their own
    is_causal: bool
    crosses: bool  # keys of another sequence than the queries
    changes: tuple[str, ...]  # arguments that alter the scores
    window: int | None = None  # the layer's setting, whatever the length
    times: int = 1  # that the module called attention in one pass of the model


_recording: ContextVar[list[AttentionCall] | None] = ContextVar("attention calls", default=None)


def recording() -> list[AttentionCall] | None:
    """The list that a probe records calls in; None outside of a probe."""
    return _recording.get()


def record(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility | None, changes: Iterable[str], *,
    is_causal: bool = False, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Record a call of attention instead of computing it: the outputs (B, L, H, E) are zeros."""
    recorded_calls = recording()
    assert recorded_calls is not None
    causal, crosses = is_causal if visibility is None else visibility.is_causal, q.shape[-2] != k.shape[-2]
    recorded_calls.append(
        AttentionCall(module, q.shape[1], q.shape[-1], visibility, causal, crosses, tuple(changes), window)
    )
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


@contextmanager
def _recorded() -> Iterator[tuple[list[AttentionCall], set[nn.Module]]]:
    """The calls of attention in the block, and all modules whose forward pass runs in it."""
    recorded_calls: list[AttentionCall] = []
    run: set[nn.Module] = set()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: run.add(module))
    token = _recording.set(recorded_calls)
    try:
        yield recorded_calls, run
    finally:
        _recording.reset(token)
        handle.remove()


def check_loaded(model: PreTrainedModel) -> None:
    """Raise ``Unsupported`` where weights hold no numbers."""
    if any(p.is_meta for p in model.parameters()):
        raise Unsupported(
            f"{type(model).__name__} has weights on the meta device, which hold no numbers, so that no probe can run: "
            "load the model first, or model.to_empty(device=...), and swap then"
        )


def find_layers(
    model: PreTrainedModel, inputs_given: dict[str, Any] | None
) -> tuple[Callable[..., Any], dict[str, AttentionCall], set[nn.Module]]:
    """A forward pass to repeat, also with padding, the modules that call attention in it, by name, and all that it ran.

    Args:
        model: The model, its attention already ours.
        inputs_given: Inputs of the caller's; None: several are tried, the model without its head first.

    Raises:
        Unsupported: The model called no attention, or no inputs for it are known here.
        ValueError: The model does not take the caller's inputs.
    """
    attempts = _tries(model) if inputs_given is None else iter([(model, inputs_given)])
    refusal = ""
    for part, inputs in attempts:

        def forward(padded: bool = False, part: Any = part, inputs: dict[str, Any] = inputs) -> Any:
            inputs = {**inputs, **_padding(part, inputs)} if padded else inputs
            calls.begin(model, arguments=frozenset(inputs))
            try:
                with torch.no_grad(), evaluating(model):
                    return part(**inputs)
            finally:
                calls.end(model)

        try:
            with _recorded() as (recorded_calls, run):
                forward()
        except Unsupported:
            raise
        except Exception as error:  # whatever a model says of inputs that it cannot use
            first = next(iter(str(error).strip().splitlines()), "")
            refusal = f"{', '.join(inputs)}: {type(error).__name__}: {first}"
            continue
        if not recorded_calls:
            raise Unsupported(
                f"{type(model).__name__} called no attention of transformers' interface in a probe forward: it has "
                f"{own_attention(model) or f'none ({model.config.model_type})'}, and nothing was swapped"
            )
        names = {module: name for name, module in model.named_modules()}
        times = Counter(call.module for call in recorded_calls)
        return forward, {names[call.module]: call._replace(times=times[call.module]) for call in recorded_calls}, run
    if Visibility.__name__ in refusal:  # which took the place of the mask that only the interface reads
        layers = own_attention(model) or own_attention(model, interface=True)
        raise Unsupported(
            f"{type(model).__name__} computes with masks in its own code, not through transformers' interface alone: "
            f"it has {layers}, and nothing was swapped"
        )
    if inputs_given is not None:
        raise ValueError(f"probe: {type(model).__name__} does not take {refusal}")
    raise Unsupported(
        f"{type(model).__name__}: no probe is known that it takes ({refusal or f'it reads {model.main_input_name}'}): "
        "give small inputs of its own, swap(model, ..., probe={'input_ids': ...})"
    )


def _padding(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """A mask under which the first row of token numbers is shorter; none where the model takes none, or has one."""
    ids = inputs.get("input_ids")
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] < 2 or "attention_mask" in inputs or not takes_mask:
        return {}
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    return {"attention_mask": mask}


def uncalled(model: nn.Module, called: dict[str, AttentionCall]) -> dict[str, AttentionCall]:
    """The attention layers that a probe did not call, by name, as far as their modules tell what they would call.

    Raises:
        Unsupported: One calls its attention through the interface, and its sizes are not known.
    """
    kinds = {type(call.module): call for call in called.values()}
    uncalled_layers = {}
    for name, module in model.named_modules():
        is_related = any(f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in called)
        if is_related:
            continue
        kind, config = type(module), getattr(module, "config", None)
        heads, width = sizes(module, config)
        if like := kinds.get(kind):  # a layer of the same class, which was called
            heads, width = heads or like.heads, width or like.head_dim
        if heads and width:
            named = "Attention" in kind.__name__ and any(kind.__module__ == each.__module__ for each in kinds)
            if like or named or calls_interface(kind):
                is_causal = bool(getattr(module, "is_causal", False))
                uncalled_layers[name] = AttentionCall(module, heads, width, None, is_causal, False, ())
        elif calls_interface(kind):
            raise Unsupported(
                f"the probe did not run {name} ({kind.__name__}), which calls its attention through transformers' "
                "interface: give inputs that run it, swap(model, ..., probe={'input_ids': ...})"
            )
    return uncalled_layers


def sizes(*parts: Any) -> tuple[int, int]:
    """Heads and the width of one, as the first part says that names them; 0 where none does."""
    heads, width = (
        next((x for part in parts for key in keys if isinstance(x := getattr(part, key, None), int)), 0)
        for keys in (HEADS, WIDTHS)
    )
    return heads, width


def own_attention(model: nn.Module, *, interface: bool = False) -> str:
    """Describe the attention of a model that does not call transformers' interface; empty where there is none.

    It is the innermost modules that have weights and are called an attention, by class, with number and a name;
    ``interface``: those that call the interface too.
    """
    named = {name: type(module) for name, module in model.named_modules()
             if "Attention" in type(module).__name__ and any(True for _ in module.parameters())}  # fmt: skip
    names: dict[type[nn.Module], list[str]] = {}
    for name, kind in named.items():
        if (interface or not calls_interface(kind)) and not any(other.startswith(f"{name}.") for other in named):
            names.setdefault(kind, []).append(name)
    kinds = [f"{kind.__name__} ({len(each)} of them, the first is {each[0]})" for kind, each in names.items()]
    return f"attention of its own, {', '.join(kinds)}" if kinds else ""


def calls_interface(kind: type[nn.Module]) -> bool:
    """Whether modules of a class call their attention through transformers' interface, as their code says."""
    code = getattr(inspect.unwrap(modules.original_class(kind).forward), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def probe_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Small inputs for a model: token numbers, or pixels, or both.

    Raises:
        Unsupported: It reads something else.
    """
    config, parameters = model.config, inspect.signature(model.forward).parameters
    inputs: dict[str, Tensor] = {}
    if "pixel_values" in parameters and (model.main_input_name == "pixel_values" or "input_ids" in parameters):
        pixels = _pixels(model)
        if pixels is not None:
            inputs["pixel_values"] = pixels
    if "input_ids" in parameters:
        inputs["input_ids"] = _numbers(config.get_text_config(), PROBE).to(model.device)
    if not inputs:
        raise Unsupported(
            f"{type(model).__name__} reads {model.main_input_name}, and a probe is made of token numbers or pixels: "
            f"give one of its own, swap(model, ..., probe={{{model.main_input_name!r}: ...}})"
        )
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = _numbers(config.get_text_config(decoder=True), PROBE - 2).to(model.device)
    return {**inputs, **({"use_cache": False} if "use_cache" in parameters else {})}


def _numbers(config: Any, length: int) -> Tensor:
    """Numbers of tokens, (2, length)."""
    ids = [i for i in range(4, 4 + length) if i < getattr(config, "vocab_size", 0)] or [0]
    return torch.tensor([(ids * length)[:length]] * 2)


def _tries(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, dict[str, Any]]]:
    """Models and inputs to try: without the head, which may need more; then all of it; then without pixels."""
    base = model.base_model
    if base is not model and isinstance(base, PreTrainedModel):
        parameters = inspect.signature(base.forward).parameters
        if base.main_input_name in parameters:
            yield from _with_states(base, probe_inputs(base))
    inputs = probe_inputs(model)
    yield from _with_states(model, inputs)
    if {"pixel_values", "input_ids"} <= {*inputs}:
        yield model, {name: x for name, x in inputs.items() if name != "pixel_values"}


def _with_states(model: PreTrainedModel, inputs: dict[str, Any]) -> Iterator[tuple[PreTrainedModel, dict[str, Any]]]:
    """Inputs with the states of another sequence, where a model may take some, in each width of its config's."""
    if STATES in inspect.signature(model.forward).parameters and "decoder_input_ids" not in inputs:
        config = model.config.get_text_config()
        for width in dict.fromkeys(filter(None, (getattr(config, name, None) for name in STATE_WIDTHS))):
            yield model, {**inputs, STATES: torch.zeros(2, MEMORY, width, device=model.device, dtype=model.dtype)}
    yield model, inputs


def _pixels(model: PreTrainedModel) -> Tensor | None:
    """Black pictures (2, C, H, W), or clips (2, frames, C, H, W); None where the config names no size."""
    nested = [getattr(model.config, name, None) for name in ("vision_config", "encoder")]
    config = next((c for c in (model.config, *nested) if getattr(c, "image_size", None)), None)
    if config is None:
        return None
    size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
    frames = [config.num_frames] if getattr(config, "num_frames", None) else []
    channels = getattr(config, "num_channels", 3)
    return torch.zeros(2, *frames, channels, *size, device=model.device, dtype=model.dtype)
