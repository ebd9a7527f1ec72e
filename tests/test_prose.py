"""Pages and docstrings are read once: short sentences, figures in tables, first words that point at nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import prose

MEAN, SHARE = 16.0, 0.02  # words a sentence, and sentences of more than 35 words: README and the site
PAGE_MEAN, PAGE_SHARE = 20.0, 0.10  # of any one page
IDEAS_MEAN = 16.5  # docs/ideas, where an example needs a longer breath
BARE = 0  # docstrings of src that begin with a bare relation
IDEAS = prose.DOCS / "ideas"
USERS = [  # pages that people read to use the library; measurements, designs and papers hold figures
    page
    for page in prose.pages()
    if page.parent in (prose.ROOT, prose.DOCS, prose.DOCS / "guides") and page.name != "reproductions.md"
]


def read(page: Path) -> list[str]:
    return prose.sentences(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("ideas", "most"), [(False, MEAN), (True, IDEAS_MEAN)], ids=["site", "ideas"])
def test_sentences_are_short(ideas: bool, most: float) -> None:
    found = [each for page in prose.pages() if page.is_relative_to(IDEAS) == ideas for each in read(page)]
    assert len(found) > 800
    mean, share = prose.mean_and_long(found)
    assert mean <= most, "python -m tests.prose names the long ones"
    assert share <= SHARE, "python -m tests.prose names the long ones"


def test_no_page_is_left_behind() -> None:
    for page in prose.pages():
        if len(found := read(page)) > 2 and not page.is_relative_to(IDEAS):
            mean, share = prose.mean_and_long(found)
            assert mean <= PAGE_MEAN, page
            assert share <= PAGE_SHARE, page


def test_there_is_no_more_to_read_than_asked() -> None:
    """Words of the site without the pages of ideas, without what records make, and a changelog of one screen."""
    written = [page for page in prose.pages() if not {"ideas", "reproductions"} & {*page.parts}]
    texts = (prose.GENERATED.sub("", page.read_text(encoding="utf-8")) for page in written)
    assert sum(len(re.findall(r"\S*\w\S*", text)) for text in texts) <= 25_000
    assert len((prose.ROOT / "CHANGELOG.md").read_bytes()) <= 2_048


def test_users_pages_have_their_figures_in_tables() -> None:
    assert len(USERS) > 25
    wrong = {
        f"{page.name}: {each}": numbers for page in USERS for each in read(page) if (numbers := prose.figures(each))
    }
    assert not wrong


def test_docstrings_are_understood_alone() -> None:
    found = prose.bare(prose.ROOT / "src")
    assert len(found) <= BARE, "\n".join(found)


def test_what_is_counted() -> None:
    """The checker sees what it is for, and nothing in code, tables, generated parts and links."""
    page = """# A heading of five words

One `piece of code` is a word. A [link of words](https://a.b/c) is read.
Twice as fast: 2.5x, 40 %, in 3 ms, of 1,024 MiB, at 0.123.

| a table | of 9 ms |
|---|---|

- An item is its own sentence
- and so is this other one

<!-- build: gain Local() -->9.9x at 4,096 tokens, which a record says<!-- end -->

```python
code = "is never a sentence here"
```
"""
    found = prose.sentences(page)
    assert [len(prose.words(each)) for each in found] == [5, 6, 16, 6, 6]
    assert prose.mean_and_long([*found, "word " * 36]) == (75 / 6, 1 / 6)
    assert prose.figures(found[2]) == ["2.5x", "40 %", "3 ms", "1,024 MiB", "0.123"]
    for harmless in ("256 tokens of 8 heads", "Python 3.11 and torch 2.13.0", "`5 ms` is code", "a grid of 16 x 16"):
        assert not prose.figures(harmless), harmless
    source = '"""Of a band."""\ndef f():\n    """Offer it to all."""\nclass C:\n    """Those that stay."""'
    said = [each for _, each in prose.docstrings(source) if prose.BARE.match(each)]
    assert said == ["Of a band.", "Those that stay."]
