"""Building the core: what is compiled when, and one line that says why nothing was built. The compilers are scripts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fast_attention import core
from fast_attention.core import building
from fast_attention.core.__main__ import make

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the compilers are shell scripts")

# "Compiles" a source by copying it and links by joining, so that the file holds the mark; notes every command.
WORKING = """
case "$*" in *-dM*) echo '#define __GNUC__ 12'; exit;; esac
echo "$*" >> "$0.log"
inputs=
while [ $# -gt 0 ]; do
    case "$1" in -o) shift; output=$1;; *.cpp | *.o) inputs="$inputs $1";; esac
    shift
done
cat $inputs > "$output"
"""
COMPILING_FAILS = """
case "$*" in *-dM*) echo '#define __GNUC__ 12'; exit;; esac
echo 'In file included from here:' >&2
echo 'kernels.cpp:3: error: no such vector' >&2
exit 1
"""
UNUSABLE = {
    "echo '#define __GNUC__ 8'": "is GCC 8; GCC 9 or clang 10 is needed, or newer",
    "echo '#define __GNUC__ 4'; echo '#define __clang_major__ 9'": "is clang 9; GCC 9 or clang 10 is needed, or newer",
    "echo '#define _MSC_VER 1940'": "is neither GCC nor clang; GCC 9 or clang 10 is needed, or newer",
    "echo 'no license' >&2; exit 3": "does not run: the compiler failed: no license",
    COMPILING_FAILS: "the compiler failed: kernels.cpp:3: error: no such vector",
}


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """Make a script the C++ compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def the_only_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().out.splitlines()
    return line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of an earlier build, which stays where a later one fails."""
    (folder := tmp_path / "built").mkdir()
    (folder / "core.so").write_text("earlier")
    return folder / "core.so"


def test_without_a_compiler_one_line_says_so(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert make(file, "all", False) == 1
    line = the_only_line(capsys)
    assert "not built: there is no C++ compiler (c++, g++, clang++)" in line
    assert line.endswith("The reference runs in its place")
    assert file.read_text() == "earlier"


@pytest.mark.parametrize("script", UNUSABLE, ids=["old GCC", "old clang", "another", "does not run", "fails"])
def test_a_compiler_that_cannot_build_it_is_named(
    script: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, tmp_path, script)
    assert make(file, "all", False) == 1
    assert UNUSABLE[script] in the_only_line(capsys)
    assert [each.read_text() for each in file.parent.iterdir()] == ["earlier"]


@pytest.mark.parametrize("folder", ["{tmp}/compiler/below", "/sys/kernel"], ids=["below a file", "read-only"])
def test_a_folder_that_cannot_be_written_is_named_before_anything_is_compiled(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path(folder).exists() and folder.startswith("/"):
        pytest.skip("there is no folder here that not even root may write")
    compiler = use(monkeypatch, tmp_path, WORKING)
    assert make(Path(folder.format(tmp=tmp_path)) / "core.so", "all", False) == 1
    assert "cannot be written" in the_only_line(capsys)
    assert not compiler.with_name("compiler.log").exists()


def test_only_what_changed_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (source := tmp_path / "source").mkdir()
    for name in ("library.cpp", "kernels.cpp", "interface.h"):
        (source / name).write_text(f"// {name}\n")
    for module in (core, building):
        monkeypatch.setattr(module, "SOURCE", source)
    log = use(monkeypatch, tmp_path, WORKING).with_name("compiler.log")
    file = tmp_path / "new" / "core.so"

    def built() -> int:
        """How many commands ran, by the log and by what was printed."""
        before = len(log.read_text().splitlines()) if log.exists() else 0
        assert make(file, "all", False) == 0
        after = len(log.read_text().splitlines())
        assert ("is up to date" if after == before else "built the compiled core in ") in the_only_line(capsys)
        return after - before

    every = 3 + len(building.ALL)  # the mark, the library, the kernels of each width, the linker
    assert built() == every
    commands = log.read_text().splitlines()
    for width in building.ALL:
        (command,) = [each for each in commands if f"-DFAST_ATTENTION_WIDTH={width} " in each]
        assert f"{source}/kernels.cpp" in command
        assert {*building.WIDTHS[width]} <= {*command.split()}
    assert core.read_mark(file) == (core.stamp(), building.ALL)
    assert built() == 0
    (source / "interface.h").write_text("// another\n")
    assert built() == every
    (source / "interface.h").rename(source / "shape.h")
    assert built() == every
    building.build(file, [4])  # narrower than what is asked for next
    assert built() == (every if building.ALL != (4,) else 0)
    assert [*file.parent.iterdir()] == [file]
