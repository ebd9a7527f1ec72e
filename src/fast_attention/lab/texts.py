"""Texts that every machine has: what Python and the installed packages say of themselves."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

from fast_attention.lab.corpus import Corpus

LIMIT = 3 << 18  # bytes that are read of a source
SHORTEST = 400  # characters of a document
WORDS = 4.0  # of a line on average: prose, neither a table of numbers nor a list
WRITTEN = (".md", ".rst", ".txt")
NO_DOCUMENTATION = ("licen", "copying", "notice", "author", "change", "release", "requirements", "test")


def python() -> Corpus:
    """The language reference that ``help`` prints, and the docstrings of the standard library."""
    documents = _limited(chain(sorted(topics.items()), _docstrings(Path(sysconfig.get_paths()["stdlib"]))))
    return Corpus("Python's topics and docstrings (PSF licence, installed)", documents)


def packages() -> Corpus:
    """Descriptions and documentation of the installed packages, in an order that mixes them."""
    return Corpus("documentation of installed packages (their own licences)", _limited(_installed()))


def _docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """Every module's docstrings as one document."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.glob("**/*.py")}
    for name in sorted(paths, key=_rank):
        if "site-packages" in name or "test" in name:
            continue
        try:
            tree = ast.parse(paths[name].read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        kinds = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        yield name, "\n\n".join(text for node in kinds if (text := ast.get_docstring(node)))


def _installed() -> Iterator[tuple[str, str]]:
    """The description of every package, and the text files that it brings."""
    known = {str(each.metadata["Name"]).lower(): each for each in importlib.metadata.distributions()}
    for name in sorted(known, key=_rank):
        if name.replace("_", "-") == "fast-attention":
            continue
        package = known[name]
        yield name, str(package.metadata.json.get("description", ""))
        for file in sorted((file for file in package.files or () if file.suffix in WRITTEN), key=str):
            if any(word in str(file).lower() for word in NO_DOCUMENTATION):
                continue
            try:
                yield f"{name}: {file}", Path(str(package.locate_file(file))).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def _rank(name: str) -> bytes:
    """Where a name stands in an order that is the same everywhere, and not the alphabet's."""
    return hashlib.sha256(name.encode()).digest()


def _limited(documents: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Documents of prose until ``LIMIT`` is reached, without paragraphs that stood before."""
    known: set[str] = set()
    kept: list[tuple[str, str]] = []
    size = 0
    for name, text in documents:
        paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
        new = [each for each in dict.fromkeys(paragraphs) if each not in known]
        known |= {*new}
        document = "\n\n".join(new)
        lines = [line for line in document.splitlines() if line.strip()]
        if len(document) < SHORTEST or len(document.split()) < WORDS * len(lines):
            continue
        kept.append((name, document))
        size += len(document.encode())
        if size >= LIMIT:
            break
    return tuple(kept)
