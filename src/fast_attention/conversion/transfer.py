"""Attention transfer: trains each layer to give the original layer's outputs on the original's inputs.

Zhang et al. 2024 (LoLCATs, arXiv 2410.10254) train the feature maps of linear attention so, on outputs instead of
weights. Here all layers are trained at once, each on the original's inputs, and their projections learn as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.conversion import adapters, goals
from fast_attention.conversion.adapters import Batch

OnError = Callable[[str, Tensor], None]


def train(model: Any, original: Any, names: Sequence[str], batch: Batch) -> float:
    """Add up every layer's gradient, with the memory of one layer at a time; the mean error of the layers."""
    errors: dict[str, list[float]] = {}

    def on_error(name: str, error: Tensor) -> None:
        if error.requires_grad:  # a window over everything leaves nothing to train
            error.backward()
        errors.setdefault(name, []).append(float(error.detach()))

    with _layer_errors(model, original, names, batch, on_error, learning=True), torch.no_grad():
        adapters.of(original).run(original, batch)
    all_errors = [x for each in errors.values() for x in each]
    return sum(all_errors) / max(len(all_errors), 1)


def errors(model: Any, original: Any, names: Sequence[str], batches: Sequence[Batch]) -> dict[str, float]:
    """Every layer's mean squared error on the original's inputs, over the variance of the original's output.

    Args:
        model: The swapped model.
        original: The original, as its adapter makes it.
        names: The layers.
        batches: What the original reads.
    """
    errors_of: dict[str, list[float]] = {name: [] for name in names}

    def on_error(name: str, error: Tensor) -> None:
        errors_of[name].append(float(error))

    for batch in batches:
        with _layer_errors(model, original, names, batch, on_error, learning=False), torch.no_grad():
            adapters.of(original).run(original, batch)
    return {name: sum(each) / max(len(each), 1) for name, each in errors_of.items()}


def weights(model: nn.Module, names: Sequence[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that the transfer trains: the mechanisms' own, and the projections of their attention modules."""
    layers = adapters.of(model).layers(model)
    maps = [parameter for name in names for parameter in layers[name].parameters()]
    map_ids = {id(parameter) for parameter in maps}
    parameters = [parameter for name in names for parameter in model.get_submodule(name).parameters()]
    return maps, [parameter for parameter in parameters if id(parameter) not in map_ids]


def calibrate(model: Any, original: Any, names: Sequence[str], batch: Batch) -> None:
    """Calibrate weights such as the damping of ``FavorPlusPlus`` on the queries and keys of the original's inputs."""

    def calibrate_bound(bound: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        q, k = inputs[:2]
        bound.adopt(bound.mechanism.calibrated(q, k, bound.w, key_mask=options.get("key_mask")))

    layers = adapters.of(model).layers(model)
    bounds = [layers[name] for name in names]
    handles = [bound.register_forward_pre_hook(calibrate_bound, with_kwargs=True) for bound in bounds]
    try:
        errors(model, original, names, [batch])
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _layer_errors(
    model: Any, original: Any, names: Sequence[str], batch: Batch, on_error: OnError, *, learning: bool
) -> Iterator[None]:
    """Run every layer of the model on the inputs of the original's layer, and call ``on_error`` with its error."""
    mask = adapters.of(original).tokens(batch)

    def add_hook(name: str) -> Any:
        layer = model.get_submodule(name)

        def compare(module: nn.Module, args: Any, options: Any, output: Any) -> None:
            with torch.set_grad_enabled(learning):
                on_error(name, goals.error(_output(layer(*args, **options)), _output(output), mask))

        return original.get_submodule(name).register_forward_hook(compare, with_kwargs=True)

    handles = [add_hook(name) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _output(returned: Any) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned
