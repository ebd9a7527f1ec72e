"""``fast-attention bench``: refuses speeds for what is wrong, can be stopped and resumed; its arithmetic is right."""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import keep
from benchmarks.peers import PEERS
from torch import Tensor, nn

from fast_attention import catalogue, clock
from fast_attention.cli import main
from fast_attention.lab import refusals
from fast_attention.lab.bench import ceilings, checks, competitors, decoding, figures, memory, page, processes, run
from fast_attention.lab.bench.competitors import Competitor, Peer, Sizes, baseline_name
from fast_attention.lab.bench.record import Benchmark, PeakMemory, Row, Step
from fast_attention.lab.measure import Passes, Setting
from fast_attention.lab.numbers import exactly
from fast_attention.lab.records import EXACT, Cell
from fast_attention.lab.timing import FEWEST_ROUNDS, FamilyGroup
from fast_attention.mechanisms.aft.aft_simple import AFTSimple
from tests.lab.reading_pages import assert_one_file, pictures, values

SMALL = ["--heads", "2", "--head-dim", "8", "--threads", "1", "--budget", "20"]
TINY = [*SMALL, "--lengths", "16", "32", "--memory-lengths", "0"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "PATIENCE", 0.0)
    monkeypatch.setattr("fast_attention.lab.bench.ceilings.ceilings.__defaults__", (0.0,))


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mechanism of a user's class, whose module only this process's path leads to."""
    (tmp_path / "bench_of_a_user.py").write_text(
        "from fast_attention import LinearAttention\n\n\nclass Mine(LinearAttention):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return import_module("bench_of_a_user").Mine()


def bench(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--out", str(folder), *arguments])
    out, err = capsys.readouterr()
    assert isinstance(stopped.value.code, int), err
    return stopped.value.code, out, err


def read(folder: Path) -> Benchmark:
    return Benchmark.from_json((folder / "bench.json").read_text())


def test_a_small_benchmark_leaves_a_table_a_page_and_a_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chosen = ["--mechanisms", "LinearAttention", "FNet", "Local(window=8)"]
    code, out, err = bench(capsys, tmp_path, *TINY, *chosen)
    assert code == 0, err
    assert "LinearAttention(), causal" in out
    for when in ("before", "before 32 tokens", "after"):
        assert f"Machine {when}: matrix product" in out
    record = read(tmp_path)
    rows = ["LinearAttention()", "LinearAttention(), causal", "FNet()", "Local(window=8)", "Local(window=8), causal"]
    assert [row.name for row in record.rows] == rows
    assert {row.check for row in record.rows} == {"right"}
    lines = [EXACT, f"{EXACT}, causal", f"{EXACT}, projected"]
    for name in (*rows, *lines):
        for length in (16, 32):
            cell = record.cell(name, length)
            assert cell is not None
            assert cell.status == "measured"
            assert cell.rounds >= 1
            assert cell.forward_ms
            assert cell.forward_best_ms
            assert cell.training_ms
            assert cell.operations
            assert cell.training_operations
            assert cell.training_operations > cell.operations
    assert record.row("FNet()").reference == f"{EXACT}, projected"  # type: ignore[union-attr]
    assert record.meta["status"] == "complete"
    assert set(record.ceilings[0]) == {
        "when", "load_average", "gemm_gflops", "bmm_gflops", "exp_gelem_s", "copy_gb_s", "fresh_gb_s", "empty_us"
    }  # fmt: skip
    assert set(record.summary["crossover"]) == set(rows)
    html = (tmp_path / "bench.html").read_text()
    assert_one_file(html)
    forward, training, ceilings = pictures(html)
    for cell in (cell for cell in record.cells if cell.status == "measured" and cell.mechanism in rows):
        for ratio, told in ((cell.forward_ratio, forward), (cell.training_ratio, training)):
            speed = exactly(1 / (ratio or math.inf))
            assert f"{cell.mechanism}: {speed} times as fast as exact attention at {cell.length:,} tokens" in told
            assert any(value == 1 / (ratio or math.inf) for value in values(html))
    assert all(text.endswith(" %") for text in ceilings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.html", "bench.json"]


def test_the_record_is_strict_json_and_comes_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = bench(capsys, tmp_path, *TINY, "--mechanisms", "AFTSimple", "--causal", "--json", "--no-backward")
    assert code == 0
    held = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {"sha256", "schema", "meta", "ceilings", "rows", "cells", "weights", "steps", "done", "summary"} == set(held)
    record = read(tmp_path)
    assert json.loads(record.to_json()) == held
    assert [row.name for row in record.rows] == ["AFTSimple(), causal"]
    assert all(cell.training_ms is None for cell in record.cells)
    record.ceilings[0]["gemm_gflops"] = math.inf
    assert json.loads(record.to_json())["ceilings"][0]["gemm_gflops"] is None


def test_what_is_wrong_gets_no_speed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = AFTSimple.attend

    def leaky(self: AFTSimple, q: Tensor, k: Tensor, v: Tensor, w: Any, **options: Any) -> Tensor:
        return right(self, q, k, v, w, is_causal=False, key_mask=options["key_mask"])

    monkeypatch.setattr(AFTSimple, "attend", leaky)
    code, out, _ = bench(capsys, tmp_path, *TINY, "--mechanisms", "AFTSimple", "LinearAttention")
    assert code == 1
    record = read(tmp_path)
    for name in ("AFTSimple()", "AFTSimple(), causal"):
        row, cell = record.row(name), record.cell(name, 16)
        assert row is not None
        assert row.check == "wrong"
        assert any("future" in fault for fault in row.faults)
        assert cell is not None
        assert (cell.status, cell.forward_ms, cell.operations) == ("refused", None, None)
        assert cell.note.startswith("no speed: ")
    assert record.cell("LinearAttention()", 16).forward_ms  # type: ignore[union-attr]
    assert "AFTSimple(), causal WRONG" in out
    assert "WRONG, so no speed" in out
    assert "no speed" in (tmp_path / "bench.html").read_text()


FAULTS = {
    "one part in a thousand": lambda out: out * 1.001,
    "not a number": lambda out: out * float("nan"),
    "gradient": lambda out: out.detach() + 0.9 * (out - out.detach()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_fast_paths_that_differ_from_the_plain_one(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded fault is in the eager path alone: under torch.func the mechanism is right."""
    right = AFTSimple.attend

    def eager_only(self: AFTSimple, *tensors: Any, **options: Any) -> Tensor:
        out = right(self, *tensors, **options)
        return out if torch._C._are_functorch_transforms_active() else FAULTS[fault](out)

    assert not checks.differences(AFTSimple(), False, CPU)
    monkeypatch.setattr(AFTSimple, "attend", eager_only)
    assert checks.differences(AFTSimple(), False, CPU)


