"""Keeps what autograd recorded in the forward pass of an opaque operation until its backward pass asks for it.

A compiler passes tensors only. So a graph has a number, in a tensor that is passed; the memory of that tensor owns the
graph, which goes when the compiler drops it, backward pass or not. A compiler may also overwrite memory that it takes
for dead: a graph is taken only where all that it reads of the compiler's is still passed, at the same place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

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
