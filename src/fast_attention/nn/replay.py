"""Stored tensors for layers that compute again in the backward pass, which nothing has changed since."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fast_attention.mechanism import Unsupported


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a module has now, with their names."""
    yield from module.named_parameters()
    yield from module.named_buffers()


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Refuse a training pass that writes to the module's buffers: the backward pass would compute with others.

    Raises:
        Unsupported: One has been written to.
    """
    before = _versions(module)
    yield
    after = _versions(module)
    if name := next((name for name in before if after.get(name) != before[name]), None):
        raise Unsupported(
            f"{name} is changed by the training pass, and the backward pass computes again with what it has become. "
            "What would work: LayerNorm for BatchNorm, weight_norm for spectral_norm, or .eval() of the module that "
            "holds it"
        )


def _versions(module: nn.Module) -> dict[str, int]:
    """How often each buffer was written to."""
    return {name: buffer._version for name, buffer in module.named_buffers() if not buffer.is_inference()}
