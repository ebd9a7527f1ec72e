"""Files that are there whole or not at all: written under another name, brought to the disk, then renamed."""

from __future__ import annotations

import os
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
