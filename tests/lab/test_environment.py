"""What a process may use of a machine and what others take of it, read out of made-up system folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fast_attention.lab import command_line, environment, measure
from fast_attention.lab.environment import Others, usable_cores

LIMITS = {
    "no groups": ("", {}, 8),
    "version 2": ("0::/a/b", {"a/b/cpu.max": "300000 100000"}, 3),
    "version 2, of a group around": ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2),
    "version 2, seen from a container": ("0::/docker/1", {"cpu.max": "400000 100000"}, 4),
    "version 2, no limit": ("0::/", {"cpu.max": "max 100000"}, 8),
    "version 2, more than there are": ("0::/", {"cpu.max": "6400000 100000"}, 8),
    "version 2, a part of a core": ("0::/", {"cpu.max": "50000 100000"}, 1),
    "version 1": (
        "3:cpuset:/z\n1:cpu,cpuacct:/a",
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "200000", "cpu,cpuacct/a/cpu.cfs_period_us": "50000"}, 4,
    ),
    "version 1, under its short name": (
        "1:cpuacct,cpu:/", {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"}, 3,
    ),
    "version 1, no limit": ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    "both versions": (
        "1:cpu:/\n0::/",
        {"cpu/cpu.cfs_quota_us": "700000", "cpu/cpu.cfs_period_us": "100000", "unified/cpu.max": "500000 100000"}, 5,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(environment, "_affinity", lambda: {*range(8)})
    own = torch.get_num_threads()
    yield
    torch.set_num_threads(own)


@pytest.mark.parametrize("case", LIMITS)
def test_usable_cores_are_those_of_the_affinity_and_the_quota(case: str, tmp_path: Path) -> None:
    groups, files, expected = LIMITS[case]
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n", encoding="utf-8")
    assert usable_cores(tmp_path) == expected
    assert usable_cores(tmp_path / "nowhere") == 8


def stat(path: Path, busy: int) -> Path:
    """Ten cores, each busy for so many ticks and half as many in the system; idle, waiting and guests are no more."""
    rows = [f"cpu{name} {busy} 0 {busy // 2} {9 * busy} {7 * busy} 0 0 0 {busy} 0" for name in ("", *range(10))]
    path.write_text("\n".join(rows) + "\nintr 1 2\n", encoding="ascii")
    return path


def test_what_others_took_is_what_this_process_did_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, now, own = os.sysconf("SC_CLK_TCK"), [100.0], [4.0]
    monkeypatch.setattr(environment.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(environment.os, "times", lambda: (own[0], 1.0, 0.0, 0.0, 500.0))
    others = Others(stat(tmp_path / "stat", 4 * ticks))
    assert others.cores() is None, "no time has passed"
    stat(tmp_path / "stat", 6 * ticks)  # 3 seconds each of the eight that may be used
    now[0], own[0] = 110.0, 4.0 + 14.0
    assert others.cores() == pytest.approx((24 - 14) / 10)
    (words,) = others.words()
    assert "other processes took 1.0 of 8 cores" in words
    own[0] = 4.0 + 17.0
    assert others.words() == [], "less than a tenth"
    assert Others(tmp_path / "nowhere").words() == []


def test_torch_has_as_many_threads_as_may_be_used_and_its_own_number_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 2)
    monkeypatch.setattr(environment.Others, "words", lambda self: ["busy"])
    monkeypatch.setattr(measure.clock, "in_turns", lambda runs, *_: {count: [1.0] for count in runs})
    torch.set_num_threads(3)
    with measure.by_threads(None) as conditions:
        assert torch.get_num_threads() == 2
        assert conditions() == ["torch had 3 threads, and this process may use 2 cores: times are of 2.", "busy"]
    assert torch.get_num_threads() == 3

    def stopped() -> None:
        with measure.by_threads(4) as conditions:
            assert torch.get_num_threads() == 4
            assert conditions()[0].startswith("--threads 4, and this process may use 2 cores: threads wait")
            raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        stopped()
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    with measure.by_threads(None) as conditions:
        assert conditions() == ["busy"]


@pytest.mark.parametrize(
    "command", [["advise", "2x8", "--length", "8"], ["compare", "--model", "2x8", "--lengths", "8"]]
)
def test_commands_say_what_disturbed_their_times(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the terminal, on the page and in the record."""
    monkeypatch.setattr(environment, "_affinity", lambda: {0})
    monkeypatch.setattr(environment.Others, "cores", lambda self: 0.7)
    own = torch.get_num_threads()
    arguments = ["--mechanisms", "Local(window=2)", "--threads", "2", "--out", str(tmp_path)]
    assert command_line.run([*command, *arguments]) == 0
    assert torch.get_num_threads() == own
    threads, busy = (
        "--threads 2, and this process may use 1 core: threads wait",
        "The machine was busy: other processes took 0.7 of 1 core meanwhile",
    )
    shown = " ".join(capsys.readouterr().out.split())
    files = [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()]
    assert len(files) == 2
    for text in (shown, *files):
        assert threads in text
        assert busy in text
