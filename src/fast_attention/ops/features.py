"""Feature maps: a kernel k(x, y) = phi(x) . phi(y) as a value that turns (..., n, d) into (..., n, C)."""

from __future__ import annotations
