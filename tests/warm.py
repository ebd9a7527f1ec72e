"""A process that has loaded torch and its like, nothing of ours, and forks for every run of tests asked for."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
with contextlib.suppress(ImportError):
    import transformers.models.bert.modeling_bert  # noqa: F401

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # what is loaded here stays; no collection in a fork walks through it again


def tests(arguments: list[str], source: str, said: str) -> None:
    """Run pytest on another copy of the source, output in the file ``said``; the exit code is pytest's plus 10."""
    out = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    assert not any(name.split(".")[0] == "fast_attention" for name in sys.modules), "the warm process holds our source"
    os.chdir(ROOT)
    os.environ.update(PYTHONPATH=source, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_XDIST_WORKER", None)
    sys.path.insert(0, source)
    sys.dont_write_bytecode = True
    words = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *arguments]
    if arguments[0].startswith("tests/gpu"):  # Triton decides at its import whether it interprets
        command = [sys.executable, "-m", "pytest", *words]
        os._exit(10 + subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode)
    code = pytest.main(words)
    sys.stdout.flush()
    os._exit(10 + int(code))
