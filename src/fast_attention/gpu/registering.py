"""Registers functions that launch kernels as torch operations: sizes for the compiler, gradients of any order.

And what operations do to their tensors before a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

from fast_attention.engine.tracing import symbolic


def operation(name: str, arguments: str, results: str, run: Callable[..., Any], like: Callable[..., Any]) -> Any:
    """An operation ``fast_attention::name`` that calls ``run``; ``like`` says the sizes of what it returns."""

    def launched(*given: Any) -> Any:
        with torch.cuda.device_of(given[0]):  # Triton launches on the current device
            return run(*given)

    schema = f"({arguments}) -> {results}"
    registered = library.custom_op(f"fast_attention::{name}", launched, mutates_args=(), schema=schema)
    registered.register_fake(like)
    return registered


def differentiable(
    registered: Any, plain: Callable[..., Any], backward: Callable[..., Any], *, tensors: int, visible: int
) -> None:
    """Give an operation its gradient.

    Args:
        registered: What ``operation`` returned.
        plain: The same function in operations that autograd follows: for gradients that are differentiated again.
        backward: ``(tensors, results, gradients of results, numbers)`` to one gradient for each tensor.
        tensors: How many arguments are tensors or None; numbers follow.
        visible: How many results are the function's; the others are kept for the backward pass alone.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        ctx.numbers = inputs[tensors:]
        ctx.mark_non_differentiable(*results[visible:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:tensors], *results)

    def vjp(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        given, results = ctx.saved_tensors[:tensors], ctx.saved_tensors[tensors:]
        none = [None] * len(ctx.numbers)
        if all(x is None for x in gradients[:visible]):
            return *[None] * tensors, *none
        if torch.is_grad_enabled() and not symbolic():
            return *_again(plain, given, ctx.numbers, gradients[:visible]), *none
        gradients_in = backward(given, results, gradients, ctx.numbers)
        needed = zip([*gradients_in, *[None] * (tensors - len(gradients_in))], ctx.needs_input_grad, strict=False)
        return *(x if need else None for x, need in needed), *none

    registered.register_autograd(vjp, setup_context=save)


def _again(
    plain: Callable[..., Any], given: tuple[Tensor | None, ...], numbers: tuple[Any, ...], gradients: Any
) -> list[Tensor | None]:
    """Gradients of the tensors that can be differentiated again."""
    twins = [None if x is None else x.view_as(x) for x in given]  # one tensor may be passed twice
    wanted = [x for x in twins if x is not None and x.requires_grad]
    with torch.autocast(wanted[0].device.type, enabled=False):
        results = plain(*twins, *numbers)
        results = results if isinstance(results, tuple) else (results,)
        pairs = [(y, g) for y, g in zip(results, gradients, strict=True) if g is not None and y.requires_grad]
        ends, starts = [y for y, _ in pairs], [g for _, g in pairs]
        gradients_in = iter(torch.autograd.grad(ends, wanted, starts, create_graph=True, allow_unused=True))
    return [next(gradients_in) if x is not None and x.requires_grad else None for x in twins]


def contiguous(*tensors: Tensor) -> list[Tensor]:
    """Tensors whose numbers of one token lie side by side, as kernels read them."""
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]


def as_bytes(key_mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A key mask as kernels read it, for the tokens of ``like``."""
    if key_mask is None:
        return None
    rows = key_mask if key_mask.stride(-1) == 1 else key_mask.contiguous()
    return rows.view(torch.uint8).expand(like.shape[:-1])


def empty(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As large as each."""
    return tuple(x.new_empty(x.shape) for x in tensors)


def rest_like(out: Tensor, keep: bool) -> Tensor:
    """Room for what rounding takes of outputs, where they are rounded and it is kept."""
    return out.new_empty(out.shape if keep and out.dtype != torch.float32 else (0,))


def zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient, or zeros where there is none."""
    return torch.zeros_like(like) if gradient is None else gradient


def some(x: Tensor | None, other: Tensor) -> Tensor:
    """``x``, or a tensor that is not read where there is none."""
    return other if x is None else x


def strides(mask: Tensor | None) -> tuple[int, int]:
    """Of batch and heads."""
    return (0, 0) if mask is None else (mask.stride(0), mask.stride(1))


def power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
