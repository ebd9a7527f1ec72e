"""Seeds every fault into a copy of the source and runs the tests named beside it: ``python -m tests.faults``.

``--write`` keeps what was found in ``found.csv``; words narrow it to the faults whose name or file has them all. Faults
run beside one another, each in a fork of a process that has loaded torch. It ends with 1 where one was not found.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import warm
from tests.faults import COPIED, FAULTS, FOUND, ROOT, path_in, write
from tests.faults.fault import Fault

FAILED = 10 + 1  # what ``warm.ask`` gives where pytest ran and a test failed

BUILD = [sys.executable, "-m", "fast_attention.core", "build"]  # of a copy's own sources, about half a minute


class Runner:
    """Runs faults, on each thread with servers of its own: one that interprets Triton's kernels, one that does not."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.own, self.servers = folder, threading.local(), list[subprocess.Popen[str]]()
        self.compiling = threading.Lock()
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / "sound" / name, ignore=shutil.ignore_patterns("__pycache__"))
        assert compileall.compile_dir(folder / "sound", quiet=1)

    def server(self, interpreted: bool) -> subprocess.Popen[str]:
        held: dict[bool, subprocess.Popen[str]] = self.own.__dict__.setdefault("servers", {})
        if interpreted not in held:
            held[interpreted] = warm.server(interpreted)
            self.servers.append(held[interpreted])
        return held[interpreted]

    def __call__(self, fault: Fault) -> tuple[str, str]:
        """The test that finds it, and what pytest said; the first is empty where no test does."""
        with tempfile.TemporaryDirectory(dir=self.folder) as made:
            copy, said = Path(made) / "copy", Path(made) / "said"
            shutil.copytree(self.folder / "sound", copy, copy_function=os.link)
            path = path_in(copy, fault)
            text = path.read_text()
            path.unlink()  # or the link's other end changes too
            path.write_text(text.replace(fault.old, fault.new))
            if fault.file.startswith("core/source/"):
                with self.compiling:  # a build takes all cores
                    subprocess.run(
                        BUILD,
                        cwd=made,
                        env={**os.environ, "PYTHONPATH": f"{copy}/src"},
                        check=True,
                        capture_output=True,
                    )
            arguments = shlex.split(fault.tests)
            code = warm.ask(self.server(arguments[0].startswith("tests/gpu")), arguments, copy, said)
            output = said.read_text()
        lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]  # or in its fixture
        return (lines[0].split(" ", 1)[1].split(" - ")[0] if code == FAILED and lines else ""), output

    def close(self) -> None:
        for server in self.servers:
            server.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("words", nargs="*", help="only the faults whose name or file has all of them")
    parser.add_argument("--write", action="store_true", help="keep the results of the faults that were run")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if all(word in f"{fault.what} {fault.file}" for word in options.words)]
    found, start = dict[str, str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        run = Runner(Path(folder))
        for i, (fault, (test, said)) in enumerate(zip(chosen, pool.map(run, chosen), strict=True), 1):
            found[fault.what] = test
            print(f"{i}/{len(chosen)} {fault.what}: {test or 'NOT FOUND'}", flush=True)
            if not test:
                print(f"{fault.file} by {fault.tests}:\n{said[-2500:]}", flush=True)
        run.close()
    if options.write:
        write(found)
    missed = [name for name, test in found.items() if not test]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found in {time.monotonic() - start:.0f} s", *missed, sep="\n")
    print(f"kept in {FOUND.relative_to(ROOT)}" if options.write else "nothing was kept: --write does")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
