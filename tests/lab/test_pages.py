"""The page builder: what files and users say is text, nothing is loaded from elsewhere, tables sort by values."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure as Canvas

from fast_attention.lab import pages
from fast_attention.lab.pages import Facts, Figure, Folded, Listing, Section, Words
from fast_attention.lab.pictures import COLOURS, DARK, STYLE, Picture, svg
from fast_attention.lab.tables import (
    Number,
    Row,
    Table,
    Value,
    bytes_of,
    count,
    factor,
    fixed,
    milliseconds,
    percent,
    show,
)
from tests.lab.reading_pages import assert_one_file, values

BAD = '<b onclick="x">&amp;'
SAFE = "&lt;b onclick=&#34;x&#34;&gt;&amp;amp;"
CHROMIUM = shutil.which("chromium")


def test_all_that_is_said_is_escaped() -> None:
    table = Table([BAD], [[BAD, Value(BAD, "slow", BAD, BAD)], Row([BAD], "exact")], title=BAD)
    blocks = [Words(BAD), Facts({BAD: BAD}), Listing([BAD, (BAD, BAD)]), Words(BAD, "code"), Folded(BAD, table)]
    html = pages.page(BAD, [Section(BAD, blocks), Section("left out", [])], [Words(BAD, "warn")])
    assert "<b" not in html.replace("<body>", "")
    assert html.count(SAFE) == 19
    assert "left out" not in html


def test_a_narrow_terminal_cuts_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns where they fit; else every row by itself, its heads beside its values. Nothing ends in an ellipsis."""
    heads = ["mechanism", "cost", "decodes", "weights", "source"]
    table = Table(heads, [["MixtureSynthesizer", "n log(n) m d", "growing", "", "Tay et al. 2020, arXiv 2506.04761"]])
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
    with matplotlib.rc_context(STYLE):
        figure = Canvas(figsize=(2, 2))
        figure.subplots().plot([1, 2], [2, 3], color=COLOURS[0])
        alt = 'a "quoted" <text>'
        html = pages.page("x", [Section("a", [Figure(Picture(svg(figure, alt), alt), "caption")])])
    assert 'aria-label="a &quot;quoted&quot; &lt;text&gt;"' in html
    assert "<figcaption>caption</figcaption>" in html
    assert html.count("prefers-color-scheme: dark") == 2
    assert_one_file(html)
    body = html[html.index("<body>") :]
    assert not [colour for colour in DARK if colour in body], "pictures take their colours by name"
    for light, dark in DARK.items():
        assert f"--{light[1:]}: {light};" in html
        assert f"--{light[1:]}: {dark};" in html
    assert f"var(--{COLOURS[0][1:]})" in body


def test_numbers_know_their_values() -> None:
    cells = [
        milliseconds(1234.5), bytes_of(1536), factor(0.25), percent(0.125), percent(5e-6), count(12345),
        fixed(0.12345, ".2f"), percent(float("inf")), factor(1 / 1234), bytes_of(1023 * 2**20),
        "-", "words", Value(Number("from 1,024", 1024)),
    ]  # fmt: skip
    assert [getattr(cell, "text", cell) for cell in cells] == [
        "1.23 s", "1.5 KiB", "4x", "12 %", "below 0.001 %", "12,345", "0.12", "not finite", "1,200x",
        "1,020 MiB", "-", "words", "from 1,024",
    ]  # fmt: skip
    html = pages.page("x", [Section("a", [Table(["a"], [["row", *cells]])])])
    assert values(html)[:8] == [1234.5, 1536, 4, 0.125, 5e-6, 12345, 0.12345, float("inf")]
    assert "data-value=Infinity>not finite" in html, "as JavaScript reads it"


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_tables_sort_by_values_and_say_where_they_go_on_in_a_browser(tmp_path: Path) -> None:
    """By value, then words, then what is empty; again downwards; then as it was. What is cut off has a sign."""
    sizes = [900, 1536, None, 20, 5 * 2**20, 1024]
    rows: list[list[str | Value]] = [[f"row {i}", bytes_of(size), "w" * 300] for i, size in enumerate(sizes)]
    rows.append(["spanned", "no numbers"])
    html = pages.page("x", [Section("a", [Table(["name", "size", "word"], rows), Table(["b"], [["c"]])])])
    orders = {1: "3051 4s2", 2: "4150 3s2", 3: "012345s"}
    for clicks, order in orders.items():
        script = f"for (let i = 0; i < {clicks}; i++) document.querySelectorAll('thead button')[1].click()"
        path = tmp_path / "page.html"
        path.write_text(html.replace("</body>", f"<script>{script}</script></body>"))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=500"]
        command = [str(CHROMIUM), *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        found = re.findall(r'scope="row"[^>]*>(?:row )?(\w)', shown)
        assert "".join(found) == f"{order.replace(' ', '')}c"
        assert re.findall('aria-sort="(\\w+)', shown) == [["ascending"], ["descending"], []][clicks - 1]
        assert re.findall('class="more"( hidden)?', shown) == ["", " hidden"]
