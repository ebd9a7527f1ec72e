"""Write the tables of docs/choose.md and draw its pictures, from the newest records: ``python docs/choose.py``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fast_attention import files

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import choose_learned  # noqa: E402  beside this file, which tests run from elsewhere
import choose_pictures  # noqa: E402
import measured  # noqa: E402

PAGE = HERE / "choose.md"
MARK = re.compile(r"(<!-- choose.py: (\w+) -->\n).*?(\n<!-- end -->)", re.S)
FAR = 4096  # tokens at which every mechanism was timed


class Need(NamedTuple):
    """A row of the table of needs: the words for it, the mechanism, what its figures are, and where to read on."""

    words: str
    take: str
    figure: Callable[[Path], str]
    read: str


def gain(expression: str, is_causal: bool = False, training: bool = False, length: int = FAR) -> Callable[[Path], str]:
    """Exact attention's time over a mechanism's, in the newest record that has this case."""

    def figure(folder: Path) -> str:
        for record, rows in measured.speeds(folder):
            for row in rows:
                if row[:4] == (expression, is_causal, training, length):
                    words = f"{', causal' * is_causal}{', training' * training}"
                    return f"{row.gain:.1f}x at {length:,} tokens{words} ({measured.link(record)})"
        raise LookupError(f"no record times {expression} at {length} tokens")

    return figure


def converted(kind: str) -> Callable[[Path], str]:
    """The cosine of a conversion's embeddings, untrained and trained."""

    def figure(folder: Path) -> str:
        record = measured.records(f"convert-{kind}", folder)[-1]
        before, after = (record.held["figures"][stage]["sentence_cosine"] for stage in ("swapped", "tuned"))
        return f"cosine {before:.3f}, trained {after:.3f} ({measured.link(record)})"

    return figure


def untrained(expression: str) -> Callable[[Path], str]:
    """The cosine of a MiniLM's sentence embeddings with the mechanism swapped in and nothing trained, and its speed."""

    def figure(folder: Path) -> str:
        record = measured.records("costs", folder)[-1]
        row = next(row for row in record.held["rows"] if row["mechanism"] == expression)
        tokens, speeds = record.held["meta"]["length"], measured.attention_gains(record, FAR)
        return (
            f"cosine {row['sentence_cosine']:.3f} at {tokens} tokens, {speeds[expression]:.1f}x at {FAR:,} "
            f"({measured.link(record)})"
        )

    return figure


def recalled(way: str) -> Callable[[Path], str]:
    """How often the right document of the retrieval benchmark came first."""

    def figure(folder: Path) -> str:
        record = measured.records("retrieval*", folder)[-1]
        found = {row["way"]: row["recall_at_1"] for row in record.held["rows"]}
        own = next(value for key, value in found.items() if way in key)
        cut = next(value for key, value in found.items() if "cut to" in key)
        return f"the right document first in {own:.0%}, {cut:.0%} where texts are cut ({measured.link(record)})"

    return figure


def state(expression: str) -> Callable[[Path], str]:
    """What a token costs late in ``generate()``, beside exact attention with its cache."""

    def figure(folder: Path) -> str:
        record = measured.records("generation", folder)[-1]
        own, exact = (record.held["mechanisms"][name][-1] for name in (expression, "Softmax()"))
        return (
            f"{own['milliseconds']:.1f} ms a token for {exact['milliseconds']:.1f} at {own['position']:,}, "
            f"{own['bytes'] / measured.MIB:.2f} MiB for {exact['bytes'] / measured.MIB:.0f} ({measured.link(record)})"
        )

    return figure


def learned(study: str, expression: str, exact: str | None = None) -> Callable[[Path], str]:
    """What a mechanism learnt in a study, beside exact attention, of another study where it learnt more there."""

    def figure(folder: Path) -> str:
        record = measured.records(f"study-{study}", folder)[-1]
        means, metric = measured.study_means(record), record.held["meta"]["metric"]
        beside = record if exact is None else measured.records(f"study-{exact}", folder)[-1]
        best, link = measured.study_means(beside)["Softmax()"], "" if exact is None else f", {measured.link(beside)}"
        return f"{means[expression]:.2f} {metric} for exact attention's {best:.2f} ({measured.link(record)}{link})"

    return figure


def told(words: str) -> Callable[[Path], str]:
    """Words where there is no figure."""
    return lambda folder: words


