"""A process that has loaded torch and its like, nothing of ours, and forks for every run of tests asked for.

``python -m tests.warm`` reads its orders from standard input, a line each, and answers with exit codes. Triton decides
at its import whether it interprets, so that tests of kernels have a process of their own, with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest
import torch

ROOT = Path(__file__).parent.parent
ON_GPU = ("jaxtyping", "triton.language", "torch.nn.attention.flex_attention")
OTHERS = (  # what tests and the modules under test import of other people's
    "jaxtyping", "typer.main", "typer.rich_utils", "rich.console", "rich.progress", "rich.table", "tomllib",
    "matplotlib.figure", "matplotlib.backends.backend_svg", "torch.distributed.checkpoint.state_dict",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "esm")),
)  # fmt: skip


def server(interpreted: bool) -> subprocess.Popen[str]:
    """Start such a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.warm"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1" if interpreted else "0", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def ask(server: subprocess.Popen[str], arguments: list[str], copy: Path, said: Path) -> int:
    """Have pytest run on a copy of the repository's code, output in the file ``said``; its exit code plus 10."""
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps([arguments, str(copy), str(said)]), file=server.stdin, flush=True)
    return int(server.stdout.readline())


def serve() -> None:
    """Load what all runs share, then fork for every line."""
    torch.set_num_threads(1)
    for name in ON_GPU if os.environ["TRITON_INTERPRET"] == "1" else OTHERS:
        with contextlib.suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()  # what is loaded here stays; no collection in a fork walks through it again
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if not child:
            _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(arguments: list[str], copy: str, said: str) -> NoReturn:
    out = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    assert not any(name.split(".")[0] == "fast_attention" for name in sys.modules), "the warm process holds our source"
    paths = [f"{copy}/src", copy]
    os.environ.update(PYTHONPATH=":".join(paths), PYTHONDONTWRITEBYTECODE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.path[:0] = paths
    for name in ("experiments", "benchmarks"):  # now: pytest puts the repository itself before the copy
        if Path(copy, name).is_dir():
            import_module(name)
    sys.dont_write_bytecode = True
    code = pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(10 + int(code))


if __name__ == "__main__":
    serve()
