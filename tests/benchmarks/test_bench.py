"""``python -m benchmarks.bench``: refuses speeds for what is wrong, can be stopped and resumed; its sums are right."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import bench, competitors, gates, keep, memory, peers
from benchmarks.bench import Benchmark, Row, Step
from benchmarks.competitors import Peer, Sizes
from fast_attention import catalogue, clock
from fast_attention.lab.measure import Setting
from fast_attention.lab.records import EXACT, Cell
from fast_attention.lab.refusals import InputError
from fast_attention.mechanisms.aft.aft_simple import AFTSimple

TINY = ["--heads", "2", "--head-dim", "8", "--threads", "1", "--lengths", "16", "32", "--memory-lengths", "0"]
CPU = torch.device("cpu")
VARIED = {repr(catalogue.parse(text)) for text in gates.VARIANTS}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = dict.fromkeys(("gemm_gflops", "bmm_gflops", "exp_gelem_s", "copy_gb_s", "fresh_gb_s", "empty_us"), 100.0)
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: rates)
    monkeypatch.setattr(bench, "MOST_ROUNDS", 3)


def run(folder: Path, *arguments: str) -> tuple[int, Benchmark]:
    code = bench.main([*TINY, "--out", str(folder), *arguments])
    return code, Benchmark.read(folder / "bench.json")


class Fake(nn.Module):
    """Exact attention, with whatever fault is asked for."""

    def __init__(self, is_causal: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.is_causal, self.weight = is_causal, nn.Parameter(torch.full((1,), factor))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weight * nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


def absent(sizes: Sizes) -> Any:
    raise ImportError("no module named 'absent'")


def exact(made: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v)


FAKES = [
    Peer("good", "good", "AFTSimple()", lambda sizes: Fake(), truth=exact),
    Peer("off", "off", "AFTSimple()", lambda sizes: Fake(factor=1.01), truth=exact),
    Peer("leaky, causal", "leaky", "AFTSimple()", lambda sizes: Fake(), is_causal=True),
    Peer("absent", "absent", "AFTSimple()", absent),
    Peer("whole", "whole", "AFTSimple()", lambda sizes: nn.Linear(sizes.width, sizes.width), "module"),
]


def test_peers_run_beside_ours_with_their_faults_marked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS", FAKES)
    code, record = run(tmp_path, "--mechanisms", "AFTSimple", "FNet", "--vs-peers", "--peers-to", "16")
    out = capsys.readouterr().out
    assert code == 0
    assert {row.name: row.check for row in record.rows} == {
        "AFTSimple()": "right", "AFTSimple(), projected": "right", "AFTSimple(), causal": "right", "FNet()": "right",
        "good": "right", "off": "faulty", "leaky, causal": "faulty", "absent": "missing", "whole": "right",
    }  # fmt: skip
    assert {row.name for row in record.rows if not row.same} == {"off"}
    assert "off by 1 %" in record.row("off").faults[0]  # type: ignore[union-attr]
    assert "future" in record.row("leaky, causal").faults[0]  # type: ignore[union-attr]
    for name in ("AFTSimple()", "AFTSimple(), projected", "AFTSimple(), causal", "FNet()", "good", "off", "whole"):
        cell = record.cell(name, 16)
        assert cell is not None
        assert (cell.status, cell.rounds) == ("measured", 3)
        assert cell.forward_ms
        assert cell.training_operations > cell.operations > 0  # type: ignore[operator]
    assert record.cell("absent", 16).status == "refused"  # type: ignore[union-attr]
    assert record.cell("good", 32).note == "peers run up to 16 tokens"  # type: ignore[union-attr]
    assert record.row("FNet()").reference == record.row("whole").reference == f"{EXACT}, projected"  # type: ignore[union-attr]
    assert {each["name"] for each in record.summary["peers_forward"]} == {
        "AFTSimple()", "AFTSimple(), projected", "AFTSimple(), causal"
    }  # fmt: skip
    for words in ("off *", "absent not installed", "times the speed of the best peer", "Machine before 32 tokens"):
        assert words in out
    held = json.loads((tmp_path / "bench.json").read_text())
    assert {"sha256", "schema", "meta", "ceilings", "rows", "cells", "weights", "steps", "done", "summary"} == {*held}
    assert held["meta"]["command"][:3] == ["python", "-m", "benchmarks.bench"]


def test_what_is_wrong_gets_no_speed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = AFTSimple.attend

    def leaky(self: AFTSimple, q: Tensor, k: Tensor, v: Tensor, w: Any, **options: Any) -> Tensor:
        return right(self, q, k, v, w, is_causal=False, key_mask=options["key_mask"])

    monkeypatch.setattr(AFTSimple, "attend", leaky)
    code, record = run(tmp_path, "--mechanisms", "AFTSimple", "--causal", "--no-backward")
    cell = record.cell("AFTSimple(), causal", 16)
    assert code == 1
    assert cell is not None
    assert (cell.status, cell.forward_ms, cell.operations) == ("refused", None, None)
    assert "no speed: the future never moves the past" in cell.note
    assert "AFTSimple(), causal WRONG" in capsys.readouterr().out


def test_a_stopped_benchmark_keeps_what_it_has_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, timed = ["--mechanisms", "AFTSimple", "--no-causal", "--no-backward"], bench.time_group

    def stopping(plan: Any, record: Any, length: int, *rest: Any) -> None:
        if length == 32:
            raise KeyboardInterrupt
        timed(plan, record, length, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(bench, "time_group", stopping)
        code, partial = run(tmp_path, *chosen)
    known = partial.cell("AFTSimple()", 16)
    assert (code, partial.meta["status"], partial.done) == (130, "interrupted", ["time 16 AFTSimple()"])
    assert partial.cell("AFTSimple()", 32).status == "not reached"  # type: ignore[union-attr]
    with pytest.raises(InputError, match="--resume"):
        run(tmp_path, *chosen)
    code, whole = run(tmp_path, *chosen, "--resume")
    assert code == 0
    assert whole.cell("AFTSimple()", 16) == known, "not measured again"
    assert all(cell.status == "measured" for cell in whole.cells)
    with pytest.raises(InputError, match="batch was 1, is 4"):
        run(tmp_path, *chosen, "--resume", "--batch", "4")


def test_adapters_and_groups_cover_the_line_up() -> None:
    everybody = competitors.chosen(competitors.default_mechanisms(), None, peers.PEERS)
    names = {each.name for each in everybody}
    assert len(names) == len(everybody)
    assert {repr(catalogue.default(name)) for name in catalogue.names()} == {each.family for each in everybody} - VARIED
    assert {peer.name for peer in peers.PEERS} <= names, "no peer is left out"
    assert pickle.loads(pickle.dumps(peers.PEERS)) == peers.PEERS, "memory is measured in another process"
    for length, together in ((2048, 1), (4096, 6), (16384, 10)):
        for name, group in bench.groups(everybody, length).items():
            assert len(name.split(" + ")) <= together
            assert {each.reference for each in group} <= {each.name for each in group}


def test_what_would_take_too_long_is_foretold() -> None:
    (each,) = competitors.chosen([catalogue.parse("AFTSimple")], False)
    plan = bench.Plan([each], [64], [], Setting(2, 8, CPU, torch.float32, False, True), patience=0.9)
    record = Benchmark({}, [Cell("AFTSimple()", 16, "measured", forward_best_ms=100.0, training_best_ms=150.0)])
    assert bench.too_much(plan, record, each, 64) == "about 1.0 s a pass: more than 0.9 s"
    assert bench.too_much(plan, record, each, 32) == ""
    record.cells[0].training_bytes = 2**50
    assert "more than half of the free memory" in bench.too_much(plan, record, each, 32)


@pytest.mark.skipif(not memory.available(CPU), reason="resident memory can be read on Linux only")
def test_memory_is_measured_in_a_fresh_process() -> None:
    (each,) = competitors.chosen([catalogue.parse("LinearAttention")], False)
    setting = Setting(4, 64, CPU, torch.float32, False, False)
    size, note = memory.measured(each, setting, 4096, 60.0)
    output = 4 * 64 * 4096 * 4
    assert note == ""
    assert 0.9 * output < size < 20 * output, "at least the output, and nothing quadratic"  # type: ignore[operator]
    assert memory.measured(each, setting, 4096, 0.0) == (None, "stopped after 0 s")


def test_decoding_measures_every_position_that_there_is_time_for() -> None:
    setting, linear = Setting(2, 8, CPU, torch.float32, False, False), catalogue.parse("LinearAttention")
    first, last = bench.decoding(linear, 3, setting, (4, 16), rounds=2)
    assert first.seconds
    assert last.seconds
    assert first.state_bytes == last.state_bytes
    first, last = bench.decoding(linear, 1, setting, (4, 16), patience=0.0, rounds=2)
    assert first.seconds
    assert "over budget" in last.note
    assert [bench.bounded_state(catalogue.parse(name)) for name in ("Local", "Softmax", "FNet")] == [True, False, False]


def test_figures_are_derived_from_the_numbers() -> None:
    assert bench.crossover({64: 0.5, 256: 2.0}) == (pytest.approx(128.0), False)
    assert bench.crossover({64: 1.5, 128: 0.5, 256: 2.0}) == (pytest.approx(128 * 2**0.5), False), "it lost again"
    assert bench.crossover({64: 1.5, 128: 3.0}) == (64.0, True)
    assert bench.crossover({64: 2.0, 128: 0.5}) is None
    assert bench.flatness([Step("A()", 1, 256, 1e-3), Step("A()", 1, 65536, 3e-3)]) == {
        "A(), batch 1": pytest.approx(3)
    }
    cells = [Cell(name, 64, forward_ratio=1 / speed, forward_best_ms=1.0, operations=10**8)
             for name, speed in (("A()", 4.0), ("a", 1.0), ("b", 2.0))]  # fmt: skip
    rows = [
        Row(name, "A()", "core", False, owner, EXACT)
        for name, owner in (("A()", "fast-attention"), ("a", "x"), ("b", "y"))
    ]
    record = Benchmark({}, cells, rows=rows, ceilings=[{"gemm_gflops": 100.0}, {"gemm_gflops": 200.0}])
    assert bench.matches(record) == [{"name": "A()", "length": 64, "peer": "b", "same": True, "factor": 2.0}]
    assert bench.percent_of_ceiling(record, cells[0]) == pytest.approx(50.0)  # 1e8 in 1 ms, of 2e11 a second


def test_records_that_tell_of_this_machine_are_not_kept(tmp_path: Path) -> None:
    held: dict[str, Any] = {"meta": {"status": "complete", "started": "2030-01-02T03:04:05+0000"}}
    source = tmp_path / "bench.json"
    source.write_text(json.dumps(held))
    assert keep.keep(source, tmp_path / "records").name == "2030-01-02-bench.json"
    assert keep.keep(source, tmp_path / "records").name == "2030-01-02-bench-2.json"
    for wrong in ({**held, "note": f"in {Path.cwd()}/x"}, {"meta": {**held["meta"], "status": "interrupted"}}):
        source.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"relative paths|only complete records"):
            keep.keep(source, tmp_path / "records")


def test_samples_of_short_calls_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of a millisecond is called twice in a sample, and each round starts with another competitor."""
    order: list[tuple[Any, int]] = []

    def seconds(call: Any, device: torch.device, repeats: int = 1) -> float:
        order.append((call, repeats))
        return 0.001

    monkeypatch.setattr(clock, "seconds", seconds)
    (each,) = competitors.chosen([catalogue.parse("AFTSimple")], False)
    group = bench.groups([each], 16)["AFTSimple()"]
    plan = bench.Plan([each], [16], [], Setting(2, 8, CPU, torch.float32, False, False), patience=5.0)
    bench.time_group(plan, Benchmark({}), 16, "AFTSimple()", group)
    rounds = order[2:]
    assert {repeats for _, repeats in rounds} == {2}
    assert rounds[0][0] is rounds[3][0], "the second round begins with the second"
