"""Reads a page of a command: that it is one file that loads nothing, and the numbers of its tables."""

from __future__ import annotations

import re

LARGEST = 3 * 2**20  # bytes


def assert_one_file(html: str) -> None:
    """It loads nothing, runs one script of its own, is small, and every picture has words for who cannot see it."""
    assert html.endswith("</html>\n")
    assert len(html.encode()) < LARGEST
    loads = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)|url\(([^)]+)\)|(@import|<link)""", html)
    assert all("".join(each).startswith(("#", "data:image/png;base64,")) for each in loads), loads
    assert re.findall("<script[^>]*>", html) == ["<script>"]
    assert not re.search(r"https?:", re.search("<script>(.*?)</script>", html, re.DOTALL)[1])  # type: ignore[index]
    assert 'name="viewport"' in html
    assert html.count("<svg") == len(re.findall('<svg role="img" aria-label="[^"]+"', html))


def values(html: str) -> list[float]:
    """The numbers that tables sort by."""
    return [float(text) for text in re.findall("data-value=([^ >]+)", html)]
