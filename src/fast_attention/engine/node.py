"""An operation as one node of a compiler's graph: nothing inside is traced, fused or compiled.

Loops over chunks would become dozens of kernels, each with seconds of a C++ compiler, and run no faster than the same
loops do eagerly, which may look at numbers besides.

On a CPU the backward pass of a node is as autograd recorded it in the forward pass. A compiler passes tensors only. So
a graph has a number, in a tensor that is passed; the memory of that tensor owns the graph, which goes when the compiler
drops it, backward pass or not. A compiler may also overwrite memory that it takes for dead: a graph is taken only where
all that it reads of the compiler's is still passed, at the same place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, library
from torch._C import DispatchKey

FORM = 5  # of nodes: graphs that torch keeps on disk have it in their names, and meet no other
WANTED = 2  # in place of 1 for a tensor that is present
ARGUMENTS = "Tensor[] tensors, int[] present, str names, SymInt[] sizes, float[] factors"

Results = Callable[..., list[Tensor]]


class Node:
    """An operation of tensors, which may be None or want a gradient, and of numbers with names.

    Args:
        name: Of the node.
        outputs: How many of the first results are outputs (-1: all but the last); the backward pass needs the others.
        sizes: ``(tensors, present, *numbers) -> results``, uninitialised: a compiler asks for sizes.
        forward: The same with its results.
        backward: ``(gradients, returned, tensors, present, *numbers)`` -> gradients of the tensors that want one.
    """

    def __init__(self, name: str, outputs: int, sizes: Results, forward: Results, backward: Results) -> None:
        self._outputs = outputs
        name, custom = f"fast_attention::{name}_{FORM}", library.custom_op
        schema = f"(Tensor[] gradients, Tensor[] returned, {ARGUMENTS}) -> Tensor[]"
        of_gradients = custom(f"{name}_backward", backward, mutates_args=(), schema=schema)
        of_gradients.register_fake(lambda gradients, returned, tensors, present, *numbers: [
            x.new_empty(x.shape) for x, one in zip(tensors, wanted(present), strict=True) if one
        ])  # fmt: skip

        def save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
            tensors, *ctx.numbers = inputs
            ctx.save_for_backward(*tensors, *output)

        def vjp(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
            none = [
                None if isinstance(x, str) or x else [] for x in ctx.numbers
            ]  # an empty list passes for one of tensors
            (present, *numbers), needed = ctx.numbers, ctx.needs_input_grad[0]
            following = iter(needed)
            present = [1 + next(following) if given else 0 for given in present]
            saved = list(ctx.saved_tensors)
            tensors, returned = saved[: len(needed)], saved[len(needed) :]
            found = iter(of_gradients(gradients[: self._outputs], returned, tensors, present, *numbers))
            return [next(found) if one else None for one in needed], *none

        self.operation = custom(name, forward, mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor[]")
        self.operation.register_fake(sizes)
        self.operation.register_autograd(vjp, setup_context=save)

    def __call__(self, tensors: tuple[Tensor | None, ...], settings: dict[str, Any]) -> Any:
        """The outputs, in a compiler's code."""
        outputs = self.operation(*arguments(tensors, settings))[: self._outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def arguments(tensors: tuple[Tensor | None, ...], settings: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments that a node is called with."""
    recording = torch.is_grad_enabled()
    present = [0 if x is None else WANTED if recording and x.requires_grad else 1 for x in tensors]
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        several = isinstance(value, tuple)
        flat |= {f"{name}.{i}": each for i, each in enumerate(value)} if several else {name: value}
    factors = [name for name in flat if isinstance(flat[name], float)]
    whole = [name for name in flat if name not in factors]
    names = [f"?{name}" if isinstance(flat[name], bool) else name for name in whole]
    # beside an open size no bool passes for a number
    sizes = [int(flat[name]) if isinstance(flat[name], bool) else flat[name] for name in whole]
    given = [x for x in tensors if x is not None]
    return given, present, " ".join(names + factors), sizes, [flat[x] for x in factors]


def restored(names: str, sizes: Sequence[Any], factors: Sequence[float]) -> dict[str, Any]:
    """The settings of a node; several numbers of one name are a tuple."""
    settings: dict[str, Any] = {}
    for name, x in zip(names.split(), (*sizes, *factors), strict=True):
        value = bool(x) if name.startswith("?") else x
        name, _, place = name.lstrip("?").partition(".")
        settings[name] = (*settings.get(name, ()), value) if place else value
    return settings


def wanted(present: Sequence[int]) -> list[bool]:
    """One flag per tensor that was given: does it need a gradient?"""
    return [given == WANTED for given in present if given]


def with_none(tensors: Sequence[Tensor], present: Sequence[int]) -> list[Tensor | None]:
    """The tensors, and None where none was given."""
    following = iter(tensors)
    return [next(following) if given else None for given in present]


class Stateless(Node):
    """A node whose kernels keep in tensors what their backward pass needs.

    Args:
        forward, backward: As ``Fast`` has them.
        like: As ``forward``, but its results are uninitialised.
        outputs: How many there are.
        name: Of the node.
    """

    def __init__(
        self, forward: Callable[..., Any], backward: Callable[..., Any] | None, like: Callable[..., Any], outputs: int,
        name: str,
    ) -> None:  # fmt: skip
        self._passes, self._like = (forward, backward), like
        super().__init__(name, outputs, self._sizes, self._forward, self._backward)

    def _sizes(self, tensors: Any, present: Any, *numbers: Any) -> list[Tensor]:
        return self._results(self._like, tensors, present, numbers)

    def _forward(self, tensors: Any, present: Any, *numbers: Any) -> list[Tensor]:
        return self._results(self._passes[0], tensors, present, numbers)

    def _backward(self, gradients: Any, returned: Any, tensors: Any, present: Any, *numbers: Any) -> list[Tensor]:
        assert self._passes[1] is not None
        leaves = [x.detach().requires_grad_(one) for x, one in zip(tensors, wanted(present), strict=True)]
        given = with_none(leaves, present), returned[: self._outputs], returned[self._outputs :], gradients
        found = self._passes[1](*given, **restored(*numbers))
        return [x for x, one in zip(found, present, strict=True) if one == WANTED]  # type: ignore[misc]

    def _results(self, run: Callable[..., Any], tensors: Any, present: Any, numbers: Any) -> list[Tensor]:
        outputs, saved = run(*with_none(tensors, present), keep=any(wanted(present)), **restored(*numbers))
        return [*outputs, *saved] if isinstance(outputs, tuple) else [outputs, *saved]


Ends = tuple[list[Tensor], list[Tensor]]  # inputs and outputs


class _Graph(bytearray):
    """The memory of a number, with the graph that it names."""

    ends: Ends
    passed: list[Tensor]


_numbers = count(1)
_graphs: WeakValueDictionary[int, _Graph] = WeakValueDictionary()


def keep(ends: Ends, passed: Sequence[Tensor]) -> Tensor:
    """The number of a graph from inputs to outputs, which lives while this tensor does.

    Args:
        ends: Its inputs and outputs.
        passed: What the graph may read of the compiler's memory: as the operation was given and has returned it.
    """
    number = next(_numbers)
    graph = _Graph(number.to_bytes(8, sys.byteorder))
    graph.ends, graph.passed = ends, [x.detach() for x in passed]  # no outer graph, which would own itself
    _graphs[number] = graph
    return torch.frombuffer(graph, dtype=torch.int64)


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


class Recorded(Node):
    """A node whose backward pass is as autograd recorded it; a second one runs the operation again.

    Args:
        operation: ``(*tensors, **settings) -> outputs``: one tensor, or a tuple.
        empty: As ``operation``, but what it returns is uninitialised.
        name: Of the node.
    """

    def __init__(self, operation: Callable[..., Any], empty: Callable[..., Any], name: str) -> None:
        self._run, self._empty = operation, empty
        super().__init__(name, -1, self._sizes, self._forward, self._backward)

    def _sizes(self, tensors: Any, present: Any, *numbers: Any) -> list[Tensor]:
        outputs = _outputs(self._empty, with_none(tensors, present), numbers)
        return [*outputs, tensors[0].new_empty(1, dtype=torch.int64)]

    def _forward(self, tensors: Any, present: Any, *numbers: Any) -> list[Tensor]:
        if not any(wanted(present)):
            with torch.autocast("cpu", enabled=False):
                outputs = _outputs(self._run, with_none(tensors, present), numbers)
            return [*_unshared(outputs, tensors), torch.zeros(1, dtype=torch.int64)]  # the number of no graph
        ends = self._recorded(tensors, present, numbers)
        returned = _unshared(ends[1], tensors)
        return [*returned, keep(ends, [*tensors, *returned])]

    def _backward(self, gradients: Any, returned: Any, tensors: Any, present: Any, *numbers: Any) -> list[Tensor]:
        *outputs, number = returned
        ends = take(number, [*tensors, *outputs], wanted(present))
        leaves, outputs = ends or self._recorded(tensors, present, numbers)
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
        sought = [x for x, one in zip(leaves, wanted(present), strict=True) if one]
        with _recording(), torch.autocast("cpu", enabled=False):
            found = torch.autograd.grad(
                [y for y, _ in pairs], sought, [g for _, g in pairs], allow_unused=True, materialize_grads=True
            )
        return _unshared(found, gradients)

    def _recorded(self, tensors: Sequence[Tensor], present: Sequence[int], numbers: Any) -> Ends:
        """The tensors as leaves, those that are wanted with a gradient, and the outputs."""
        with _recording(), torch.autocast("cpu", enabled=False):
            leaves = [x.detach().requires_grad_(one) for x, one in zip(tensors, wanted(present), strict=True)]
            return leaves, list(_outputs(self._run, with_none(leaves, present), numbers))


def _outputs(run: Callable[..., Any], tensors: Sequence[Any], numbers: Any) -> Sequence[Tensor]:
    outputs = run(*tensors, **restored(*numbers))
    return outputs if isinstance(outputs, tuple) else (outputs,)


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd, which is shut off inside operations."""
    shut_off = (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView)
    with ExitStack() as stack:
        for key in shut_off:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


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
