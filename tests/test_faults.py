"""The seeded faults are of this source, and all of them were found when they were run last (``make faults``)."""

from __future__ import annotations

from tests.faults import FAULTS, ROOT, path_in, read


def test_the_texts_of_all_faults_stand_once_in_their_files() -> None:
    """A change that takes a fault's text away gives the fault its new one."""
    held = {fault.file: path_in(ROOT, fault).read_text() for fault in FAULTS}
    wrong = [f"{fault.what}: {fault.file}" for fault in FAULTS if held[fault.file].count(fault.old) != 1]
    assert not wrong, wrong


def test_the_list_has_every_fault_and_the_test_that_finds_it() -> None:
    rows = read()
    wanted = {fault.what: fault.file for fault in FAULTS}
    assert {name: row["file"] for name, row in rows.items()} == wanted, "run make faults"
    missed = [name for name, row in rows.items() if row["found"] != "yes"]
    assert not missed, missed
