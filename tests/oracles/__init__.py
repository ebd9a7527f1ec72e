"""The oracles: every mechanism from its paper, in float64 loops over one head, importing nothing of ours.

Each file of this package holds the oracles of one family:

- ``ORACLES``: class name -> function. An attention oracle is ``f(m, q, k, v, w, *, head, is_causal, key_mask)`` with
  q (L, E), k (S, E), v (S, Ev), key_mask None or boolean (S,), -> (L, Ev); a mixer oracle is
  ``f(m, x, w, *, is_causal, key_mask)`` with x (N, E) -> (N, E). ``m`` is the mechanism, read for its settings only;
  ``w`` its weights (all heads; ``head`` says which one). Tensors are float64 and the function is differentiable, so
  that its gradients are an oracle too.
- ``VARIANTS``: reprs of further settings to test beside the default one, each fit for 13 tokens and less.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

ORACLES: dict[str, Callable[..., Any]] = {}
VARIANTS: list[str] = []
for _module in pkgutil.iter_modules(__path__):
    _family = importlib.import_module(f"{__name__}.{_module.name}")
    ORACLES.update(_family.ORACLES)
    VARIANTS += _family.VARIANTS
