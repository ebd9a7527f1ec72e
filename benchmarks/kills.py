"""Kills a random process of a training at random moments: ``python -m benchmarks.kills --number 20``.

Every time all processes have to end, with one message and within ten seconds, and the run has to resume from its last
checkpoint, with another number of processes.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MESSAGE = "fast-attention: another process of this run is gone"
TASK = ["copy", "--mechanism", "LinearAttention", "--width", "32", "--batch-size", "4", "--evaluate-every", "40"]
PATIENCE = 60.0  # seconds after which a run counts as hung


@dataclass
class End:
    """How a run ended after one of its processes was killed."""

    moment: float  # seconds after the start
    rank: int
    seconds: float  # until all had ended
    messages: int
    left: int  # processes that still ran
    resumed: bool

    @property
    def is_clean(self) -> bool:
        """Whether all ended in time, with at most one message: before the group has met there is none."""
        return self.seconds <= 10 and self.messages <= 1 and not self.left


def command(processes: int, sequence: int, steps: int, out: Path, *more: str) -> list[str]:
    """Training on some processes of this machine."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    settings = ["--steps", str(steps), "--save-every", "10", "--sequence-parallel", str(sequence), "--out", str(out)]
    return [*start, "-m", "fast_attention", "train", *TASK, *settings, *more]


def workers(parent: int) -> dict[int, int]:
    """The processes that torchrun started, by rank."""
    ids = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and int((folder / "stat").read_text().rsplit(")")[-1].split()[1]) == parent:
                words = (folder / "environ").read_bytes().split(b"\0")
                ids |= {int(word[5:]): int(folder.name) for word in words if word.startswith(b"RANK=")}
        except (OSError, IndexError):
            continue
    return ids


def kill_one(out: Path, moment: float, *, processes: int = 4, sequence: int = 2, resume_on: int = 2) -> End:
    """Start a run, kill one of its processes after ``moment`` seconds, and resume the run for some steps."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = subprocess.Popen(command(processes, sequence, 100_000, out), env=environment, text=True, **pipes)
    time.sleep(moment)
    while not (ids := workers(run.pid)):
        time.sleep(0.05)
    rank = random.choice(sorted(ids))
    os.kill(ids[rank], signal.SIGKILL)
    began = time.monotonic()
    try:
        said, _ = run.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        run.kill()
        said = ""
    seconds = time.monotonic() - began
    left = sum(Path(f"/proc/{each}").exists() for each in ids.values())
    held = [int(path.name[5:]) for path in (out / "checkpoints").glob("step_*") if path.name[5:].isdecimal()]
    again = command(resume_on, resume_on, max(held, default=0) + 5, out, "--resume")
    resumed = subprocess.run(again, env=environment, capture_output=True, text=True, timeout=300)
    is_resumed = resumed.returncode == 0 and (not held or "resumes from" in resumed.stdout + resumed.stderr)
    return End(moment, rank, seconds, said.count(MESSAGE), left, is_resumed)


def main() -> None:
    """Print a line for each kill, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--longest", type=float, default=20.0, help="seconds after the start up to which to kill")
    given = parser.parse_args()
    random.seed(0)
    ends = []
    for number in range(given.number):
        folder = Path(tempfile.mkdtemp())
        moment = random.uniform(1.0, given.longest)
        ends.append(end := kill_one(folder / "run", moment, processes=given.processes, resume_on=random.choice((1, 2))))
        shutil.rmtree(folder)
        print(
            f"{number + 1:3d}  killed rank {end.rank} after {moment:4.1f} s: ended in {end.seconds:4.1f} s, "
            f"{end.messages} messages, {end.left} left, {'resumed' if end.resumed else 'NOT RESUMED'}",
            flush=True,
        )
    print(
        f"{sum(end.is_clean for end in ends)} of {len(ends)} clean ends, the longest in "
        f"{max(end.seconds for end in ends):.1f} s; {sum(end.resumed for end in ends)} resumes"
    )


if __name__ == "__main__":
    main()
