"""Records what every attention layer of a model is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fast_attention.engine import heads
from fast_attention.mechanism import Attention
from fast_attention.nn.bound import Bound


class Call(NamedTuple):
    """One layer's call: the mechanism, its inputs (q, k, v: (1, H, L, E)), and the rest of its arguments."""

    layer: str
    bound: Bound
    q: Tensor
    k: Tensor
    v: Tensor
    keywords: dict[str, Any]


@torch.no_grad()
def calls_during(model: nn.Module, run: Callable[[], Any]) -> list[Call]:
    """The calls of all bound attentions in a model during ``run``, in their order."""
    calls: list[Call] = []

    def watch(name: str, part: Bound) -> Any:
        layer = name.removesuffix(".bound").removesuffix(".fast_attention").removesuffix(".attention")

        def keep(module: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
            chosen = {x: options[x] for x in ("is_causal", "key_mask", "attn_mask") if options.get(x) is not None}
            before = sum(call.bound is part for call in calls)  # some models run one layer several times
            again = f", time {before + 1}" if before else ""
            q, k, v = inputs[:3]
            k, v = heads.repeated(q.shape[-3], k=k, v=v)
            calls.append(Call(layer + again, part, q, k, v, chosen))

        return part.register_forward_pre_hook(keep, with_kwargs=True)

    bounds = {name: part for name, part in model.named_modules() if isinstance(part, Bound)}
    hooks = [watch(name, part) for name, part in bounds.items() if isinstance(part.mechanism, Attention)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def reading(model: nn.Module, tokens: Tensor) -> list[Call]:
    """The calls while a model reads tokens (1, L), without a cache: its state would be advanced past the mechanism's
    own call."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return calls_during(model, lambda: model(tokens, **options))