NEEDS = (
    Need("texts of up to some 500 tokens", "Softmax()", told("what comes near it is no faster there"), "model"),
    Need("exact attention's results at any length", "Softmax()", told("no approximation gives them"), "model"),
    Need("a pretrained encoder, no training", "BigBird()", untrained("BigBird()"), "swap"),
    Need(
        "what is near in meaning, wherever it stands", "Selected()", gain("Selected()"), "swap",
    ),
    Need("a pretrained encoder, trained back in minutes",
         "Hybrid(far=LearnedFeatures(num_features=32, scale=0.5))", converted("hybrid"), "convert"),
    Need("documents beyond the positions of a model", "BlockLocal(block_size=256)",
         recalled("BlockLocal(block_size=256)"), "../long"),
    Need("an encoder from scratch, fixed length", "Linformer()", gain("Linformer()"), "model"),
    Need("an encoder from scratch, long sequences (proteins)", "Local(window=64) + FavorPlus(num_features=64)",
         learned("proteins", "Local(window=64) + FavorPlus(num_features=64)"), "train"),
    Need("softmax estimated without training", "Nystrom()", gain("Nystrom()"), "swap"),
    Need("a language model from scratch, long contexts", "WKV()", learned("byte-lm-learned", "WKV()", "byte-lm"),
         "train"),
    Need("the same with exact attention to near tokens", "Local(window=64)", learned("byte-lm", "Local(window=64)"),
         "train"),
    Need("recall of far tokens in a decoder", "Local(window=(1, 0)) + LinearAttention()",
         learned("mqar", "Local(window=(1, 0)) + LinearAttention()"), "train"),
    Need("decoding from a state of constant size", "LinearAttention()", state("LinearAttention()"), "decode"),
    Need("the same with decay: recent tokens count more", "WKV()", gain("WKV()", is_causal=True), "decode"),
    Need("linear attention that prefers near keys, encoders too", "CosFormer()", gain("CosFormer()"), "swap"),
    Need("a state that grows with the logarithm only", "LogLinearAttention()",
         gain("LogLinearAttention()", is_causal=True), "decode"),
    Need("images, spectrograms: each pixel its neighbourhood", "Local2d(height=64, width=64)",
         gain("Local2d(height=64, width=64)"), "images"),
    Need("images in blocks, as Swin has them", "BlockLocal2d(56, 56)", told("no record yet"), "images"),
    Need("scores with positions: BLOOM, MPT", "Local(window=64, bias=ALiBi())",
         gain("Local(window=64, bias=ALiBi())"), "positions"),
    Need("scores with positions: T5", "Local(window=64, bias=T5Buckets())", told("as with ALiBi, and learned"),
         "positions"),
    Need("models with learned sinks (gpt-oss)", "Local(window=64, sinks=True)", told("windows, blocks, "
         "`Selected` and `Hybrid` take them"), "swap"),
    Need("the same bits in any batch and split", "Softmax()", told("`with fast_attention.batch_invariant():`, any "
         "mechanism, slower"), "decode"),
)  # fmt: skip


def needs(folder: Path = measured.RECORDS) -> str:
    """The table of needs."""
    lines = ["| you need | take | measured |", "|---|---|---|"]
    for need in NEEDS:
        page = need.read.removeprefix("../") if need.read.startswith("../") else f"guides/{need.read}"
        lines.append(f"| [{need.words}]({page}.md) | {measured.linked(need.take)} | {need.figure(folder)} |")
    return "\n".join(lines)


def lengths(folder: Path = measured.RECORDS) -> str:
    """The speeds of the newest benchmark by length, and of what was timed at one length only."""
    record, rows = _benchmark(folder)
    columns = _columns(rows)
    parts = [f"Exact attention's time over the mechanism's, forward; above 1 it is faster. {_measured(record)}", ""]
    for is_causal, title in ((False, "not causal"), (True, "causal")):
        parts += [f"| {title} | " + " | ".join(f"{n:,}" for n in columns) + " |", "|---" * (1 + len(columns)) + "|"]
        for name, cells in _by_name(rows, is_causal).items():
            told = (measured.times(cells[n]) if n in cells else "-" for n in columns)
            parts.append(f"| {measured.linked(name)} | {' | '.join(told)} |")
        parts.append("")
    apart: dict[str, dict[bool, str]] = {}
    for source, found in measured.speeds(folder):
        for row in found if source != record else ():
            if row.length == FAR and not row.training:
                figure = f"{measured.times(row.gain)} ({measured.link(source)})"
                apart.setdefault(row.expression, {}).setdefault(row.is_causal, figure)
    parts += [f"| measured apart, at {FAR:,} tokens | not causal | causal |", "|---|---|---|"]
    parts += [
        f"| {measured.linked(name)} | {own.get(False, '-')} | {own.get(True, '-')} |" for name, own in apart.items()
    ]
    return "\n".join(parts)


