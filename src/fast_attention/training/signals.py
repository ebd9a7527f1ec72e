"""Notes signals that ask a run to stop, so that it can stop between two batches."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")


class Signals:
    """A context in which SIGTERM, SIGINT and SIGUSR1 are only noted; a second one ends the process at once.

    Outside the main thread, where Python takes no handlers, nothing is noted.
    """

    def __init__(self) -> None:
        self.caught = ""  # the name of the first one
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            known = {each.name: each for each in signal.Signals}
            for number in (known[name] for name in NAMES if name in known):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.caught:
            if sys.stderr is not None and sys.stderr.isatty():
                os.write(sys.stderr.fileno(), b"\x1b[?25h")  # the cursor, which a progress bar may hide
            os._exit(128 + number)
        self.caught = signal.Signals(number).name
