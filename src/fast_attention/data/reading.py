"""Reads files that users name, up to a limit: a device has no end, and gzip may unpack to a thousand times its size."""

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
    """Open a file for reading, also a pipe that a shell gives (``<(command)``, ``/dev/stdin``).

    Raises:
        OSError: It cannot be opened, or is a named pipe, to which nobody may ever write.
    """
    is_shells = os.path.realpath(path).startswith(("/dev/", "/proc/"))  # its other end is open already
    if not is_shells and stat.S_ISFIFO(os.stat(path).st_mode):
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
    content = raw(path)
    if not content.startswith(GZIP):
        return content
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        return _all(file, os.fspath(path))


def too_long(name: str) -> str:
    """The message about a file that is longer than the limit."""
    return f"{name}: more than {LIMIT.get():,} bytes, the limit for a file or folder, unpacked: --max-bytes reads more"


def _all(file: IO[bytes] | Any, name: str) -> bytes:
    content = bytearray()
    while chunk := file.read(CHUNK):
        content += chunk
        if len(content) > LIMIT.get():
            raise TooLong(too_long(name))
    return bytes(content)
