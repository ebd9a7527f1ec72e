"""A small forward pass through a Hugging Face model, in which every attention layer ought to be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fast_attention.integrations import attention
from fast_attention.integrations.attention import Call
from fast_attention.mechanism import Unsupported

PROBE = 8  # tokens
MEMORY = 5  # tokens of another sequence, which a decoder attends to: others than its own, so that this shows
CROSSES = ("encoder_attn", "crossattention", "cross_attn")  # what such layers are called


def found(model: PreTrainedModel, given: dict[str, Any] | None) -> tuple[Callable[[], None], dict[str, Call]]:
    """A forward pass that can be repeated, and every attention module that it calls, by name, in order.

    Args:
        model: The model, its attention already ours.
        given: Inputs of the caller's; None: tried out here, the model without its head first.

    Raises:
        Unsupported: The model called no attention, or no inputs for it are known here.
        ValueError: The model does not take the caller's inputs.
    """
    tries = _tries(model) if given is None else iter([(model, given)])
    refusal = ""
    for part, inputs in tries:

        def forward(part: Any = part, inputs: dict[str, Any] = inputs) -> None:
            with torch.no_grad(), _evaluating(model):
                part(**inputs)

        try:
            with attention.recorded() as asked:
                forward()
        except Unsupported:
            raise
        except Exception as error:  # whatever a model says of inputs that it cannot use
            first = next(iter(str(error).strip().splitlines()), "")
            refusal = f"{', '.join(inputs)}: {type(error).__name__}: {first}"
            continue
        if not asked:
            raise Unsupported(
                f"{type(model).__name__} called no attention in a probe forward: it has none "
                f"({model.config.model_type}), and nothing was swapped"
            )
        names = {module: name for name, module in model.named_modules()}
        return forward, {names[call.module]: call for call in asked}
    if given is not None:
        raise ValueError(f"probe: {type(model).__name__} does not take {refusal}")
    raise Unsupported(
        f"{type(model).__name__}: no probe is known that it takes ({refusal or f'it reads {model.main_input_name}'}): "
        "give small inputs of its own, swap(model, ..., probe={'input_ids': ...})"
    )


def uncalled(model: nn.Module, called: dict[str, Call]) -> dict[str, tuple[nn.Module, int, int]]:
    """Attention layers that a probe did not call, by name, each with its heads and its width per head."""
    missed = {}
    for name, module in model.named_modules():
        near = any(f"{name}.".startswith(f"{one}.") or f"{one}.".startswith(f"{name}.") for one in called)
        heads, width = (
            next((x for key in keys if isinstance(x := getattr(module, key, None), int)), None)
            for keys in (("num_heads", "num_attention_heads", "n_heads"), ("head_dim", "attention_head_size"))
        )
        if "Attention" in type(module).__name__ and not near and heads and width and _ours(module, called):
            missed[name] = (module, heads, width)
    return missed


def _ours(module: nn.Module, called: dict[str, Call]) -> bool:
    """Whether the module calls its attention through transformers' interface: its file is one that does."""
    return any(type(module).__module__ == type(call.module).__module__ for call in called.values())


def probe_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Small inputs of the kind that a model takes: token numbers, or pixels, or both.

    Raises:
        Unsupported: It reads something else.
    """
    config, known = model.config, inspect.signature(model.forward).parameters
    given: dict[str, Tensor] = {}
    if "pixel_values" in known and (model.main_input_name == "pixel_values" or "input_ids" in known):
        pixels = _pixels(model)
        if pixels is not None:
            given["pixel_values"] = pixels
    if "input_ids" in known:
        usual = [i for i in range(4, 4 + PROBE) if i < config.get_text_config().vocab_size] or [0]
        given["input_ids"] = torch.tensor([(usual * PROBE)[:PROBE]] * 2, device=model.device)
    if not given:
        raise Unsupported(
            f"{type(model).__name__} reads {model.main_input_name}, and a probe is made of token numbers or pixels: "
            f"give one of its own, swap(model, ..., probe={{{model.main_input_name!r}: ...}})"
        )
    if config.is_encoder_decoder and "decoder_input_ids" in known:
        text = config.get_text_config(decoder=True)
        usual = [i for i in range(4, 2 + PROBE) if i < text.vocab_size] or [0]
        given["decoder_input_ids"] = torch.tensor([(usual * PROBE)[: PROBE - 2]] * 2, device=model.device)
    elif "encoder_hidden_states" in known and _crosses(model):
        width = getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
        given["encoder_hidden_states"] = torch.zeros(2, MEMORY, width, device=model.device, dtype=model.dtype)
    return {**given, **({"use_cache": False} if "use_cache" in known else {})}


def _tries(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, dict[str, Any]]]:
    """The model without its head, which may want more; then all of it; then without pixels beside its text."""
    base = model.base_model
    if base is not model and isinstance(base, PreTrainedModel):
        known = inspect.signature(base.forward).parameters
        if base.main_input_name in known:
            yield base, probe_inputs(base)
    given = probe_inputs(model)
    yield model, given
    if {"pixel_values", "input_ids"} <= {*given}:
        yield model, {name: x for name, x in given.items() if name != "pixel_values"}


def _crosses(model: PreTrainedModel) -> bool:
    """Whether a decoder has layers that attend to another sequence."""
    named = any(name.endswith(CROSSES) for name, _ in model.named_modules())
    return named or bool(getattr(model.config, "add_cross_attention", False))


def _pixels(model: PreTrainedModel) -> Tensor | None:
    """Black pictures (2, C, H, W), or clips (2, frames, C, H, W); None where the config names no size."""
    parts = [getattr(model.config, name, None) for name in ("vision_config", "encoder")]
    config = next((c for c in (model.config, *parts) if getattr(c, "image_size", None)), None)
    if config is None:
        return None
    size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
    frames = [config.num_frames] if getattr(config, "num_frames", None) else []
    channels = getattr(config, "num_channels", 3)
    return torch.zeros(2, *frames, channels, *size, device=model.device, dtype=model.dtype)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
