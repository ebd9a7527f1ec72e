"""Checkpoints: folders that are whole or not there, every file with its SHA-256; the newest intact one is taken.

A checkpoint is a model's folder (``nn.saving``) with the optimiser's and the generators' states and a manifest beside
them. ``torch.load`` and safetensors read flipped bits without a word; so hashes are compared before anything is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention import __version__, files
from fast_attention.nn import saving
from fast_attention.nn.models import ModelConfig

FORMAT = "fast-attention checkpoint 1"
MANIFEST = "manifest.json"
FILES = ("model.safetensors", "config.json", "optimiser.pt", "random.pt")


class Checkpoint(NamedTuple):
    """What a checkpoint holds."""

    manifest: dict[str, Any]
    config: ModelConfig
    tensors: dict[str, Tensor]
    optimiser: dict[str, Any]
    randomness: list[dict[str, Any]]  # of every process


class Damaged(ValueError):
    """A checkpoint whose files are not what was written. The message names the file."""


def save(
    folder: str | os.PathLike[str],
    step: int,
    config: ModelConfig,
    tensors: dict[str, Tensor],
    optimiser: dict[str, Any],
    randomness: list[dict[str, Any]],
    *,
    keep: int = 2,
    **also: Any,
) -> Path:
    """Write ``step_N`` under another name, bring it to the disk, rename it, and drop all but ``keep`` sound ones.

    Args:
        folder: Where the checkpoints stand.
        step: N, the steps that lie behind.
        config: The model's settings.
        tensors: The model's state.
        optimiser: The optimiser's state.
        randomness: ``random_states()`` of every process.
        keep: Checkpoints to keep: this one, and the newest of the others that are as they were written.
        also: What else the manifest is to hold, as JSON: task, settings, data position.

    Raises:
        OSError: It could not be written; the checkpoints before it are as they were.
    """
    folder = Path(folder)
    path, partial = folder / f"step_{step}", folder / f"step_{step}.tmp"
    try:
        for left in folder.glob("step_*.tmp"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)
        saving.write(config, tensors, partial)
        for name, state in (("optimiser.pt", optimiser), ("random.pt", randomness)):
            with files.whole(partial / name) as place:
                _dump(state, place)
        body = {"format": FORMAT, "version": __version__, "step": step, "mechanism": config.mechanism, **also}
        body["files"] = {name: files.sha256(partial / name) for name in FILES}
        files.write(partial / MANIFEST, _sealed(body))
        if path.exists():  # one that was damaged and passed over
            _drop(path)
        partial.rename(path)
        if os.name == "posix":
            files.sync(folder)
        _retain(path, keep)
    except Exception as error:  # safetensors and torch have their own kinds for a full disk
        with contextlib.suppress(OSError):
            shutil.rmtree(partial, ignore_errors=True)
        raise _unwritten(path, error) from error
    return path


def _dump(state: Any, place: Path) -> None:
    with place.open("wb") as handle:
        torch.save(state, handle)


def _unwritten(path: Path, error: Exception) -> OSError:
    """One line that says what failed, why, and what is left; torch and safetensors wrap the system's error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    why = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error).strip().split("\n")[0]
    before = every(path.parent)
    left = f"{before[0].name} before it is whole" if before else "there is none before it"
    number = cause.errno if isinstance(cause, OSError) and cause.errno else 5
    return OSError(number, f"the checkpoint {path} could not be written: {why}; {left}")


def _retain(fresh: Path, keep: int) -> None:
    """Drop what lies behind ``keep`` sound checkpoints; damaged ones do not count, a later version's are left alone."""
    sound = 1
    for path in every(fresh.parent):
        try:
            if path == fresh:
                continue
            if sound < keep:
                verify(path)
                sound += 1
            else:
                _manifest(path)
                _drop(path)
        except Damaged:
            if sound >= keep:
                _drop(path)
        except files.Newer:
            continue


def _drop(path: Path) -> None:
    """Delete a checkpoint; one that is half deleted no longer bears a checkpoint's name."""
    going = path.with_name(f"{path.name}.old.tmp")
    path.rename(going)
    shutil.rmtree(going)


def every(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, intact or not, the newest first."""
    numbered = [(path.name.removeprefix("step_"), path) for path in Path(folder).glob("step_*") if path.is_dir()]
    return [path for number, path in sorted(((int(n), p) for n, p in numbered if n.isdecimal()), reverse=True)]


def newest(folder: str | os.PathLike[str], say: Callable[[str], None] = print) -> Path | None:
    """The newest intact checkpoint, or None; each damaged one is named to ``say`` and passed over.

    Raises:
        Newer: A later version of this library wrote one that is newer than any that is intact.
    """
    for path in every(folder):
        try:
            verify(path)
        except Damaged as error:
            say(f"{error}; passed over")
        else:
            return path
    return None


def verify(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written.

    Raises:
        Damaged: One is missing, cut short or changed.
        Newer: A later version of this library wrote it.
    """
    path = Path(path)
    body = _manifest(path)
    for name in FILES:
        try:
            sound = files.sha256(path / name) == body["files"].get(name)
        except OSError:
            sound = False
        if not sound:
            raise Damaged(f"the checkpoint {path} is damaged: {name} is not what was written")
    return body


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest as it was written. A later version's is recognised by its format, however that version seals it."""
    try:
        text = (path / MANIFEST).read_bytes()
        body = dict(json.loads(text))
        files.readable(body, FORMAT, f"the checkpoint {path}")
        del body["sha256"]
        if text != _sealed(body).encode():
            raise ValueError("changed")
        dict(body["files"])
    except files.Newer:
        raise
    except Exception as error:
        raise Damaged(f"the checkpoint {path} is damaged: {MANIFEST} is not what was written") from error
    return body


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """All of a checkpoint, verified first.

    Raises:
        Damaged: A file is not what was written; nothing of it is loaded.
    """
    path = Path(path)
    manifest = verify(path)
    config, tensors = saving.read(path)
    optimiser, randomness = (
        torch.load(path / name, map_location="cpu", weights_only=True) for name in ("optimiser.pt", "random.pt")
    )
    return Checkpoint(manifest, config, tensors, optimiser, randomness)


def random_states() -> dict[str, Any]:
    """The states of all generators of this process: Python's, NumPy's if it is imported, torch's on every device."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Go on where ``random_states`` was taken."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])


def _plain(body: dict[str, Any]) -> str:
    return json.dumps(body, indent=1)


def _sealed(body: dict[str, Any]) -> str:
    """The manifest's text, with the hash of the rest at its end."""
    return _plain({**body, "sha256": _digest(_plain(body).encode())}) + "\n"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
