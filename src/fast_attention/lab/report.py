"""Shows a comparison: the table on the terminal, and the page."""

from __future__ import annotations

from typing import Any

from fast_attention import catalogue
from fast_attention.lab import pages, pictures, verdicts
from fast_attention.lab.comparison import Comparison, Error
from fast_attention.lab.numbers import amount, bytes_of, count, digits, factor, milliseconds, percent
from fast_attention.lab.pages import Figure, Folded, Listing, Section, Words
from fast_attention.lab.records import EXACT, PASSES, Cell
from fast_attention.lab.tables import Row, Table, Value
from fast_attention.lab.tradeoff import tradeoff
from fast_attention.mechanism import Mixer

_READING = """The fastest at the greatest length stand first, exact attention where its own time puts it. Speed is exact
attention's time divided by the mechanism's, forward pass, median over interleaved rounds, and below it the middle half
of the rounds: above 1 is faster (green), below 1 slower (red), and grey is about equal, within noise. Errors are
relative RMS against exact attention on the model's own tensors. "Pairs read" are the visible pairs of a query and a key
that the mechanism weighs at that length: where nearly all are read, a small error says little. A whole-token mixer has
no queries, keys and values: it is timed on tokens of the same width against the same exact attention, whose projections
are not counted. Hover over what is no number for its reason, over a speed for its time."""
_TRADEOFF = """a forward pass. The green line joins the Pareto front: whatever lies off it is beaten in both by
something on it. What must be trained first has no error to show."""
_LINE = "The line without dots is exact attention; green is where the mechanism beats it."
_DOTS = "The dotted line and its number mark the crossover, interpolated between the measured lengths."


def html(record: Comparison) -> str:
    """The page."""
    meta = record.meta
    lengths = ", ".join(f"{length:,}" for length in meta["lengths"])
    facts = {
        "Tensors": meta["source"],
        "Errors on": "; ".join(meta.get("error_tensors", {}).values()) or "nothing yet",
        "Times on": f"Gaussian tensors of the same {meta['heads']} heads of width {meta['head_dim']}, one sequence of "
        f"{lengths} tokens, {meta['dtype']}",
        "Direction": "causal" if meta["causal"] else "bidirectional",
        "Exact attention": "torch's fused scaled_dot_product_attention, in the same process and the same rounds",
    }
    names = [name for name in verdicts.order(record) if name != EXACT]
    sentences = [(name, verdicts.sentence(record, catalogue.parse(name))) for name in names]
    denied = [(name, ", ".join(verdicts.cannot(catalogue.parse(name))) or "-") for name in sorted(names)]
    sections = [
        _verdict(record),
        Section("Error and speed", [Words(_READING), _speeds(record)]),
        _costs(record),
        *_growth(record),
        _errors_by_length(record),
        _errors(record),
        _matrices(record),
        Section("Each in a sentence", [Listing(sentences, "each")]),
        Section("What each cannot do", [Table([], denied, plain=True)]),
        Section("Not measured", [Listing(notes)] if (notes := missing(record)) else []),
        pages.run(meta, facts),
        pages.again(meta, record.data),
    ]
    return pages.page("compare", sections, _warnings(meta))


def missing(record: Comparison) -> list[str]:
    """Why times and errors are missing."""
    errors = [f"{e.mechanism}, error at {e.length:,} tokens: {e.note}" for e in record.errors if e.note]
    return record.missing() + errors


def summary(record: Comparison) -> Table:
    """The comparison on the terminal."""
    lengths = record.meta["lengths"]
    shown, last = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]}), lengths[-1]
    at = f" at {record.length:,}" if record.length else ""
    heads = ["mechanism", f"error{at}: median / worst", "pairs read", *(f"speed at {length:,}" for length in shown)]
    rows = []
    for name in verdicts.order(record):
        cell = record.cell(name, last) or Cell(name, last)
        wins = [verdicts.wins(record, name, which) if name != EXACT else "" for which in PASSES]
        speeds = [_speed(record.cell(name, length)) for length in shown]
        error, memory = [_short_error(record, name), _reads(record, name)], [cell.peak_bytes, cell.state_bytes]
        rows.append([name, *error, *speeds, *wins, *map(bytes_of, memory)])
    return Table([*heads, "wins", "wins training", f"memory at {last:,}", "state"], rows)


