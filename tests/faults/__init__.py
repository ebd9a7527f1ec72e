"""The seeded faults, one file for each folder of the source, and the list of the tests that find them.

``python -m tests.faults`` (``make faults``) runs them.
"""

from __future__ import annotations

import csv
import pkgutil
from importlib import import_module
from pathlib import Path

from tests.faults.fault import Fault

ROOT = Path(__file__).parent.parent.parent
FOUND = Path(__file__).parent / "found.csv"
COPIED = [name for name in ("src", "experiments", "benchmarks") if (ROOT / name).is_dir()]
NO_FAULTS = ("__main__", "fault")
FAULTS: list[Fault] = [
    fault
    for part in pkgutil.iter_modules(__path__)
    if part.name not in NO_FAULTS
    for fault in import_module(f"{__name__}.{part.name}").FAULTS
]


def path_in(root: Path, fault: Fault) -> Path:
    """The file of a fault, in the repository or a copy of it: one of the package, or by its path from the root."""
    return root / fault.file if fault.file.split("/")[0] in COPIED else root / "src" / "fast_attention" / fault.file


def read() -> dict[str, dict[str, str]]:
    """What was found when the faults were run last, by their names."""
    with FOUND.open(newline="", encoding="utf-8") as file:
        return {row["fault"]: row for row in csv.DictReader(file)}


def write(found: dict[str, str]) -> None:
    """Keep the test that finds each fault; the rows of others stay where they are still faults."""
    before = read() if FOUND.exists() else {}
    with FOUND.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["fault", "file", "found", "by"])
        for fault in FAULTS:
            by = found[fault.what] if fault.what in found else before.get(fault.what, {}).get("by", "")
            rows.writerow([fault.what, fault.file, "yes" if by else "no", by])
