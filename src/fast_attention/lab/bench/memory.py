"""Measures peak memory in fresh processes: a parent that has only imported forks a child for every pass.

``python -m fast_attention.lab.bench.memory`` is that parent: it reads jobs from its input, one JSON object a line, and
answers each with one line. A child's growth is its high-water mark of resident memory (``VmHWM``, reset after weights
and inputs are made) less what was resident then. Linux only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from typing import Any

import torch

from fast_attention.lab.bench import competitors
from fast_attention.lab.bench.competitors import Competitor
from fast_attention.lab.measure import Setting
from fast_attention.lab.refusals import failure

WARM = 256  # tokens of the passes that load libraries and start threads


def available(device: torch.device) -> bool:
    """Whether resident memory can be read here, and is what the device uses."""
    return device.type == "cpu" and sys.platform == "linux" and os.path.exists("/proc/self/status")


class Meter:
    """Measures memory through the parent process. Close it after use."""

    def __init__(self, setting: Setting, threads: int, mechanisms: list[Any], vs_peers: bool) -> None:
        options = {
            "heads": setting.heads, "head_dim": setting.head_dim, "batch": setting.batch, "seed": setting.seed,
            "dtype": str(setting.dtype).removeprefix("torch."), "threads": threads,
            "mechanisms": pickle.dumps(mechanisms).hex(), "path": sys.path, "vs_peers": vs_peers,
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-m", "fast_attention.lab.bench.memory", json.dumps(options)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)

    def measure(self, name: str, length: int, backward: bool, patience: float) -> tuple[int | None, str]:
        """Growth in bytes of one pass of one competitor, or None and why not."""
        job = json.dumps({"name": name, "length": length, "backward": backward, "patience": patience})
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(job + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        except (OSError, ValueError) as error:
            return None, f"the measuring process ended ({error})"
        return answer.get("bytes"), answer.get("note", "")

    def close(self) -> None:
        """End the parent process and the child that it may wait for: both are in a session of their own."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a job that a process which has ended did not read
                pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def growth(competitor: Competitor, setting: Setting, length: int) -> int:
    """Bytes by which resident memory rises above weights and inputs during one pass, in this process."""

    def built(tokens: int) -> Any:
        passes = competitor.make(setting, tokens)
        return passes.training if setting.backward else passes.forward

    built(min(WARM, length))()
    run = built(length)
    gc.collect()
    _reset()
    before = _status("VmHWM")
    result = run()
    after = _status("VmHWM")
    del result
    return after - before


def _reset() -> None:
    """Set the high-water mark to what is resident now."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _status(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def _child(job: dict[str, Any], options: dict[str, Any], known: dict[str, Competitor], answer: int) -> None:
    """Measure one job and write the answer; never returns."""
    try:
        torch.set_num_threads(options["threads"])
        dtype = getattr(torch, options["dtype"])
        sizes = (options["heads"], options["head_dim"], torch.device("cpu"), dtype, False, job["backward"])
        setting = Setting(*sizes, options["seed"], options["batch"])
        result = {"bytes": growth(known[job["name"]], setting, job["length"])}
    except Exception as error:  # whatever it is, the parent must report it
        result = {"note": failure(error)}
    os.write(answer, json.dumps(result).encode())
    os._exit(0)


def _serve(options: dict[str, Any]) -> None:
    sys.path[:] = options["path"]  # where modules of users' mechanisms are
    mechanisms = pickle.loads(bytes.fromhex(options["mechanisms"]))
    chosen = competitors.chosen(mechanisms, "both", competitors.load_peers() if options["vs_peers"] else ())
    known = {each.name: each for each in (*competitors.baselines(chosen), *chosen)}
    for line in sys.stdin:
        job = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)  # what a peer prints is no answer
            _child(job, options, known, writer)
        os.close(writer)
        print(json.dumps(_answer(child, reader, job["patience"])), flush=True)


def _answer(child: int, reader: int, patience: float) -> dict[str, Any]:
    until = time.monotonic() + patience
    ready, _, _ = select.select([reader], [], [], patience)
    if not ready:
        os.kill(child, signal.SIGKILL)
    text = os.read(reader, 2**16).decode() if ready else ""
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    late = time.monotonic() >= until
    return {"note": f"stopped after {patience:.0f} s" if late else f"died with status {status}"}


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
