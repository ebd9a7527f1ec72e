"""Notes what a measurement was made with: versions, hardware, load."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fast_attention import __version__
from fast_attention.allocator import freed_memory

if TYPE_CHECKING:
    import torch


def begun(device: torch.device, **settings: Any) -> dict[str, Any]:
    """The meta data of a record: the command as it was typed, its settings, versions and hardware."""
    return {
        "status": "running",
        "command": ["fast-attention", *sys.argv[1:]],
        "started": timestamp(),
        **settings,
        **surroundings(device),
    }


def timestamp() -> str:
    """The time in the format of records."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def surroundings(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, for the record."""
    import torch  # here, so that a command's options are read without it

    return {
        "fast_attention": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "freed_memory": freed_memory(),
        "load_average": load_average(),
    }


def load_average() -> list[float] | None:
    """How many processes wanted the cores over the last 1, 5 and 15 minutes, this one among them."""
    return [round(load, 2) for load in os.getloadavg()] if sys.platform != "win32" else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree this runs from, with ``+`` where files were changed; None outside of one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    ask = ["git", "--no-optional-locks", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
