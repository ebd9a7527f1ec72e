"""Mechanisms made of other mechanisms. A new one is exported by one line here."""

from fast_attention.combinations.hybrid import Hybrid as Hybrid

__all__ = [
    "Hybrid",
]  # fmt: skip
