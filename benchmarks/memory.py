"""Peak memory in fresh processes: the growth of resident memory during one pass, beyond weights and inputs.

A process that has only imported forks a child for every pass. Its growth is the high-water mark of resident memory
(``VmHWM``, reset after weights and inputs are made) less what was resident then. Limit: Linux, on the CPU.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from typing import Any

import torch

from benchmarks.competitors import Competitor
from fast_attention.lab.measure import Setting
from fast_attention.lab.refusals import failure

WARM = 256  # tokens of the passes that load libraries and start threads


def available(device: torch.device) -> bool:
    """Whether resident memory can be read here, and is what the device uses."""
    return device.type == "cpu" and sys.platform == "linux" and os.path.exists("/proc/self/status")


def measured(competitor: Competitor, setting: Setting, length: int, patience: float) -> tuple[int | None, str]:
    """Growth in bytes of one pass in a process of its own, or None and why not; ``patience`` in seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, torch.get_num_threads(), competitor, setting, length))
    process.start()
    sender.close()
    try:
        if not receiver.poll(patience):
            return None, f"stopped after {patience:.0f} s"
        return receiver.recv()
    except EOFError:
        process.join()
        return None, f"died with status {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _child(sender: Any, threads: int, competitor: Competitor, setting: Setting, length: int) -> None:
    try:
        torch.set_num_threads(threads)
        sender.send((growth(competitor, setting, length), ""))
    except Exception as error:  # whatever it is, the benchmark must report it
        sender.send((None, failure(error)))


def growth(competitor: Competitor, setting: Setting, length: int) -> int:
    """Bytes by which resident memory rises above weights and inputs during one pass, in this process."""

    def built(tokens: int) -> Any:
        passes = competitor.make(setting, tokens)
        return passes.training if setting.backward else passes.forward

    built(min(WARM, length))()
    run = built(length)
    gc.collect()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # sets the high-water mark to what is resident now
    before = _high_water()
    result = run()
    after = _high_water()
    del result
    return after - before


def _high_water() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
