"""Long documents of Debian packages, as plain text: what no model of this library is trained on."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Manual(NamedTuple):
    """A document, with the package that it is of."""

    package: str
    name: str
    text: str


class Package(NamedTuple):
    """Where a package keeps its documents, and their licence."""

    files: str
    licence: str
    plain: Callable[[str], str]


def pod(text: str) -> str:
    """Perl's documentation without its commands and formatting codes."""
    text = re.sub(r"(?m)^=(?!cut|over|back|pod|encoding|begin|end|for)\w+ ?|^=\w+.*$", "", text)
    return re.sub(r"[A-Z]<+ ?([^<>]*?) ?>+", r"\1", text)


def roff(text: str) -> str:
    """A manual page without its requests, comments and escapes."""
    lines = []
    for line in text.splitlines():
        if line.startswith(("'\\\"", '.\\"')):
            continue
        request = re.match(r"[.'] *(\w*) ?(.*)", line)
        if request and request[1] not in ("B", "I", "BR", "BI", "IR", "IB", "RB", "RI", "SH", "SS", "SM"):
            lines += [""] if request[1] in ("PP", "P", "LP", "TP", "IP", "sp") else []
            continue
        words = request[2].replace('"', "") if request else line
        lines.append(re.sub(r"\\f.|\\[&|/c%:]|\\\*\(..", "", words).replace("\\-", "-").replace("\\e", "\\"))
    return "\n".join(lines)


PACKAGES = {
    "perl-doc": Package("usr/share/perl/*/pod/*.pod", "Artistic or GPL-1+", pod),
    "git-doc": Package("usr/share/doc/git-doc/**/*.txt", "GPL-2", str),
    "debian-policy": Package("usr/share/doc/debian-policy/**/*.txt*", "GPL-2+", str),
    "manpages-dev": Package("usr/share/man/man[23]/*.[23].gz", "Linux-man-pages-copyleft and others", roff),
    "manpages": Package("usr/share/man/man7/*.7.gz", "Linux-man-pages-copyleft and others", roff),
}


def manuals(root: Path, tokenizer: Any, shortest: int, longest: int, count: int) -> list[Manual]:
    """Up to so many documents with a number of tokens in range, in an order that mixes the packages.

    Raises:
        SystemExit: There are none under ``root``.
    """
    read = sorted(_all(root), key=lambda each: hashlib.sha256(f"{each.package} {each.name}".encode()).digest())
    chosen: dict[str, Manual] = {}
    for each in read:
        if len(chosen) == count:
            break
        tokens = len(tokenizer(each.text, add_special_tokens=False, verbose=False)["input_ids"])
        if shortest <= tokens <= longest:
            chosen.setdefault(each.text, each)
    if not chosen:
        raise SystemExit(f"no documents under {root}: unpack {', '.join(PACKAGES)} there (dpkg -x)")
    return [*chosen.values()]


def _all(root: Path) -> Iterator[Manual]:
    for name, package in PACKAGES.items():
        for path in sorted(root.glob(package.files)):
            if path.is_file():
                raw = path.read_bytes()
                text = gzip.decompress(raw) if path.suffix == ".gz" else raw
                yield Manual(name, path.stem, package.plain(text.decode("utf-8", "replace")).strip())
