"""Which layers are best left exact: each is put back for a moment, and the loss is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

LossWith = Callable[[Sequence[str]], float]


class Choice(NamedTuple):
    """The layers to keep exact, in the order in which they were chosen, and the loss after each."""

    kept: tuple[str, ...]
    losses: tuple[float, ...]
    reached: bool  # whether the limit is kept


@contextmanager
def put_back(model: Any, original: Any, names: Sequence[str]) -> Iterator[None]:
    """The model with the original's own attention modules, weights included, in the layers ``names``."""
    ours = {name: model.get_submodule(name) for name in names}
    try:
        for name in names:
            model.set_submodule(name, original.get_submodule(name))
        yield
    finally:
        for name, module in ours.items():
            model.set_submodule(name, module)


def choose(loss_with: LossWith, names: Sequence[str], limit: float) -> Choice:
    """As few layers as a greedy search needs: each time the one whose exact attention lowers the measured loss most.

    Args:
        loss_with: The loss with the given layers exact.
        names: The layers to choose from.
        limit: The greatest loss that will do.
    """
    kept: list[str] = []
    losses: list[float] = []
    loss = loss_with([])
    while loss > limit and len(kept) < len(names):
        tried = {name: loss_with([*kept, name]) for name in names if name not in kept}
        best = min(tried, key=lambda name: tried[name])
        loss = tried[best]
        kept.append(best)
        losses.append(loss)
    return Choice(tuple(kept), tuple(losses), loss <= limit)
