"""Attention transfer: each layer's outputs on the original's own inputs, as near the original's as they get.

Zhang et al. 2024 (LoLCATs, arXiv 2410.10254) train the maps of linear attention so, on outputs instead of weights. Here
every layer is trained at once, each on the original's inputs, and the layer's projections learn as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.conversion import goals, kinds
from fast_attention.conversion.kinds import Batch

Hear = Callable[[str, Tensor], None]


def train(model: Any, original: Any, names: Sequence[str], batch: Batch) -> float:
    """Add every layer's gradient, one layer's memory at a time; the mean error of the layers."""
    errors: dict[str, list[float]] = {}

    def hear(name: str, error: Tensor) -> None:
        error.backward()
        errors.setdefault(name, []).append(float(error.detach()))

    with _heard(model, original, names, batch, hear, learning=True), torch.no_grad():
        kinds.of(original).run(original, batch)
    found = [x for each in errors.values() for x in each]
    return sum(found) / max(len(found), 1)


def errors(model: Any, original: Any, names: Sequence[str], batches: Sequence[Batch]) -> dict[str, float]:
    """Every layer's mean squared error on the original's inputs, over the variance of the original's output.

    Args:
        model: The swapped model.
        original: The original, as ``kinds`` makes it.
        names: The layers.
        batches: What the original reads.
    """
    found: dict[str, list[float]] = {name: [] for name in names}

    def hear(name: str, error: Tensor) -> None:
        found[name].append(float(error))

    for batch in batches:
        with _heard(model, original, names, batch, hear, learning=False), torch.no_grad():
            kinds.of(original).run(original, batch)
    return {name: sum(each) / max(len(each), 1) for name, each in found.items()}


def weights(model: nn.Module, names: Sequence[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What the transfer may train: the mechanisms' own weights, and the projections of their attention modules."""
    layers = kinds.of(model).layers(model)
    maps = [parameter for name in names for parameter in layers[name].parameters()]
    own = {id(parameter) for parameter in maps}
    inside = [parameter for name in names for parameter in model.get_submodule(name).parameters()]
    return maps, [parameter for parameter in inside if id(parameter) not in own]


def calibrate(model: Any, original: Any, names: Sequence[str], batch: Batch) -> None:
    """Suit weights such as the damping of ``FavorPlusPlus`` to the queries and keys on the original's inputs."""

    def suit(bound: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        q, k = inputs[:2]
        bound.adopt(bound.mechanism.calibrated(q, k, bound.w, key_mask=options["key_mask"]))

    layers = kinds.of(model).layers(model)
    bounds = [layers[name] for name in names]
    handles = [bound.register_forward_pre_hook(suit, with_kwargs=True) for bound in bounds]
    try:
        errors(model, original, names, [batch])
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _heard(
    model: Any, original: Any, names: Sequence[str], batch: Batch, hear: Hear, *, learning: bool
) -> Iterator[None]:
    """While the original runs, every layer of the model is given what the original's has, and its error is told."""
    seen = kinds.of(original).tokens(batch)

    def listen(name: str) -> Any:
        ours = model.get_submodule(name)

        def after(module: nn.Module, args: Any, options: Any, output: Any) -> None:
            with torch.set_grad_enabled(learning):
                hear(name, goals.error(_output(ours(*args, **options)), _output(output), seen))

        return original.get_submodule(name).register_forward_hook(after, with_kwargs=True)

    handles = [listen(name) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _output(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found
