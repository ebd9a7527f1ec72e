"""A way to spread a mechanism over processes: what is computed, and how many bytes are sent for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fast_attention.parallel.shards import Shards


class Call(NamedTuple):
    """One call as every process knows it. ``key_mask`` is None on all processes or on none."""

    mechanism: Any
    w: Any
    shards: Shards
    is_causal: bool
    key_mask: Tensor | None = None  # boolean (..., S), this process's keys

    @property
    def masked(self) -> bool:
        """Whether there is a mask."""
        return self.key_mask is not None


class Sizes(NamedTuple):
    """The sizes of one process's queries (batch, heads, L, width) and values, of which bytes are counted.

    A mixer's tokens (batch, L, width) have one head, and values as wide as they.
    """

    batch: int
    heads: int
    width: int
    values: int
    itemsize: int = 4


@dataclass(frozen=True)
class Strategy:
    """How one kind of mechanism is spread over processes.

    Args:
        name: One word or two.
        collectives: What is sent, in words.
        attend: ``(call, q, k, v) -> outputs`` of this process's queries; of a mixer ``(call, x) -> outputs``. Raises
            ``Unsupported`` on all processes alike.
        sends: ``(call, sizes) -> bytes`` that this process sends to others in the forward pass; ``call`` has no tensors
            but its weights. The backward pass sends as many, of gradients.
    """

    name: str
    collectives: str
    attend: Callable[..., Tensor]
    sends: Callable[[Call, Sizes], int]
