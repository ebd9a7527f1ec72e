"""Turns what a user typed into values. What cannot be had is an ``InputError``: one line, in the user's words."""

from __future__ import annotations

import ast
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fast_attention import catalogue, files
from fast_attention.lab.refusals import DTYPES, install
from fast_attention.lab.refusals import InputError as InputError
from fast_attention.mechanism import Unsupported


def need(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or say how to install what that needs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"{purpose} needs {error.name}: {install(extra)}") from error


@contextmanager
def refusing(*also: type[Exception], where: str = "") -> Iterator[None]:
    """Raise what the library refuses in the block, and ``also`` these, as ``InputError`` that begins with ``where``."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, Unsupported, *also) as error:
        raise InputError(f"{where}{error}") from error


def mechanisms(texts: list[str]) -> list[Any]:
    """The mechanisms that expressions mean, each once; one text may hold several, separated by commas."""
    values: list[Any] = []
    for part in (part for text in texts for part in _split(text)):
        with refusing():
            try:
                values.append(catalogue.parse(part))
            except TypeError as error:
                raise InputError(f"{part}: a setting has a value of the wrong kind ({error})") from error
    return list(dict.fromkeys(values))


def mechanism(text: str, option: str = "--mechanism") -> Any:
    """The one mechanism that an expression means."""
    values = mechanisms([text])
    if len(values) > 1:
        raise InputError(f"{option} {text}: {' and '.join(map(repr, values))} are {len(values)}: give one of them")
    return values[0]


def _split(text: str) -> list[str]:
    """``"A, B(x=1)"`` as ``["A", "B(x=1)"]``; what is no list is left for ``parse`` to judge."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # nested too deeply, or holding a null byte
        return [text]
    return [ast.unparse(part) for part in tree.elts] if isinstance(tree, ast.Tuple) and tree.elts else [text]


def is_attention(target: str) -> bool:
    """Whether a name means a mechanism, which begins with a capital, or a factory; a path that exists is a model."""
    name = target.split("(")[0].strip()
    named = (name.isidentifier() and name[0].isupper()) or catalogue.elsewhere(name) != ""
    return not Path(target).exists() and (":" in target or named)


def lengths(values: list[int], option: str = "--lengths") -> list[int]:
    """Sequence lengths in rising order, each once; all at least 1."""
    wrong = [value for value in values if value < 1]
    if wrong:
        raise InputError(f"{option} {wrong[0]}: a sequence has at least 1 token")
    return sorted(set(values))


def numbers(option: str, text: str) -> list[int]:
    """``"0,100"`` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"{option} {text}: write numbers counted from 0 with commas between, such as 0,3")
    return [int(part) for part in parts]


def tokens_or_auto(option: str, text: str | None) -> Any:
    """``"512"`` as a number of tokens, at least 1; ``"auto"`` as it is; None for nothing."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{option} {text}: write a number of tokens, at least 1, or auto")
    return int(text)


def folder(path: Path) -> None:
    """Try whether the folder for the results can be made and written to; nothing is left of that."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"--out {str(path)!a}: the name is not UTF-8: name another folder") from error
    try:
        with files.prepared(path):
            (path / ".writable").touch()
            (path / ".writable").unlink()
    except FileExistsError as error:
        there = Path(error.filename)
        what = "is no folder" if there.exists() else f"is a link to {os.readlink(there)}, which is not there"
        raise InputError(f"--out {path}: {there} {what}: name another folder") from error
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror or error}") from error


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lock the folder for the results for this process while the block runs."""
    folder(path)
    try:
        with files.locked(path):
            yield
    except files.InUse as error:
        raise InputError(str(error)) from error


def results(paths: list[Path], out: Path, what: str, *, resume: bool, restart: bool) -> None:
    """Refuse to write over results unasked, which messages call ``what``; where it is asked for, clear them away."""
    if resume and restart:
        raise InputError("--resume resumes and --restart begins anew: give one of them")
    if restart:
        for path in paths:
            path.unlink(missing_ok=True)
    elif not resume and any(path.exists() for path in paths):
        raise InputError(
            f"--out {out} holds {what}: add --resume to resume it or --restart to begin anew over it, or name "
            "another folder"
        )


def dtype(name: str) -> torch.dtype:
    """The dtype called ``name``."""
    if name not in DTYPES:
        raise InputError(f"--dtype {name}: choose one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def device(name: str) -> torch.device:
    """The device called ``name``, tried with one tensor."""
    try:
        chosen = torch.device(name)
        torch.zeros(1, device=chosen).item()
    except Exception as error:  # every backend has its own kinds
        others = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        others += ["mps"] if torch.backends.mps.is_available() else []
        raise InputError(f"--device {name}: not available here; there is: {', '.join(['cpu', *others])}") from error
    return chosen


def threads(count: int) -> None:
    """Set the number of torch's threads; more than any machine has would all be started."""
    most = max(1024, 2 * (os.cpu_count() or 1))
    if count > most:
        raise InputError(f"--threads {count}: this machine has {os.cpu_count()} cores; at most {most} can be asked for")
    torch.set_num_threads(count)
