"""The API page names every public name, once."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from typing import Any

import fast_attention
from tests.docs.conftest import ROOT
from tests.test_names import PUBLIC

ENTRY = re.compile(r"^\.\. auto(?:class|function|data):: (fast_attention\.[\w.]+)$", re.M)


def value(path: str) -> Any:
    """What a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_public_name_stands_once() -> None:
    entries = ENTRY.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    assert len(entries) == len({*entries})
    shown = Counter(id(value(path)) for path in entries)
    twice = [path for path in entries if shown[id(value(path))] > 1]
    assert not twice, "one thing under two paths"
    public = {f"{module}.{name}" for module in PUBLIC for name in importlib.import_module(module).__all__}
    public -= {path for path in public if isinstance(value(path), type(importlib))}
    missing = sorted(path for path in public if id(value(path)) not in shown)
    assert not missing
    own = {path for path in entries if path.count(".") == 1}
    assert own == {f"fast_attention.{name}" for name in fast_attention.__all__}
    assert len(entries) > 150


def test_names_that_guides_tell_to_call_are_there() -> None:
    entries = ENTRY.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    shown = {id(value(path)) for path in entries}
    guides = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")]
    called = 0
    for page in guides:
        if page.name == "api.md":
            continue
        for path in re.findall(r"`(fast_attention(?:\.\w+)+)[`(]", page.read_text(encoding="utf-8")):
            found = named(path)
            assert isinstance(found, type(importlib)) or id(found) in shown, f"{page.name} names {path}"
            called += 1
    assert called > 5


def named(path: str) -> Any:
    """A module, or what stands in one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return value(path)
