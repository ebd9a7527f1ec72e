"""What a run writes about itself: ``log.jsonl``, a line for each report, and TensorBoard's files if it is installed."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

from fast_attention import files

LOG = "log.jsonl"


def read(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's log; a last one that was cut short is left out."""
    path, found = Path(folder) / LOG, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


class Journal:
    """The log of a run that goes on at a step: lines from beyond it, which a killed run left, are taken out.

    Training lines hold step, loss, rate, norm, tokens_per_second, step_seconds (the mean since the last line) and
    seconds; evaluations hold step, valid (in the task's metric), valid_loss (nats per target), metric and seconds.

    Args:
        folder: The run's.
        step: Steps that lie behind.
        evaluated: The step of the last evaluation that counts; -1 for none.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int, evaluated: int) -> None:
        folder = Path(folder)
        old = [line for line in read(folder) if line["step"] <= (evaluated if "valid" in line else step)]
        files.write(folder / LOG, "".join(json.dumps(line) + "\n" for line in old))
        self._file = (folder / LOG).open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", step)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in line.items():
                if name not in ("step", "seconds") and isinstance(value, int | float):
                    self._board.add_scalar(name, value, line["step"])

    def sync(self) -> None:
        """Bring the log to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """End the log."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # of its own imports
            from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
