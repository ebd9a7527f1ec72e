"""Code in processes to which nothing of this library was told before.

One process loads other people's packages, which takes seconds, and forks for every piece of code.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
NEEDED = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX's")
TORCH = "import torch"
TRANSFORMERS = "import torch, transformers\ntransformers.AutoModel, transformers.BertModel, transformers.pipeline"
DRIVER = """
import gc, json, os, signal, sys, tempfile, traceback, warnings
{loaded}
torch.set_num_threads(int(os.environ["THREADS"]))  # or last digits differ
assert not [name for name in sys.modules if name.startswith("fast_attention")]
gc.freeze()
known = dict(globals())

def run(folder, code, said):
    os.dup2(said, 1)
    os.dup2(said, 2)
    signal.alarm(300)
    warnings.filterwarnings("ignore")
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        with torch.no_grad():
            exec(code, {{**known, "__name__": "__main__"}})
    except SystemExit as stop:
        return stop.code
    except BaseException:
        return traceback.format_exc()

for line in sys.stdin:
    folder, code = json.loads(line)
    with tempfile.TemporaryFile("w+") as said:
        if not (child := os.fork()):
            ended = run(folder, code, said.fileno())
            print(ended or "", flush=True)
            os._exit(bool(ended))
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        print(json.dumps([ended, said.read()]), flush=True)
"""
_drivers: dict[str, subprocess.Popen[str]] = {}


def told(asked: list[tuple[str, str, str]], loaded: str = TRANSFORMERS) -> dict[str, str]:
    """What went wrong in each check, given its name, folder and code, in processes with as many threads as this one.

    Nothing but ``loaded`` was imported there. Empty where nothing went wrong.
    """
    if loaded not in _drivers:
        places = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        _drivers[loaded] = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", DRIVER.format(loaded=loaded)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": places, "THREADS": str(torch.get_num_threads())},
        )  # fmt: skip
        atexit.register(_drivers[loaded].kill)
    driver, found = _drivers[loaded], {}
    assert driver.stdin is not None
    assert driver.stdout is not None
    for name, folder, code in asked:
        print(json.dumps([folder, code]), file=driver.stdin, flush=True)
        ended, said = json.loads(driver.stdout.readline())
        found[name] = said or f"ended with {ended}" if ended else ""
    return found
