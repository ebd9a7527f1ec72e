"""What a Hybrid declares that it can do: by a window, by chosen blocks."""

from __future__ import annotations

from dataclasses import replace

from fast_attention.traits import Traits


def by_window(far: Traits) -> Traits:
    """The far part decides whether weights are trained or drawn, and what is approximated."""
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
        learned=far.learned,
        approximates=far.approximates,
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
