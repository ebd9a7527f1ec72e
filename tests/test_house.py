"""The house keeps its shape: arrows point down, nothing is listed twice, the contents page and the tables are fresh."""

from __future__ import annotations

import ast
import functools
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import fast_attention
from fast_attention import catalogue

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fast_attention"
FILES = sorted(SOURCE.rglob("*.py"))
# From the ground up: a file imports only from floors below its own, or from its own folder.
FLOORS = [
    ["value", "expressions", "files", "cache_argument", "allocator"],
    ["core"],
    ["engine"],
    ["feature_maps"],
    ["gpu"],
    ["checks", "decoding", "traits"],
    ["biases", "refusals", "left_padding"],
    ["mechanism"],
    ["dense"],
    ["sparse"],
    ["sinkhorn", "lsh", "linear"],
    ["aft"],
    ["log_manhattan"],
    ["mixers"],
    ["hybrid"],
    ["mechanisms"],
    ["catalogue", "packed", "grouped"],
    ["parallel"],
    ["functional", "nn", "counting", "clock", "attention_maps"],
    ["conformance", "explanation", "exporting", "integrations"],
    ["conversion"],
    ["lab"],
    ["cli", "contents"],
    ["__main__"],
]


def floor(module: str) -> tuple[int, str]:
    room = module.split(".")[1] if "." in module else "__init__"
    if room == "mechanisms" and module.count(".") > 1:  # every family has a room of its own
        room = module.split(".")[2]
    for height, rooms in enumerate(FLOORS):
        if room in rooms:
            return height, room
    return len(FLOORS), room


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes(*kinds: type[Any]) -> Iterator[tuple[Path, Any]]:
    """Every such node of the source, with its file."""
    return ((path, node) for path in FILES for node in ast.walk(tree(path)) if isinstance(node, kinds))


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fast_attention":
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.append(submodule if node.module == "fast_attention" or submodule in NAMES else node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("fast_attention")]
        elif isinstance(node, ast.Constant) and str(node.value).startswith("fast_attention.") and node.value in NAMES:
            found.append(str(node.value))  # for import_module
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


NAMES = {module_name(path): path for path in FILES}


def climbing(here: str, path: Path) -> list[str]:
    """The imports of a module that point up or across."""
    height, room = floor(here)
    if height == len(FLOORS):
        return [f"{here} stands on no floor: give it one in tests/test_house.py and CHARTER.md"]
    found = []
    for target in imports(path):
        below, other = floor(target)
        across = room == other == "mechanisms" and path.name != "__init__.py"
        if target != "fast_attention.__version__" and (across or not (below < height or room == other)):
            found.append(f"{here} imports {target}, which does not lie below it")
    return found


def test_arrows_point_down() -> None:
    modules = {name: path for name, path in NAMES.items() if name not in ("fast_attention", "fast_attention.__main__")}
    breaches = [each for name, path in modules.items() for each in climbing(name, path)]
    assert not breaches, breaches


def test_the_package_imports_nothing_that_stands_around_it() -> None:
    """Experiments and benchmarks are not installed with it."""
    around = {"benchmarks", "docs", "examples", "experiments", "tests"}
    breaches = [
        f"{path}:{node.lineno} imports {name}"
        for path, node in nodes(ast.Import, ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
        if name.split(".")[0] in around
    ]
    assert not breaches, breaches


def test_no_imports_run_in_a_circle() -> None:
    """Imports inside functions count, those of a package mean its ``__init__``."""
    graph = {name: {each for each in imports(path) if each in NAMES} - {name} for name, path in NAMES.items()}
    try:
        [*TopologicalSorter(graph).static_order()]
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_shortcuts() -> None:
    breaches = [f"{path} is a heap: what does it hold?" for path in FILES if "utils" in path.stem]
    for path, node in nodes(ast.Call, ast.Global):
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if isinstance(node, ast.Global) or name in ("hasattr", "eval", "exec"):
            breaches.append(f"{path}:{node.lineno} has {name or 'a global statement'}")
    assert not breaches, breaches


LISTS = {"mechanisms/__init__.py", "contents.py"}  # where mechanisms may be listed by name


def named(node: ast.expr | None) -> str:
    """The name that an element of a list is or begins with: ``Local``, ``"Local"``, ``Local(window=8)``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return named(function)
        case ast.Constant(value=str(text)):
            return text.split("(")[0]
        case _:
            return ""


def test_mechanisms_are_listed_once() -> None:
    """What holds for some of them is a trait, which a new mechanism declares in its own file."""
    breaches = []
    for path, node in nodes(ast.List, ast.Tuple, ast.Set, ast.Dict):
        elements = [*node.keys, *node.values] if isinstance(node, ast.Dict) else node.elts
        found = {named(each) for each in elements} & {*catalogue.names()}
        if len(found) > 2 and str(path.relative_to(SOURCE)) not in LISTS:
            breaches.append(f"{path}:{node.lineno} lists {', '.join(sorted(found))}")
    assert not breaches, breaches


# Names that say nothing about what they hold; CHARTER's glossary has the words to use.
RIDDLES = """
    trail followed stretches stretch desk pulled entrant entrants lineup ledger heats heat race prices price
    stranger strangers spelling spelled fades sheets sheet placed landmarks going_on took owed told holes calm wild
    steep steady lift upward downward worth mine made spelt fade fading tails tail everywhere scratch room rooms
    sent here segment segments pieces moment now hear heard history anew strange aside explicit doings wished wish
    narrower obstacle gpu_obstacle walking settled bounded at_once alike put merged surroundings vehicles
    ahead behind beside described further held in_range lead together twins unserved passages taught teach begun_anew
    walk cut apart sight sunk biased
""".split()  # noqa: SIM905


def names_of(path: Path) -> set[str]:
    """The functions, classes, arguments, assigned variables and attributes of a file, without outer underscores."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name.strip("_").lower())
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name.strip("_").lower())
            case _:
                pass
    return names


