"""Layers of a swapped model: a mechanism with its weights in place of transformers' attention function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fast_attention import checks
from fast_attention.engine.tracing import traced
from fast_attention.integrations import relative, visible
from fast_attention.integrations.cache import StateLayer, layer_of
from fast_attention.integrations.visible import Visibility
from fast_attention.mechanism import Mechanism
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.hybrid.by_length import Part, covered, exact_for
from fast_attention.nn.bound import Bound

CHILD = "fast_attention"  # what the module that holds a layer's mechanism is called in the attention module


class Swapped(nn.Module):
    """A layer's mechanism with its weights, in place of transformers' attention function.

    Args:
        bound: The mechanism.
        unchanged: Whether this is exact attention because nothing else was asked for, or nothing else would do.
        positions: What the model's positions add to the layer's scores, where that is known.
    """

    def __init__(self, bound: Bound, *, unchanged: bool = False, positions: relative.Positions | None = None) -> None:
        super().__init__()
        self.bound, self.unchanged, self.positions = bound, unchanged, positions
        self.hooks: tuple[Any, ...] = ()

    def exact(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, cache: StateLayer | None) -> Tensor | None:
        """The outputs of a call, behind a ``cache`` if there is one, that comes to exact attention; None of another.

        The mechanism is not asked for its weights then, nor checked: short texts cost what the original model takes.
        """
        bound, keys = self.bound, k.shape[-2]
        if traced() or not visibility.is_whole or checks.empty(q, k, v):
            return None
        if bound._forward_pre_hooks or bound._forward_hooks or bound.members is not None:
            return None
        if cache is not None:
            is_step = visibility.is_causal or q.shape[-2] == 1
            return cache.exact(q, k, v) if visibility.tokens is None and is_step else None
        if q.shape[:2] != k.shape[:2]:
            return None
        short, key_mask = exact_for(bound.mechanism, keys), visibility.key_mask(keys)
        if short is None:
            return None
        if key_mask is None:
            return softmax_attention(q, k, v, is_causal=visibility.is_causal, scale=short.scale)
        k, v, mask = checks.without_masked(k, v, key_mask, "qkv")
        if short is bound.mechanism:
            return softmax_attention(q, k, v, key_mask=mask, is_causal=visibility.is_causal, scale=short.scale)
        return covered(q, k, v, mask, Part(short, ()), is_causal=visibility.is_causal)

    def state_in(self, cache: Any, module: nn.Module) -> StateLayer | None:
        """The layer of transformers' cache that keeps the mechanism's state; None where keys and values are kept."""
        index = getattr(module, "layer_idx", None)
        if (
            not keeps_state(self.bound.mechanism)
            or module.training
            or not getattr(module, "is_causal", False)
            or None in (cache, index)
        ):
            return None
        return layer_of(cache, int(index or 0), self.bound)

    def adds_positions(self, visibility: Any) -> bool:
        """Whether the mechanism makes what positions add to the scores, so that the model need not, for all pairs."""
        is_served = isinstance(visibility, Visibility) and visibility.complete
        return is_served and relative.serves(self.bound.mechanism, self.positions)

    def added(self, position_bias: Tensor, visibility: Visibility, q: Tensor, k: Tensor) -> dict[str, Tensor]:
        """The arguments that change scores, made of the model's ``position_bias``."""
        positions, tokens = self.positions, visibility.tokens
        if self.adds_positions(visibility):
            assert positions is not None
            if not positions.by_token or tokens is None:
                return {}
            if torch.compiler.is_compiling():
                visible.assert_contiguous(tokens)
                return {}
            if bool(visible.contiguous(tokens)):
                return {}
        if position_bias.ndim == 0:
            assert positions is not None
            position_bias = positions.dense(q, k)
        return {"position_bias": position_bias}

    def extra_repr(self) -> str:
        """Whether it is the model's own attention."""
        return "unchanged" if self.unchanged else ""


def like_module(bound: Bound, module: nn.Module, model: nn.Module) -> Bound:
    """A mechanism on the device and in the dtype of a layer, or of its model: a quantized layer may have no numbers."""
    numbers = (p for part in (module, model) for p in part.parameters() if p.is_floating_point())
    like = next(numbers, None)
    return bound if like is None else bound.to(device=like.device, dtype=like.dtype)


def keeps_state(mechanism: Mechanism[Any, Any]) -> bool:
    """Whether transformers' cache holds a mechanism's own state, not keys and values."""
    traits = mechanism.traits
    return traits.memory in ("constant", "window") or (traits.memory is not None and not traits.cross)


def adds_positions(module: nn.Module, visibility: Any) -> bool:
    """Whether a module's mechanism makes what positions add to its scores, under a mask."""
    swapped = module._modules.get(CHILD)
    return isinstance(swapped, Swapped) and swapped.adds_positions(visibility)


def layers_of(model: nn.Module) -> dict[str, Swapped]:
    """The mechanisms in a swapped model, by the names of their attention modules."""
    end = f".{CHILD}"
    return {name.removesuffix(end): part for name, part in model.named_modules() if isinstance(part, Swapped)}
