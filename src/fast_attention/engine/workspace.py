"""Hands out memory that loops over blocks reuse, so that it stays in cache and is never faulted in anew."""

from __future__ import annotations

import math

from torch import Tensor


class Workspace:
    """Memory by name, in the dtype and on the device of ``like``.

    The memory of a name is valid until the same name is asked for again, whatever the shape.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self._held: dict[str, Tensor] = {}
        self._views: dict[tuple[str | int, ...], Tensor] = {}
        self._parts: dict[tuple[str | int, ...], tuple[Tensor, ...]] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Uninitialised memory of this shape."""
        view = self._views.get((name, *shape))
        return self._allocated(name, shape) if view is None else view

    def parts(self, name: str, rows: int, *shape: int) -> tuple[Tensor, ...]:
        """The memory as (rows, chunks, ...), chunk by chunk, each for all rows at once: views, made once."""
        memory, views = self(name, *shape), self._parts.get((name, rows, *shape))
        if views is None:
            views = self._parts[(name, rows, *shape)] = memory.view(rows, -1, *shape[1:]).unbind(1)
        return views

    def _allocated(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size, held = math.prod(shape), self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = self.like.new_empty(size)
            for views in (self._views, self._parts):  # of the smaller memory that this replaces
                for key in [key for key in views if key[0] == name]:
                    del views[key]
        self._views[(name, *shape)] = view = held[:size].view(shape)
        return view
