"""The suite can fail: faults seeded into a copy of the source are all found by the tests named beside them."""

from __future__ import annotations

import multiprocessing
import shutil
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


WARM = multiprocessing.get_context("forkserver")  # torch and what tests import is loaded once, not once a fault
WARM.set_forkserver_preload(["tests.warm"])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_seeded_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.gz"))
    path = tmp_path / "src" / "fast_attention" / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.old!r} stands {text.count(fault.old)} times in {fault.file}"
    path.write_text(text.replace(fault.old, fault.new))
    arguments = [part.strip("'") for part in fault.tests.split(" ", 2)]
    run = WARM.Process(target=warm.tests, args=(arguments, str(tmp_path / "src"), str(tmp_path / "said")))
    run.start()
    run.join()
    assert run.exitcode == 11, f"not found by {fault.tests}:\n{(tmp_path / 'said').read_text()[-2500:]}"
