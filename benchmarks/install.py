"""Install the peers one by one into the environment that runs this; name those that will not, and go on.

Peers come without their own requirements (several pin old or heavy ones): what they need beside torch stands in EXTRAS.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
EXTRAS = (
    "setuptools", "einops", "axial-positional-embedding", "product-key-memory", "colt5-attention", "hyper-connections",
    "torch-einops-utils", "labml",
)  # fmt: skip
PEERS = (
    "performer-pytorch", "linear-attention-transformer", "local-attention", "sinkhorn-transformer", "reformer-pytorch",
    "linformer", "aft-pytorch", "labml-nn", "g-mlp-pytorch", "fnet-pytorch", "mlp-mixer-pytorch",
)  # fmt: skip
WHOLE = ("scipy", "transformers")  # with their own requirements


def install(package: str, *options: str) -> bool:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), *options, package]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        said = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines()[-1:]
        print(f"benchmarks: {package} will not install: {' '.join(said)}", flush=True)
    return run.returncode == 0


def main() -> None:
    done = [install(package, "--no-deps") for package in (*EXTRAS, *PEERS)] + [install(package) for package in WHOLE]
    print(f"benchmarks: {sum(done)} of {len(done)} packages installed")


if __name__ == "__main__":
    main()
