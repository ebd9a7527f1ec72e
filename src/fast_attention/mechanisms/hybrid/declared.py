"""What a Hybrid declares that it can do, by a window or by chosen blocks, and which windows it takes."""

from __future__ import annotations

from dataclasses import replace

from fast_attention.biases import sinks as learned_sinks
from fast_attention.biases.bias import Bias
from fast_attention.biases.transformer_xl import TransformerXL
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.mechanisms.sparse.selected import Selected
from fast_attention.traits import Traits


def declared(near: Local | BlockLocal | Selected, far: Traits) -> Traits:
    """The far part decides whether weights are trained or drawn; chosen blocks are not causal; sinks are learned."""
    traits = by_choice(far) if isinstance(near, Selected) else by_window(far, near.bias)
    return learned_sinks.learned(traits) if near.sinks else traits


def by_window(far: Traits, bias: Bias | None = None) -> Traits:
    """The far part decides what is approximated; a bias may be learned."""
    return Traits(
        paper="Zhang et al. 2024, arXiv 2410.10254 (window, linear remainder); Xiao et al. 2023, arXiv 2309.17453",
        formula="softmax over near, first and last keys, phi(q_i) . phi(k_j) for the others, one normaliser",
        cost="n (w + m) d",
        order=1.0,
        causal=True,
        padding=True,
        cross=True,
        rotary=far.rotary,
        memory="window",
        random=far.random,
        learned=far.learned or (bias is not None and bias.learned),
        approximates=far.approximates if bias is None else None,
    )


def by_choice(far: Traits) -> Traits:
    """Blocks of queries choose by their means, which hold what comes after the first of them: not causal."""
    return replace(
        by_window(far),
        paper="Zhang et al. 2025, arXiv 2509.24006 (chosen blocks, linear remainder); SPLA, arXiv 2601.22379",
        formula="softmax over chosen blocks, first and last keys, phi(q_i) . phi(k_j) for the others, one normaliser",
        cost="n (b c + m) d + (n / b)^2 m d",
        order=2.0,
        causal=False,
        cross=False,
        memory=None,
    )


def check_window(message: str, window: Local | BlockLocal) -> None:
    """Raise a ``ValueError`` that begins with ``message`` unless far keys can share the normaliser of this window."""
    if isinstance(window, Local) and window.dilation != 1:
        raise ValueError(f"{message}: near must see every key of its window: leave out its dilation")
    if isinstance(window.bias, TransformerXL):
        raise ValueError(f"{message}: near takes ALiBi() or T5Buckets(), as far keys meet no vectors of positions")
