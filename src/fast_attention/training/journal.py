"""What a run writes about itself: ``log.jsonl``, a line for each report, and TensorBoard's files if it is installed."""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fast_attention import files

LOG, ASIDE = "log.jsonl", "log.damaged"
CHECK = "check"  # a checksum of the rest of the line; lines without one were written before there were any


NUMBERS = ("step", "seconds", "loss", "rate", "norm", "tokens_per_second", "step_seconds", "valid", "valid_loss")


def read(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's log that are whole."""
    return _sorted(Path(folder) / LOG)[0]


def _sorted(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The whole lines of a log, and those that are damaged or were cut short."""
    whole, hurt = [], []
    for text in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            line = files.decoded(text) if text.strip() else None
        except ValueError:
            line = None
        if isinstance(line, dict) and _is_whole(line) and line.pop(CHECK, None) in (None, _check(line)):
            whole.append(line)
        elif text.strip():
            hurt.append(text)
    return whole, hurt


def _check(line: dict[str, Any]) -> str:
    """What a digit that was changed in a line changes too."""
    return f"{zlib.crc32(json.dumps({**line, CHECK: ''}).encode()):08x}"


def _written(line: dict[str, Any]) -> str:
    return json.dumps({**line, CHECK: _check(line)}) + "\n"


def _is_whole(line: dict[str, Any]) -> bool:
    known = [line[name] for name in NUMBERS if name in line]
    return type(line.get("step")) is int and "seconds" in line and all(type(x) in (int, float) for x in known)


class Journal:
    """The log of a run that is resumed at a step: lines from beyond it, which a killed run left, are taken out.

    Lines that are damaged are set aside, in ``log.damaged`` beside the log.

    Training lines hold step, loss, rate, norm, tokens_per_second, step_seconds (the mean since the last line) and
    seconds; evaluations hold step, valid (in the task's metric), valid_loss (nats per target), metric and seconds.

    Args:
        folder: The run's.
        step: Steps that lie behind.
        evaluated: The step of the last evaluation that counts; -1 for none.
        say: Told of lines that are set aside.
    """

    def __init__(
        self, folder: str | os.PathLike[str], step: int, evaluated: int, say: Callable[[str], None] = print
    ) -> None:
        folder = Path(folder)
        whole, hurt = _sorted(folder / LOG)
        if hurt:
            with (folder / ASIDE).open("ab") as aside:
                aside.writelines(line + b"\n" for line in hurt)
            say(f"{folder / LOG}: {len(hurt)} damaged lines are set aside in {ASIDE}")
        old = [line for line in whole if line["step"] <= (evaluated if "valid" in line else step)]
        files.write(folder / LOG, "".join(map(_written, old)))
        self._file = (folder / LOG).open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", step)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line."""
        self._file.write(_written(line))
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
