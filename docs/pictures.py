"""Draw the README's study from its committed record: ``python docs/pictures.py``."""

from __future__ import annotations

from pathlib import Path

from fast_attention import files
from fast_attention.lab.study import drawings
from fast_attention.lab.study.ledger import Ledger

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Both pictures of the newest record."""
    record = sorted((ROOT / "records").glob("*-study-mqar.json"))[-1]
    ledger = Ledger.from_json(record.read_text(encoding="utf-8"))
    files.write(ROOT / "docs" / "study-prices.svg", drawings.prices(ledger).svg)
    files.write(ROOT / "docs" / "study-curves.svg", drawings.curves(ledger).svg)
    print(f"docs/study-prices.svg, docs/study-curves.svg from {record.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
