"""Loads the compiled core: C++ kernels for eager calls on CPUs, registered as ``torch.ops.fast_attention_core``.

The library runs without it. ``python -m fast_attention.core build`` compiles ``source/`` into one file beside this one;
a platform's wheel brings that file along. The environment variable ``FAST_ATTENTION_CORE`` turns the core off (``0``)
or names another file.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import NamedTuple

SOURCE = Path(__file__).parent / "source"
FILE = Path(__file__).parent / f"_core.{sysconfig.get_platform()}.so"
BUILD = "python -m fast_attention.core build"
VARIABLE = "FAST_ATTENTION_CORE"
# The build compiles this text in. It is read without loading the file, which could not be unloaded again.
MARK = "fast-attention core of sources {stamp}, widths {widths};"
_MARK = re.compile(MARK.format(stamp="([0-9a-f]{16})", widths="([0-9 ]+)").encode())


class Found(NamedTuple):
    """The outcome of looking for the core: a file that serves, or the reason why none does."""

    reason: str
    file: Path = FILE
    width: int = 0  # numbers in a vector


class Useless(Exception):
    """A file is there that cannot serve; the message says why, and what to do."""


_found: list[Found] = []  # one, from the first look on
_off: list[None] = []  # one for each switched_off() that is open
_looking = Lock()


def unavailable() -> str:
    """Why the core does not serve; empty where it does. The first call loads it."""
    return "turned off here" if _off else found().reason


@contextmanager
def switched_off() -> Iterator[None]:
    """Turn the core off while the block runs, in all threads."""
    _off.append(None)
    try:
        yield
    finally:
        _off.pop()


def found() -> Found:
    """Load the core, once in a process. A file that cannot serve is reported by one warning."""
    if _found:
        return _found[0]
    with _looking:
        if _found:
            return _found[0]
        try:
            result, warning = _look(), ""
        except Useless as error:
            result, warning = Found(str(error)), f"the compiled core does not serve: {error}. The reference runs"
        _found.append(result)
    if warning:
        warnings.warn(warning, stacklevel=2)
    return result


def _look() -> Found:
    chosen = os.environ.get(VARIABLE, "")
    if chosen == "0":
        return Found(f"turned off by {VARIABLE}=0")
    file = Path(chosen) if chosen not in ("", "1") else FILE
    if not file.exists():
        if file != FILE:
            raise Useless(f"{VARIABLE} names {file}, which is not there")
        others = sorted(each.name.split(".", 1)[1].removesuffix(".so") for each in FILE.parent.glob("_core.*.so"))
        if others:
            return Found(f"built for another platform ({', '.join(others)}); `{BUILD}` builds it for this one")
        return Found(f"no core was built; `{BUILD}` makes one")
    return _load(file)


def _load(file: Path) -> Found:
    import torch  # it takes seconds, which `build` on an up-to-date core does not need

    if (mark := read_mark(file)) is None or mark[0] != stamp():
        raise Useless(f"built for other sources; `{BUILD}` builds it anew")
    try:
        torch.ops.load_library(str(file))
        width = torch.ops.fast_attention_core.use_width(native_width())
    except Exception as error:  # whatever the system, the file or torch holds against it
        raise Useless(f"torch could not load it: {' '.join(str(error).split())}") from None
    return Found("", file, width)


def stamp() -> str:
    """Hash of the sources in this package: names and contents, in 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.iterdir()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def read_mark(file: Path) -> tuple[str, tuple[int, ...]] | None:
    """The stamp and the widths that a built file holds; None for any other file."""
    try:
        match = _MARK.search(file.read_bytes())
    except OSError:
        return None
    return None if match is None else (match[1].decode(), tuple(int(each) for each in match[2].split()))


def native_width() -> int:
    """How many float32 numbers the widest vectors hold that torch uses on this processor: 16, 8 or 4."""
    import torch

    return {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
