"""Functions that ``torch.compile`` takes as one operation each: nothing inside is traced, fused or compiled.

Loops over chunks become dozens of kernels, each with seconds of a C++ compiler, and run no faster than the same loops
do eagerly, which may look at numbers besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, library
from torch._C import DispatchKey

from fast_attention.engine.tracing import exporting

Function = Callable[..., tuple[Tensor, ...]]
GIVEN = "Tensor[] tensors, int[] there, SymInt[] sizes, float[] factors"


class Opaque:
    """A function of tensors, one operation for the compiler; its backward pass runs the function again.

    Args:
        function: ``(*tensors, *numbers) -> outputs``: a tensor may be None; whole numbers come before others.
        empty: As ``function``, but what it returns is uninitialised: for the compiler, which asks for sizes only.

    Exporting, transforms of functions and devices other than the CPU take the function itself.
    """

    def __init__(self, function: Function, empty: Function) -> None:
        self.function = function
        name = f"{function.__module__.rpartition('.')[2]}_{function.__name__.lstrip('_')}"
        self._operation = self._register(f"fast_attention::{name}", empty)

    def _register(self, name: str, empty: Function) -> Callable[..., list[Tensor]]:
        function = self.function

        def forward(tensors: Any, there: Any, sizes: Any, factors: Any) -> list[Tensor]:
            with torch.autocast("cpu", enabled=False):
                return _apart(function(*_placed(tensors, there), *sizes, *factors), tensors)

        def backward(gradients: Any, tensors: Any, there: Any, sizes: Any, factors: Any) -> list[Tensor]:
            with _recording(), torch.autocast("cpu", enabled=False):
                leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
                outputs = function(*_placed(leaves, there), *sizes, *factors)
                return _apart(_pulled(outputs, gradients, leaves), gradients)

        def saved(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
            tensors, *ctx.numbers = inputs
            ctx.save_for_backward(*tensors)

        def gradient(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
            none = [None if numbers else [] for numbers in ctx.numbers]  # an empty list passes for one of tensors
            return pulled(gradients, list(ctx.saved_tensors), *ctx.numbers), *none

        custom = library.custom_op
        pulled = custom(
            f"{name}_backward", backward, mutates_args=(), schema=f"(Tensor[] gradients, {GIVEN}) -> Tensor[]"
        )
        pulled.register_fake(lambda gradients, tensors, *numbers: [x.new_empty(x.shape) for x in tensors])
        operation = custom(name, forward, mutates_args=(), schema=f"({GIVEN}) -> Tensor[]")
        operation.register_fake(
            lambda tensors, there, sizes, factors: list(empty(*_placed(tensors, there), *sizes, *factors))
        )
        operation.register_autograd(gradient, setup_context=saved)
        return operation

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The outputs."""
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if not torch.compiler.is_compiling() or exporting() or not tensors[0].is_cpu:
            return self.function(*arguments)
        there = [int(x is not None) for x in arguments if x is None or isinstance(x, Tensor)]
        numbers = arguments[len(there) :]
        factors = [x for x in numbers if isinstance(x, float)]
        whole = numbers[: len(numbers) - len(factors)]
        sizes = [int(x) if isinstance(x, bool) else x for x in whole]  # beside an open size no bool passes for a number
        return tuple(self._operation(tensors, there, sizes, factors))


def _pulled(outputs: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of all leaves, zeros for those that have none."""
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    ends, given = [y for y, _ in pairs], [g for _, g in pairs]
    found = iter(torch.autograd.grad(ends, wanted, given, allow_unused=True, materialize_grads=True))
    return [next(found) if x.requires_grad else torch.zeros_like(x) for x in leaves]


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd, which is shut off inside operations."""
    shut_off = (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView)
    with ExitStack() as stack:
        for key in shut_off:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


def _placed(tensors: Sequence[Tensor], there: Sequence[int]) -> list[Tensor | None]:
    """The tensors, and None where none is."""
    following = iter(tensors)
    return [next(following) if present else None for present in there]


def _apart(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, contiguous and in memory of their own."""
    taken = {x.untyped_storage().data_ptr() for x in inputs}
    found = []
    for x in outputs:
        own = x.detach().contiguous()
        if (place := own.untyped_storage().data_ptr()) in taken:
            own = own.clone(memory_format=torch.contiguous_format)
            place = own.untyped_storage().data_ptr()
        taken.add(place)
        found.append(own)
    return found
