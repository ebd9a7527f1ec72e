"""Going on: nothing that was trained is overwritten unasked, whatever has happened to the folder meanwhile."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_attention import __version__, files
from fast_attention.lab import commands
from fast_attention.tasks import sequences
from fast_attention.tasks.bytes import ByteLM as Text
from fast_attention.tasks.recall import Copy
from fast_attention.tasks.sequences import Sequences
from fast_attention.training import checkpoints, journal, steps
from fast_attention.training.checkpoints import Damaged
from fast_attention.training.loop import Outcome, train
from fast_attention.training.settings import TrainingSettings

TASK = Copy(symbols=3, words=2)
CONFIG = steps.config_for(TASK, width=8, heads=2, layers=1)
SETTINGS = TrainingSettings(
    steps=6, batch_size=2, evaluate_every=3, evaluation_batches=1, log_every=2, save_every=2, keep=2
)
RECORDS = {"study": "study.json", "bench": "bench.json", "convert": "report.json"}
WORDS = ["--width", "8", "--heads", "2", "--layers", "1", "--batch-size", "2", "--evaluate-every", "3"]


def run(out: Path, said: list[str] | None = None, steps: int = 6, **how: bool) -> Outcome:
    def watch(line: dict[str, Any]) -> None:
        if said is not None and "message" in line:
            said.append(line["message"])

    return train(TASK, CONFIG, replace(SETTINGS, steps=steps), out, watch=watch, **how)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def damage(path: Path, name: str = "model.safetensors") -> None:
    text = bytearray((path / name).read_bytes())
    text[len(text) // 2] ^= 1
    (path / name).write_bytes(text)


def made_newer(path: Path) -> None:
    """As a later version might write it."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest |= {"format": "fast-attention checkpoint 2", "version": "7.5.0"}
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    run(out)
    return out


