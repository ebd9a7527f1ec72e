"""The builder of docs/, imported as Sphinx imports it, and a copy of the records to change."""

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
Change = Callable[[str, Callable[[Any], None]], None]


@pytest.fixture(scope="session")
def build() -> ModuleType:
    """The builder; ``build.measured`` and ``build.pictures`` are its other modules."""
    sys.path.insert(0, str(ROOT / "docs"))
    return importlib.import_module("build")


@pytest.fixture(scope="session")
def pages(build: ModuleType) -> dict[Path, str]:
    """The page of every mechanism, at the path where Sphinx finds it."""
    return {build.MECHANISMS / f"{name}.md": build.page(name) for name in build.catalogue.names()}


@pytest.fixture
def changed(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """The builder reads a copy of the records, of which one was changed."""

    def change(kind: str, how: Callable[[Any], None]) -> None:
        folder = Path(shutil.copytree(ROOT / "records", tmp_path / "records"))
        path = sorted(folder.glob(f"*-{kind}.json"), key=lambda path: path.stem)[-1]
        held = json.loads(path.read_text(encoding="utf-8"))
        how(held)
        path.write_text(json.dumps(held), encoding="utf-8")
        monkeypatch.setattr(build.measured, "RECORDS", folder)

    return change
