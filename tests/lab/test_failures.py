"""What goes wrong on the command line: one line, its exit code, nothing half written, what stood before stays."""

from __future__ import annotations

import errno
import gzip
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fast_attention import cli, conformance, files
from fast_attention.data import FastaError, reading
from fast_attention.data.fasta import parse_fasta
from fast_attention.lab import command_line, commands, corpus, refusals
from fast_attention.lab.inputs import InputError
from fast_attention.tasks import ByteLM
from fast_attention.tasks.bytes import sides
from fast_attention.training.settings import TrainingSettings

COPY = "Copy(symbols=3, words=2)"
SMALL = ["--width", "8", "--heads", "2", "--layers", "1", "--batch-size", "2", "--steps", "2", "--evaluate-every", "2"]
COMPARE = ["compare", "--model", "gaussian", "--mechanisms", "FNet", "--lengths", "8", "--no-backward", "--budget", "5"]
BENCH = ["bench", "--mechanisms", "FNet", "--lengths", "8", "--memory-lengths", "0", "--no-backward", "--budget", "5"]
BENCH += ["--no-causal", "--heads", "1", "--head-dim", "4"]
WRITING = {
    "train": ["train", COPY, *SMALL],
    "study": ["study", COPY, *SMALL, "--seeds", "1"],
    "compare": COMPARE,
    "bench": BENCH,
}


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("fast-attention: ")
    return lines[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("name", WRITING)
def test_a_full_disk_is_one_line_and_nothing_is_half_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From any write on: every file that stands afterwards is one that was whole."""

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "sync", full)
    monkeypatch.setattr(commands.measure, "useful_threads", lambda: 1)
    assert command_line.run([*WRITING[name], "--out", str(tmp_path)]) == 1
    assert "No space left on device" in said(capsys)
    assert not [name for name in contents(tmp_path) if "part" in name or "tmp" in name]
    assert {Path(name).suffix for name in contents(tmp_path)} <= {""}, "no file has got its name"


def test_a_full_disk_at_the_last_write_keeps_what_stood_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands.measure, "useful_threads", lambda: 1)
    assert command_line.run([*COMPARE, "--out", str(tmp_path)]) == 0
    before, sync = contents(tmp_path), files.sync
    capsys.readouterr()

    def full(path: Path) -> None:
        if "report.html" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    monkeypatch.setattr(files, "sync", full)
    assert command_line.run([*COMPARE, "--out", str(tmp_path)]) == 1
    assert f"{tmp_path / 'report.html'}: No space left on device" in said(capsys)
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    assert after["report.html"] == before["report.html"]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError(), 1, "not enough memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory"),
            1,
            "memo",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), 1, "20.00 GiB"),
        (RuntimeError("can't start new thread"), 1, "thread"),
        (OSError(errno.EIO, "Input/output error", "/x"), 1, "/x: Input/output error"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), 2, "/x: No such file"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_every_failure_has_its_code(
    error: BaseException,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(commands, "list_command", lambda **options: broken())
    assert command_line.run(["list"]) == code
    assert not words or words in said(capsys)


def test_a_fault_of_the_program_is_not_hidden() -> None:
    assert refusals.refusal(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert refusals.refusal(TypeError("unexpected")) is None


@pytest.mark.skipif(os.name != "posix", reason="limits are POSIX's")
def test_no_memory_is_one_line(tmp_path: Path) -> None:
    """Under ``ulimit -v``, once torch is there: what is asked for does not fit."""
    code = """
import resource, sys
from fast_attention.cli import main
import fast_attention.lab.commands
kilobytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() // 1024
resource.setrlimit(resource.RLIMIT_AS, ((kilobytes + 300_000) * 1024, resource.RLIM_INFINITY))
main(["train", "Copy(symbols=3, words=2)", "--width", "65536", "--steps", "1", "--out", sys.argv[1]])
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("fast-attention: not enough memory")
    assert len(done.stderr.strip().splitlines()) == 1


BAD = {
    "device": (["train", COPY, "--device", "foo"], "device='foo'"),
    "device without numbers": (["train", COPY, "--device", "meta"], "device='meta'"),
    "device of a study": (["study", COPY, "--device", "foo"], "device"),
    "threads": (["compare", "--threads", str(10**12)], f"--threads {10**12}"),
    "more threads": (["bench", "--threads", str(10**30)], f"--threads {10**30}"),
    "seed": (["compare", "--seed", str(10**30)], "--seed"),
    "seed to train": (["train", COPY, "--seed", str(1 << 32)], "seed"),
    "nested": (["compare", "--mechanisms", "(" * 100_000], "no mechanism is written in so many"),
    "nested names": (["list", "Hybrid(" * 100_000], "no mechanism is written in so many"),
    "nested task": (["train", "Copy(" * 100_000], "task"),
    "null": (["compare", "--mechanisms", "a\0b"], "is not a mechanism"),
    "exit": (["check", "builtins:exit"], "is no factory"),
    "abort": (["check", "os:abort"], "is no factory"),
    "no attention": (["check", "builtins:int"], "no module and no function"),
    "no arguments": (["check", "torch.nn:Linear"], "in_features"),
    "relative": (["check", ".x:y"], "relative"),
    "no module": (["check", ":x"], "Empty module name"),
    "endless text": (["compare", "--text", "/dev/zero", "--max-bytes", "100000"], "100,000 bytes"),
    "endless fasta": (["compare", "--max-bytes=100000", "--fasta", "/dev/zero"], "100,000 bytes"),
    "endless config": (["train", COPY, "--config", "/dev/zero", "--max-bytes", "100000"], "100,000 bytes"),
    "endless bytes": (["--max-bytes", "100000", "train", "ByteLM(path='/dev/zero')"], "100,000 bytes"),
    "no limit": (["compare", "--max-bytes", "0"], "--max-bytes"),
    "module to import": (
        ["list", "--import", "no_such_module"],
        "no_such_module: ModuleNotFoundError: No module named",
    ),
    "limit without a number": (["compare", "--max-bytes"], "--max-bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_had_is_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, words = BAD[case]
    assert command_line.run(arguments) == 2
    line = said(capsys)
    assert words in line
    assert len(line) < 3000
    assert reading.LIMIT.get() == 1 << 30, "a limit is the command's own"


def test_gzip_bombs_end_at_the_limit(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(bytes(3_000_000)))
    assert bomb.stat().st_size < 10_000
    token = reading.LIMIT.set(1_000_000)
    try:
        for option in ("text", "fasta"):
            with pytest.raises(InputError, match="more than 1,000,000 bytes"):
                corpus.read(**{option: str(bomb)})
    finally:
        reading.LIMIT.reset(token)
    token = reading.LIMIT.set(1000)
    try:
        with pytest.raises(reading.TooLong):
            reading.raw(__file__)
        with pytest.raises(FastaError, match="more than 1,000 bytes"):
            list(parse_fasta(b">a\n" + b"MKV\n" * 1000))
        assert len(list(parse_fasta(b">a\n" + b"MKV\n" * 200))) == 1
    finally:
        reading.LIMIT.reset(token)


@pytest.mark.parametrize("option", ["--text", "--fasta", "--config", "task"])
def test_a_named_pipe_is_not_waited_for(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "link").symlink_to(pipe)
    for name in (pipe, link):
        words = {"--config": ["train", COPY, option, str(name)], "task": ["train", f"ByteLM(path={str(name)!r})"]}
        assert command_line.run([*words.get(option, ["compare", option, str(name)]), "--out", str(tmp_path)]) == 2
        assert f"{name}: a named pipe" in said(capsys)


def test_a_folder_is_limited_as_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(bytes(300))
    task = ByteLM(path=str(tmp_path), context=8, share=0.3)
    before = reading.LIMIT.set(1500)
    try:
        assert sum(map(len, sides(task))) == 1500 + 3  # line ends between the files of each side
        sides.cache_clear()
        reading.LIMIT.set(1499)
        with pytest.raises(ValueError, match=r"more than 1,499 bytes, the limit for a file or folder"):
            sides(task)
    finally:
        reading.LIMIT.reset(before)


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    """As the shell's ``<(...)`` gives: what cannot be wound back."""
    reader, writer = os.pipe()
    os.write(writer, gzip.compress(b">one\nMKV\n"))
    os.close(writer)
    from fast_attention.data import read_fasta

    assert [protein.sequence for protein in read_fasta(f"/dev/fd/{reader}")] == ["MKV"]
    os.close(reader)


def test_a_strangers_exit_does_not_end_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def none():\n    raise SystemExit(3)\n"
    text += "def some():\n    def attend(q, k, v):\n        raise SystemExit(3)\n    return attend\n"
    (tmp_path / "leaving.py").write_text(text)
    (tmp_path / "gone.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for subject in ("leaving:none", "gone:anything"):
        with pytest.raises(ValueError, match="SystemExit: 3"):
            conformance.resolve(subject)
    report = conformance.check(conformance.resolve("leaving:some"), laws=conformance.ESSENTIAL[-3:])
    assert any("raised SystemExit" in finding.detail for finding in report.broken)


def test_seeds_that_no_generator_takes() -> None:
    assert TrainingSettings(seed=(1 << 32) - 1).seed == (1 << 32) - 1
    for name in ("seed", "order"):
        with pytest.raises(ValueError, match="a seed is below"):
            TrainingSettings(**{name: 1 << 32})


RUN = [sys.executable, "-m", "fast_attention.cli"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_an_output_that_takes_nothing_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*RUN, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("No space left on device\n")
    assert done.stderr.count("\n") == 1


def test_an_output_that_nobody_reads_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*RUN, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_encoding_that_lacks_a_character_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    monkeypatch.setattr(command_line, "run", lambda _: print("0.5 \xb1 0.1") or 0)
    with pytest.raises(SystemExit) as stop:
        cli.main(["list"])
    assert (stop.value.code, output.getvalue()) == (0, b"0.5 ? 0.1\n")


@pytest.mark.skipif(os.name != "posix", reason="a shell's")
def test_closed_outputs_are_no_traceback() -> None:
    words = f"{sys.executable} -m fast_attention.cli --version <&- >&-"
    done = subprocess.run(["sh", "-c", words], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("wait", [0.15, 0.6, 1.2])
def test_ctrl_c_while_libraries_are_imported(wait: float) -> None:
    heed = "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    code = "import sys\nfrom fast_attention.cli import main\nprint('here', flush=True)\nmain(['list'])"
    process = subprocess.Popen(
        [sys.executable, "-c", heed, sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