@pytest.fixture
def out(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_only_sound_checkpoints_count_for_retention(out: Path) -> None:
    """With every old one damaged, whatever is written stays, also where its number is lower."""
    folder = out / "checkpoints"
    for path in checkpoints.find_all(folder):
        damage(path)
    run(out, resume=True, restart=True, steps=4)
    assert [path.name for path in checkpoints.find_all(folder)] == ["step_4", "step_2"]
    for number in (9, 8):  # from beyond, and damaged
        shutil.copytree(folder / "step_4", folder / f"step_{number}")
        damage(folder / f"step_{number}")
    run(out, resume=True, steps=6)
    assert [path.name for path in checkpoints.find_all(folder)] == ["step_9", "step_8", "step_6", "step_4"]
    assert checkpoints.newest(folder, lambda words: None) == folder / "step_6"


def test_a_process_killed_while_it_replaces_a_checkpoint_loses_none(out: Path) -> None:
    folder, said = out / "checkpoints", list[str]()
    shutil.copytree(folder / "step_6", folder / "step_6.tmp")
    (folder / "step_6").rename(folder / "step_6.old.tmp")
    shutil.copytree(folder / "step_4", folder / "step_8.tmp")
    damage(folder / "step_8.tmp")
    run(out, said, resume=True)
    assert said[0].endswith("step_6")
    assert sorted(path.name for path in folder.iterdir()) == ["step_4", "step_6", "step_6.old.tmp", "step_8.tmp"]


def test_the_last_evaluation_is_kept_with_the_step_it_is_of(tmp_path: Path) -> None:
    """A checkpoint that was written at the last step, before its evaluation, does not stand for it."""
    task = Text(path=str(tmp_path / "text.txt"), context=8)
    (tmp_path / "text.txt").write_text("what is said twice, " * 40)
    config, settings = steps.config_for(task, width=8, heads=2, layers=1), replace(SETTINGS, evaluate_every=4)
    assert train(task, config, settings, tmp_path / "run").best_step == 6  # 6 steps, saved at each second one
    more = replace(settings, steps=7, lr=0.0)
    assert train(task, config, more, tmp_path / "run", resume=True).best_step == 6
    assert [line["step"] for line in journal.read(tmp_path / "run") if "valid" in line] == [0, 4, 6, 7]
    assert not [*(tmp_path / "run" / "checkpoints").glob("*.tmp")]


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    """A split drawn anew would make training sequences of what was held out."""
    path = tmp_path / "labelled.csv"
    rows = [f"text {i},{'ab'[i % 2]}\n" for i in range(20)]
    path.write_text("text,label\n" + "".join(rows))
    task = Sequences(str(path), context=16)
    config = steps.config_for(task, width=8, heads=2, layers=1)
    train(task, config, SETTINGS, tmp_path / "run")
    before = contents(tmp_path / "run")
    path.write_text("text,label\n" + "".join(rows) + "text 99,a\n")
    sequences.sides.cache_clear()
    more = replace(SETTINGS, steps=8)
    with pytest.raises(ValueError, match=r"data \(training\) 18 sequences.*, not 19 sequences.*cannot be resumed so"):
        train(task, config, more, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before
    path.write_text("text,label\n" + "".join(rows))
    sequences.sides.cache_clear()
    assert train(task, config, more, tmp_path / "run", resume=True).step == 8


def test_all_checkpoints_damaged_is_refused_and_nothing_is_touched(out: Path) -> None:
    for path in checkpoints.find_all(out / "checkpoints"):
        damage(path)
    before = contents(out)
    with pytest.raises(ValueError, match=r"step_6, step_4 and a log up to step 6 and no intact checkpoint.*--restart"):
        run(out, resume=True)
    assert contents(out) == before
    said: list[str] = []
    assert run(out, said, resume=True, restart=True).status == "complete"
    assert any("begins anew" in words for words in said)


def test_a_later_versions_checkpoint_is_refused_with_both_versions(out: Path) -> None:
    newest = checkpoints.find_all(out / "checkpoints")[0]
    made_newer(newest)
    before = contents(out)
    for how in ({"resume": True}, {"resume": True, "restart": True}):
        with pytest.raises(files.Newer) as found:
            run(out, **how)
        assert "7.5.0" in str(found.value)
        assert __version__ in str(found.value)
        assert str(newest) in str(found.value)
    with pytest.raises(files.Newer):
        checkpoints.load(newest)
    assert contents(out) == before


def test_retention_leaves_a_later_versions_checkpoint_alone(out: Path) -> None:
    made_newer(out / "checkpoints" / "step_4")
    run(out, resume=True, steps=10)
    assert [path.name for path in checkpoints.find_all(out / "checkpoints")] == ["step_10", "step_8", "step_4"]


@pytest.mark.parametrize("lost", ["nothing", "checkpoints", "checkpoints and log"])
def test_beginning_anew_needs_restart(out: Path, lost: str) -> None:
    if lost != "nothing":
        shutil.rmtree(out / "checkpoints")
    if lost == "checkpoints and log":
        (out / journal.LOG).unlink()
    before = contents(out)
    for how in ({}, {"resume": True}) if lost != "nothing" else ({},):
        with pytest.raises(ValueError, match="--restart"):
            run(out, **how)
        assert contents(out) == before
    assert run(out, restart=True, steps=4).step == 4
    assert [path.name for path in checkpoints.find_all(out / "checkpoints")] == ["step_4", "step_2"]
    assert max(line["step"] for line in journal.read(out)) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--device", "cuda:99"), "not available"), (("--mechanism", "Linformer(rank=2)"), "causal"), ((), "in use")],
)
def test_a_refused_restart_takes_nothing_away(
    out: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert commands.run(["train", "--out", str(out), "--resume", "--steps", "8"]) == 0
    before, asked = contents(out), ["train", repr(TASK), *WORDS, "--steps", "2", "--out", str(out), "--restart"]
    with nullcontext() if options else files.locked(out):
        assert commands.run([*asked, *options]) == 2
    assert words in capsys.readouterr().err
    assert contents(out) == before
    assert commands.run(asked) == 0
    assert json.loads((out / "result.json").read_text())["outcome"]["step"] == 2


def test_a_restart_that_is_stopped_leaves_no_result_of_the_run_before(out: Path) -> None:
    assert commands.run(["train", "--out", str(out), "--resume", "--steps", "8"]) == 0

    def kill(line: dict[str, Any]) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        train(TASK, CONFIG, SETTINGS, out, restart=True, watch=kill)
    assert not {"result.json", "curve.svg"} & {path.name for path in out.iterdir()}


def test_a_run_killed_before_its_first_checkpoint_begins(tmp_path: Path) -> None:
    """What it leaves, a log of step 0 and a model that has seen nothing, is no result."""

    def kill(line: dict[str, Any]) -> None:
        if "step" in line:
            raise KeyError

    with pytest.raises(KeyError):
        train(TASK, CONFIG, SETTINGS, tmp_path, watch=kill)
    assert (tmp_path / "model").exists()
    assert run(tmp_path, resume=True).step == 6


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    """The second is told who holds it; a kill lets go."""
    code = "import sys, time\nfrom fast_attention import files\nwith files.locked(sys.argv[1]):\n"
    code += "    print('held', flush=True)\n    time.sleep(100)"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(files.InUse, match=rf"{re.escape(str(tmp_path))} is in use by process {other.pid} on "):
            run(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [files.LOCK]
        for command in (["study", "copy"], ["bench", "--mechanisms", "FNet"], ["convert", ".", "--mechanism", "FNet"]):
            assert commands.run([*command, "--out", str(tmp_path)]) == 2
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    run(tmp_path)
    assert not (tmp_path / files.LOCK).exists()


def test_a_lock_that_is_let_go_of_is_held_by_one_of_many(tmp_path: Path) -> None:
    """Processes that enter and leave as fast as they can are never inside together."""
    code = """
import os, sys, time
from pathlib import Path
from fast_attention import files
folder, done, end = Path(sys.argv[1]), 0, time.monotonic() + 30
while done < 25 and time.monotonic() < end:
    try:
        with files.locked(folder):
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            os.unlink(folder / "inside")
            done += 1
    except files.InUse:
        pass
print(done)
"""
    many = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [each.communicate(timeout=100)[0] for each in many] == ["25\n"] * 2


HURT = {
    "not JSON": b'{"step": 2, "loss": ',
    "not UTF-8": b'{"step": 2, "lo\xffss": 1.0, "seconds": 1}',
    "no object": b"[1, 2]",
    "no step": b'{"loss": 1.0, "seconds": 1.0}',
    "words for a number": b'{"step": 2, "loss": "low", "seconds": 1.0}',
    "nested": b"[" * 100_000,
    "another checksum": b'{"step": 2, "loss": 1.5, "seconds": 1.0, "check": "00000000"}',
}


@pytest.mark.parametrize("case", HURT)
def test_a_damaged_line_of_the_log_is_set_aside(out: Path, case: str) -> None:
    log = out / journal.LOG
    before = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*before[:2], HURT[case] + b"\n", *before[2:]]))
    assert len(journal.read(out)) == len(before)
    said: list[str] = []
    run(out, said, resume=True, steps=8)
    assert any(str(log) in words and "set aside" in words for words in said)
    assert (out / journal.DAMAGED).read_bytes() == HURT[case] + b"\n"
    assert log.read_bytes().startswith(b"".join(before))
    run(out, resume=True, steps=10)
    assert (out / journal.DAMAGED).read_bytes() == HURT[case] + b"\n"


