"""Measures prose: words a sentence, figures in sentences, docstrings that begin with a bare relation.

``python -m tests.prose`` prints every page's figures, then the sentences and docstrings to mend.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BUILT = {"_build", "mechanisms", "auto_gallery", "auto_start"}  # folders that a build makes
LONG = 35  # words

GENERATED = re.compile(r"<!-- build: .*?<!-- end -->|<!--.*?-->", re.S)
FENCED = re.compile(r"^( *)(`{3,}|:{3,})[^\n]*\n.*?^\1\2 *$", re.S | re.M)
APART = re.compile(r"\s*(\||#|:{3}|!\[|:\w+:)")  # tables, headings, directives, pictures, options
ITEM = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.)\s)")
END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\[(`*\"])|(?<=[.!?]\*\*)\s+")
WORD = re.compile(r"\w[\w'^-]*")
FIGURE = re.compile(
    r"(?<![\w.-])\d[\d,.]*(?: |\u00a0)?(?:ms|s|seconds?|KiB|MiB|GiB|%|x(?! \d)|times)(?!\w)|(?<![\w.-])0?\.\d{2,}"
)
BARE = re.compile(r"(?:Of|As|Those|These|The same|Such|What|Whatever|Whoever|Who|They|Their|Its)\b")


def pages() -> list[Path]:
    """README and the pages of the site, without those that a build makes."""
    return [ROOT / "README.md", *(path for path in sorted(DOCS.rglob("*.md")) if not BUILT & {*path.parts})]


def sentences(text: str) -> list[str]:
    """The sentences of a page: without code, tables, headings and what is made from records."""
    text = FENCED.sub("", GENERATED.sub("", text))
    found = []
    for block in ITEM.split(text):
        prose = " ".join(line for line in block.splitlines() if not APART.match(line))
        prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose)
        found += [each for each in END.split(prose) if len(words(each)) >= 3]
    return found


def words(sentence: str) -> list[str]:
    """The words of a sentence; a piece of code is one."""
    return WORD.findall(re.sub(r"`[^`]*`|\$[^$]*\$", " code ", sentence))


def mean_and_long(found: list[str]) -> tuple[float, float]:
    """Words a sentence, and the share of sentences with more than 35."""
    lengths = [len(words(each)) for each in found]
    return sum(lengths) / len(lengths), sum(length > LONG for length in lengths) / len(lengths)


def figures(sentence: str) -> list[str]:
    """Times, sizes, shares and gains that a sentence gives, where a table should."""
    return [figure.strip() for figure in FIGURE.findall(re.sub(r"`[^`]*`|\$[^$]*\$", "code", sentence))]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the first paragraph of every docstring."""
    for node in ast.walk(ast.parse(source)):
        described = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if described and (said := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), " ".join(said.split("\n\n")[0].split())


def bare(folder: Path) -> list[str]:
    """Docstrings that are not understood alone: their first word points at something else."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {said}"
        for path in sorted(folder.rglob("*.py"))
        for line, said in docstrings(path.read_text(encoding="utf-8"))
        if BARE.match(said)
    ]


if __name__ == "__main__":
    everything = []
    for page in pages():
        own = sentences(page.read_text(encoding="utf-8"))
        everything += own
        if own:
            mean, share = mean_and_long(own)
            print(
                f"{page.relative_to(ROOT)!s:44s} {len(own):5d} sentences, {mean:5.1f} words, {share:6.1%} over {LONG}"
            )
            for each in own:
                if len(words(each)) > LONG:
                    print(f"    {len(words(each))} words: {each}")
                if numbers := figures(each):
                    print(f"    {', '.join(numbers)}: {each}")
    print(*bare(ROOT / "src"), sep="\n")
