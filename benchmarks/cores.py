"""Time against the number of threads and beside busy processes: exact attention and a few mechanisms, in turns.

``python -m benchmarks.cores`` takes about five minutes of two cores with nothing else to do. It prints, for B1 H8 D64
in float32, the wall time of a call by one thread up to all that the process may use, and by all of them beside one and
two processes that only loop. Next to it stand the gains by all threads and by the last, and the slowdown beside two
processes, each divided by exact attention's own of the same rounds. Last come the parallel regions of a call. A
shared library in front of OpenMP's runtime counts them (``regions.c``), where there are Linux and a C compiler.

    python -m benchmarks.cores --threads 1 2 --length 512 --patience 1
    python benchmarks/keep.py out/cores/cores.json cores     # into records/
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from experiments.arguments import Arguments
from fast_attention import Bound, Shape, clock, files, keep_memory
from fast_attention.lab import environment, records
from fast_attention.lab.records import EXACT
from fast_attention.lab.tables import Table, Value, milliseconds, say, show

HEADS, WIDTH = 8, 64
ROUNDS = 9  # of a figure, at most
SAMPLE = 0.1  # seconds: shorter calls are repeated within a sample, which beside others spans many time slices
BUSY = (0, 1, 2)  # processes beside the measured one
REGIONS, HYBRID, SLOWDOWN, GAIN = 3, 6, 1.5, 0.9  # what is asked for: at most, at most, at most, at least
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000): pass"

Run = Callable[[], Any]


class Case(NamedTuple):
    """A mechanism in one direction."""

    expression: str
    is_causal: bool = False

    @property
    def name(self) -> str:
        return self.expression + ", causal" * self.is_causal


CASES = [
    Case("Local(window=64)"), Case("Local()"), Case("LinearAttention()", is_causal=True), Case("FavorPlus()"),
    Case("FavorPlus()", is_causal=True), Case("LSH()"), Case("BigBird()"), Case("Hybrid()"),
]  # fmt: skip


class Condition(NamedTuple):
    """Under which a call is timed: torch's threads, and processes beside it."""

    threads: int
    busy: int = 0


