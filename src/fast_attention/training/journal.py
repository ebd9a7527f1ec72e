"""The log of a training run: ``log.jsonl``, a line for each report, and TensorBoard's files if it is installed."""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fast_attention import files

LOG, DAMAGED = "log.jsonl", "log.damaged"
CHECK = "check"  # the key of a checksum of the rest of the line; old logs have none


NUMBERS = ("step", "seconds", "loss", "rate", "norm", "tokens_per_second", "step_seconds", "valid", "valid_loss")


def read(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The intact lines of a run's log."""
    return _split_lines(Path(folder) / LOG)[0]


def _split_lines(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The intact lines of a log, and those that are damaged or cut short."""
    intact, damaged = [], []
    for text in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            line = files.decoded(text) if text.strip() else None
        except ValueError:
            line = None
        if isinstance(line, dict) and _is_complete(line) and line.pop(CHECK, None) in (None, _check(line)):
            intact.append(line)
        elif text.strip():
            damaged.append(text)
    return intact, damaged


def _check(line: dict[str, Any]) -> str:
    """The checksum of a line."""
    return f"{zlib.crc32(json.dumps({**line, CHECK: ''}).encode()):08x}"


def _encoded(line: dict[str, Any]) -> str:
    return json.dumps({**line, CHECK: _check(line)}) + "\n"


def _is_complete(line: dict[str, Any]) -> bool:
    known = [line[name] for name in NUMBERS if name in line]
    return type(line.get("step")) is int and "seconds" in line and all(type(x) in (int, float) for x in known)


class Journal:
    """Writes the log of a run. On resuming at a step, it deletes the later lines that a killed run left.

    Damaged lines are moved to ``log.damaged`` beside the log.

    Training lines hold step, loss, rate, norm, tokens_per_second, step_seconds (the mean since the last line) and
    seconds; evaluations hold step, valid (in the task's metric), valid_loss (nats per target), metric and seconds.

    Args:
        folder: The run's folder.
        step: The number of finished steps.
        evaluated: The step of the last evaluation that counts; -1 for none.
        say: Called with a message about damaged lines.
    """

    def __init__(
        self, folder: str | os.PathLike[str], step: int, evaluated: int, say: Callable[[str], None] = print
    ) -> None:
        folder = Path(folder)
        intact, damaged = _split_lines(folder / LOG)
        if damaged:
            with (folder / DAMAGED).open("ab") as handle:
                handle.writelines(line + b"\n" for line in damaged)
            say(f"{folder / LOG}: {len(damaged)} damaged lines are set aside in {DAMAGED}")
        kept = [line for line in intact if line["step"] <= (evaluated if "valid" in line else step)]
        files.write(folder / LOG, "".join(map(_encoded, kept)))
        self._file = (folder / LOG).open("a", encoding="utf-8")
        self._tensorboard = _tensorboard(folder / "tensorboard", step)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line."""
        self._file.write(_encoded(line))
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in line.items():
                if name not in ("step", "seconds") and isinstance(value, int | float):
                    self._tensorboard.add_scalar(name, value, line["step"])

    def sync(self) -> None:
        """Bring the log to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """End the log."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # of its own imports
            from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
