"""Whether freed memory is kept is seen by the pages that a process is given anew."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fast_attention import allocator, keep_memory
from fast_attention.lab import environment

COUNTING = """
import os, resource, statistics, sys, threading, torch
from fast_attention import keep_memory

def pages_given():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for kept in sys.argv[1:]:  # each in a process of its own
    if os.fork():
        os.wait()
        continue
    if kept != "given back":
        assert keep_memory(None if kept == "all" else int(kept))
    given = []

    def run():
        for _ in range(16):
            before = pages_given()
            torch.ones(2**24)  # 64 MiB, more than another arena of glibc holds
            given.append(pages_given() - before)

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()  # the first are new in any case, and a busy system takes one back now and then
    print(statistics.median(given[7:16]), statistics.median(given[23:]), flush=True)
    os._exit(0)
"""
PAGES = 2**26 // 4096  # of a tensor


def pages_given(*kept: str) -> list[list[float]]:
    """Pages that a tensor of 64 MiB is given anew, the median of nine one after another, for each way to keep.

    In the thread with which the process began, and in another.
    """
    command = [sys.executable, "-c", COUNTING, *kept]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "THP_", "GLIBC_"))}
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=plain).stdout
    return [[float(number) for number in line.split()] for line in said.splitlines()]


needs_glibc = pytest.mark.skipif(not allocator._is_glibc(), reason="another C library")


@needs_glibc
def test_memory_that_is_kept_is_not_given_anew() -> None:
    attempts = []
    while len(attempts) < 3:  # one process in many was given all anew, why is not known
        a_gibibyte, everything, nothing, too_little = given = pages_given("1024", "all", "given back", "1")
        assert min(nothing + too_little) > 0.9 * PAGES
        if max(a_gibibyte + everything) < 0.05 * PAGES:
            return
        attempts.append(given)
    raise AssertionError(f"pages given anew, of {PAGES}: {attempts}")


@needs_glibc
def test_records_say_what_becomes_of_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_freed_memory", ["given back"])
    assert environment.environment(torch.device("cpu"))["freed_memory"] == "given back"
    assert keep_memory()
    assert environment.environment(torch.device("cpu"))["freed_memory"] == "kept up to 1,024 MiB"


@needs_glibc
@pytest.mark.parametrize(("kept", "bytes_kept"), [(3, 3 * 2**20), (None, -1)])
def test_library_is_told_sizes_and_places(kept: int | None, bytes_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of a process do not tell whether freed memory is trimmed: that hangs on what lies above it."""
    said: dict[int, int] = {}

    class Library:
        def mallopt(self, setting: int, size: int) -> int:
            said[setting] = size
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(allocator, "_freed_memory", ["given back"])
    assert keep_memory(kept)
    assert said == {allocator.MMAP_THRESHOLD: bytes_kept, allocator.TRIM_THRESHOLD: bytes_kept, allocator.ARENA_MAX: 1}


@pytest.mark.parametrize("mebibytes", [0, -1, 2048, 1.5, math.inf])
def test_sizes_that_cannot_be_kept_are_refused(mebibytes: Any) -> None:
    with pytest.raises(ValueError, match=rf"mebibytes={mebibytes}: give a whole number from 1 to 2047, or None"):
        keep_memory(mebibytes)


def no_name(name: str) -> str:
    raise ValueError("unrecognized configuration name")


@pytest.mark.parametrize("confstr", [no_name, lambda name: "", lambda name: None])
def test_other_c_libraries_are_left_alone(confstr: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", confstr)
    monkeypatch.setattr(allocator, "_freed_memory", ["given back"])
    assert not keep_memory()
    assert allocator.freed_memory() == "given back"