def calls(case: Case, length: int) -> dict[str, Run]:
    """Exact attention and the mechanism, on the same tensors."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, length, WIDTH)
    bound = Bound(case.expression, Shape(HEADS, WIDTH, length))
    return {
        EXACT: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal),
        case.name: lambda: bound(q, k, v, is_causal=case.is_causal),
    }


@torch.no_grad()
def measured(case: Case, length: int, condition: Condition, patience: float) -> dict[str, Any]:
    """Median seconds of both in turns, after one call of each, or two where they are short."""
    torch.set_num_threads(condition.threads)
    runs, device = calls(case, length), torch.device("cpu")
    once = {name: clock.seconds(run, device) for name, run in runs.items()}
    once = {name: first if first > SAMPLE else clock.seconds(runs[name], device) for name, first in once.items()}
    repeats = {name: math.ceil(SAMPLE / seconds) for name, seconds in once.items()}

    def sample(name: str) -> Run:
        return lambda: [runs[name]() for _ in range(repeats[name])]

    times = clock.in_turns({name: sample(name) for name in runs}, device, ROUNDS, patience)
    exact, own = (statistics.median(times[name]) / repeats[name] for name in (EXACT, case.name))
    return {
        "case": case.name, **condition._asdict(), "seconds": own, "exact_seconds": exact,
        "rounds": len(times[case.name]),
    }  # fmt: skip


@contextmanager
def beside(number: int) -> Iterator[None]:
    """Processes that loop, and end with this one whatever becomes of it."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number):
            started.append(subprocess.Popen([sys.executable, "-c", LOOP]))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def regions(length: int, threads: int) -> tuple[dict[str, int], str]:
    """The parallel regions of a call by name; or none, and why they were not counted."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        return {}, "not counted: that takes Linux and a C compiler"
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(__file__).with_name("regions.c"), Path(folder) / "regions.so"
        build = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        count = [sys.executable, "-c", f"from benchmarks import cores; cores.tell({length}, {threads})"]
        place = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for command, more in ((build, {}), (count, {"LD_PRELOAD": str(library)})):
            made = subprocess.run(command, capture_output=True, text=True, check=False, env={**place, **more})
            if made.returncode:
                return {}, f"not counted: {(made.stderr.strip().splitlines() or ['it ended'])[-1]}"
    found: dict[str, int] = json.loads(made.stdout.splitlines()[-1])
    if found.pop("exponential") != 1:
        return {}, "not counted: torch runs by a runtime of threads that regions.c does not know"
    return found, ""


@torch.no_grad()
def tell(length: int, threads: int) -> None:
    """Print the regions of one call each, in a process that loaded ``regions.c``; one of exp shows that it counts."""
    begun = ctypes.CDLL(None).regions_begun
    begun.restype = ctypes.c_long
    torch.set_num_threads(threads)
    many = torch.randn(1 << 20)
    runs: dict[str, Run] = {"exponential": many.exp}
    for case in CASES:
        runs |= {f"{EXACT}{', causal' * case.is_causal}" if name == EXACT else name: run
                 for name, run in calls(case, length).items()}  # fmt: skip
    found = {}
    for name, run in runs.items():
        for _ in range(3):  # what is made at a first call is not a call's
            before = begun()
            run()
            found[name] = begun() - before
    print(json.dumps(found))


class Summary(NamedTuple):
    """A mechanism's gains and slowdown, each divided by exact attention's own in the same rounds."""

    gain: float | None  # of all threads over one
    last: float | None  # of all threads over the number before
    slowdown: float | None  # beside the most busy processes


def summary(rows: list[dict[str, Any]]) -> Summary:
    """The summary of a mechanism's rows."""
    quiet = {row["threads"]: row for row in rows if not row["busy"]}
    most = max(quiet)
    fewer = [number for number in quiet if number < most]
    loaded = [row for row in rows if row["busy"] == max(BUSY)]

    def over(slow: dict[str, Any], fast: dict[str, Any]) -> float:
        return (slow["seconds"] / fast["seconds"]) / (slow["exact_seconds"] / fast["exact_seconds"])

    return Summary(
        over(quiet[1], quiet[most]) if 1 in fewer else None,
        over(quiet[max(fewer)], quiet[most]) if fewer else None,
        over(loaded[0], quiet[most]) if loaded else None,
    )


def table(rows: list[dict[str, Any]], counted: dict[str, int]) -> Table:
    """A line for exact attention in each direction and for every mechanism."""
    conditions = [*dict.fromkeys(Condition(row["threads"], row["busy"]) for row in rows)]
    cells: list[list[str | Value]] = []
    names = [*dict.fromkeys(row["case"] for row in rows)]
    for suffix in ("", ", causal"):
        own = [row for row in rows if row["case"].endswith(", causal") == bool(suffix)]
        if own:
            times = [statistics.median(row["exact_seconds"] for row in under(own, each)) for each in conditions]
            cells.append([EXACT + suffix, *(milliseconds(1000 * each) for each in times), "", "", "",
                          str(counted.get(EXACT + suffix, "-"))])  # fmt: skip
    for name in names:
        own = [row for row in rows if row["case"] == name]
        times = [f"{milliseconds(1000 * row['seconds'])} ({row['exact_seconds'] / row['seconds']:.2f}x)"
                 for each in conditions for row in under(own, each)]  # fmt: skip
        found = summary(own)
        gains = [worded(each, each is not None and each < GAIN) for each in (found.gain, found.last)]
        slowed = worded(found.slowdown, (found.slowdown or 0.0) > SLOWDOWN)
        number, most = counted.get(name), HYBRID if name.startswith("Hybrid") else REGIONS
        regions = Value("-") if number is None else Value(f"{number:,}", "slow" if number > most else "")
        cells.append([name, *times, *gains, slowed, regions])
    heads = [f"{each.threads} thr." if not each.busy else f"beside {each.busy}" for each in conditions]
    return Table(["attention", *heads, "gain", "last", "slowdown", "regions"], cells)


