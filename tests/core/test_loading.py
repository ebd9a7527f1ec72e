"""Loading the core: it serves where a compiler is, and whatever is wrong with a file is a reason, never an error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fast_attention import attention, core
from fast_attention.core import building


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process will look for the core, as if for the first time; nothing is there yet."""
    path = tmp_path / core.FILE.name
    monkeypatch.delenv(core.VARIABLE, raising=False)
    monkeypatch.setattr(core, "FILE", path)
    monkeypatch.setattr(core, "_found", [])
    return path


def mark(stamp: str, widths: str) -> str:
    return core.MARK.format(stamp=stamp, widths=widths)


def test_the_core_serves_where_a_compiler_is() -> None:
    """Its build is part of every run of the tests (``make test``); it imports the stable interface of torch only."""
    if os.environ.get(core.VARIABLE) == "0":
        pytest.skip(f"{core.VARIABLE}=0")
    try:
        building.find_compiler()
    except building.NoCompiler as error:
        pytest.skip(str(error))
    assert core.unavailable() == ""
    found = core.found()
    assert 4 <= found.width <= core.native_width()
    if (nm := shutil.which("nm")) and sys.platform == "linux":
        symbols = subprocess.run([nm, "-D", "-u", found.file], capture_output=True, text=True, check=True).stdout
        imported = {line.split()[-1].partition("@")[0] for line in symbols.splitlines()}
        assert "aoti_torch_library_init_def" in imported
        foreign = {name for name in imported if re.match(r"_ZN?K?(2at|3c10|5torch)|GOMP|omp_|Py|_Py", name)}
        assert not foreign, foreign


def test_no_file_and_files_of_others_are_reasons(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert core.unavailable() == f"no core was built; `{core.BUILD}` makes one"
    core._found.clear()
    file.with_name("_core.plan9-mips.so").write_text("not looked at")
    assert core.unavailable() == f"built for another platform (plan9-mips); `{core.BUILD}` builds it for this one"
    core._found.clear()
    monkeypatch.setenv(core.VARIABLE, "0")
    assert core.unavailable() == "turned off by FAST_ATTENTION_CORE=0"


USELESS: dict[str, tuple[Callable[[], str], str]] = {
    "stale": (lambda: mark("0123456789abcdef", "4"), "built for other sources; `python -m fast_attention.core build`"),
    "not a core": (lambda: "something else", "built for other sources"),
    "no library": (lambda: mark(core.stamp(), "4"), "torch could not load it: "),
}


@pytest.mark.parametrize("kind", USELESS)
def test_a_file_that_cannot_serve_is_told_once_and_the_reference_runs(kind: str, file: Path) -> None:
    content, reason = USELESS[kind]
    file.write_text(content())
    q = torch.randn(1, 2, 50, 8)
    with pytest.warns(UserWarning, match=re.escape(f"the compiled core does not serve: {reason}")):
        assert core.unavailable().startswith(reason)
    assert core.unavailable().startswith(reason)  # without a warning, which would be an error here
    out, expected = (attention(q, q, q, "Local(window=8)", impl=impl) for impl in ("auto", "reference"))
    torch.testing.assert_close(out, expected)


def test_another_file_by_its_path(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(core.VARIABLE, str(tmp_path / "mine.so"))
    with pytest.warns(UserWarning, match="FAST_ATTENTION_CORE names .*mine.so, which is not there"):
        assert core.unavailable()


def test_switched_off_in_every_thread_until_the_last_block_ends(file: Path) -> None:
    q, inside = torch.randn(1, 2, 50, 8), []
    with core.switched_off():
        with core.switched_off():
            pass
        thread = threading.Thread(target=lambda: inside.append(core.unavailable()))
        thread.start()
        thread.join()
        assert inside == [core.unavailable()] == ["turned off here"]
        assert not core._found  # nothing was looked for
        with pytest.raises(NotImplementedError, match=r"impl='core' was asked for.*turned off here"):
            attention(q, q, q, "Local(window=8)", impl="core")
    assert core.unavailable().startswith("no core was built")
    with pytest.raises(NotImplementedError, match="no core was built; `python -m"):
        attention(q, q, q, "Local(window=8)", impl="core")


def test_threads_that_ask_at_once_look_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, looks, answers = threading.Barrier(8), [], []

    def look() -> core.Found:
        looks.append(None)
        threading.Event().wait(0.05)  # the others ask meanwhile
        raise core.Useless("slow")

    def ask() -> None:
        together.wait()
        answers.append(core.unavailable())

    monkeypatch.setattr(core, "_look", look)
    threads = [threading.Thread(target=ask) for _ in range(8)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(looks), answers, len(told)) == (1, ["slow"] * 8, 1)


def test_a_process_that_only_imports_it_loads_nothing() -> None:
    code = "import sys; from fast_attention import core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    command = [sys.executable, "-m", "fast_attention.core"]
    off = {**os.environ, core.VARIABLE: "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=off)
    assert done.stdout == "the compiled core does not serve: turned off by FAST_ATTENTION_CORE=0\n"
    assert done.returncode == 1