def stopping(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    count, right = [0], FamilyGroup.run

    def stop(self: FamilyGroup) -> None:
        count[0] += 1
        if count[0] > after:
            raise KeyboardInterrupt
        right(self)

    monkeypatch.setattr(FamilyGroup, "run", stop)


def test_a_stopped_benchmark_keeps_what_it_has_and_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [*TINY, "--mechanisms", "AFTSimple", "LinearAttention", "--no-causal"]
    with monkeypatch.context() as patch:
        stopping(patch, after=1)
        code, out, _ = bench(capsys, tmp_path, *chosen)
    assert code == 130
    assert "AFTSimple()" in out
    partial = read(tmp_path)
    assert partial.meta["status"] == "interrupted"
    assert partial.done == ["time 16 AFTSimple()"]
    known = partial.cell("AFTSimple()", 16)
    assert known is not None
    assert known.status == "measured"
    assert partial.cell("LinearAttention()", 32).status == "not reached"  # type: ignore[union-attr]
    assert "was interrupted" in (tmp_path / "bench.html").read_text()
    code, _, err = bench(capsys, tmp_path, *chosen, "--resume")
    assert code == 0, err
    whole = read(tmp_path)
    assert whole.meta["status"] == "complete"
    assert whole.cell("AFTSimple()", 16) == known, "not measured again"
    assert all(cell.status == "measured" for cell in whole.cells)
    lines = [cell for cell in whole.cells if cell.mechanism == EXACT]
    assert {(cell.length, cell.group) for cell in lines} == {
        (n, name) for n in (16, 32) for name in ("AFTSimple()", "LinearAttention()")
    }, "a baseline in every group"
    assert len(whole.meta["resumed"]) == 1
    assert len(whole.done) == len(set(whole.done)) == 4
    code, _, err = bench(capsys, tmp_path, *chosen, "--head-dim", "4", "--resume")
    assert code == 2
    assert "head_dim was 8, is 4" in err
    code, _, err = bench(capsys, tmp_path / "new", *chosen, "--resume")
    assert code == 2
    assert "no benchmark to resume" in err


def test_an_interrupted_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rounds stay; the one that was cut short leaves no ratio of its own."""
    calls, real = [0], clock.seconds
    setting = Setting(2, 8, CPU, torch.float32, False, False)
    group = run.groups(competitors.chosen([catalogue.parse("AFTSimple")], "bidirectional"), 16)["AFTSimple()"]
    record = Benchmark({})
    timed = FamilyGroup(setting, group, record, 16, 30.0, lambda what: None, group="AFTSimple()")
    timed.rests = lambda name, number: False  # type: ignore[method-assign]

    def cut(*rest: Any) -> float:
        calls[0] += 1
        if calls[0] > 4 + 5:  # two calls to prepare each of the two, then two rounds and a half
            raise KeyboardInterrupt
        return real(*rest)

    monkeypatch.setattr(clock, "seconds", cut)
    with pytest.raises(KeyboardInterrupt):
        timed.run()
    assert [cell.rounds for cell in record.cells] == [3, 2] or [cell.rounds for cell in record.cells] == [2, 2]


class Fake(nn.Module):
    """Exact attention, with whatever fault is asked for."""

    def __init__(self, is_causal: bool, leaks: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.is_causal, self.factor = is_causal and not leaks, factor
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.factor * self.weight * out


def absent(sizes: Sizes) -> Any:
    raise ImportError("no module named 'absent'")


def exact(made: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v)


FAKES = [
    Peer("good", "good", "AFTSimple()", lambda sizes: Fake(False), truth=exact),
    Peer("off", "off", "AFTSimple()", lambda sizes: Fake(False, factor=1.01), truth=exact),
    Peer("leaky, causal", "leaky", "AFTSimple()", lambda sizes: Fake(True, leaks=True), is_causal=True),
    Peer("absent", "absent", "AFTSimple()", absent),
    Peer("whole", "whole", "AFTSimple()", lambda sizes: nn.Linear(sizes.width, sizes.width), "module"),
    Peer("of another", "other", "LinearAttention()", absent),
]


def test_peers_run_beside_ours_with_their_faults_marked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(competitors, "load_peers", lambda: FAKES)
    code, out, err = bench(capsys, tmp_path, *TINY, "--mechanisms", "AFTSimple", "--vs-peers")
    assert code == 0, err
    record = read(tmp_path)
    found = {row.name: row.check for row in record.rows}
    assert found == {
        "AFTSimple()": "right", "AFTSimple(), projected": "right", "AFTSimple(), causal": "right",
        "good": "right", "off": "faulty", "leaky, causal": "faulty", "absent": "missing", "whole": "right",
    }  # fmt: skip
    assert {row.name for row in record.rows if not row.same} == {"off"}
    assert "off by 1 %" in record.row("off").faults[0]  # type: ignore[union-attr]
    assert "future" in record.row("leaky, causal").faults[0]  # type: ignore[union-attr]
    for name in ("good", "off", "leaky, causal", "whole"):
        assert record.cell(name, 32).forward_ms  # type: ignore[union-attr]
    assert record.cell("absent", 32).status == "refused"  # type: ignore[union-attr]
    assert record.row("whole").reference == baseline_name("module", False)  # type: ignore[union-attr]
    assert len({cell.rounds for cell in record.cells if cell.length == 32 and cell.rounds}) == 1, "the same rounds"
    assert "off *" in out
    assert "absent not installed" in out
    assert "times the speed of the best peer" in out
    kinds = {(m.kind, m.is_causal, m.peer) for m in figures.matches(record, 32)}
    assert {kind[:2] for kind in kinds} == {("core", False), ("core", True), ("module", False)}
    assert "Beside the best peer" in (tmp_path / "bench.html").read_text()


def test_without_a_checkout_peers_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(competitors, "checkout", lambda: None)
    code, _, err = bench(capsys, tmp_path, *TINY, "--vs-peers")
    assert code == 2
    assert "--vs-peers: the adapters are in a checkout's benchmarks folder" in err


def test_over_processes_it_says_what_each_mechanism_sends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mine: Any
) -> None:
    code, out, _ = bench(
        capsys, tmp_path, "--processes", "2", "--causal", "--lengths", "64", "--heads", "2", "--head-dim", "8",
        "--json", "--mechanisms", "LinearAttention", "Softmax", "GMLP", "Linformer", repr(mine),
    )  # fmt: skip
    rows = {row["mechanism"]: row for row in json.loads(out)["rows"]}
    assert code == 0
    assert set(rows) == {"LinearAttention()", "Softmax()", "GMLP()", "Mine()"}  # Linformer is not causal
    assert all(row["declared"] == row["counted"] > 0 and row["seconds"] > 0 for row in rows.values())
    assert [row["strategy"] for row in rows.values()] == ["states", "heads", "channels", "states"]


def test_processes_that_are_spread_over_end_with_a_command_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, daemon: bool = False, **__: object) -> None:
        raise KeyboardInterrupt(f"daemon={daemon}")  # Python ends those at its own end, and waits for others

    monkeypatch.setattr(processes.mp, "spawn", stopped)
    with pytest.raises(KeyboardInterrupt, match="daemon=True"):
        processes.measure(2, [], [], Setting(1, 4, torch.device("cpu"), torch.float32, False, False))


def test_every_adapter_names_one_of_the_line_up() -> None:
    families = {repr(mechanism) for mechanism in competitors.default_mechanisms()}
    assert len(families) == len(catalogue.names()) + len(competitors.VARIANTS) == 47
    assert families >= {repr(catalogue.default(name)) for name in catalogue.names()}
    names = [peer.name for peer in PEERS]
    assert len(names) == len(set(names)) >= 25
    for peer in PEERS:
        assert repr(catalogue.parse(peer.against)) in families, peer.name
        assert peer.kind in ("core", "module", "mixer")
        assert peer.is_causal == peer.name.endswith(", causal")
        assert peer.is_causal <= catalogue.parse(peer.against).traits.causal, peer.name
    found = competitors.chosen(competitors.default_mechanisms(), "both", PEERS)
    assert len({competitor.name for competitor in found}) == len(found)
    assert {peer.name for peer in PEERS} <= {competitor.name for competitor in found}, "no peer is left out"


def test_a_peer_that_is_not_there_is_missing_not_fatal() -> None:
    said = "absent is not installed (ImportError: no module named 'absent')"
    assert checks.peer(FAKES[3]) == ("missing", [said])
    assert "/" not in refusals.failure(ImportError("cannot import name 'a' from 'b' (/home/me/lib/b.py)")).split("(")[1]


def test_crossovers_are_joined_on_logarithmic_scales() -> None:
    assert figures.crossover({64: 0.5, 256: 2.0}) == (pytest.approx(128.0), False)
    assert figures.crossover({64: 0.25, 128: 0.5, 1024: 4.0}) == (pytest.approx(128 * 8 ** (1 / 3)), False)
    assert figures.crossover({64: 1.5, 128: 3.0}) == (64.0, True)
    assert figures.crossover({64: 1.5, 128: 0.5, 256: 2.0}) == (pytest.approx(128 * 2**0.5), False), "it lost again"
    assert figures.crossover({64: 2.0, 128: 0.5}) is None
    assert figures.crossover({}) is None


def synthetic() -> Benchmark:
    """Two families with peers: ours 4 and 0.5 times as fast as exact attention, the peers 1, 2 and 1."""
    rows = [
        Row("A()", "A()", "core", False, "fast-attention", EXACT),
        Row("A(), projected", "A()", "module", False, "fast-attention", baseline_name("module", False)),
        Row("a", "A()", "core", False, "x", EXACT),
        Row("a2", "A()", "core", False, "y", EXACT),
        Row("am", "A()", "module", False, "x", baseline_name("module", False)),
        Row("B()", "B()", "core", False, "fast-attention", EXACT),
        Row("b", "B()", "core", False, "x", EXACT),
        Row("b, causal", "B()", "core", True, "x", baseline_name("core", True)),
    ]
    speeds = {"A()": 4.0, "A(), projected": 3.0, "a": 1.0, "a2": 2.0, "am": 1.0, "B()": 0.5, "b": 1.0, "b, causal": 9.0}
    cells = [
        Cell(name, 64, "measured", forward_ms=1.0, forward_best_ms=1.0, forward_ratio=1 / speed, operations=10**8)
        for name, speed in speeds.items()
    ]
    record = Benchmark({"lengths": [64]}, cells, rows=rows)
    record.ceilings = [{"when": "before", "gemm_gflops": 100.0}, {"when": "after", "gemm_gflops": 200.0}]
    return record


def test_peers_are_compared_at_the_greatest_length_that_nearly_all_reached() -> None:
    record = synthetic()
    for length, names in ((128, ("A()", "A(), projected", "a", "am", "B()", "b")), (256, ("A()", "a"))):
        for name in names:
            record.cells.append(Cell(name, length, "measured", forward_ms=1.0, forward_best_ms=1.0, forward_ratio=1.0))
    assert figures.common_length(record) == 128


def test_like_is_compared_with_like() -> None:
    record = synthetic()
    found = figures.matches(record, 64)
    assert [(m.family, m.kind, m.peer, m.factor) for m in found] == [
        ("A()", "core", "a2", 2.0), ("A()", "module", "am", 3.0), ("B()", "core", "b", 0.5)
    ]  # fmt: skip
    assert [m.factor for m in figures.hardest(found)] == [2.0, 0.5]
    summary = figures.summarise(record)
    assert summary["peers_forward"]["geometric_mean"] == pytest.approx(1.0)
    assert summary["peers_forward"]["smallest"]["family"] == "B()"
    assert summary["peers_training"]["geometric_mean"] is None
    record.row("b").same = False  # type: ignore[union-attr]
    again = figures.summarise(record)["peers_forward"]
    assert again["geometric_mean"] == pytest.approx(1.0)
    assert again["geometric_mean_of_the_same_function"] == pytest.approx(2.0)
    assert summary["common_length"] == 64
    assert summary["crossover"]["A()"]["forward"] == (64.0, True)


def test_percent_of_the_ceiling_is_of_the_best_product_of_the_run() -> None:
    record = synthetic()
    assert figures.percent_of_ceiling(record, record.cells[0]) == pytest.approx(50.0)  # 1e8 in 1 ms, of 2e11 a second
    assert figures.percent_of_ceiling(record, record.cells[0], "training") is None
    record.ceilings = []
    assert figures.percent_of_ceiling(record, record.cells[0]) is None


def test_slopes_and_means() -> None:
    assert figures.slope({1024: 3.0, 2048: 6.0, 4096: 12.0}) == pytest.approx(1.0)
    assert figures.slope({1024: 1.0, 2048: 4.0}) == pytest.approx(2.0)
    assert figures.slope({1024: 1.0}) is None
    assert figures.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert figures.geometric_mean([]) is None
    steps = [Step("A()", 1, 256, 1e-3), Step("A()", 1, 65536, 3e-3), Step("A()", 8, 256, None)]
    assert decoding.flatness(steps) == {("A()", 1): pytest.approx(3.0)}


def test_rounds_go_on_when_the_slow_have_sat_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round costs is what those in it cost: one slow pass must not take the others' rounds from them."""
    now = [50.0]  # preparing took more than the share
    slow, quick = Passes(lambda: 8.0, lambda: 8.0, lambda: None), Passes(lambda: 0.1, lambda: 0.1, lambda: None)

    def seconds(call: Any, device: torch.device, repeats: int = 1) -> float:
        now[0] += call() * repeats
        return call()

    monkeypatch.setattr(clock, "seconds", seconds)
    monkeypatch.setattr(FamilyGroup, "spent", property(lambda self: now[0]))
    group = run.groups(competitors.chosen([catalogue.parse("AFTSimple")], "bidirectional"), 16)["AFTSimple()"]
    record = Benchmark({})
    timed = FamilyGroup(Setting(2, 8, CPU, torch.float32, False, True), group, record, 16, 10.0, lambda what: None)
    timed.runners = {EXACT: quick, "AFTSimple()": slow}
    timed.estimates = {EXACT: (0.1, 0.1), "AFTSimple()": (8.0, 8.0)}
    record.cells = [Cell(name, 16) for name in timed.runners]
    timed.rounds()
    assert {cell.mechanism: cell.rounds for cell in record.cells} == {EXACT: FEWEST_ROUNDS, "AFTSimple()": 1}
    assert record.cells[1].forward_ratio == pytest.approx(80.0)


def test_the_slow_sit_out_and_what_takes_too_long_is_over_budget() -> None:
    group = run.groups(competitors.chosen([catalogue.parse("AFTSimple")], "bidirectional"), 64)["AFTSimple()"]
    record = Benchmark({}, [Cell("AFTSimple()", 16, "measured", forward_best_ms=100.0, training_best_ms=150.0)])

    def timed(seconds: float) -> FamilyGroup:
        return FamilyGroup(
            Setting(2, 8, CPU, torch.float32, False, True), group, record, 64, seconds, lambda what: None
        )

    found = [(each.name, reason) for each, reason in timed(2.0).admitted()]
    assert found == [
        (EXACT, ""), ("AFTSimple()", "about 1.0 s a pass: too long for its group's 2 s at this length")
    ]  # fmt: skip
    assert [reason for _, reason in timed(4.0).admitted()] == ["", ""]
    record.cells[0].training_bytes = 2**50
    few = timed(4.0)
    assert "more than half of the free memory" in few.admitted()[1][1]
    few.runners = dict.fromkeys(["AFTSimple()", EXACT])  # type: ignore[arg-type]
    few.estimates = {"AFTSimple()": (0.9, 0.5), EXACT: (9.0, 9.0)}
    assert [few.rests("AFTSimple()", number) for number in range(3)] == [False, True, True]
    assert not any(few.rests(EXACT, number) for number in range(9))
    del few.quick
    few.estimates["AFTSimple()"] = (0.8, 0.5)  # three rounds fit
    assert not any(few.rests("AFTSimple()", number) for number in range(3))


def test_peers_stop_where_asked() -> None:
    """Beyond ``peers_to`` only ours and the baselines run, and the others' cells say so."""
    everybody = competitors.chosen(
        [catalogue.parse("AFTSimple")], "bidirectional", [Peer("theirs", "none", "AFTSimple()", absent)]
    )
    setting = Setting(2, 8, CPU, torch.float32, False, True)
    plan = run.Plan(
        [catalogue.parse("AFTSimple")],
        [everybody[-1].peer],
        [16, 32],
        [],
        setting,
        "bidirectional",
        1.0,
        1,
        peers_to=16,
    )
    assert [[plan.timed(competitor, length) for competitor in everybody] for length in (16, 32)] == [
        [True, True],
        [True, False],
    ]
    record = Benchmark({})
    run.finish(plan, record, "complete")
    assert "peers run up to 16 tokens" in [cell.note for cell in record.cells if cell.mechanism == "theirs"]


def test_long_lengths_share_the_lines_to_beat() -> None:
    everybody = competitors.chosen(competitors.default_mechanisms(), "both")
    assert len(run.groups(everybody, 2048)) == len(competitors.default_mechanisms())
    assert len(run.groups(everybody, 4096)) == 8
    together = run.groups(everybody, 16384)
    assert len(together) == 5
    for group in together.values():
        names = [competitor.name for competitor in group]
        assert len(names) == len(set(names))
        assert {competitor.reference for competitor in group} <= set(names)
    assert sum(map(len, together.values())) < len(everybody) + 20


@pytest.mark.skipif(not memory.available(CPU), reason="resident memory can be read on Linux only")
def test_memory_is_measured_in_fresh_processes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--heads", "4", "--head-dim", "64", "--threads", "1", "--budget", "900", "--lengths", "32"]
    chosen = ["--mechanisms", "LinearAttention", "--no-causal", "--memory-lengths", "4096", "8192"]
    code, _, err = bench(capsys, tmp_path, *sizes, *chosen)
    assert code == 0, err
    record = read(tmp_path)
    weights = {(each.name, each.length): each for each in record.memory}
    assert set(weights) == {(name, n) for name in (EXACT, "LinearAttention()") for n in (4096, 8192)}
    for weight in weights.values():
        assert weight.note == ""
        assert weight.essential_bytes == 4 * 4 * 64 * 4 * weight.length
        output = weight.essential_bytes / 4
        assert 0.9 * output < weight.forward_bytes < 20 * output, "at least the output, and nothing quadratic"  # type: ignore[operator]
        assert weight.training_bytes > weight.forward_bytes  # type: ignore[operator]
    assert "LinearAttention()" in record.summary["memory_slope"]
    assert "Memory" in (tmp_path / "bench.html").read_text()


def test_a_meter_gives_the_reason_why_it_could_not_measure(mine: Any) -> None:
    setting = Setting(2, 8, CPU, torch.float32, False, True)
    meter = memory.Meter(setting, 1, [catalogue.parse("AFTSimple"), mine], False)
    try:
        assert meter.measure("nobody", 64, False, 20.0) == (None, "KeyError: 'nobody'")
        for name in ("AFTSimple()", "Mine()"):
            size, note = meter.measure(name, 64, True, 20.0)
            assert (size is not None, note) == (True, "")
        meter.process.kill()  # as the system does where memory is short
        meter.process.wait()
        assert meter.measure("AFTSimple()", 64, True, 20.0)[0] is None
    finally:
        meter.close()
    assert meter.measure("AFTSimple()", 64, True, 20.0)[0] is None


def test_decoding_measures_every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(2, 8, CPU, torch.float32, False, False)
    monkeypatch.setattr(decoding, "CHUNK", 5)
    steps = decoding.decoding(catalogue.parse("LinearAttention"), 3, setting, (4, 16), rounds=2)
    assert [(step.name, step.batch, step.position) for step in steps] == [
        ("LinearAttention()", 3, 4), ("LinearAttention()", 3, 16)
    ]  # fmt: skip
    assert all(step.seconds and not step.note for step in steps)
    assert steps[0].state_bytes == steps[1].state_bytes
    assert decoding.bounded_state(catalogue.parse("Local"))
    assert not decoding.bounded_state(catalogue.parse("Softmax"))
    assert not decoding.bounded_state(catalogue.parse("FNet"))
    hasty = decoding.decoding(catalogue.parse("LinearAttention"), 1, setting, (4, 16), rounds=2, patience=0.0)
    assert hasty[0].seconds is not None
    assert hasty[1].seconds is None
    assert "over budget" in hasty[1].note
    broken = decoding.decoding(catalogue.parse("Linformer"), 1, setting, (4,), rounds=1)
    assert broken[0].seconds is None
    assert broken[0].note


def test_a_partial_record_still_makes_a_page_and_a_table() -> None:
    record = Benchmark({
        "status": "interrupted", "command": ["fast-attention", "bench"], "started": "now", "heads": 1, "head_dim": 8,
        "batch": 1, "lengths": [16], "dtype": "float32", "seed": 0, "hardware": "h", "device": "cpu", "threads": 1,
        "cores": 1, "load_average": [0.0], "fast_attention": "0", "commit": None, "torch": "0", "python": "3",
        "platform": "p", "memory": "m", "backward": True,
    })  # fmt: skip
    record.summary = figures.summarise(record)
    assert "was interrupted" in page.html(record)
    assert not page.table(record).rows
    record.memory = [PeakMemory("A()", 16, note="over budget")]
    assert "memory at 16 tokens: over budget" in page.html(record)


def test_records_that_tell_of_this_machine_are_not_kept(tmp_path: Path) -> None:
    held: dict[str, Any] = {"meta": {"status": "complete", "started": "2030-01-02T03:04:05+0000"}}
    source = tmp_path / "bench.json"
    source.write_text(json.dumps(held))
    assert keep.keep(source, tmp_path / "records").name == "2030-01-02-bench.json"
    assert keep.keep(source, tmp_path / "records").name == "2030-01-02-bench-2.json"
    source.write_text(json.dumps({**held, "note": f"in {Path.cwd()}/x"}))
    with pytest.raises(ValueError, match="relative paths"):
        keep.keep(source, tmp_path / "records")
    source.write_text(json.dumps({"meta": {**held["meta"], "status": "interrupted"}}))
    with pytest.raises(ValueError, match="only complete records"):
        keep.keep(source, tmp_path / "records")


def test_a_competitor_of_each_kind_runs_in_every_direction(device: torch.device) -> None:
    setting = Setting(2, 8, device, torch.float32, False, True, batch=3)
    found: list[Competitor] = competitors.chosen(
        [catalogue.parse("AFTSimple"), catalogue.parse("GMLP")], "both", FAKES[4:5]
    )
    for competitor in (*found, *competitors.baselines(found)):
        passes = competitor.make(setting, 12)
        out = passes.forward()
        assert out.shape == ((3, 2, 12, 8) if competitor.kind == "core" else (3, 12, 16)), competitor.name
        assert all(g is None or torch.isfinite(g).all() for g in passes.training())
