"""Formats numbers for people: few digits, no exponents."""

from __future__ import annotations

import math
from typing import Self


class Number(str):
    """A number as people read it, which knows its value: tables sort by that."""

    __slots__ = ("value",)
    value: float

    def __new__(cls, text: str, value: float) -> Self:
        """The text with its value."""
        self = super().__new__(cls, text)
        self.value = value
        return self


def digits(value: float, count: int = 2) -> str:
    """So many digits: 110.3 as ``110``, 0.01234 as ``0.012``."""
    return f"{float(f'{value:.{count}g}'):,.10g}" if abs(value) >= 1e-4 or not value else f"{value:.0e}"


def count(number: int) -> Number:
    """12345 as ``12,345``."""
    return Number(f"{number:,}", number)


def percent(value: float | None) -> str:
    """A relative error as a percentage of two digits; here and below ``-`` stands for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return Number("not finite", value)
    return Number("below 0.001 %" if 0 < value < 1e-5 else f"{digits(100 * value)} %", value)


def bytes_of(size: int | None) -> str:
    """1536 as ``1.5 KiB``."""
    return _scaled(size, 1024, (" B", " KiB", " MiB", " GiB"))


def milliseconds(value: float | None) -> str:
    """12.3456 as ``12.3 ms``."""
    return _scaled(value, 1000, (" ms", " s"))


def _scaled(value: float | None, base: int, units: tuple[str, ...]) -> str:
    if value is None:
        return "-"
    power = next((power for power in range(len(units)) if value < base ** (power + 1)), len(units) - 1)
    return Number(f"{digits(value / base**power, 3)}{units[power]}", value)


def factor(ratio: float | None) -> str:
    """A time ratio as a speed: 0.5 as ``2x``."""
    return "-" if ratio is None else Number(f"{digits(1 / ratio)}x", 1 / ratio)


def fixed(value: float | None, form: str) -> str:
    """A number in a format of its own, such as ``.3f``."""
    return "-" if value is None else Number(f"{value:{form}}", value)
