"""The suite can fail: faults seeded into a copy of the source are all found by the tests named beside them."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.faults import FAULTS
from tests.faults.fault import Fault

ROOT = Path(__file__).parent.parent


def test_the_texts_of_all_faults_stand_once_in_their_files() -> None:
    """Quick, by ``-k texts``: a change that takes a fault's text away gives the fault its new one."""
    held = {fault.file: (ROOT / "src" / "fast_attention" / fault.file).read_text() for fault in FAULTS}
    wrong = [f"{fault.what}: {fault.file}" for fault in FAULTS if held[fault.file].count(fault.old) != 1]
    assert not wrong, wrong


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[bool, subprocess.Popen[str]]]:
    """Processes that have loaded torch and what tests import: once, not once a fault; by whether Triton interprets."""
    started: dict[bool, subprocess.Popen[str]] = _Started()
    yield started
    for server in started.values():
        server.communicate()


class _Started(dict[bool, "subprocess.Popen[str]"]):
    def __missing__(self, interpreted: bool) -> subprocess.Popen[str]:
        self[interpreted] = warm.server(interpreted)
        return self[interpreted]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with its bytecode: what a fault does not touch is compiled once."""
    source = tmp_path_factory.mktemp("compiled") / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.gz", "__pycache__"))
    assert compileall.compile_dir(source, quiet=1)
    return source


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_seeded_fault_is_found(
    fault: Fault, tmp_path: Path, compiled: Path, servers: dict[bool, subprocess.Popen[str]]
) -> None:
    shutil.copytree(compiled, tmp_path / "src", copy_function=os.link)
    path = tmp_path / "src" / "fast_attention" / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.old!r} stands {text.count(fault.old)} times in {fault.file}"
    path.unlink()  # or the link's other end changes too
    path.write_text(text.replace(fault.old, fault.new))
    arguments = [part.strip("'") for part in fault.tests.split(" ", 2)]
    code = warm.ask(servers[arguments[0].startswith("tests/gpu")], arguments, tmp_path / "src", tmp_path / "said")
    assert code == 11, f"not found by {fault.tests}:\n{(tmp_path / 'said').read_text()[-2500:]}"