def _warnings(meta: dict[str, Any]) -> list[Words]:
    warnings = pages.partial(meta, "comparison")
    load = max((meta[when] or [0.0])[0] for when in ("load_average", "load_average_after"))
    if load > meta["cores"] + 0.5:
        busy = f"The machine was busy with other work (load {load} on {meta['cores']} cores): times are uncertain."
        warnings.append(Words(busy, "warn"))
    if extension := meta.get("extension"):
        warnings.append(Words(f"Beyond the model's own context: {extension}."))
    return [*warnings, pages.where(meta, meta["source"])]


def _verdict(record: Comparison) -> Section:
    lead, points = [Words(words, "lead") for words in verdicts.headline(record)], tradeoff(record)
    if points is None:
        return Section("Verdict", lead)
    caption = f"Error against speed, {points.where}, {_TRADEOFF}"
    return Section("Verdict", [Figure(pictures.scatter(points), caption, "small"), *lead])


def _speeds(record: Comparison) -> Table:
    lengths = record.meta["lengths"]
    at = f"error at {record.length:,}" if record.length else "error"
    speeds = (f"speed at {length:,}" for length in lengths)
    heads = ["mechanism", f"{at}, median head", f"{at}, worst head", "pairs read", *speeds]
    rows = []
    for name in verdicts.order(record):
        cells = [_speed(record.cell(name, length)) for length in lengths]
        if name == EXACT:
            rows.append(Row([EXACT, Value("the reference", span=3), *cells, "", ""], "exact"))
        else:
            wins = [Value(verdicts.wins(record, name, which), "words") for which in PASSES]
            rows.append(Row([name, *_both_errors(record, name), *cells, *wins]))
    return Table([*heads, "faster", "faster in training"], rows)


def _costs(record: Comparison) -> Section:
    """Memory and the like, at the greatest length."""
    last = record.meta["lengths"][-1]
    at = next((f"{error.length:,}" for error in record.errors if error.matrix), "-")
    heads = ["mechanism", "peak memory", "operations", "decoding state", "weights", f"error of the matrix at {at}"]
    cells = [record.cell(name, last) or Cell(name, last) for name in verdicts.order(record)]
    rows = [
        Row([
            cell.mechanism, bytes_of(cell.peak_bytes), amount(cell.operations), bytes_of(cell.state_bytes),
            bytes_of(cell.weight_bytes), _matrix_error(record, cell.mechanism),
        ], "exact" if cell.mechanism == EXACT else "")
        for cell in sorted(cells, key=lambda cell: cell.peak_bytes or float("inf"))
    ]  # fmt: skip
    passes = " (forward and backward)" if record.meta["backward"] else ""
    reading = (
        f"At {last:,} tokens, the least memory first. Peak memory is what one pass holds beyond its inputs{passes}; "
    )
    return Section("Memory and work", [Words(reading + "the state is what decoding keeps."), Table(heads, rows)])


def _matrix_error(record: Comparison, name: str) -> str:
    summaries = [e.summary("matrix") for e in record.errors if e.mechanism == name and e.matrix]
    return percent(summaries[-1][0]) if summaries and summaries[-1] else "-"


def _both_errors(record: Comparison, name: str) -> list[Value]:
    mechanism: Any = catalogue.parse(name)
    error = record.error(name)
    output = error.summary() if error else None
    if mechanism.traits.approximates is None:
        return [Value(verdicts.kind(mechanism), "none", span=3)]
    if error is None or output is None:
        return [Value("not measured", "none", span=3)]
    against = "" if error.against == "Softmax" else f" vs {error.against}"
    return [Value(percent(output[0]) + against), Value(percent(output[1])), _reads(record, name)]


def _reads(record: Comparison, name: str) -> Value:
    """The fraction of the visible pairs that it weighs at the length of its error."""
    error = record.error(name)
    share = error.visible_fraction if error else None
    return Value("-", "none") if share is None else Value("all" if share == 1.0 else percent(share))


def _short_error(record: Comparison, name: str) -> Value:
    if name == EXACT:
        return Value("the reference", "strong")
    mechanism: Any = catalogue.parse(name)
    if mechanism.traits.approximates is None:
        words = "train it" if mechanism.traits.learned else "another function"
        return Value(words + (", mixer" if isinstance(mechanism, Mixer) else ""), "none")
    error = record.error(name)
    summary = error.summary() if error else None
    return Value(f"{percent(summary[0])} / {percent(summary[1])}" if summary else "not measured")


