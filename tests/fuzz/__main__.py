"""`python -m tests.fuzz --minutes 30`: rounds of all fuzz tests, a new seed each, until the time is up or one fails."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round")
    parser.add_argument("--processes", default="2")
    parser.add_argument("--only", default="", help="pytest's -k")
    asked = parser.parse_args()
    until, tried, rounds = time.monotonic() + 60 * asked.minutes, Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        while time.monotonic() < until:
            seed = asked.seed + rounds
            env = {**os.environ, "FUZZ_FACTOR": "10", "FUZZ_SEED": str(seed), "FUZZ_COUNTS": str(counts)}
            env.setdefault("OMP_NUM_THREADS", "1")
            words = ["-q", "-n", asked.processes, "-p", "no:cacheprovider", "tests/fuzz", "-k", asked.only]
            run = subprocess.run([sys.executable, "-m", "pytest", *words], env=env, check=False)
            rounds += 1
            tried.update(json.loads(counts.read_text()) if counts.exists() else {})
            if run.returncode:
                print(f"failed in round {rounds}: again with  FUZZ_FACTOR=10 FUZZ_SEED={seed} pytest tests/fuzz")
                return 1
    for kind, count in sorted(tried.items()):
        print(f"{kind:<60} {count:>9,} inputs")
    print(f"clean: {sum(tried.values()):,} inputs in {rounds} rounds, seeds {asked.seed} to {asked.seed + rounds - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
