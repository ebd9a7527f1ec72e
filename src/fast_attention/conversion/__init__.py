"""Converts a pretrained model to fast attention: swap, attention transfer, fine-tune."""

from fast_attention.conversion.converting import convert as convert
from fast_attention.conversion.goals import Chunks as Chunks
from fast_attention.conversion.outcome import Conversion as Conversion
from fast_attention.conversion.outcome import ConversionSettings as ConversionSettings
from fast_attention.conversion.outcome import Diverged as Diverged

__all__ = [
    "Chunks", "Conversion", "ConversionSettings", "Diverged", "convert",
]  # fmt: skip