def _speed(cell: Cell | None) -> Value:
    if cell is None or cell.forward_ratio is None or cell.forward_ms is None:
        return Value(cell.status, "none", f"{cell.status}: {cell.note}") if cell else Value("-", "none")
    if cell.mechanism == EXACT:
        return Value(milliseconds(cell.forward_ms), "strong")
    kind = "even" if verdicts.even(cell) else "fast" if cell.forward_ratio < 1 else "slow"
    details = f"{milliseconds(cell.forward_ms)}, {cell.rounds} rounds{', about equal' if kind == 'even' else ''}"
    spread = " to ".join(digits(1 / edge) for edge in (cell.forward_high, cell.forward_low) if edge is not None)
    return Value(factor(cell.forward_ratio), kind, details, spread)


def _growth(record: Comparison) -> list[Section]:
    if verdicts.longest(record) is None:
        return []
    backward = record.meta["backward"]

    def figure(title: str, quantity: pictures.Quantity, crossed: pictures.Crossed = None) -> Figure:
        alt = f"{title} against length, a panel per mechanism. {_LINE}"
        unit = "milliseconds" if crossed else "MiB"
        return Figure(
            pictures.growth(record, quantity, unit, alt, crossed), f"{title}. {_LINE} {_DOTS if crossed else ''}"
        )

    times = [figure("Time of a forward pass", lambda cell: cell.forward_ms, "forward")]
    if backward:
        times.append(figure("Time of a forward and backward pass", lambda cell: cell.training_ms, "training"))
    title = f"Peak memory of a forward {'and backward ' if backward else ''}pass"
    memory = figure(title, lambda cell: cell.peak_bytes and cell.peak_bytes / 2**20)
    numbers = Folded("Every time and peak", every(record))
    return [Section("Time against length", times), Section("Memory against length", [memory, numbers])]


def every(record: Comparison) -> Table:
    """The numbers of the pictures: a row for a mechanism and a length."""
    heads = ["mechanism", "tokens", "forward", "forward and backward", "peak memory", "rounds"]
    cells = [cell for name in verdicts.order(record) for cell in record.cells if cell.mechanism == name]
    rows = []
    for cell in (cell for cell in cells if cell.status == "measured"):
        spent = [milliseconds(cell.times(which).ms) for which in PASSES]
        rows.append([cell.mechanism, count(cell.length), *spent, bytes_of(cell.peak_bytes), count(cell.rounds)])
    return Table(heads, rows)


def _errors_by_length(record: Comparison) -> Section:
    """Every error beside its length and the pairs that are read there."""
    lengths = sorted({error.length for error in record.errors if error.output})
    rows = []
    for name in verdicts.order(record):
        errors = [record.error(name, length) for length in lengths]
        if any(errors):
            rows.append([name, *map(_error_and_pairs, errors)])
    title = "Error against length"
    words = Words("Median head, and below it the visible pairs that are read: speed counts at the same length only.")
    return Section(title, [words, Table(["mechanism", *(f"{n:,} tokens" for n in lengths)], rows)] if rows else [])


def _error_and_pairs(error: Error | None) -> Value:
    summary = error.summary() if error else None
    if error is None or summary is None:
        return Value("-", "none")
    share = error.visible_fraction
    pairs = "" if share is None else "all pairs" if share == 1.0 else f"{percent(share)} of pairs"
    return Value(percent(summary[0]), small=pairs)


def _errors(record: Comparison) -> Section:
    shown = [error for name in record.mechanisms if (error := record.error(name)) is not None]
    where = f"at {record.length or 0:,} tokens"
    caption = f"Relative RMS error of every head's output {where}; on the right median and worst."
    if not shown:
        return Section("Error of every head", [])
    picture = pictures.head_errors(shown, layers := record.meta["layers"])
    most = max(len(row) for error in shown for row in error.output)
    rows = [
        [error.mechanism, layer, *(percent(value) for value in row), *[""] * (most - len(row))]
        for error in shown
        for layer, row in zip(layers, error.output, strict=True)
    ]
    every = Table(["mechanism", "layer", *(f"head {head}" for head in range(most))], rows, left=[1])
    return Section("Error of every head", [Figure(picture, caption), Folded("Every head's error", every)])


def _matrices(record: Comparison) -> Section:
    held = record.matrices
    if held is None:
        return Section("Attention matrices", [])
    caption = (
        f"{held.where}. Rows are queries, columns keys; one colour scale (square root); negative weights shown as 0."
    )
    return Section("Attention matrices", [Figure(pictures.matrices(held), caption)])
