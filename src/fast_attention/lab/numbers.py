"""Numbers as people read them: of few digits, and never with an exponent."""

from __future__ import annotations

import math


def digits(value: float, count: int = 2) -> str:
    """So many digits: 110.3 as ``110``, 0.01234 as ``0.012``."""
    return f"{float(f'{value:.{count}g}'):,.10g}" if abs(value) >= 1e-4 or not value else f"{value:.0e}"


def percent(value: float) -> str:
    """A relative error as a percentage of two digits."""
    if not math.isfinite(value):
        return "not finite"
    return "below 0.001 %" if 0 < value < 1e-5 else f"{digits(100 * value)} %"


def bytes_of(size: int | None) -> str:
    """1536 as ``1.5 KiB``."""
    if size is None:
        return "-"
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{digits(amount, 3)} {unit}"
        amount /= 1024
    return f"{digits(amount, 3)} GiB"


def amount(number: int | None) -> str:
    """1500000 as ``1.5 M``."""
    if number is None:
        return "-"
    value = float(number)
    for unit in ("", " k", " M"):
        if value < 1000:
            return f"{digits(value, 3)}{unit}"
        value /= 1000
    return f"{digits(value, 3)} G"


def milliseconds(value: float) -> str:
    """12.3456 as ``12.3 ms``."""
    return f"{digits(value, 3)} ms" if value < 1000 else f"{digits(value / 1000, 3)} s"


def factor(ratio: float) -> str:
    """A time ratio as a speed: 0.5 as ``2x``."""
    return f"{digits(1 / ratio)}x"
