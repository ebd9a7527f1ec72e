"""Files that users name, read whole and never beyond a limit: a device has no end, and gzip hides a thousandfold."""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

GZIP = b"\x1f\x8b"
LIMIT: ContextVar[int] = ContextVar("bytes of a file, unpacked", default=1 << 30)
CHUNK = 1 << 20


class TooLong(ValueError):
    """A file is longer than the limit."""


def opened(path: str | os.PathLike[str]) -> IO[bytes]:
    """A file open for reading. A pipe that a shell gives (``<(command)``, ``/dev/stdin``) is one, too.

    Raises:
        OSError: It cannot be opened, or is a pipe in a folder: nobody may ever write to it.
    """
    at_hand = os.path.realpath(path).startswith(("/dev/", "/proc/"))  # its other end is open already
    if not at_hand and stat.S_ISFIFO(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "a named pipe, on which one may wait for ever: give a file", os.fspath(path))
    return Path(path).open("rb")


def raw(path: str | os.PathLike[str]) -> bytes:
    """A file's bytes.

    Raises:
        TooLong: There are more than ``LIMIT`` allows.
        OSError: It cannot be read.
    """
    with opened(path) as file:
        return _all(file, os.fspath(path))


def unpacked(path: str | os.PathLike[str]) -> bytes:
    """A file's bytes, unpacked where the first two say that it is gzip.

    Raises:
        TooLong: There are more than ``LIMIT`` allows.
        EOFError, zlib.error, gzip.BadGzipFile: The gzip data are cut off or damaged.
        OSError: It cannot be read.
    """
    found = raw(path)
    if not found.startswith(GZIP):
        return found
    with gzip.GzipFile(fileobj=io.BytesIO(found)) as file:
        return _all(file, os.fspath(path))


def too_long(name: str) -> str:
    """The message about a file that is longer than the limit."""
    return f"{name}: more than {LIMIT.get():,} bytes, the limit for a file or folder, unpacked: --max-bytes reads more"


def _all(file: IO[bytes] | Any, name: str) -> bytes:
    found = bytearray()
    while part := file.read(CHUNK):
        found += part
        if len(found) > LIMIT.get():
            raise TooLong(too_long(name))
    return bytes(found)
