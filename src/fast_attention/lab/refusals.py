"""What a command says in one line, and with which exit code, when it cannot be carried out."""

from __future__ import annotations

import errno
import re

BROKEN = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN,
)  # fmt: skip
NO_MEMORY = ("alloc", "out of memory", "Cannot allocate memory", "can't start new thread", "Storage size calculation")


class InputError(ValueError):
    """The user asked for something that cannot be had. The message is one line and says what would work."""


def told(error: Exception) -> tuple[int, str] | None:
    """Exit code and words: 2 for the user's mistakes, 1 for what went wrong. None: a fault of the program.

    What went wrong is the machine's: no memory, a full disk, an output that nobody reads any more (no words then).
    """
    if isinstance(error, InputError):
        return 2, str(error)
    if isinstance(error, BrokenPipeError):
        return 1, ""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return 1 if error.errno in BROKEN else 2, f"{where}{error.strerror or error}"
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    ):
        return 1, f"not enough memory: {_first(error)}"
    return None


def _first(error: Exception) -> str:
    """The first line of what an error says, without torch's own place in its source."""
    first = (str(error).splitlines() or ["the system gives no more"])[0]
    return re.sub(r"^\[enforce fail at .*?\] (err == 0\. )?", "", first)