def test_no_name_is_a_riddle() -> None:
    breaches = [f"{path}: {', '.join(riddles)}" for path in FILES if (riddles := sorted(names_of(path) & {*RIDDLES}))]
    assert not breaches, breaches


# Fields of Traits, attributes and classes that had such names: the words stay English elsewhere.
OLD_NAMES = {
    "traits.py": "order reads spans",
    "engine": "served above kept",
    "mechanisms/dense": "kept",
    "mechanisms/sparse": "kept",
    "mechanisms/sinkhorn": "kept",
    "mechanisms/hybrid": "kept",
    "mechanisms/aft": "both kept",
    "mechanisms/linear": "both kept above below",
    "biases": "unbiased",
    "gpu": "forms known both",
    "mechanism.py": "summary",
    "integrations": "tried might above both kept",
    "integrations/visible.py": "back",
}


def test_old_names_do_not_come_back() -> None:
    for place, words in OLD_NAMES.items():
        paths = [path for path in FILES if path.is_relative_to(SOURCE / place)]
        assert paths, place
        banned = {word.lower() for word in words.split()}
        for path in paths:
            assert not names_of(path) & banned, (path, names_of(path) & banned)


PAGES = [
    ROOT / "README.md", ROOT / "CHARTER.md",
    *(path for where in ("*.md", "guides/*.md", "ideas/*.md") for path in sorted((ROOT / "docs").glob(where))),
]  # fmt: skip


def test_mechanisms_in_prose_parse() -> None:
    """``Local(window=64)`` in a docstring or a page is what a reader copies."""
    names, read = "|".join(catalogue.names()), 0
    for path in {*FILES, *PAGES}:
        for found in re.finditer(rf'(``|`|")((?:{names})\([^`"\n{{}}]*\))\1', path.read_text(encoding="utf-8")):
            for each in found[2].split(" + "):  # layers in turns
                assert catalogue.parse(each), path
            read += 1
    assert read > 100


def prose(path: Path) -> str:
    """A page, or the comments and strings of a source file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(token.string for token in tokens if token.type in (tokenize.STRING, tokenize.COMMENT))


def test_files_that_prose_names_exist() -> None:
    """By name alone, which stays true when they move, or by path from the root of the repository or the package."""
    known = {path.name for top in ROOT.iterdir() if top.name[0] != "." for path in (top, *top.rglob("*"))}
    own = {path for path in PAGES if path.parent.name != "ideas"}  # ideas name files of other people's packages
    for path in {*FILES, *own, ROOT / "CONTRIBUTING.md"}:
        text = prose(path)
        for folder, name in re.findall(r"((?:[\w-]+/)*)(\w+\.py)\b", text):
            assert name in known, f"{path} names {name}"
            places = [base / folder / name for base in (ROOT, SOURCE)]
            assert not folder or any(each.exists() for each in places), f"{path}: {name} is not in {folder}"
        for folder in re.findall(r"(?<![\w/.-])((?:engine|feature_maps|mechanisms)/(?:\w+/)*)", text):
            assert (SOURCE / folder).is_dir(), f"{path} names {folder}"


def test_nothing_is_installed_by_a_name_that_no_index_has() -> None:
    for path in [*FILES, *PAGES, ROOT / "Makefile"]:
        assert not re.search(r"pip install [^`\n]*fast-attention\[", path.read_text(encoding="utf-8")), path


def test_the_contents_page_names_every_mechanism() -> None:
    assert len(catalogue.names()) >= 25
    for name in catalogue.names():
        assert getattr(fast_attention, name) is type(catalogue.default(name)), name
    for name in ("attention", "MultiheadAttention", "TokenMixer", "Bound", "Shape", "Traits", "Unsupported"):
        assert getattr(fast_attention, name)
    for name in ("catalogue", "conformance", "functional"):
        assert getattr(fast_attention, name)


def test_every_folder_says_what_it_is_for() -> None:
    for folder in {path.parent for path in FILES}:
        said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert said, f"{folder} needs an __init__.py whose docstring says what it is for (CHARTER's tree)"


def test_numpy_comes_with_the_package() -> None:
    """Without it torch warns when it is imported, and digests of data fail; torch itself does not bring it."""
    held = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(each.startswith("numpy") for each in held["dependencies"])


LIGHT = """
import gc, sys, time
start = time.process_time()
import torch
torch_took = time.process_time() - start
gc.freeze()  # or a collection of all that torch made falls to whoever comes next
before, start, finders = {*sys.modules}, time.process_time(), [*sys.meta_path]
import fast_attention; fast_attention.attention
assert sys.meta_path == finders, "import fast_attention puts a finder of its own into sys.meta_path"
took = (time.process_time() - start) / torch_took
heavy = {"numpy.testing"} & {*sys.modules}
print(took, *heavy, *sorted({name.split(".")[0] for name in {*sys.modules} - before} - {*sys.stdlib_module_names}))
"""


def test_import_is_light(tmp_path: Path) -> None:
    """Nothing heavy comes in with the package, and it adds at most a third of torch's time: the best of a few tries.

    The first try compiles, where users have compiled files.
    """
    took, cached = [], {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    while len(took) < 2 or (min(took) >= 0.33 and len(took) < 4):  # a busy machine takes its time now and then
        command = [sys.executable, "-c", LIGHT]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=cached)
        spent, *brought = run.stdout.split()
        known = {"fast_attention", "jaxtyping", "numpy", "torch"}
        assert {name for name in brought if not name.startswith("_sysconfigdata")} <= known, brought  # Python's own
        took.append(float(spent))
    assert min(took) < 0.33, took