def under(rows: list[dict[str, Any]], condition: Condition) -> list[dict[str, Any]]:
    """The rows of one condition."""
    return [row for row in rows if (row["threads"], row["busy"]) == condition]


def worded(ratio: float | None, is_short: bool) -> Value:
    """A ratio, marked where it is short of what is asked for."""
    return Value("-") if ratio is None else Value(f"{ratio:.2f}", "slow" if is_short else "")


def default_threads(usable: int) -> list[int]:
    """All numbers up to four; beyond, doublings, and the last two, whose difference is the gain by the last thread."""
    doublings = [2**power for power in range(usable.bit_length())]
    return sorted({number for number in (*doublings, 3, usable - 1, usable) if 1 <= number <= usable})


def main(arguments: list[str] | None = None, cases: Sequence[Case] = CASES) -> None:
    """Print the table and write the record."""
    usable = environment.usable_cores()
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", help="Numbers of threads. Default: 1 to all, by doublings.")
    parser.add_argument("--length", type=int, default=4096, help="Tokens.")
    parser.add_argument("--patience", type=float, default=5.0, help="Seconds after which no further round begins.")
    parser.add_argument("--out", type=Path, default=Path("out/cores"), help="Folder for the record, cores.json.")
    asked = parser.parse_args(arguments)
    threads = sorted({*(asked.threads or default_threads(usable))})
    if threads[0] < 1 or asked.length < 1:
        parser.error("--threads and --length: give numbers from 1 on")
    keep_memory()
    torch.set_num_threads(threads[-1])
    command = ["python", "-m", "benchmarks.cores", *(arguments if arguments is not None else sys.argv[1:])]
    meta = {"status": "running", "command": command, "started": environment.timestamp()}
    meta |= environment.environment(torch.device("cpu"))
    meta |= {"heads": HEADS, "width": WIDTH, "length": asked.length}
    rows: list[dict[str, Any]] = []

    def write(**changes: Any) -> None:
        held = {"meta": meta | changes, "rows": rows, "regions": counted}
        files.write(asked.out / "cores.json", records.sealed("cores", held) + "\n")

    counted, uncounted = regions(asked.length, max(2, threads[-1]))
    conditions = [*(Condition(number) for number in threads), *(Condition(threads[-1], busy) for busy in BUSY[1:])]
    others, words = environment.Others(), list[str]()
    for condition in conditions:
        with beside(condition.busy):
            for case in cases:
                rows.append(measured(case, asked.length, condition, asked.patience))
                say(f"{condition.threads} threads beside {condition.busy}: {case.name} {rows[-1]['seconds']:.4f} s")
                write()
        if not condition.busy:
            meta["others"], words = others.cores(), others.words()
    finished = {"status": "complete", "finished": environment.timestamp(), "uncounted": uncounted}
    write(**finished, load_average_after=environment.load_average())
    notes = [f"Regions {uncounted}."] * bool(uncounted)
    if threads[-1] > usable:
        notes.append(f"{threads[-1]} threads, and this process may use {usable} cores: threads wait for each other.")
    asked_for = (
        f"In brackets: times as fast as exact attention. Gain (of all threads; of the last) and slowdown (beside "
        f"{max(BUSY)} busy processes) are divided by exact attention's own. Asked: gain {GAIN} at least, slowdown "
        f"{SLOWDOWN} at most, {REGIONS} regions at most (Hybrid {HYBRID})."
    )
    show(table(rows, counted), asked_for, *notes, *words, f"Record: {asked.out / 'cores.json'}")


if __name__ == "__main__":
    main()
