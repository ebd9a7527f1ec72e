"""What the generated tests run over: every mechanism with its default settings, and the oracles' variants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fast_attention import Attention, Bound, Mixer, Shape, catalogue
from tests.oracles import VARIANTS

CASES: list[Any] = [catalogue.default(name) for name in catalogue.names()]
CASES += [
    m for m in (catalogue.parse(text) for text in VARIANTS if text.split("(")[0] in catalogue.names()) if m not in CASES
]
ATTENTIONS: list[Any] = [m for m in CASES if isinstance(m, Attention)]
MIXERS: list[Any] = [m for m in CASES if isinstance(m, Mixer)]


def uncached() -> Any:
    """For exports: torch's cache of traced operations, which there costs a third more than it saves, is off."""
    import torch._dynamo

    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False)


def bind(
    mechanism: Any,
    heads: int = 2,
    head_dim: int = 8,
    max_len: int = 32,
    device: Any = "cpu",
    dtype: Any = torch.float64,
) -> Bound:
    """A bound mechanism whose learned weights are moved off their initial values, so that zeros hide nothing."""
    torch.manual_seed(7)
    bound = Bound(mechanism, Shape(heads, head_dim, max_len))
    for parameter in bound.parameters():
        nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.3)
    return bound.to(device=device, dtype=dtype)


def qkv(
    length: int,
    keys: int | None = None,
    *,
    batch: int = 2,
    heads: int = 2,
    width: int = 8,
    device: Any = "cpu",
    dtype: Any = torch.float64,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian queries, keys and values."""
    sizes = (length, keys or length, keys or length)
    q, k, v = (scale * torch.randn(batch, heads, size, width, dtype=dtype).to(device) for size in sizes)
    return q, k, v


def some_keys(batch: int, keys: int, device: Any = "cpu") -> Tensor:
    """A key mask with holes and a padded end, different for every sequence, never empty."""
    mask = torch.rand(batch, keys) > 0.3
    mask[..., 0] = True
    mask[-1, -(keys // 3) :] = False
    mask[-1, 0] = True
    return mask.to(device)
