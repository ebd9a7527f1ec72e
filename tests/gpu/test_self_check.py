"""The self-check: right kernels pass, wrong ones are named once and never run, verdicts are kept by versions."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fast_attention import LinearAttention, __version__, attention
from fast_attention.engine import trace
from fast_attention.gpu import maps, self_check
from fast_attention.gpu.self_check import Case
from fast_attention.mechanisms.aft import kernels as pools
from fast_attention.mechanisms.linear import kernels
from tests.gpu import errors


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_verdicts", {})
    monkeypatch.setattr(self_check, "TOKENS", 70)
    return tmp_path


pytestmark = pytest.mark.usefixtures("interpreted")
ELEMENTWISE = kernels.check_elementwise(maps.ELU)


def verdict(width: int = 16, dtype: torch.dtype = torch.float32, case: Case = ELEMENTWISE, masked: bool = False) -> str:
    return self_check.verdict(case, width, 16, dtype, torch.empty(0).device, masked=masked)


CASES = [
    ELEMENTWISE, pools.check(), kernels.check_exponential(24, 16),
    kernels.check_decayed(maps.ELU, normalized=False),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("dtype", "masked"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True)])
def test_right_kernels_pass(dtype: torch.dtype, masked: bool, case: Case) -> None:
    assert verdict(dtype=dtype, masked=masked, case=case) == ""


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(ELEMENTWISE, torch.bfloat16), (ELEMENTWISE, torch.float16), (kernels.check_exponential(32, 64), torch.float16)],
    ids=["sums in bf16", "sums in fp16", "exponentials in fp16"],
)
def test_kernels_read_as_many_digits_as_they_sum(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor cores leave digits out; where only numerators do, gradients of queries are of what rounding left."""
    monkeypatch.setattr(self_check, "TOKENS", 300)
    monkeypatch.setitem(self_check.LARGEST, dtype, 0.6 * self_check.LARGEST[dtype])
    assert self_check.verdict(case, 64, 64, dtype, torch.empty(0).device, masked=False) == ""


@pytest.mark.parametrize("found", ["", "causal output is off by 1"])
def test_a_captured_graph_keeps_to_what_was_found_before(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    capturing: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(self_check, "compared", lambda *given, **named: found)
    heads: Any = SimpleNamespace(is_cuda=True, shape=(1, 1, 40, 16), dtype=torch.float32, device=torch.empty(0).device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert self_check.unsupported_reason(ELEMENTWISE, heads, heads, masked=True) == found
    monkeypatch.setattr(self_check, "compared", lambda *given, **named: pytest.fail("compared while captured"))
    capturing.append(True)
    assert self_check.unsupported_reason(ELEMENTWISE, heads, heads, masked=True) == found
    monkeypatch.setattr(self_check, "_verdicts", {})  # another process has only the file
    assert self_check.unsupported_reason(ELEMENTWISE, heads, heads, masked=True) == found
    assert self_check.unsupported_reason(ELEMENTWISE, heads, heads, masked=False) == ""


def test_every_part_is_told_and_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m tests.gpu.errors`` goes on behind the first wrong part, where the self-check stops."""
    case, device = kernels.check_exponential(16, 64), torch.empty(0).device
    lines = list(errors.told(case, torch.bfloat16, device, masked=False))
    assert len(lines) == 10
    assert not any("REFUSED" in line for line in lines)
    with errors.varied({"block": 16, "precision": "ieee"}):
        assert not any("REFUSED" in line for line in errors.told(case, torch.bfloat16, device, masked=False))
    right = kernels.chunk_scan

    def wrong(*given: Any, **settings: Any) -> Any:
        out, *rest = right(*given, **settings)
        if trace.wanted() == "reference":
            return out, *rest
        return out * torch.where(torch.arange(70)[:, None] == 40, 1.5, 1.0).to(out.dtype), *rest

    monkeypatch.setattr(kernels, "chunk_scan", wrong)
    output, *_, state = errors.told(ELEMENTWISE, torch.bfloat16, device, masked=False)
    assert output.endswith("block 1  REFUSED")
    assert "REFUSED" not in state


def test_the_callers_modes_do_not_matter() -> None:
    kind = torch.empty(0).device.type
    with torch.inference_mode(), torch.autocast(kind, dtype=torch.bfloat16):
        assert verdict() == ""
    torch.set_default_dtype(torch.float64)
    try:
        assert verdict(case=kernels.check_decayed(maps.ELU, normalized=True), dtype=torch.bfloat16) == ""
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_wrong_kernels_are_named_once_and_never_run(
    monkeypatch: pytest.MonkeyPatch, interpreted: None, folder: Path
) -> None:
    right = kernels.chunk_scan

    def wrong(*given: Any, **settings: Any) -> Any:
        out, last = right(*given, **settings)
        return out if trace.wanted() == "reference" else 1.001 * out, last

    monkeypatch.setattr(kernels, "chunk_scan", wrong)
    with pytest.warns(UserWarning, match="plain operations instead of Triton kernels: causal output of heads of 16"):
        told = verdict()
    assert "is off by 0.001" in told
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdict() == told  # no second warning
    monkeypatch.setattr(self_check, "unsupported_reason", lambda *given, **named: told)
    q = torch.randn(1, 1, 40, 16)
    with trace.recorded() as steps:
        attention(q, q, q, LinearAttention(), is_causal=True)
    assert not any(step.path.startswith(trace.KERNEL) for step in steps)
    assert any(step.why == told for step in steps)


def test_verdicts_are_kept_for_the_next_process(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    verdict()
    (path,) = folder.rglob("kernels.json")
    (key,) = json.loads(path.read_text())
    assert f"{__version__} {torch.__version__}" in key
    assert "cpu" in key or "NVIDIA" in key
    monkeypatch.setattr(self_check, "_verdicts", {})
    monkeypatch.setattr(self_check, "compared", lambda *given, **named: pytest.fail("compared again"))
    assert verdict() == ""
    monkeypatch.setattr(self_check, "compared", lambda *given, **named: "wrong")
    with pytest.warns(UserWarning, match="wrong"):
        assert verdict(width=8) == "wrong"
    assert len(json.loads(path.read_text())) == 2


def test_what_could_not_be_compared_is_tried_again(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def failing(*given: Any, **named: Any) -> str:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(self_check, "compared", failing)
    with pytest.warns(UserWarning, match="Failed to find C compiler"):
        assert "map 2 for heads of 16 and 16 in torch.float32 failed" in verdict(
            case=kernels.check_elementwise(maps.RELU)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "failed" in verdict(case=kernels.check_elementwise(maps.RELU))  # once a process
    assert not [*folder.rglob("kernels.json")]
    monkeypatch.undo()
    monkeypatch.setattr(self_check, "_path", lambda: folder / "kernels.json")
    monkeypatch.setattr(self_check, "_verdicts", {})  # another process
    assert verdict(case=kernels.check_elementwise(maps.RELU)) == ""


@pytest.mark.parametrize("held", ["", "[]", "{"])
def test_a_damaged_file_is_none(folder: Path, held: str) -> None:
    path = folder / "fast_attention" / "kernels.json"
    path.parent.mkdir()
    path.write_text(held)
    assert verdict() == ""
