"""Saves, finds and loads checkpoints: folders that are written whole or not at all, with a SHA-256 of every file.

A checkpoint is a model's folder (``nn.saving``) with the optimiser's and the generators' states and a manifest.
``torch.load`` and safetensors read flipped bits without an error; so hashes are compared before anything is loaded.
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
    """The contents of a checkpoint."""

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
    **extra: Any,
) -> Path:
    """Write the checkpoint ``step_N``, whole or not at all, and delete all but the newest ``keep`` intact ones.

    Args:
        folder: The folder of the run's checkpoints.
        step: N, the number of finished steps.
        config: The model's settings.
        tensors: The model's state.
        optimiser: The optimiser's state.
        randomness: ``random_states()`` of every process.
        keep: Checkpoints to keep: this one, and the newest of the others that are as they were written.
        extra: Further entries of the manifest, as JSON: task, settings, data position.

    Raises:
        OSError: It could not be written; earlier checkpoints are unchanged.
    """
    folder = Path(folder)
    path, partial = folder / f"step_{step}", folder / f"step_{step}.tmp"
    try:
        for leftover in folder.glob("step_*.tmp"):
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)
        saving.write(config, tensors, partial)
        for name, state in (("optimiser.pt", optimiser), ("random.pt", randomness)):
            with files.atomic(partial / name) as target:
                _dump(state, target)
        manifest = {"format": FORMAT, "version": __version__, "step": step, "mechanism": config.mechanism, **extra}
        manifest["files"] = {name: files.sha256(partial / name) for name in FILES}
        files.write(partial / MANIFEST, _with_digest(manifest))
        replaced = _renamed(path) if path.exists() else None  # a damaged one, or one before the step's evaluation
        partial.rename(path)
        if replaced is not None:
            shutil.rmtree(replaced)
        files.sync(folder)
        _drop_old(path, keep)
    except Exception as error:  # safetensors and torch have their own kinds for a full disk
        with contextlib.suppress(OSError):
            shutil.rmtree(partial, ignore_errors=True)
        raise _write_error(path, error) from error
    return path


def _dump(state: Any, path: Path) -> None:
    with path.open("wb") as handle:
        torch.save(state, handle)


def _write_error(path: Path, error: Exception) -> OSError:
    """An error of one line with the cause and the last whole checkpoint; libraries wrap the system's error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    why = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error).strip().split("\n")[0]
    others = find_all(path.parent)
    remaining = f"{others[0].name} before it is whole" if others else "there is none before it"
    code = cause.errno if isinstance(cause, OSError) and cause.errno else 5
    return OSError(code, f"the checkpoint {path} could not be written: {why}; {remaining}")


def _drop_old(newest_path: Path, keep: int) -> None:
    """Delete all but ``keep`` intact checkpoints; damaged ones do not count, a later version's are left alone."""
    intact_count = 1
    for path in find_all(newest_path.parent):
        try:
            if path == newest_path:
                continue
            if intact_count < keep:
                verify(path)
                intact_count += 1
            else:
                _manifest(path)
                _drop(path)
        except Damaged:
            if intact_count >= keep:
                _drop(path)
        except files.Newer:
            continue


def _drop(path: Path) -> None:
    """Delete a checkpoint, renamed first, so that a half-deleted one is not taken for a checkpoint."""
    shutil.rmtree(_renamed(path))


def _renamed(path: Path) -> Path:
    return path.rename(path.with_name(f"{path.name}.old.tmp"))


def find_all(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, intact or not, the newest first."""
    numbered = [(path.name.removeprefix("step_"), path) for path in Path(folder).glob("step_*") if path.is_dir()]
    return [path for number, path in sorted(((int(n), p) for n, p in numbered if n.isdecimal()), reverse=True)]


def newest(folder: str | os.PathLike[str], say: Callable[[str], None] = print) -> Path | None:
    """The newest intact checkpoint, or None; each damaged one is reported to ``say`` and skipped.

    Raises:
        Newer: A later version of this library wrote one that is newer than any that is intact.
    """
    for path in find_all(folder):
        try:
            verify(path)
        except Damaged as error:
            say(f"{error}; passed over")
        else:
            return path
    return None


def settle(folder: str | os.PathLike[str]) -> None:
    """Give whole checkpoints back the names that a killed process had no time to give, in a folder that is locked."""
    for path in sorted(Path(folder).glob("step_*.tmp"), reverse=True):  # the new one before that which it replaces
        with contextlib.suppress(Damaged, files.Newer, OSError):
            verify(path)
            path.rename(path.with_name(path.name.partition(".")[0]))


def verify(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a checkpoint, all of whose files are as they were written.

    Raises:
        Damaged: A file is missing, cut short or changed.
        Newer: A later version of this library wrote it.
    """
    path = Path(path)
    manifest = _manifest(path)
    for name in FILES:
        try:
            is_intact = files.sha256(path / name) == manifest["files"].get(name)
        except OSError:
            is_intact = False
        if not is_intact:
            raise Damaged(f"the checkpoint {path} is damaged: {name} is not what was written")
    return manifest


def _manifest(path: Path) -> dict[str, Any]:
    """Read the manifest and compare its digest. A later version's is recognised by its format alone."""
    try:
        text = (path / MANIFEST).read_bytes()
        manifest = dict(json.loads(text))
        files.readable(manifest, FORMAT, f"the checkpoint {path}")
        del manifest["sha256"]
        if text != _with_digest(manifest).encode():
            raise ValueError("changed")
        dict(manifest["files"])
    except files.Newer:
        raise
    except Exception as error:
        raise Damaged(f"the checkpoint {path} is damaged: {MANIFEST} is not what was written") from error
    return manifest


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Verify and load a checkpoint.

    Raises:
        Damaged: A file is not what was written; nothing is loaded.
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
    """Set all generators to what ``random_states`` returned."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])


def _plain(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=1)


def _with_digest(manifest: dict[str, Any]) -> str:
    """The manifest's text, with the hash of the rest as its last entry."""
    return _plain({**manifest, "sha256": _digest(_plain(manifest).encode())}) + "\n"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
