"""Gives functions a hand-written gradient, for loops over blocks that autograd would record slice by slice.

(Autograd through slices is quadratic: the gradient of every slice is a tensor of full length.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine.precision import Precision
from fast_attention.engine.tracing import batched, traced, wrapped

Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class CustomGradient:
    """A fast forward and backward pass beside the plain differentiable form of the same function.

    ``plain`` serves where tensors are traced (compile, export, ``make_fx``, fake tensors), where a function transform
    or a derivative forwards runs (``torch.func``), and where the gradient is to be differentiated again or is a batch
    of gradients (``is_grads_batched``); the other two serve everywhere else and may work in place on what they make.

    Args:
        plain: ``(*tensors, **settings) -> outputs``, one tensor or a tuple, in operations that autograd follows.
        forward: ``(*tensors, keep, **settings) -> (outputs, kept)``: the same outputs, and the tensors that the
            backward pass needs beside inputs and outputs (normalisers, coarse states); ``()`` unless ``keep``.
        backward: ``(inputs, outputs, kept, gradients, **settings)`` -> one gradient or None per input tensor.
            Gradients of outputs that nobody used are zeros.
    """

    plain: Callable[..., Any]
    forward: Callable[..., tuple[Any, tuple[Tensor, ...]]]
    backward: Callable[..., Tensors]

    def __call__(self, *tensors: Tensor | None, **settings: Any) -> Any:
        """The outputs, by whichever form serves. A tensor may be None; settings are no tensors."""
        if traced() or wrapped(tensors):
            return self.plain(*tensors, **settings)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return _Function.apply(self, settings, *tensors)
        return self.forward(*tensors, keep=False, **settings)[0]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: CustomGradient, settings: dict[str, Any], *tensors: Tensor | None) -> Any:
        ctx.precision = Precision.current(tensors)
        outputs, kept = rule.forward(*tensors, keep=True, **settings)
        flat = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.rule, ctx.settings, ctx.sizes = rule, settings, (len(tensors), len(flat))
        ctx.save_for_backward(*tensors, *flat, *kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        count, number = ctx.sizes
        saved = ctx.saved_tensors
        inputs, outputs, kept = saved[:count], saved[count : count + number], saved[count + number :]
        with ctx.precision.restored():
            if torch.is_grad_enabled() or batched(gradients):
                with torch.enable_grad():
                    return None, None, *_differentiable(ctx.rule.plain, ctx.settings, inputs, gradients)
            return None, None, *ctx.rule.backward(inputs, outputs, kept, gradients, **ctx.settings)


def _differentiable(
    plain: Callable[..., Any],
    settings: dict[str, Any],
    inputs: tuple[Tensor | None, ...],
    gradients: tuple[Tensor, ...],
) -> list[Tensor | None]:
    """Gradients that can be differentiated again."""
    twins = [None if x is None else x.view_as(x) for x in inputs]  # one tensor may be passed twice
    wanted = [x for x in twins if x is not None and x.requires_grad]
    outputs = plain(*twins, **settings)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(x, g) for x, g in zip(outputs, gradients, strict=True) if x.requires_grad]  # log scales need not
    outputs, gradients = zip(*pairs, strict=True)
    grad_in = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True))
    return [next(grad_in) if x is not None and x.requires_grad else None for x in twins]
