"""What the two parts of a converted model's Hybrid are worth: its figures with either of them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fast_attention.conversion import adapters
from fast_attention.conversion.outcome import Figures
from fast_attention.integrations.randomness import restored_generators
from fast_attention.mechanisms.hybrid.hybrid import Hybrid
from fast_attention.nn.bound import Bound

PARTS = {"far part off": "near", "near part off": "far"}  # by the part that is left
Measured = tuple[Figures, dict[str, Figures]]


def measure(
    model: Any, names: Sequence[str], limit: Callable[[], Callable[[], None]], figures: Callable[[], Measured]
) -> dict[str, dict[str, Figures]]:
    """The figures of each group with one part of every ``Hybrid`` left out; nothing for other mechanisms.

    Far part off leaves the window or the blocks alone, near part off the linear attention of all keys, with the weights
    as trained; the first and last keys that a ``Hybrid`` weighs exactly go with the part that is left out.

    Args:
        model: The converted model.
        names: Its converted layers.
        limit: Lets exact attention serve short inputs, as it does in the end; returns what undoes that.
        figures: Measures the model: all, and by group.
    """
    adapter, rows = adapters.of(model), {}
    bounds = {name: adapter.layers(model)[name] for name in names}
    if not all(isinstance(bound.mechanism, Hybrid) for bound in bounds.values()):
        return {}
    for words, part in PARTS.items():
        for name, bound in bounds.items():
            adapter.bind(model, name, _alone(bound, part))
        undo = limit()
        rows[words] = figures()[1]
        undo()
    for name, bound in bounds.items():
        adapter.bind(model, name, bound)
    return rows


def _alone(bound: Bound, part: str) -> Bound:
    """One part of a bound ``Hybrid``, with its weights."""
    mechanism = getattr(bound.mechanism, part)
    like = next(iter([*bound.parameters(), *bound.buffers()]), None)
    with restored_generators():
        alone = Bound(mechanism, bound.shape)
    if like is not None:
        alone = alone.to(like.device, like.dtype)
    if mechanism.needs_weights:
        alone.adopt(bound.w)
    return alone.train(bound.training)
