"""What the generated tests run over: every mechanism with its default settings, and the oracles' variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention import Attention, Bound, Mixer, Shape, catalogue
from tests.oracles import VARIANTS

DEFAULTS: list[Any] = [catalogue.default(name) for name in catalogue.names()]
CASES = DEFAULTS + [
    m
    for m in (catalogue.parse(text) for text in VARIANTS if text.split("(")[0] in catalogue.names())
    if m not in DEFAULTS
]


def promises(mechanism: Any) -> Any:
    """Its traits without what they say in words."""
    return type(mechanism), replace(mechanism.traits, paper="", formula="", cost="", approximates=None)


# The defaults, and the first setting of a mechanism that promises something else: another implementation runs there.
DISTINCT: list[Any] = [*{promises(m): m for m in reversed(CASES)}.values()][::-1]
# What wrappers tell apart: fused attention, own scores, states that are sums, drawn and learned weights, windows,
# blocks, sorted tokens, tables of positions, two mechanisms in one, attention that sees padding, whole tokens.
KINDS: list[Any] = [
    catalogue.parse(text)
    for text in (
        "Softmax", "ReLUAttention", "LinearAttention", "FavorPlus(num_features=5)", "Local(window=3)",
        "BlockLocal(block_size=4)", "LSH(num_buckets=4)", "Linformer(rank=4)", "AFTFull", "AFTSimple",
        "Hybrid(near=BlockLocal(block_size=4))", "ByLength(long=Local(window=4), above=3)", "Nystrom(num_landmarks=4)",
        "GMLP",
    )
]  # fmt: skip
# All settings by the mechanism's name, for tests that are so quick that each goes through several.
SETTINGS: dict[str, list[Any]] = {
    name: [m for m in CASES if type(m).__name__ == name] for name in catalogue.names()
}  # fmt: skip
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
