"""Chooses the layers that stay exact, by the loss with the original's layers put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fast_attention.mechanism import Unsupported

LossWith = Callable[[Sequence[str]], float]


class Choice(NamedTuple):
    """The layers to keep exact, in the order of choice, and the loss after each."""

    kept: tuple[str, ...]
    losses: tuple[float, ...]
    reached: bool  # whether the last loss is within the limit


@contextmanager
def put_back(model: Any, original: Any, names: Sequence[str]) -> Iterator[None]:
    """Put the original's attention modules, weights included, into the layers ``names`` while the block runs."""
    converted = {name: model.get_submodule(name) for name in names}
    try:
        for name in names:
            model.set_submodule(name, original.get_submodule(name))
        yield
    finally:
        for name, module in converted.items():
            model.set_submodule(name, module)


def choose(loss_with: LossWith, names: Sequence[str], limit: float) -> Choice:
    """Choose layers by a greedy search, each time the one whose exact attention lowers the measured loss most.

    Args:
        loss_with: The loss with the given layers exact.
        names: The layers to choose from.
        limit: The largest acceptable loss.
    """
    kept: list[str] = []
    losses: list[float] = []
    loss = loss_with([])
    while loss > limit and len(kept) < len(names):
        loss_of = {name: loss_with([*kept, name]) for name in names if name not in kept}
        best = min(loss_of, key=lambda name: loss_of[name])
        loss = loss_of[best]
        kept.append(best)
        losses.append(loss)
    return Choice(tuple(kept), tuple(losses), loss <= limit)


def within(loss_with: LossWith, names: Sequence[str], limit: float, budget: str, mechanism: Any) -> Choice:
    """``choose``, for a budget in words.

    Raises:
        Unsupported: Nothing but the original's layers is within the limit.
    """
    choice = choose(loss_with, names, limit)
    if len(choice.kept) == len(names):
        best = [loss_with([]), *choice.losses][-2]
        raise Unsupported(
            f"within {budget} times the original's loss no layer can run {mechanism!r}: with one layer of {len(names)} "
            f"left to it the loss is {best:.4f}, and {limit:.4f} is allowed. What would work: a larger budget, more "
            "minutes"
        )
    return choice
