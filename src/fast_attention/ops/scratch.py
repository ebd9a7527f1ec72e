"""Memory that loops over blocks use again and again, so that it stays in cache and is never faulted in anew."""

from __future__ import annotations

import math

from torch import Tensor


class Scratch:
    """Memory by name, in the dtype and on the device of ``like``.

    What a name holds is good until the same name is asked for again, whatever the shape.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self._held: dict[str, Tensor] = {}
        self._parts: dict[str, dict[tuple[int, ...], tuple[Tensor, ...]]] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Uninitialised memory of this shape."""
        size, held = math.prod(shape), self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = self.like.new_empty(size)
            self._parts[name] = {}
        return held[:size].view(shape)

    def parts(self, name: str, rows: int, *shape: int) -> tuple[Tensor, ...]:
        """The same memory as (rows, chunks, ...), chunk by chunk, each for all rows at once: views, made once."""
        whole, known = self(name, *shape), self._parts[name]
        if (rows, *shape) not in known:
            known[(rows, *shape)] = whole.view(rows, -1, *shape[1:]).unbind(1)
        return known[(rows, *shape)]
