"""Attention transfer: trains each layer to give the original layer's outputs on the original's inputs.

Zhang et al. 2024 (LoLCATs, arXiv 2410.10254) train the feature maps of linear attention so, on outputs instead of
weights. Here all layers are trained at once, each on the original's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.conversion import goals
from fast_attention.conversion.goals import Batch


def layers_of(model: Any) -> dict[str, Any]:
    """The mechanisms of a swapped model, by the names of its layers."""
    from fast_attention.integrations import swapped  # which imports transformers

    return swapped.layers_of(model)


@torch.no_grad()
def errors(
    model: Any, original: Any, names: Sequence[str], batches: Sequence[Batch],
    backward: Callable[[Tensor], Any] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Every layer's mean squared error on the original's inputs, over the variance of the original's output.

    Args:
        model: The swapped model.
        original: The original, frozen, swapped to exact attention.
        names: The layers.
        batches: What the original reads.
        backward: Adds up the gradients of a layer's error: with the memory of one layer at a time. None: no gradients.
    """
    measured: dict[str, list[float]] = {name: [] for name in names}

    def hooked(name: str, batch: Batch) -> Any:
        layer, mask = model.get_submodule(name), goals.tokens(batch)

        def compare(module: nn.Module, args: Any, options: Any, output: Any) -> None:
            with torch.set_grad_enabled(backward is not None):
                error = goals.error(_output(layer(*args, **options)), _output(output), mask)
                if backward is not None and error.requires_grad:  # a window over everything has nothing to train
                    backward(error)
            measured[name].append(float(error.detach()))

        return original.get_submodule(name).register_forward_hook(compare, with_kwargs=True)

    for batch in batches:
        handles = [hooked(name, batch) for name in names]
        try:
            goals.run(original, batch)
        finally:
            for handle in handles:
                handle.remove()
    return {name: sum(each) / max(len(each), 1) for name, each in measured.items()}


def calibrate(model: Any, original: Any, names: Sequence[str], batch: Batch) -> None:
    """Calibrate weights such as the damping of ``FavorPlusPlus`` on the queries and keys of the original's inputs."""

    def calibrate_bound(bound: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        q, k = inputs[:2]
        bound.adopt(bound.mechanism.calibrated(q, k, bound.w, key_mask=options.get("key_mask")))

    layers = layers_of(model)
    handles = [layers[name].bound.register_forward_pre_hook(calibrate_bound, with_kwargs=True) for name in names]
    try:
        errors(model, original, names, [batch])
    finally:
        for handle in handles:
            handle.remove()


def _output(returned: Any) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned
