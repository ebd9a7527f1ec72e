"""The page builder: whatever a file or a user says is text, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re

from fast_attention.lab import pages
from fast_attention.lab.drawing import bars, figure_grid, line, picture
from fast_attention.lab.pages import Code, Facts, Figure, Folded, Listing, Section, Words
from fast_attention.lab.tables import Row, Table, Value

BAD = '<b onclick="x">&amp;'
SAFE = "&lt;b onclick=&#34;x&#34;&gt;&amp;amp;"


@picture
def drawn(alt: str):  # type: ignore[no-untyped-def]
    figure, (left, right) = figure_grid(2.0, 1, 2)
    line(left, {1: 2.0, 2: 3.0}, label="a")
    bars(right, ["one", "two"], {"ours": [1.0, 2.0], "theirs": [2.0, 1.0]}, ("red", "blue"))
    return figure, alt


def test_all_that_is_said_is_escaped() -> None:
    table = Table([BAD], [[BAD, Value(BAD, "slow", BAD, BAD)], Row([BAD], "exact")])
    blocks = [Words(BAD), Facts({BAD: BAD}), Listing([BAD, (BAD, BAD)]), Code(BAD), Folded(BAD, table)]
    html = pages.page(BAD, [Section(BAD, blocks), Section("left out", [])], [Words(BAD, "warn")])
    assert "<b" not in html.replace("<body>", "")
    assert html.count(SAFE) == 18
    assert "left out" not in html
    assert html.endswith("</html>\n")


def test_a_page_is_one_file_that_reads_in_the_dark() -> None:
    html = pages.page("x", [Section("a", [Figure(drawn('a "quoted" <text>'), "caption")])])
    assert 'aria-label="a &quot;quoted&quot; &lt;text&gt;"' in html
    assert "<figcaption>caption</figcaption>" in html
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    loads = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)|url\(([^)]+)\)|@import|<script|<link""", html)
    assert all((a or b).startswith("#") for a, b in loads), loads
