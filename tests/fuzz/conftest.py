"""Adds up the inputs that all processes tried, for `make fuzz`."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.kit import TRIED

_ALL: Counter[str] = Counter()


def pytest_sessionfinish(session: pytest.Session) -> None:
    worker: Any = session.config
    if "workerinput" in vars(worker):
        worker.workeroutput["tried"] = dict(TRIED)
    elif out := os.environ.get("FUZZ_COUNTS"):
        Path(out).write_text(json.dumps(_ALL + TRIED))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _ALL.update(node.workeroutput.get("tried", {}) if "workeroutput" in vars(node) else {})
