"""The page builder: what files and users say is text, nothing is loaded from elsewhere, tables sort and filter."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fast_attention.lab import hover, numbers, pages
from fast_attention.lab.drawing import COLOURS, THEMES, attention_map, bars, figure_grid, line, picture
from fast_attention.lab.hover import Series
from fast_attention.lab.numbers import Number, bytes_of, count, factor, fixed, milliseconds, percent
from fast_attention.lab.pages import Code, Facts, Figure, Folded, Listing, Section, Words
from fast_attention.lab.tables import Row, Table, Value, show
from tests.lab.reading_pages import assert_one_file, pictures, values

BAD = '<b onclick="x">&amp;'
SAFE = "&lt;b onclick=&#34;x&#34;&gt;&amp;amp;"
CHROMIUM = shutil.which("chromium")


@picture
def drawn(alt: str):  # type: ignore[no-untyped-def]
    figure, (left, right) = figure_grid(2.0, 1, 2)
    line(left, {1: 2.0, 2: 3.25}, says=Series("a <line>", up="{} ms".format), color=COLOURS[0], label="a")
    bars(right, ["one", "two"], {"ours": [1.0, 2.0], "theirs": [2.0, 1.5]}, ("red", "blue"), " s")
    return figure, alt


@picture
def mapped():  # type: ignore[no-untyped-def]
    figure, (left, right) = figure_grid(2.0, 1, 2)
    table = [[0.0, 0.125], [0.5, float("nan")]]
    attention_map(left, table, 0.5)
    hover.cells(left, table, lambda y, x: f"{y} {x}: {table[y][x]}")
    hover.panel(right, "all of it")
    hover.point(right, 5.0, 0.5, "out of sight")
    right.set_xlim(0, 1)
    return figure, "cells"


def test_all_that_is_said_is_escaped() -> None:
    table = Table([BAD], [[BAD, Value(BAD, "slow", BAD, BAD)], Row([BAD], "exact")], title=BAD)
    blocks = [Words(BAD), Facts({BAD: BAD}), Listing([BAD, (BAD, BAD)]), Code(BAD), Folded(BAD, table)]
    html = pages.page(BAD, [Section(BAD, blocks), Section("left out", [])], [Words(BAD, "warn")])
    assert "<b" not in html.replace("<body>", "")
    assert html.count(SAFE) == 19
    assert "left out" not in html
    assert html.endswith("</html>\n")


def test_a_narrow_terminal_cuts_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns where they fit; else every row by itself, its heads beside its values. Nothing ends in an ellipsis."""
    heads = ["mechanism", "cost", "decodes", "weights", "source"]
    table = Table(heads, [["LogLinearAttention", "n log(n) m d", "growing", "", "Guo et al. 2025, arXiv 2506.04761"]])
    for width in (200, 80, 60, 40):
        show(table, width=width)
        words = capsys.readouterr().out
        assert "\u2026" not in words
        assert "2506.04761" in words
        assert max(map(len, words.splitlines())) <= width
        assert ("cost n log(n)" in words) == (width == 40)
    show(Table(["law", "detail"], [["x" * 30, "many short words here, one below another " * 4]]), width=45)
    assert "detail many short words" in capsys.readouterr().out
    show(Table(["mechanism", *["milliseconds"] * 4], [["Local()", "1", "2", "3", "4"]]), width=50)
    assert capsys.readouterr().out.count("milliseconds") == 4


def test_a_page_is_one_file_that_reads_in_the_dark() -> None:
    html = pages.page("x", [Section("a", [Figure(drawn('a "quoted" <text>'), "caption")])])
    assert 'aria-label="a &quot;quoted&quot; &lt;text&gt;"' in html
    assert "<figcaption>caption</figcaption>" in html
    assert html.count("prefers-color-scheme: dark") == 2
    assert_one_file(html)
    body = html[html.index("<body>") :]
    assert not [colour for colour in THEMES if colour in body], "pictures take their colours by name"
    for light, (name, dark) in THEMES.items():
        assert f"--{name}: {light};" in html
        assert f"--{name}: {dark};" in html
    assert f"var(--{THEMES[COLOURS[0]].name})" in body


def test_pictures_say_their_numbers() -> None:
    html = pages.page("x", [Section("a", [Figure(drawn("alt"), ""), Figure(mapped(), "")])])
    lines, cells = pictures(html)
    assert lines == [
        "one, ours: 1 s", "two, ours: 2 s", "one, theirs: 2 s", "two, theirs: 1.5 s",
        "a <line>: 2.0 ms at 1 tokens, 3.25 ms at 2 tokens",
        "a <line>: 2.0 ms at 1 tokens", "a <line>: 3.25 ms at 2 tokens",
    ]  # fmt: skip
    assert cells == ["all of it", "0 0: 0.0", "0 1: 0.125", "1 0: 0.5"], "what is no number or not shown says nothing"


