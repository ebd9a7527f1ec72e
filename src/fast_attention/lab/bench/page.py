"""The picture page of a benchmark: one self-contained HTML file."""

from __future__ import annotations

import shlex
from html import escape

from fast_attention.lab import report
from fast_attention.lab.bench import drawings, figures, terminal
from fast_attention.lab.bench.entrants import OURS
from fast_attention.lab.bench.record import Benchmark, Row
from fast_attention.lab.bench.run import percent_of_ceiling
from fast_attention.lab.numbers import bytes_of, milliseconds
from fast_attention.lab.records import Cell
from fast_attention.lab.report import figure, section

_SPEED = """<p>Speed is the time of exact attention divided by the row's own, in the same interleaved rounds (median of
the rounds' ratios): above 1 is faster (green), below slower (red). Exact attention is torch's fused
scaled_dot_product_attention, causal for causal rows; rows that take whole tokens (mixers, and attentions
&ldquo;projected&rdquo;, between linear maps) are compared with Linear, exact attention, Linear of the same width. A
star marks a peer with a fault of its own (listed below); hover for times.</p>"""
_CEILING = """Operations counted from the tensors (2 per multiply-add, 1 per element written, fused kernels by torch's
formulas) divided by the fastest time, in percent of the rate of one 2048-wide matrix product in the same run.
Mechanisms that spend their time on exponentials, sorts or memory cannot come near 100."""


def html(record: Benchmark) -> str:
    """The page."""
    length = record.summary.get("common_length")
    parts = [_run(record), _lead(record)]
    if length is not None:
        parts += [_pictures(record, length), _crossovers(record), _table(record), _times(record)]
    parts += [_faults(record), _missing(record), _again(record)]
    return report.page("bench", "\n".join(parts))


def _run(record: Benchmark) -> str:
    meta = record.meta
    status = meta["status"]
    warning = "" if status == "complete" else f"<p class=warn>This benchmark was {escape(status)}: it is partial.</p>"
    rows = {
        "Tensors": f"Gaussian, batch {meta['batch']}, {meta['heads']} heads of width {meta['head_dim']}, "
        f"{', '.join(f'{n:,}' for n in meta['lengths'])} tokens, {meta['dtype']}, seed {meta['seed']}",
        "Machine": f"{meta['hardware']}, {meta['device']}, {meta['threads']} of {meta['cores']} threads, "
        f"load average {meta['load_average']} before and {meta.get('load_average_after')} after",
        "Versions": f"fast-attention {meta['fast_attention']} ({meta['commit'] or 'no commit known'}), "
        f"torch {meta['torch']}, Python {meta['python']}, {meta['platform']}",
        "Memory": meta["memory"],
        "When": f"{meta['started']} to {meta.get('finished', 'unfinished')}, {meta.get('seconds', 0):,.0f} s",
    }
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in rows.items())
    heads = ("gemm_gflops", "bmm_gflops", "exp_gelem_s", "copy_gb_s", "fresh_gb_s", "empty_us")
    words = ("", "matrix product, GFLOP/s", "small batched products, GFLOP/s", "exp, G numbers/s", "copy, GB/s",
             "fresh memory, GB/s", "one small operation, us")  # fmt: skip
    body = "".join(
        f"<tr><th scope=row>{escape(found['when'])}</th>" + "".join(f"<td>{found[h]:.3g}</td>" for h in heads) + "</tr>"
        for found in record.ceilings
    )
    limits = _grid(words, body)
    return warning + section("What was run", f"<dl>{cells}</dl>") + section("The machine's limits in this run", limits)


def _grid(heads: tuple[str, ...] | list[str], body: str) -> str:
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in heads)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _lead(record: Benchmark) -> str:
    words = [line for line in terminal.remarks(record) if line.startswith(("Forward", "Decoding"))]
    return section("In short", *(f"<p class=lead>{escape(line)}.</p>" for line in words)) if words else ""


def _pictures(record: Benchmark, length: int) -> str:
    said = "Above the line at 1 it beats exact attention; ours solid, peers dashed, * a peer with a fault of its own."
    parts = [section("Speed against length", figure(drawings.speeds(record, "forward"), f"Forward pass. {said}"))]
    if record.meta["backward"]:
        parts.append(figure(drawings.speeds(record, "training"), f"Forward and backward pass. {said}"))
    if figures.matches(record, length):
        words = (
            f"At {length:,} tokens: ours beside the best peer of the same kind and direction, and the factor between."
        )
        parts.append(section("Beside the best peer", figure(drawings.beside_peers(record, length), words)))
    parts.append(section("Percent of the ceiling", figure(drawings.ceilings(record, length), _CEILING)))
    memory, decoding = drawings.memory(record), drawings.decoding(record)
    if memory is not None:
        words = "Peak growth of resident memory in a fresh process over the bytes of inputs and output: flat is linear."
        parts.append(section("Memory", figure(memory, words), _slopes(record)))
    if decoding is not None:
        words = "Median time of one token after so many were read: flat lines do not slow down."
        parts.append(section("Decoding", figure(decoding, words)))
    return "\n".join(parts)


