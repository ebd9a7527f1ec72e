"""Equations as MathML, written when the site is built: pages need no script and no third party to show them."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

STYLES = {"bold": "MATHEMATICAL BOLD {}", "double-struck": "DOUBLE-STRUCK {}", "script": "MATHEMATICAL SCRIPT {}"}
STYLED = re.compile(r'<(m[in]) mathvariant="([a-z-]+)">(\w)<')
PRIME = re.compile(r"(\\mathbf \w|\\[a-zA-Z]+|\w)'")
FUNCTION = re.compile(r"(<mi>(?:cos|exp|log)</mi>)(?!<mo )")  # before an argument without parentheses


def _letter(styled: re.Match[str]) -> str:
    """A letter of a style, as Unicode has it: browsers ignore the attribute of MathML that names the style."""
    element, style, letter = styled.groups()
    kind = "DIGIT" if letter.isdigit() else "CAPITAL" if letter.isupper() else "SMALL"
    name = unicodedata.name(letter).split()[-1]
    return f"<{element}>{unicodedata.lookup(STYLES[style].format(f'{kind} {name}'))}<"


def mathml(latex: str, display: str) -> str:
    """An equation in LaTeX as MathML that browsers show without help.

    Raises:
        ValueError: Where a command was not understood, which would show as LaTeX.
    """
    plain = re.sub(r"\\(begin|end)\{gathered\}", r"\\\1{matrix}", latex)  # latex2mathml has no `gathered`
    plain = PRIME.sub("{\\1\\\\text{\u2032}}", plain)  # no superscript, where most fonts have it too small to see
    text = STYLED.sub(_letter, convert(plain, display=display)).replace("<mtable>", '<mtable displaystyle="true">')
    text = text.replace("<mtext>\u2032<", '<mtext class="prime">\u2032<')
    if left := re.findall(r"\\[a-zA-Z]+|mathvariant=\S+", text):
        raise ValueError(f"{latex}: no MathML for {', '.join(left)}")
    return FUNCTION.sub(r'<mrow>\1<mspace width="0.17em"/></mrow>', text)


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    """An equation of its own line, with the number of its ``\\tag`` at the right."""
    latex, tagged, tag = node.astext().strip().partition("\\tag{")
    number = f'<span class="eqno">({tag.rstrip("}")})</span>' if tagged else ""
    writer.body.append(f'<div class="math"><div>{mathml(latex, "block")}</div>{number}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Name the renderer that ``html_math_renderer`` asks for."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
