"""What a seeded fault is."""

from __future__ import annotations

from typing import NamedTuple

ORACLE, LAW = "tests/test_oracles.py -k ", "tests/conformance/test_contract.py -k "


class Fault(NamedTuple):
    """``old`` becomes ``new`` in a source file; ``tests`` (pytest arguments) must then fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str
