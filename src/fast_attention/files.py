"""Writes files atomically, locks folders for one process, verifies hashes and formats."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import reprlib
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fast_attention import __version__

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

LOCK = ".lock"
LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # raised by file systems that know no locks


class InUse(ValueError):
    """Another process uses the folder. The message names it."""


class Newer(ValueError):
    """A later version of this library wrote it, in a format that this one cannot read. The message names both."""


@contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path whose file replaces ``path`` if the block ends without an error; else nothing changes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)  # the new name too
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(partial), partial):
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_group(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path in a temporary folder, whose files replace ``path`` and its neighbours of the same names.

    They replace them if the block ends without an error, the one for ``path`` last; else nothing changes. An empty file
    takes its neighbour away. Where the process is killed meanwhile, all are the old ones, or new after ``settle``.
    """
    path = Path(path)
    folder = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of a killed process of this number
        folder.mkdir(parents=True)
        settle(path)
        yield folder / path.name
        files = list(folder.iterdir())
        for file in (*files, folder):
            sync(file)
        folder.rename(_complete(path))
        if len(files) > 1:
            path.unlink(missing_ok=True)  # an older one must not stand beside new neighbours
        settle(path)
        sync(path.parent)
    except OSError as error:
        if error.filename is not None and folder.name in str(error.filename):
            error.filename = str(path)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def settle(path: str | os.PathLike[str]) -> None:
    """Put in place what an ``atomic_group`` wrote for ``path`` and its neighbours, if its process was killed first.

    Who reads such a group calls this before. Several processes may, at the same time.
    """
    path = Path(path)
    complete = _complete(path)
    for file in sorted(complete.glob("*"), key=lambda file: file.name == path.name):
        with suppress(FileNotFoundError):  # another process has put it in place
            if file.stat().st_size:
                os.replace(file, path.with_name(file.name))
            else:
                path.with_name(file.name).unlink(missing_ok=True)
                file.unlink()
    with suppress(OSError, ValueError):
        complete.rmdir()


def _complete(path: Path) -> Path:
    """The folder of a group's files that are all written and not all in place."""
    return path.with_name(f".{path.name}.complete")


def sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def verify(path: str | os.PathLike[str], digest: object) -> None:
    """Raise a ``ValueError`` that names the file unless it has the SHA-256 that was taken when it was written."""
    if (actual := sha256(path)) != digest:
        raise ValueError(f"{os.fspath(path)} is damaged: its SHA-256 is {actual}, and {digest} was saved")


def sync(path: Path) -> None:
    """Flush a file to the disk, or a folder's entries where the system can."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file (UTF-8)."""
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def prepared(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Make a folder and those above it while the block runs; those that were not there and are empty then go again."""
    folder = Path(folder)
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for each in new:
            with suppress(OSError):
                each.rmdir()


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Lock a folder while the block runs; the system releases the lock if the process dies.

    Where the system or the file system has no locks, nothing is locked. What killed processes left half written in the
    folder is deleted.

    Raises:
        InUse: Another process has locked it; the message says which one, on which machine, since when.
    """
    folder = Path(folder)
    with prepared(folder):
        handle = _lock(folder / LOCK, folder)
        try:
            os.ftruncate(handle, 0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
            for partial in folder.glob(".*.[0-9]*.part"):  # of a process that was killed while it wrote
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
            yield
        finally:
            with suppress(OSError):
                (folder / LOCK).unlink()  # while it is held, so that no other process's is taken away
            os.close(handle)


def _lock(path: Path, folder: Path) -> int:
    """Open and lock the file at ``path``."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except BlockingIOError:
            who = os.read(handle, 300).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise InUse(f"{folder} is in use by {who}: wait for its end, or choose another folder") from None
        except OSError as error:
            if error.errno in LOCKLESS:
                return handle
            raise
        os.close(handle)  # the process that held it has taken the file away: there is a new one


def decoded(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: It is not JSON, not UTF-8, nested deeper than can be read, or an object has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, no key of which stands twice: ``json`` takes the last value in silence."""
    seen: dict[str, Any] = {}
    for name, value in pairs:
        if name in seen:
            raise ValueError(
                f"{name!r} stands twice in an object, as {reprlib.repr(seen[name])} and {reprlib.repr(value)}"
            )
        seen[name] = value
    return seen


def readable(header: Mapping[str, Any], expected: str, what: str) -> None:
    """Raise unless ``header["format"]`` is the expected one, a name and a number: ``"fast-attention checkpoint 1"``.

    Raises:
        Newer: The format has the same name and a higher number.
        ValueError: The format is another one.
    """
    stored, (name, _, number) = header.get("format"), expected.rpartition(" ")
    later = re.fullmatch(rf"{re.escape(name)} (\d{{1,9}})", stored) if isinstance(stored, str) else None
    if later is not None and int(later[1]) > int(number) and header.get("version") != __version__:  # else it is damaged
        raise Newer(
            f"{what} was written by fast-attention {header.get('version') or 'of a later version'} ({stored!r}); this "
            f"is {__version__}, which reads {expected!r}. It is left as it is: use the later version"
        )
    if stored != expected:
        raise ValueError(f"its format is not {expected!r}")
