"""The scripts of docs/, imported as Sphinx imports them, and a copy of the records to change."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
Change = Callable[[str, Callable[[Any], None]], Path]


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """A module of docs/ by name."""
    sys.path.insert(0, str(ROOT / "docs"))
    return importlib.import_module


@pytest.fixture(scope="session")
def pages(script: Callable[[str], ModuleType]) -> dict[Path, str]:
    """The page of every mechanism, at the path where Sphinx finds it."""
    writer = script("mechanism_pages")
    from fast_attention import catalogue

    return {ROOT / "docs" / "mechanisms" / f"{name}.md": writer.page(name) for name in catalogue.names()}


@pytest.fixture
def changed(tmp_path: Path) -> Change:
    """A copy of the records in which one record was changed."""

    def change(name: str, how: Callable[[Any], None]) -> Path:
        folder = Path(shutil.copytree(ROOT / "records", tmp_path / "records"))
        path = sorted(folder.glob(f"*-{name}.json"), key=lambda path: path.stem)[-1]
        held = json.loads(path.read_text(encoding="utf-8"))
        how(held)
        path.write_text(json.dumps(held), encoding="utf-8")
        return folder

    return change