def quality(folder: Path = measured.RECORDS) -> str:
    """What swaps do to a pretrained model, and what mechanisms learn from scratch."""
    record = measured.records("costs", folder)[-1]
    rows = [row for row in record.held["rows"] if "sentence_cosine" in row]
    best = sorted(rows, key=lambda row: -row["sentence_cosine"])
    lines = [f"Swapped into a MiniLM, untrained: cosine of the embeddings of {record.held['meta']['passages']} "
             f"passages of {record.held['meta']['length']} tokens. {_measured(record)}", ""]  # fmt: skip
    lines += ["| at least | mechanisms |", "|---|---|"]
    edges = (0.99, 0.9, 0.7, 0.5, -1.0)
    for upper, edge in zip((2.0, *edges), edges, strict=False):
        within = [row for row in best if edge <= row["sentence_cosine"] < upper]
        names = ", ".join(
            f"{measured.linked(row['mechanism'])}{' +' * row['learned']} {row['sentence_cosine']:.3f}" for row in within
        )
        lines.append(f"| {edge if edge > 0 else 'less'} | {names} |")
    lines += ["", "Those marked + have weights of their own, which say nothing before they are trained.", ""]
    lines += ["| trained from scratch | result, the best first | record |", "|---|---|---|"]
    apart = [study for group in measured.together(folder) for study in group]
    for study in measured.newest_studies(folder):
        if study in apart:
            continue
        means, meta = measured.study_means(study), study.held["meta"]
        sign = -1 if meta["metric"] == "accuracy" else 1
        ranked = sorted(means.items(), key=lambda item, sign=sign: sign * item[1])
        told = ", ".join(f"`{name}` {mean:.3f}" for name, mean in ranked).replace("`Local(window=0)`", "no mixing")
        lines.append(
            f"| `{meta['task']}`, {measured.budget(meta)}: {meta['metric']} | {told} | {measured.link(study)} |"
        )
    return "\n".join(lines)


def machines(folder: Path = measured.RECORDS) -> str:
    """On which machines the records were made."""
    seen: dict[str, list[measured.Record]] = {}
    for record in measured.records("*", folder):
        meta = record.held.get("meta", {})
        if "hardware" in meta:
            where = f"{meta['hardware']}, {meta.get('device', 'cpu')}, {meta.get('cores', '?')} cores"
            seen.setdefault(where, []).append(record)
    lines = ["| machine | records | from | to |", "|---|---|---|---|"]
    lines += [f"| {where} | {len(own)} | {own[0].date} | {own[-1].date} |" for where, own in seen.items()]
    return "\n".join(lines)


TABLES = {"needs": needs, "lengths": lengths, "quality": quality, "learned": choose_learned.table, "machines": machines}


def page(folder: Path = measured.RECORDS) -> str:
    """The page with its tables made anew."""
    return MARK.sub(lambda match: f"{match[1]}{TABLES[match[2]](folder)}{match[3]}", PAGE.read_text(encoding="utf-8"))


def _benchmark(folder: Path) -> tuple[measured.Record, list[measured.Speed]]:
    record = measured.records("bench", folder)[-1]
    return record, [row for row in measured.bench_speeds(record) if not row.training]


def _columns(rows: list[measured.Speed]) -> list[int]:
    return sorted({row.length for row in rows if row.length >= 256})


def _by_name(rows: list[measured.Speed], is_causal: bool) -> dict[str, dict[int, float]]:
    """Gains by length of each mechanism, the fastest at the longest common length first."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.is_causal == is_causal:
            found.setdefault(row.expression, {})[row.length] = row.gain
    return dict(sorted(found.items(), key=lambda item: -item[1].get(FAR, 0.0)))


def _measured(record: measured.Record) -> str:
    return f"Measured {record.date} on {record.machine} ([{record.name}](../records/{record.name}))."


def stale() -> bool:
    """Whether the page or a picture says something else than the newest records."""
    return page() != PAGE.read_text(encoding="utf-8") or choose_pictures.stale()


if __name__ == "__main__":
    files.write(PAGE, page())
    choose_pictures.main()
