"""Write a page for each mechanism, docs/mechanisms/NAME.md: idea, pattern, settings, limits and what was measured."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from fast_attention import Attention, catalogue
from fast_attention.mechanism import Mixer
from fast_attention.refusals import granting

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import measured  # noqa: E402  beside this file, which Sphinx and the tests run from elsewhere
import patterns  # noqa: E402

IDEAS = HERE / "ideas"
SECTIONS = ("Idea", "Limits", "Known faults elsewhere")  # of a file of ideas; the last may be absent
NARROW = "\u00a0"  # a space at which no line of a table breaks
DENIED = {  # trait -> what cannot be done without it
    "causal": "No causal order: no decoder, no language model.",
    "bidirectional": "Causal only: calls without `is_causal=True` are refused, and so are encoders.",
    "padding": "No `key_mask`: sequences of one length in a batch, or packed ones.",
    "cross": "Self-attention only: as many queries as keys, of the same tokens.",
    "mask": "No arbitrary `attn_mask`, and no dropout of weights: scores are never in the open.",
    "rotary": "Rotary positions mean nothing to it: its weights are no function of `q . k`.",
    "memory": "No decoding token by token.",
    "matrix": "No attention map: its outputs are no `A v` with one matrix for all channels.",
    "compile": "Not for `torch.compile(fullgraph=True)`.",
    "export": "Not for export.",
}
HELD = {  # trait -> what follows where it is granted
    "bounded": "Its weights are for at most `max_len` tokens; longer inputs are refused.",
    "learned": "It has weights to train: until then its results say nothing of a pretrained model.",
    "random": "It holds random draws, which change its results from seed to seed; they are saved with the model.",
    "spans": "It is laid out over the padded length: a padded input is not computed as the shorter one.",
}


def sections(text: str) -> dict[str, str]:
    """The level-2 sections of a file of ideas, by heading."""
    parts = re.split(r"^## (.+)\n", text, flags=re.M)
    return {heading.strip(): body.strip() for heading, body in zip(parts[1::2], parts[2::2], strict=True)}


def ideas(name: str) -> dict[str, str]:
    """What a person wrote about a mechanism; nothing where no file is there yet."""
    path = IDEAS / f"{name}.md"
    return sections(path.read_text(encoding="utf-8")) if path.exists() else {}


def arguments(cls: type) -> dict[str, str]:
    """The meaning of each setting, from the Args of the class's docstring; one entry may name several."""
    said, found, entry = inspect.getdoc(cls) or "", {}, ""
    listed = re.search(r"^Args:\n(.*?)(?:^\w[\w ]*:\n|\Z)", said, flags=re.M | re.S)
    for line in (listed[1] if listed else "").splitlines():
        start = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
        if start:
            entry = start[1]
            found[entry] = start[2]
        elif entry and line.strip():
            found[entry] += f" {line.strip()}"
    return {name: text for entry, text in found.items() for name in entry.split(", ")}


def settings(mechanism: Any) -> list[str]:
    """A table of the settings, with their defaults."""
    said = arguments(type(mechanism))
    if not fields(mechanism):
        return ["None."]
    rows = header("setting", "default", "meaning")
    for field in fields(mechanism):
        meaning = said[field.name].replace("``", "`").replace("|", "\\|")
        rows.append(f"| `{field.name}` | `{getattr(mechanism, field.name)!r}` | {meaning} |")
    return rows


def refusals(mechanism: Any) -> list[str]:
    """What the traits deny, in words, and which mechanisms grant it, as the error says."""
    kind = Attention if isinstance(mechanism, Attention) else Mixer
    skipped = () if kind is Attention else ("cross", "mask", "rotary", "matrix")
    lines = []
    for trait, words in DENIED.items():
        if trait not in skipped and not getattr(mechanism.traits, trait):
            others = ", ".join(f"[`{name}`]({name}.md)" for name in granting(kind, trait, like=mechanism.traits)[:6])
            lines.append(f"- {words}" + (f" What would work: {others}." if others else ""))
    if kind is Mixer:
        lines.append("- It mixes whole tokens: no queries, no heads, no cross attention and no attention map.")
    lines += [f"- {words}" for trait, words in HELD.items() if getattr(mechanism.traits, trait)]
    return lines or ["Nothing that exact attention can: any mask, cross attention, causal order, padding, decoding."]


def paper(said: str) -> str:
    """The source, its arXiv numbers as links."""
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", said)


def link(record: measured.Record) -> str:
    """A record's name, linked to the file."""
    return f"[{record.name}](../../records/{record.name})"


