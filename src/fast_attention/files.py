"""Files that are there whole or not at all: written under another name, brought to the disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write what will stand at ``path`` once the block has ended without an error; else nothing changes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
        if os.name == "posix":
            sync(path.parent)  # the new name too
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def together(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write what will stand at ``path`` beside files that belong to it: they are put into the same folder.

    All take their places once the block has ended without an error, the one at ``path`` last; else nothing changes.
    """
    path = Path(path)
    folder = path.with_name(f".{path.name}.{os.getpid()}.part")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder / path.name
        parts = sorted(folder.iterdir(), key=lambda part: part.name == path.name)
        for part in parts:
            sync(part)
        if len(parts) > 1:
            path.unlink(missing_ok=True)  # an older one must not stand beside new neighbours
        for part in parts:
            os.replace(part, path.with_name(part.name))
        if os.name == "posix":
            sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file (UTF-8)."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")
