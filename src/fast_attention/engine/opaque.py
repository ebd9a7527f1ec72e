"""Makes a function one operation for ``torch.compile``: nothing inside is traced, fused or compiled.

Loops over chunks become dozens of kernels, each with seconds of a C++ compiler, and run no faster than the same loops
do eagerly, which may look at numbers besides.

Keeps what autograd recorded in the forward pass of an opaque operation until its backward pass asks for it.

A compiler passes tensors only. So a graph has a number, in a tensor that is passed; the memory of that tensor owns the
graph, which goes when the compiler drops it, backward pass or not. A compiler may also overwrite memory that it takes
for dead: a graph is taken only where all that it reads of the compiler's is still passed, at the same place.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, library
from torch._C import DispatchKey

from fast_attention.engine.operation import served
from fast_attention.engine.tracing import exporting, symbolic

Function = Callable[..., tuple[Tensor, ...]]
Decorated = TypeVar("Decorated", bound=Callable[..., Tensor])
FORM = 3  # of these operations: graphs that torch keeps on disk have it in their names, and meet no other
WANTED = 2  # in place of 1 for a tensor that is present
ARGUMENTS = "Tensor[] tensors, int[] present, SymInt[] sizes, float[] factors"


def opaque(empty: Callable[..., Tensor]) -> Callable[[Decorated], Decorated]:
    """Make the decorated function, ``(*tensors, **numbers) -> Tensor``, one operation for the compiler.

    Tensors are positional and may be None; numbers (annotated bool, int or float) are keywords without defaults.

    Args:
        empty: Takes the same arguments and returns an uninitialised output: for the compiler, which asks for sizes.
    """

    def decorate(function: Decorated) -> Decorated:
        named = [x for x in inspect.signature(function).parameters.values() if x.kind is x.KEYWORD_ONLY]
        named.sort(key=lambda x: x.annotation == "float")  # whole numbers first
        names, flags = [x.name for x in named], {x.name for x in named if x.annotation == "bool"}

        def called(form: Callable[..., Tensor]) -> Function:
            def with_numbers(*arguments: Any) -> tuple[Tensor]:
                tensors, numbers = arguments[: len(arguments) - len(names)], arguments[len(arguments) - len(names) :]
                pairs = zip(names, numbers, strict=True)
                return (form(*tensors, **{name: bool(x) if name in flags else x for name, x in pairs}),)

            return functools.wraps(function)(with_numbers)

        operation = Opaque(called(function), called(empty))

        @functools.wraps(function)
        def wrapped(*tensors: Any, **numbers: Any) -> Tensor:
            if not _compiled(tensors):
                return function(*tensors, **numbers)
            return operation(*tensors, *(numbers[name] for name in names))[0]

        return wrapped  # type: ignore[return-value]

    return decorate


def like_queries(q: Tensor, k: Tensor, v: Tensor, *others: Any, **numbers: Any) -> Tensor:
    """An uninitialised row of values for each query: what ``opaque`` needs to know of most attentions."""
    return v.new_empty(*q.shape[:-1], v.shape[-1])


Ends = tuple[list[Tensor], list[Tensor]]  # inputs and outputs


class _Graph(bytearray):
    """The memory of a number, with the graph that it names."""

    ends: Ends
    passed: list[Tensor]


_numbers = count(1)
_graphs: WeakValueDictionary[int, _Graph] = WeakValueDictionary()


def keep(ends: Ends, passed: Sequence[Tensor]) -> Tensor:
    """The number of a graph from inputs to outputs, kept while this tensor is.

    Args:
        ends: Its inputs and outputs.
        passed: What the graph may read of the compiler's memory: as the operation was given and has returned it.
    """
    number = next(_numbers)
    graph = _Graph(number.to_bytes(8, sys.byteorder))
    graph.ends, graph.passed = ends, [x.detach() for x in passed]  # no outer graph, which would own itself
    _graphs[number] = graph
    return torch.frombuffer(graph, dtype=torch.int64)


def nothing() -> Tensor:
    """The number of no graph."""
    return torch.zeros(1, dtype=torch.int64)


def take(number: Tensor, passed: Sequence[Tensor], wanted: Sequence[bool]) -> Ends | None:
    """The inputs and outputs of a graph, once; None where it is gone or does not lead to all inputs wanted."""
    graph = _graphs.pop(int(number), None)
    if graph is None:
        return None
    (inputs, outputs), before = graph.ends, graph.passed
    del graph.ends, graph.passed  # or it lives as long as its number
    recorded = all(x.requires_grad for x, one in zip(inputs, wanted, strict=True) if one)
    return (inputs, outputs) if recorded and all(map(_same, before, passed)) else None


def _same(before: Tensor, after: Tensor) -> bool:
    return before.data_ptr() == after.data_ptr() and before.shape == after.shape and before.stride() == after.stride()


class Opaque:
    """A function of tensors as one operation for the compiler, whose backward pass is as autograd recorded it.

    Args:
        function: ``(*tensors, *numbers) -> outputs``: a tensor may be None; whole numbers come before others.
        empty: As ``function``, but what it returns is uninitialised: for the compiler, which asks for sizes only.

    A second backward pass runs the function again. Exporting, transforms and other devices take the function itself.
    """

    def __init__(self, function: Function, empty: Function) -> None:
        self.function = function
        name = f"{function.__module__.rpartition('.')[2]}_{function.__name__.lstrip('_')}"
        self._operation = self._register(f"fast_attention::{name}_{FORM}", empty)

    def _register(self, name: str, empty: Function) -> Callable[..., list[Tensor]]:
        def save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
            tensors, *ctx.numbers = inputs
            ctx.save_for_backward(*tensors, *output)

        def vjp(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
            none = [None if numbers else [] for numbers in ctx.numbers]  # an empty list passes for one of tensors
            (present, *numbers), needed = ctx.numbers, ctx.needs_input_grad[0]
            wanted = iter(needed)
            present = [1 + next(wanted) if given else 0 for given in present]
            saved = list(ctx.saved_tensors)
            tensors, returned = saved[: len(needed)], saved[len(needed) :]
            following = iter(backward_operation(gradients[:-1], returned, tensors, present, *numbers))
            return [next(following) if one else None for one in needed], *none

        custom = library.custom_op
        schema = f"(Tensor[] gradients, Tensor[] returned, {ARGUMENTS}) -> Tensor[]"
        backward_operation = custom(f"{name}_backward", self._backward, mutates_args=(), schema=schema)
        backward_operation.register_fake(lambda gradients, returned, tensors, present, *numbers: [
            x.new_empty(x.shape) for x, one in zip(tensors, _wanted(present), strict=True) if one
        ])  # fmt: skip
        operation = custom(name, self._forward, mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor[]")
        operation.register_fake(lambda tensors, present, sizes, factors: [
            *empty(*_with_none(tensors, present), *sizes, *factors), tensors[0].new_empty(1, dtype=torch.int64)
        ])  # fmt: skip
        operation.register_autograd(vjp, setup_context=save)
        return operation

    def _forward(self, tensors: Any, present: Any, sizes: Any, factors: Any) -> list[Tensor]:
        if not any(_wanted(present)):
            with torch.autocast("cpu", enabled=False):
                outputs = self.function(*_with_none(tensors, present), *sizes, *factors)
            return [*_unshared(outputs, tensors), nothing()]
        ends = self._recorded(tensors, present, *sizes, *factors)
        returned = _unshared(ends[1], tensors)
        return [*returned, keep(ends, [*tensors, *returned])]

    def _backward(self, gradients: Any, returned: Any, tensors: Any, present: Any, *numbers: Any) -> list[Tensor]:
        *outputs, number = returned
        ends = take(number, [*tensors, *outputs], _wanted(present))
        ends = ends or self._recorded(tensors, present, *(x for some in numbers for x in some))
        return _unshared(_gradients(*ends, gradients, _wanted(present)), gradients)

    def _recorded(self, tensors: Sequence[Tensor], present: Sequence[int], *numbers: Any) -> Ends:
        """The tensors as leaves, those that are wanted with a gradient, and the outputs."""
        with _recording(), torch.autocast("cpu", enabled=False):
            leaves = [x.detach().requires_grad_(one) for x, one in zip(tensors, _wanted(present), strict=True)]
            return leaves, list(self.function(*_with_none(leaves, present), *numbers))

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The outputs."""
        if not _compiled(arguments):
            return self.function(*arguments)
        given = [x for x in arguments if x is None or isinstance(x, Tensor)]
        tensors, recording = [x for x in given if x is not None], torch.is_grad_enabled()
        present = [0 if x is None else WANTED if recording and x.requires_grad else 1 for x in given]
        numbers = arguments[len(present) :]
        factors = [x for x in numbers if isinstance(x, float)]
        whole = numbers[: len(numbers) - len(factors)]
        sizes = [int(x) if isinstance(x, bool) else x for x in whole]  # beside an open size no bool passes for a number
        return tuple(self._operation(tensors, present, sizes, factors)[:-1])


