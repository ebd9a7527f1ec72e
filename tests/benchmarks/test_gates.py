"""The speed gates compare two source trees in one process: equal trees are equal, a slowed one is named."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gates

SLOWED = """
_quick = Bound.forward


def _slowed(*arguments, **options):
    for _ in range(1000):
        (lambda: None)()
    return _quick(*arguments, **options)


Bound.forward = _slowed
"""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Both trees are gone after the test."""
    path = [*sys.path]
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.split(".")[0] in ("fast_attention_old", "fast_attention_new")]:
        del sys.modules[name]


def function_calls(run: Callable[[], Any], repeats: int) -> float:
    """Millionths for every function that is called: a clock that no other program disturbs."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count * 1e-6


def test_a_tree_is_as_fast_as_itself_and_a_slowed_copy_is_above_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "seconds", function_calls)
    shutil.copytree(gates.ROOT / "src", tmp_path / "slowed" / "src", ignore=shutil.ignore_patterns("*.gz"))
    with (tmp_path / "slowed" / "src" / "fast_attention" / "nn" / "bound.py").open("a") as file:
        file.write(SLOWED)
    what, record = ["--only", "Softmax", "--lengths", "64", "--threads", "1"], tmp_path / "record.json"
    code = gates.main([str(gates.ROOT), "--new", str(tmp_path / "slowed"), *what, "--out", str(record)])
    held, printed = json.loads(record.read_text()), capsys.readouterr().out
    assert code == 1
    assert held["meta"]["above"] == held["meta"]["measured"] == 4  # forward and training, causal and not
    assert held["meta"]["old"] != "unknown"
    assert all(row["rounds"] > 5 for row in held["rows"]), "measured again before it counts"
    assert "Softmax(), causal" in printed
    assert "NOT PASSED" in printed
    tree = gates.Tree("fast_attention", "")
    found = gates.run(tree, tree, gates.rows(tree, [64], ["Softmax"]), gates.Budget(5.0, 2.0))
    assert all(row.ratio and 0.99 < row.ratio < 1.01 for row in found), found


def test_what_would_take_too_long_is_left_out_and_says_so() -> None:
    row = gates.Row("Softmax()", False, 1024, False)
    budget = gates.Budget(5.0, 2.0, known={(row.mechanism, False, False): (256, 0.5, 0)})
    assert budget.refusal(row, order=2.0) == "about 8 s a call"
    assert budget.refusal(row, order=1.0) == ""
    budget.known[row.mechanism, False, False] = (256, 0.1, 2**44)
    assert budget.refusal(row, order=1.0).endswith("GiB")


def test_what_is_no_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no src/fast_attention"):
        gates.main([str(tmp_path)])
    with pytest.raises(SystemExit, match="neither a folder nor a git revision"):
        gates.main(["no-such-revision"])
