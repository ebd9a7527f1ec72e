"""The least bytes and operations of a mechanism's forward and backward pass, for ``benchmarks.on_gpu``."""

from __future__ import annotations

import math
from typing import Any

import torch

from fast_attention import (
    LSH,
    AFTConv,
    AFTFull,
    AFTLocal,
    AFTSimple,
    BigBird,
    Favor,
    FavorPlus,
    FNet,
    LearnedFeatures,
    Local,
    LogAttention,
    Manhattan,
    Sinkhorn,
    catalogue,
)

INPUTS = {FNet: 1, LSH: 2}  # tensors that are read; of other mechanisms queries, keys and values


def operations(name: str, D: int, length: int, *, is_causal: bool) -> float:
    """The least operations of a forward pass for each token and head of width D, products and elementwise ones."""
    mechanism: Any = catalogue.parse(name)
    match mechanism:
        case Local():
            return 4 * D * sum(mechanism.sides if not is_causal else mechanism.sides[:1])
        case BigBird():
            window = mechanism.window_blocks // 2 + 1 if is_causal else mechanism.window_blocks
            others = mechanism.num_random_blocks + mechanism.num_global_blocks
            return 4 * D * mechanism.block_size * (window + others)
        case LSH():  # its own chunk, of which causal queries see half, and the one before
            return 4 * D * mechanism.num_hashes * mechanism.bucket_size * (1.5 if is_causal else 2)
        case Sinkhorn():
            return 4 * D * mechanism.block_size * (1.5 if is_causal else 2)
        case AFTLocal() | AFTConv():  # the pool, and products of weights with terms and weighted values
            taps = 2 * mechanism.window - 1 if isinstance(mechanism, AFTLocal) else mechanism.kernel_size
            return 12 * D + 4 * D * ((taps + 1) // 2 if is_causal else taps)
        case AFTFull():
            return 4 * D * length / (2 if is_causal else 1)
        case AFTSimple() | LogAttention() | Manhattan():
            return 12 * D  # two exponentials or logarithms, a gate, two sums
        case FNet():
            return 5 * D * math.log2(length)
        case Favor():  # queries' and keys' projections, and a sine and a cosine of each
            return 12 * D * mechanism.num_features
        case FavorPlus() | LearnedFeatures():
            count = mechanism.num_features
            return 4 * D * count + 4 * D * count * (2 if isinstance(mechanism, LearnedFeatures) else 1)
    return 4 * D * D


def floor(
    name: str, sizes: tuple[int, ...], dtype: torch.dtype, most: dict[str, float], *, is_causal: bool
) -> tuple[float, float]:
    """The least seconds of a forward and of a backward pass, at ``most`` bytes and operations a second."""
    B, H, L, D = sizes
    tokens, bits = B * H * L, torch.finfo(dtype).bits
    products, read = operations(name, D, L, is_causal=is_causal), INPUTS.get(type(catalogue.parse(name)), 3)
    back = 2 * read + 2 if read > 1 else 2  # inputs, outputs and both gradients; of a linear map gradients alone
    moved = tokens * D * bits / 8 / most["bytes"]
    forward = max((read + 1) * moved, tokens * products / most["operations"])
    return forward, max(back * moved, 2.5 * tokens * products / most["operations"])
