"""Has the C library keep memory that is freed, so that the next call need not have it cleared, page by page."""

from __future__ import annotations

import ctypes
import os

# mallopt(3): the least that is mapped by itself, the most that is kept, in how many places threads look for memory.
MMAP_THRESHOLD, TRIM_THRESHOLD, ARENA_MAX = -3, -1, -8
LARGEST = 2047  # MiB that fit into the number that ``mallopt`` takes
LARGEST_BEFORE = 32  # MiB that older versions of glibc allow

_freed_memory = ["given back"]  # what becomes of it


def keep_memory(mebibytes: int | None = 1024) -> bool:
    """Keep freed memory for the next call: on a CPU long calls take up to a third less time.

    Linux's C library gives large pieces back to the system as soon as a tensor is gone; the next tensor gets them back
    cleared, 4 KiB at a time, which takes as long as what is computed for it. Call this once, at a program's start:
    threads that are there already do not keep theirs. It concerns the whole process, other libraries and exact
    attention too, and no GPU.

    Args:
        mebibytes: How much freed memory the process may keep, in MiB, and how large the pieces may be of which it is
            kept (older versions of glibc: at most 32 MiB); 1 to 2047. None keeps all: what the process takes is then
            the most that it ever took.

    Returns:
        Whether it is so from now on. Where the C library is another than glibc (macOS, Windows, musl) nothing is
        changed.

    Raises:
        ValueError: If ``mebibytes`` is not one of these.
    """
    if mebibytes is not None and mebibytes not in range(1, LARGEST + 1):
        raise ValueError(f"mebibytes={mebibytes!r}: give a whole number from 1 to {LARGEST}, or None to keep all")
    if not _is_glibc():
        return False
    library, most = ctypes.CDLL(None), -1 if mebibytes is None else int(mebibytes) << 20  # -1: without a limit
    sizes = library.mallopt(MMAP_THRESHOLD, most) or library.mallopt(MMAP_THRESHOLD, LARGEST_BEFORE << 20)
    if not (sizes and library.mallopt(TRIM_THRESHOLD, most)):
        return False
    library.mallopt(ARENA_MAX, 1)  # a second place would keep nothing: glibc gives back all of it that is free
    _freed_memory[:] = ["kept" if mebibytes is None else f"kept up to {mebibytes:,} MiB"]
    return True


def freed_memory() -> str:
    """The policy for freed memory in this process, as far as ``keep_memory`` has set it."""
    return _freed_memory[0]


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # Windows has no such call, other systems no such name
        return False