def test_resume_alone_reads_the_runs_settings(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(["train", "--out", str(out), "--resume", "--steps", "8"]) == 0
    assert "8 steps" in capsys.readouterr().out
    found = json.loads((out / "result.json").read_text())
    assert found["task"] == repr(TASK)
    assert found["settings"]["batch_size"] == 2
    assert found["model"]["width"] == 8
    assert commands.run(["train", "copy", "--out", str(out), "--resume"]) == 2
    assert f"task {TASK!r}, not Copy()" in capsys.readouterr().err
    assert commands.run(["train", "--out", str(out), "--resume", "--width", "16", "--seed", "4"]) == 2
    err = capsys.readouterr().err
    assert "seed 0, not 4" in err
    assert "width 8, not 16" in err
    assert len(err.splitlines()) == 1


def test_no_task_and_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(["train", "--out", str(tmp_path / "a")]) == 2
    assert "name a task" in capsys.readouterr().err
    assert commands.run(["train", "--out", str(tmp_path / "a"), "--resume"]) == 2
    assert "holds no run to resume: name the task" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "command",
    [["study", "Copy(symbols=3, words=2)"], ["bench", "--mechanisms", "FNet"], ["convert", ".", "--mechanism", "FNet"]],
)
def test_records_are_not_overwritten_unasked(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor by later versions' neighbours: a record that cannot be read is refused and stays."""
    name = RECORDS[command[0]]
    (tmp_path / name).write_text("{}")
    for more, said in (([], "--restart"), (["--resume"], name), (["--resume", "--restart"], "one of them")):
        assert commands.run([*command, "--out", str(tmp_path), *more]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert len(err.splitlines()) == 1
        assert (tmp_path / name).read_text() == "{}"


@pytest.mark.parametrize("name", ["study", "bench", "convert"])
def test_a_later_versions_record_is_refused_with_both_versions(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = json.dumps({"schema": f"fast-attention {name} 3", "meta": {"fast_attention": "7.5.0"}})
    record = tmp_path / RECORDS[name]
    record.write_text(held)
    words = {
        "study": ["Copy(symbols=3, words=2)"],
        "bench": ["--mechanisms=FNet"],
        "convert": [".", "--mechanism=FNet"],
    }
    assert commands.run([name, *words[name], "--out", str(tmp_path), "--resume"]) == 2
    err = capsys.readouterr().err
    assert "7.5.0" in err
    assert __version__ in err
    assert record.read_text() == held


def test_a_study_begins_anew_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["study", "Copy(symbols=3, words=2)", *WORDS, "--seeds", "1", "--out", str(tmp_path)]
    assert commands.run([*words, "--steps", "2"]) == 0
    assert commands.run([*words, "--steps", "3"]) == 2
    assert commands.run([*words, "--steps", "3", "--restart"]) == 0
    assert {result["steps"] for result in json.loads((tmp_path / "study.json").read_text())["results"]} == {3}


def test_damaged_and_newer_are_different_errors() -> None:
    assert not issubclass(files.Newer, Damaged)
    assert not issubclass(Damaged, files.Newer)


def test_a_changed_digit_of_the_log_is_noticed_and_older_logs_are_read(tmp_path: Path) -> None:
    """Every digit of a line that stays valid JSON; lines without a checksum are those of an older version."""
    line = {"step": 12, "loss": 1.25, "rate": 1e-05, "seconds": 3.0}
    written = journal.Journal(tmp_path, 20, -1)
    written.write(line)
    written.close()
    log = tmp_path / journal.LOG
    text = log.read_text()
    assert journal.read(tmp_path) == [line]
    for at, letter in enumerate(text):
        if letter.isdigit():
            log.write_text(text[:at] + str((int(letter) + 1) % 10) + text[at + 1 :])
            assert journal.read(tmp_path) == [], text[at - 9 : at + 9]
    log.write_text(json.dumps(line) + "\n")
    assert journal.read(tmp_path) == [line]
