"""Notes what a measurement was made with: versions, hardware, load."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fast_attention import __version__
from fast_attention.allocator import freed_memory

if TYPE_CHECKING:
    import torch

BUSY = 0.1  # of the cores: what other processes take on a machine that is busy


def begun(device: torch.device, **settings: Any) -> dict[str, Any]:
    """The meta data of a record: the command as it was typed, its settings, versions and hardware."""
    return {
        "status": "running",
        "command": ["fast-attention", *sys.argv[1:]],
        "started": timestamp(),
        **settings,
        **environment(device),
    }


def timestamp() -> str:
    """The time in the format of records."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, for the record."""
    import torch  # here, so that a command's options are read without it

    from fast_attention import core

    cpu = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    return {
        "fast_attention": __version__,
        "commit": _commit(),
        "core": core.unavailable() or "loaded",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "freed_memory": freed_memory(),
        "load_average": load_average(),
    }


def load_average() -> list[float] | None:
    """How many processes wanted the cores over the last 1, 5 and 15 minutes, this one among them."""
    return [round(load, 2) for load in os.getloadavg()] if sys.platform != "win32" else None


def usable_cores(root: Path = Path("/")) -> int:
    """How many cores this process may use: those of its affinity, and no more than the quota of its control groups.

    A part of a core does not count beside whole ones: a thread more than the quota would be stopped again and again.
    """
    return max(1, int(min([len(_affinity()), *_quotas(root)])))


def _affinity() -> set[int]:
    """The numbers of the cores that this process may run on."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else {*range(os.cpu_count() or 1)}


def _quotas(root: Path) -> Iterator[float]:
    """The cores' worth of time that each control group around this process may use, where it has a limit.

    A container often sees its own group as the root of all, under the path that it has outside: what is not there is
    passed over, and the groups above it are read up to the root.
    """
    groups = (line.split(":", 2) for line in _lines(root / "proc/self/cgroup") if line.count(":") >= 2)
    for number, names, path in groups:
        mounts = ["", "unified"] if number == "0" else [names, "cpu"] if "cpu" in names.split(",") else []
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            inner = top / path.strip("/")
            for folder in (inner, *(each for each in inner.parents if each.is_relative_to(top))):
                quota, period = _lines(folder / "cpu.cfs_quota_us"), _lines(folder / "cpu.cfs_period_us")
                limit = [*quota, *period] if quota and period else "".join(_lines(folder / "cpu.max")).split()
                if len(limit) == 2 and limit[0].isdigit() and int(limit[1]) > 0:  # "max" and -1: none
                    yield int(limit[0]) / int(limit[1])


class Others:
    """Measures how many cores other processes took since it was made, of those that this process may run on."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self.stat, self.all = stat, len(_affinity())
        self.before = self._read()

    def cores(self) -> float | None:
        """On average since then; None where the system does not say.

        What a hypervisor took counts as others'; children count as this process once they have ended.
        """
        (began, theirs, own), (ended, after, spent) = self.before, self._read()
        if theirs is None or after is None or ended <= began:
            return None
        return max(0.0, ((after - theirs) - (spent - own)) / (ended - began))

    def words(self) -> list[str]:
        """That the machine was busy, in a sentence; none where it was not."""
        taken = self.cores() or 0.0
        of = f"{taken:.1f} of {self.all} core{'s' * (self.all > 1)}"
        busy = f"The machine was busy: other processes took {of} meanwhile, and times are uncertain."
        return [busy] if taken > BUSY * self.all else []

    def _read(self) -> tuple[float, float | None, float]:
        """The time; seconds for which the cores were not idle; seconds that this process used of them."""
        names = {f"cpu{number}" for number in _affinity()}
        rows = [line.split() for line in _lines(self.stat)]
        taken = [sum(map(int, row[1:4] + row[6:9])) for row in rows if row and row[0] in names]  # not idle, nor waiting
        ticks = os.sysconf("SC_CLK_TCK") if taken else 1
        own = os.times()
        return time.monotonic(), sum(taken) / ticks if taken else None, sum(own[:4])


def _lines(path: Path) -> list[str]:
    """The lines of a file; none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []


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