def header(*columns: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def speed(name: str, folder: Path = measured.RECORDS) -> list[str]:
    """A table of each record that timed the mechanism: exact attention's time over its own."""
    lines, known = [], set()
    for record, rows in measured.speeds(folder):
        own = [row for row in rows if measured.of_itself(row.expression, name) and row[:4] not in known]
        if not own:
            continue
        known |= {row[:4] for row in own}
        lengths = sorted({row.length for row in own})
        lines += [f"Measured {record.date} on {record.machine} ({link(record)}):", ""]
        lines += header("settings", "pass", *(f"{n:,}" for n in lengths))
        for case in dict.fromkeys(row[:3] for row in own):
            cells = {
                row.length: f"{measured.times(row.gain)}{NARROW}({_ms(row.milliseconds)})"
                for row in own
                if row[:3] == case
            }
            words = ("training" if case[2] else "forward") + (", causal" if case[1] else "")
            lines.append(f"| `{case[0]}` | {words} | " + " | ".join(cells.get(n, "-") for n in lengths) + " |")
        lines.append("")
    return lines or ["No record has its time yet.", ""]


def _ms(value: float) -> str:
    return f"{value:,.0f}{NARROW}ms" if value >= 100 else f"{value:.3g}{NARROW}ms"


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value / measured.MIB:,.1f}{NARROW}MiB"


def memory(name: str, folder: Path = measured.RECORDS) -> list[str]:
    """Peak memory beside exact attention's, from the newest benchmark."""
    record, rows = measured.memory(name, folder)
    if not rows:
        return ["No record has its memory yet.", ""]
    lines = [f"Peak beyond weights and inputs, in brackets exact attention's ({link(record)}):", ""]
    lines += header("settings", "tokens", "forward", "training")
    for row in rows:
        exact = row["exact"] or {}
        cells = [
            _mib(row[what]) + (f" ({_mib(exact[what])})" if exact.get(what) else "")
            for what in ("forward_bytes", "training_bytes")
        ]
        lines.append(f"| `{row['name'].split(', causal')[0]}`{', causal' * row['name'].endswith(', causal')} "
                     f"| {row['length']:,} | {cells[0]} | {cells[1]} |")  # fmt: skip
    return [*lines, ""]


def quality(name: str, folder: Path = measured.RECORDS) -> list[str]:
    """Every statement of the records about its results."""
    rows = measured.qualities(name, folder)
    if not rows:
        return ["No record has its results yet.", ""]
    lines = header("measured", "settings", "result", "exact attention", "record")
    for row in rows:
        lines.append(f"| {row.question} | `{row.expression}` | {row.answer} | {row.exact} | {link(row.record)} |")
    return [*lines, ""]


def decoding(name: str, folder: Path = measured.RECORDS) -> list[str]:
    """Time of a token and size of the state, where they were measured."""
    found = measured.decoding(name, folder)
    if not found:
        return []
    lines = ["### Decoding", "", "Milliseconds of one token, and the state's size, by the tokens that stand there:", ""]
    positions = sorted({row["position"] for _, _, rows in found for row in rows})
    lines += header("settings", *(f"{n:,}" for n in positions), "record")
    for record, expression, rows in found:
        cells = {row["position"]: f"{row['milliseconds']:.2g}{NARROW}ms, {_mib(row['bytes'])}" for row in rows}
        label = f"`{expression}`" if "`" not in expression else "`" + expression.replace(" in `", "` in `", 1)
        lines.append(f"| {label} | " + " | ".join(cells.get(n, "-") for n in positions) + f" | {link(record)} |")
    return [*lines, ""]


def page(name: str, folder: Path = measured.RECORDS) -> str:
    """The page of a mechanism; its picture is drawn apart."""
    mechanism, written = catalogue.default(name), ideas(name)
    traits = mechanism.traits
    first = (inspect.getdoc(type(mechanism)) or "").split("\n\n")[0].replace("``", "`").replace("\n", " ")
    _, alt, caption = patterns.draw(name)
    parts = [f"# {name}", "", first, ""]
    parts += ["## Idea", "", written["Idea"], ""] if "Idea" in written else []
    parts += ["## Formula", "", "```text", traits.formula, "```", ""]
    parts += [f"Time `{traits.cost}` ([letters](../mechanisms.md)). Source: {paper(traits.paper)}.", ""]
    parts += ["## Pattern", "", f"![{alt}]({name}.svg)", "", caption, ""]
    parts += ["## Settings", "", *settings(mechanism), ""]
    parts += ["## What it cannot do", "", *refusals(mechanism), ""]
    parts += [line for key in SECTIONS[1:] if key in written for line in (f"## {key}", "", written[key], "")]
    parts += ["## Measured", "", "### Time", "", "Exact attention's time over its own: above 1 it is faster.", ""]
    parts += [*speed(name, folder), "### Memory", "", *memory(name, folder), *decoding(name, folder)]
    parts += ["### Quality", "", *quality(name, folder)]
    parts += ["## Class", "", "```{eval-rst}", f".. autoclass:: fast_attention.{name}", "   :no-index:", "   :members:"]
    return "\n".join([*parts, "```", ""])


def write(target: Path = HERE / "mechanisms") -> None:
    """Write all pages and pictures, and remove pages of mechanisms that are gone."""
    target.mkdir(exist_ok=True)
    for path in target.iterdir():
        if path.stem not in catalogue.names():
            path.unlink()
    for name in catalogue.names():
        for path, text in ((f"{name}.svg", patterns.draw(name)[0]), (f"{name}.md", page(name))):
            file = target / path
            if not file.exists() or file.read_text(encoding="utf-8") != text:  # Sphinx reads what changed only
                file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
