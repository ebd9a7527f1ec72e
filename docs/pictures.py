"""Draw the README's study from its committed record: ``python docs/pictures.py``."""

from __future__ import annotations

from pathlib import Path

from fast_attention import files
from fast_attention.lab.study import drawings
from fast_attention.lab.study.record import Study

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Both pictures of the newest record."""
    path = sorted((ROOT / "records").glob("*-study-mqar.json"))[-1]
    record = Study.read(path)
    files.write(ROOT / "docs" / "study-prices.svg", drawings.prices(record).svg)
    files.write(ROOT / "docs" / "study-curves.svg", drawings.curves(record).svg)
    print(f"docs/study-prices.svg, docs/study-curves.svg from {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