def _compiled(arguments: Sequence[Any]) -> bool:
    """Whether the operation serves; the first argument is a tensor."""
    return symbolic() and not exporting() and served(arguments[0])


def _gradients(
    leaves: Sequence[Tensor], outputs: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor]:  # fmt: skip
    """The gradients of the leaves that are wanted, zeros where none comes."""
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    ends, grad_out = [y for y, _ in pairs], [g for _, g in pairs]
    sought = [x for x, one in zip(leaves, wanted, strict=True) if one]
    with _recording(), torch.autocast("cpu", enabled=False):
        return list(torch.autograd.grad(ends, sought, grad_out, allow_unused=True, materialize_grads=True))


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd, which is shut off inside operations."""
    shut_off = (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView)
    with ExitStack() as stack:
        for key in shut_off:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


def _wanted(present: Sequence[int]) -> list[bool]:
    """Of every tensor that was given, whether its gradient is asked for."""
    return [given == WANTED for given in present if given]


def _with_none(tensors: Sequence[Tensor], present: Sequence[int]) -> list[Tensor | None]:
    """The tensors, and None where none was given."""
    following = iter(tensors)
    return [next(following) if given else None for given in present]


def _unshared(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, contiguous and each in memory of its own, as operations must return them."""
    taken = {x.untyped_storage().data_ptr() for x in inputs}
    copies = []
    for x in outputs:
        copy = x.detach().contiguous()
        if (address := copy.untyped_storage().data_ptr()) in taken:
            copy = copy.clone(memory_format=torch.contiguous_format)
            address = copy.untyped_storage().data_ptr()
        taken.add(address)
        copies.append(copy)
    return copies
