"""``convert`` as most tests want it: the mechanism at every length, and all weights trained."""

from __future__ import annotations

from functools import partial

from fast_attention import ConversionSettings
from fast_attention import convert as given

convert = partial(given, exact_up_to=None)
settings_of_all = partial(ConversionSettings, train="model")
