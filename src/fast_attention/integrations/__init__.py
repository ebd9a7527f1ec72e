"""Replaces the attention of other people's models by any mechanism; saves, loads and restores them.

Importing it lets transformers' own ``from_pretrained`` read swapped models.
"""

from fast_attention.integrations import fresh
from fast_attention.integrations.extending import Extension as Extension
from fast_attention.integrations.extending import extend as extend
from fast_attention.integrations.late_chunking import Chunk as Chunk
from fast_attention.integrations.late_chunking import LateChunks as LateChunks
from fast_attention.integrations.late_chunking import late_chunks as late_chunks
from fast_attention.integrations.report import ExactLayer as ExactLayer
from fast_attention.integrations.report import ExactReport as ExactReport
from fast_attention.integrations.report import Layer as Layer
from fast_attention.integrations.report import Report as Report
from fast_attention.integrations.report import Verified as Verified
from fast_attention.integrations.swapping import from_pretrained as from_pretrained
from fast_attention.integrations.swapping import swap as swap
from fast_attention.integrations.swapping import swap_back as swap_back

__all__ = [
    "Chunk", "ExactLayer", "ExactReport", "Extension", "LateChunks", "Layer", "Report", "Verified", "extend",
    "from_pretrained", "late_chunks", "swap",
    "swap_back",
]  # fmt: skip

fresh.install()
