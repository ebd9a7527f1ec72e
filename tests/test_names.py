"""Names: a star import brings what the contents page names and nothing of other people's."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fast_attention

PUBLIC = [
    "fast_attention", "fast_attention.functional", "fast_attention.catalogue", "fast_attention.conformance",
    "fast_attention.conversion", "fast_attention.decoding", "fast_attention.exporting",
    "fast_attention.integrations", "fast_attention.mechanisms",
]  # fmt: skip


def contents() -> dict[str, Any]:
    """The public names and what they are: those of the contents page, also those that it imports later."""
    page = vars(importlib.import_module("fast_attention.contents"))
    names = [name for name in page if name[0] != "_" and name not in ("LATER", "TYPE_CHECKING")]
    return {name: getattr(fast_attention, name) for name in [*names, *page["LATER"]]}


def starred(name: str) -> dict[str, Any]:
    """What ``from name import *`` brings."""
    module = importlib.import_module(name)
    return {each: getattr(module, each) for each in module.__all__}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_star_import_brings_no_modules_and_nothing_of_other_packages(name: str) -> None:
    found = starred(name)
    assert found
    assert len(found) == len(importlib.import_module(name).__all__), "a name stands twice"
    for each, value in found.items():
        assert not isinstance(value, ModuleType), f"from {name} import * puts the module {each} over the user's"
        home = getattr(value, "__module__", None)
        assert home in (None, "typing") or home.startswith("fast_attention"), f"{name}.{each} is of {home}"


def test_a_star_import_leaves_torchs_nn_alone() -> None:
    space: dict[str, Any] = {}
    exec("from torch import nn\nfrom fast_attention import *\nlayer = nn.Linear(2, 2)\nfound = attention", space)
    assert space["found"] is fast_attention.attention


def test_the_star_names_all_that_the_contents_page_imports() -> None:
    page = {name for name, value in contents().items() if not isinstance(value, ModuleType)}
    assert set(fast_attention.__all__) == page, "a name of the contents page is not in __all__"
    assert len(contents()) <= 66, "more names than a reader looks through"


def test_the_star_of_functional_names_every_function_of_the_mechanisms() -> None:
    functional = importlib.import_module("fast_attention.functional")
    page = {
        name for name, value in vars(functional).items()
        if name.endswith(("_attention", "_mix", "_mlp", "_manhattan")) and callable(value) and name[0] != "_"
    }  # fmt: skip
    assert page <= set(functional.__all__)


def test_docs_name_every_public_name() -> None:
    """A new name or module of the contents page has to be there."""
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
    for name, value in contents().items():
        if isinstance(value, ModuleType):
            assert f"automodule:: {value.__name__}\n" in page, name
        else:
            assert f":: fast_attention.{name}\n" in page, name


def test_importing_the_package_has_no_side_effects() -> None:
    """Nothing is put into ``sys.meta_path``, and neither torch nor transformers is imported: in a fresh process."""
    code = (
        "import sys; before = [*sys.meta_path]; import fast_attention; assert sys.meta_path == before, sys.meta_path; "
    )
    code += "assert not {'torch', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