def _slopes(record: Benchmark) -> str:
    body = ""
    for name, slopes in record.summary["memory_slope"].items():
        cells = "".join(f"<td>{'-' if slopes[w] is None else format(slopes[w], '.2f')}</td>" for w in figures.PASSES)
        body += f"<tr><th scope=row>{escape(name)}</th>{cells}</tr>"
    return _grid(["memory grows with the power", "forward", "forward and backward"], body)


def _crossovers(record: Benchmark) -> str:
    body = ""
    for row in record.rows:
        if row.owner == OURS and row.check != "wrong":
            cells = "".join(f"<td>{escape(terminal.wins(record, row.name, which))}</td>" for which in figures.PASSES)
            body += f"<tr><th scope=row>{escape(row.name)}</th>{cells}</tr>"
    words = "<p>The length from which on it is faster at every measured length, interpolated on logarithmic scales.</p>"
    return section("Faster from", words, _grid(["", "forward", "forward and backward"], body))


def _table(record: Benchmark) -> str:
    lengths = sorted({cell.length for cell in record.cells})
    body = ""
    for row in record.rows:
        cells = "".join(_speed(record.cell(row.name, length), which) for length in lengths for which in figures.PASSES)
        body += f"<tr><th scope=row>{escape(_title(row))}</th>{cells}</tr>"
    heads = ["", *(f"{n:,} {'fwd' if which == 'forward' else 'fwd+bwd'}" for n in lengths for which in figures.PASSES)]
    return section("Speeds", _SPEED, _grid(heads, body))


def _title(row: Row) -> str:
    return ("" if row.owner == OURS else "· ") + row.name + terminal.MARKS[row.check]


def _speed(cell: Cell | None, which: figures.Pass) -> str:
    value = figures.speed(cell, which)
    if cell is None or value is None:
        return f'<td title="{escape(f"{cell.status}: {cell.note}" if cell else "")}">-</td>'
    median, least = _pair(cell, which)
    kind = "fast" if value > 1 else "slow"
    title = f"{milliseconds(median)}, least {milliseconds(least)}, {cell.rounds} rounds"
    return f'<td class={kind} title="{title}">{terminal.times(value)}</td>'


def _pair(cell: Cell, which: figures.Pass) -> tuple[float, float]:
    if which == "forward":
        return cell.forward_ms or 0.0, cell.forward_best_ms or 0.0
    return cell.training_ms or 0.0, cell.training_best_ms or 0.0


def _times(record: Benchmark) -> str:
    """Everything measured, one line for a row and a length."""
    body = ""
    names = [*dict.fromkeys(row.reference for row in record.rows), *(row.name for row in record.rows)]
    for name in names:
        for length in sorted({cell.length for cell in record.cells}):
            cell = record.cell(name, length)  # of a line to beat, which ran in several groups, the first
            if cell is not None and cell.status == "measured":
                body += f"<tr><th scope=row>{escape(name)}</th><td>{cell.length:,}</td>{_numbers(record, cell)}</tr>"
    heads = ["", "tokens", "fwd median", "least", "fwd+bwd median", "least", "rounds", "% of GEMM", "% fwd+bwd",
             "peak fwd", "peak fwd+bwd", "weights"]  # fmt: skip
    table = _grid(heads, body)
    return section("Times and memory", f"<details><summary>Every row and length</summary>{table}</details>")


def _numbers(record: Benchmark, cell: Cell) -> str:
    shares = [percent_of_ceiling(record, cell, which) for which in figures.PASSES]
    times = [*_pair(cell, "forward"), *_pair(cell, "training")]
    peaks = [figures.memory_of(record, cell.mechanism, w).get(cell.length) for w in figures.PASSES]
    texts = [milliseconds(t) if t else "-" for t in times]
    texts += [str(cell.rounds), *("-" if share is None else f"{share:.2g}" for share in shares)]
    texts += [bytes_of(peak) for peak in peaks] + [bytes_of(cell.weight_bytes)]
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def _faults(record: Benchmark) -> str:
    lines = [f"<li><code>{escape(r.name)}</code> {escape('; '.join(r.faults))}</li>" for r in record.rows if r.faults]
    notes = [f"<li><code>{escape(r.name)}</code> {escape(r.note)}</li>" for r in record.rows if r.note]
    parts = [section("Checks that failed", f"<ul>{''.join(lines)}</ul>")] if lines else []
    return "\n".join([*parts, section("What peers do differently", f"<ul>{''.join(notes)}</ul>") if notes else ""])


def _missing(record: Benchmark) -> str:
    said = dict.fromkeys(
        f"{cell.mechanism} at {cell.length:,} tokens: {cell.status}, {cell.note}"
        for cell in record.cells
        if cell.status != "measured"
    )
    said |= dict.fromkeys(f"{w.name}, memory at {w.length:,} tokens: {w.note}" for w in record.weights if w.note)
    said |= dict.fromkeys(f"{s.name}, decoding with batch {s.batch}: {s.note}" for s in record.steps if s.note)
    rows = "".join(f"<li>{escape(words)}</li>" for words in said)
    return section("Not measured", f"<ul>{rows}</ul>") if rows else ""


def _again(record: Benchmark) -> str:
    command = escape(shlex.join(record.meta["command"]))
    return section("How to reproduce", f"<pre>{command}</pre>", "<p>All numbers: bench.json beside this page.</p>")