def test_hover_texts_lie_on_what_they_tell() -> None:
    """The bars of the picture and their places have the same edges."""
    svg = drawn("alt").svg
    placed = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"><title>(\w+, \w+)', svg)
    ends = {name: float(x) + float(width) for x, _, width, _, name in placed}
    found = re.findall(r'<path d="M ([\d.]+) ([\d.]+) \nL ([\d.]+) [\d.]+ \nL [\d.]+ ([\d.]+) [^"]*" clip-path', svg)
    shown = [float(right) for _, _, right, _ in found][:4]
    assert [ends[f"{name}, {label}"] for label in ("ours", "theirs") for name in ("one", "two")] == pytest.approx(
        shown, abs=0.1
    )


def test_numbers_know_their_values() -> None:
    cells = [
        milliseconds(1234.5), bytes_of(1536), factor(0.25), percent(0.125), percent(5e-6), count(12345),
        fixed(0.12345, ".2f"), percent(float("inf")), "-", "words", Value(Number("from 1,024", 1024)),
    ]  # fmt: skip
    assert [getattr(cell, "text", cell) for cell in cells] == [
        "1.23 s", "1.5 KiB", "4x", "12 %", "below 0.001 %", "12,345", "0.12", "not finite", "-", "words", "from 1,024",
    ]  # fmt: skip
    html = pages.page("x", [Section("a", [Table(["a"], [["row", *cells]])])])
    assert values(html) == [1234.5, 1536, 4, 0.125, 5e-6, 12345, 0.12345, float("inf"), 1024]
    assert "data-value=Infinity>not finite" in html, "as JavaScript reads it"
    assert numbers.exactly(1234.5678) == "1,234.57"
    assert numbers.exactly(1.25e-7) == "1.25e-07"


class Shown(HTMLParser):
    """The rows of the first table, without those that are hidden, and what the heads say of the order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[str] = []
        self.order: list[str | None] = []
        self.said = ""
        self._row = self._output = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = dict(attrs)
        if tag == "th" and held.get("scope") == "col":
            self.order.append(held.get("aria-sort"))
        self._row = tag == "th" and held.get("scope") == "row" and not self._hidden
        self._output = tag == "output"
        if tag == "tr":
            self._hidden = "hidden" in held

    def handle_data(self, data: str) -> None:
        if self._row:
            self.rows.append(data)
        if self._output:
            self.said = data
        self._row = self._output = False


def after(tmp_path: Path, steps: str) -> Shown:
    """The page after some steps of JavaScript in a browser without a network."""
    sizes = [900, 1536, None, 20, 5 * 2**20, 1024, 2, 3, 1]
    rows: list[list[str | Value]] = [[f"row {i}", bytes_of(size), f"word{9 - i}"] for i, size in enumerate(sizes)]
    rows.append(["spanned", Value("no numbers", span=2)])
    html = pages.page("x", [Section("a", [Table(["name", "size", "word"], rows)])])
    path = tmp_path / "page.html"
    path.write_text(html.replace("</body>", f"<script>{steps}</script></body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    command = [str(CHROMIUM), *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    return Shown(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_tables_sort_by_values_and_filter_in_a_browser(tmp_path: Path) -> None:
    def rows(*numbers: int) -> list[str]:
        return [f"row {i}" for i in numbers]

    once = after(tmp_path, "document.querySelectorAll('thead button')[1].click()")
    assert once.rows == [*rows(8, 6, 7, 3, 0, 5, 1, 4), "spanned", "row 2"], "by value, then words, then what is empty"
    assert once.order == [None, "ascending", None]
    twice = after(tmp_path, "const b = document.querySelectorAll('thead button')[1]; b.click(); b.click()")
    assert twice.rows == [*rows(4, 1, 5, 0, 3, 7, 6, 8), "spanned", "row 2"]
    assert twice.order == [None, "descending", None]
    thrice = "b.click(); " + 3 * "a.click(); "
    back = after(tmp_path, f"const [a, b] = document.querySelectorAll('thead button'); {thrice}")
    assert back.rows == [*rows(*range(9)), "spanned"], "as it was"
    assert back.order == [None, None, None]
    typed = "const f = document.querySelector('input'); f.value = 'WORD KiB'; f.dispatchEvent(new Event('input'))"
    found = after(tmp_path, typed)
    assert found.rows == rows(1, 5)
    assert found.said == "2 of 10 rows"


def test_the_script_is_short() -> None:
    script = Path(pages.__file__).parent / "templates" / "page.js"
    assert len(script.read_text().splitlines()) <= 60
