"""What the records say of speed, memory and quality, by the names that mechanisms have today."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fast_attention import catalogue

RECORDS = Path(__file__).resolve().parent.parent / "records"
MIB = 2**20
FAR = 4096  # tokens at which every mechanism was timed
EXACT, ALONE = "Softmax()", "Local(window=0)"  # the controls of every study
NAMES = ("mechanism", "name", "model")  # the columns of a record that may name a mechanism


class Record(NamedTuple):
    """A record: its file's name, and what it holds of mechanisms that the library has today."""

    name: str
    held: dict[str, Any]

    @property
    def meta(self) -> dict[str, Any]:
        """Settings, machine and versions."""
        return self.held["meta"]

    @property
    def date(self) -> str:
        """The day in the file's name."""
        return self.name[:10]

    @property
    def link(self) -> str:
        """The date as a link to the file, from a page in docs/."""
        return f"[{self.date}](../records/{self.name})"

    @property
    def machine(self) -> str:
        """The processor, threads and version of torch."""
        return f"{self.meta['hardware']}, {self.meta['threads']} threads, torch {self.meta['torch']}"


@functools.cache
def today(name: str, date: str) -> str:
    """The name that a mechanism of a record has today, other names as they are; empty where the mechanism is gone.

    Until 28 November 2026 ``Hybrid`` had a sliding window unless told otherwise, and records leave that out.
    """
    if date <= "2026-11-28":
        name = re.sub(r"Hybrid\((?!near=)", "Hybrid(near=Local(window=64), ", name).replace(", )", ")")
    for part in name.split(" + "):
        if expression := re.match(r"[A-Z]\w*\(.*\)", part):
            try:
                catalogue.parse(expression[0])
            except (ValueError, TypeError, NotImplementedError):
                return ""
    return name


@functools.cache
def read(path: Path) -> Record:
    """The record in a file, by today's names and without the rows of mechanisms that are gone."""
    date, gone = path.name[:10], object()

    def known(held: dict[str, Any]) -> Any:
        names = {key: today(name, date) for key, name in held.items() if key in NAMES and isinstance(name, str)}
        if not all(names.values()):
            return gone
        parts = {today(key, date): part for key, part in (held | names).items() if part is not gone}
        lists = {key: [each for each in part if each is not gone] for key, part in parts.items() if type(part) is list}
        return {key: part for key, part in (parts | lists).items() if key}

    return Record(path.name, json.loads(path.read_text(encoding="utf-8"), object_hook=known))


def records(kind: str) -> list[Record]:
    """The records of a kind (``bench``, ``study-*``), the newest last."""
    paths = sorted(RECORDS.glob(f"????-??-??-{kind}.json"), key=lambda path: path.stem)  # a day's second one is "-2"
    return [record for record in map(read, paths) if kind != "convert-*" or "conversion" in record.held]


def newest(kind: str) -> Record:
    """The last record of a kind."""
    return records(kind)[-1]


# Speed and memory


class Speed(NamedTuple):
    """One timed case: exact attention's time over the mechanism's, and the mechanism's milliseconds."""

    expression: str
    is_causal: bool
    training: bool
    length: int
    gain: float
    milliseconds: float


def bench_speeds(record: Record) -> list[Speed]:
    """The speeds of a benchmark's mechanisms, each beside exact attention of its order."""
    own = {row["name"]: row["is_causal"] for row in record.held["rows"] if row["owner"] == "fast-attention"}
    own = {name: is_causal for name, is_causal in own.items() if ", projected" not in name}
    found = []
    for cell in record.held["cells"]:
        for what in ("forward", "training"):
            if cell["mechanism"] in own and cell["status"] == "measured" and (ratio := cell[f"{what}_ratio"]):
                name, is_causal = cell["mechanism"].removesuffix(", causal"), own[cell["mechanism"]]
                gain, milliseconds = 1 / ratio, cell[f"{what}_ms"]
                found.append(Speed(name, is_causal, what == "training", cell["length"], gain, milliseconds))
    return found


def speeds() -> list[tuple[Record, list[Speed]]]:
    """The newest benchmark and all records beside exact attention, the newest first."""
    found = [(record, bench_speeds(record)) for record in records("bench")[-1:]]
    keys = ("mechanism", "is_causal", "training", "length", "ratio", "new_ms")
    for record in records("against-exact*"):
        rows = [[row[key] for key in keys] for row in record.held["rows"] if row.get("ratio")]
        found.append((record, [Speed(*case, 1 / ratio, ms) for *case, ratio, ms in rows]))
    return sorted(found, key=lambda each: each[0].name.removesuffix(".json"), reverse=True)  # "-2" is the newer


def at_length(length: int = FAR) -> dict[str, dict[bool, tuple[float, Record]]]:
    """The newest forward gain of every mechanism at one length, by causal order."""
    found: dict[str, dict[bool, tuple[float, Record]]] = {}
    for record, rows in speeds():
        for row in rows:
            if row.length == length and not row.training:
                found.setdefault(row.expression, {}).setdefault(row.is_causal, (row.gain, record))
    return found


def memory(name: str) -> list[tuple[str, int, list[float | None]]]:
    """Peak bytes in the newest benchmark by settings and length: forward, exact attention's, training, exact's."""
    rows = [row for row in newest("bench").held["weights"] if ", projected" not in row["name"]]
    held = {(row["name"], row["length"]): row for row in rows}
    found = []
    for (label, length), row in held.items():
        if label.startswith(f"{name}(") and row.get("forward_bytes"):
            exact = held.get(("exact attention" + ", causal" * label.endswith(", causal"), length), {})
            peaks = [each.get(what) for what in ("forward_bytes", "training_bytes") for each in (row, exact)]
            found.append((label, length, peaks))
    return found


def attention_gains(record: Record, length: int) -> dict[str, float]:
    """The original's time over each model's in a record of costs, of the attention modules alone."""
    rows = [row for row in record.held["prices"] if row["length"] == length and row.get("attention_seconds")]
    seconds = {row["model"]: row["attention_seconds"] for row in rows}
    return {name: seconds["original"] / each for name, each in seconds.items()}


def times(value: float) -> str:
    """How many times, in few digits: 0.04x, 0.9x, 8.6x, 120x."""
    return f"{value:.0f}x" if value >= 99.5 else f"{value:.1f}x" if value >= 0.095 else f"{value:.2f}x"


# Quality


def qualities(name: str) -> list[tuple[str, str, str, str, Record]]:
    """The results of a mechanism: question, settings, answer, that of exact attention, record."""
    found, costs = [], newest("costs")
    for row in costs.held["rows"]:
        if "sentence_cosine" in row:
            question = f"swapped into a MiniLM, untrained: cosine of passages of {costs.meta['length']} tokens"
            found.append((question, row["mechanism"], f"{row['sentence_cosine']:.3f}", "1.000", costs))
    for row in newest("chosen-blocks").held["rows"]:
        question = f"{row['length']:,} tokens, untrained: cosine to the same MiniLM with exact attention"
        found.append((question, row["model"], f"{row['to_exact']:.3f}", "1.000", newest("chosen-blocks")))
    for record in records("convert-*"):
        figures, model = record.held["figures"], record.meta["model"].split(" (")[0].split("/")[-1]
        measure = "sentence_cosine" if "sentence_cosine" in figures["tuned"] else "bits_per_byte"
        question = f"{model} converted: {'cosine of embeddings' if 'cosine' in measure else 'bits per byte'}"
        answer = f"{figures['swapped'][measure]:.4f}, trained {figures['tuned'][measure]:.4f}"
        exact = f"{figures['original'][measure]:.4f}"
        found.append((question, record.held["conversion"]["mechanism"], answer, exact, record))
    for record in studies():
        means = {key: fmean(values) for key, values in learned(record).items()}
        exact = f"{means.pop(EXACT):.3f}; no mixing {means.pop(ALONE):.3f}"
        question = f"trained on `{record.meta['task']}`, {', '.join([budget(record), *around(record)])}: "
        found += [(question + record.meta["metric"], key, f"{mean:.3f}", exact, record) for key, mean in means.items()]
    return [each for each in found if re.search(rf"(?<!\w){name}(?!\w)", each[1])]


def studies() -> list[Record]:
    """The newest study of every name."""
    return [*{record.name[11:]: record for record in records("study-*")}.values()]


def learned(record: Record) -> dict[str, list[float]]:
    """What each mechanism of a study reached, a value for every seed."""
    values: dict[str, list[float]] = {}
    for row in record.held["results"]:
        if row["value"] is not None and row["status"] != "failed":
            values.setdefault(row["mechanism"], []).append(row["value"])
    return values


def budget(record: Record) -> str:
    """How long a study trained each mechanism, as its command says."""
    given = dict(zip(record.meta["command"], record.meta["command"][1:], strict=False))
    return next((f"{given[f'--{unit}']} {unit}" for unit in ("minutes", "steps") if f"--{unit}" in given), "its steps")


def around(record: Record) -> list[str]:
    """What stood around the mechanisms of a study, as far as recorded."""
    model = record.meta["model"]
    positions = {"none": ["no positions"], None: []}.get(held := model.get("positions"), [f"{held} positions"])
    return positions + ([f"a convolution of {model['conv']} tokens"] if model.get("conv") else [])


# Single figures, which pages name where they stand


def gain(expression: str, order: str = "") -> str:
    """Exact attention's time over a mechanism's, in the newest record that has it."""
    value, record = at_length()[expression][order == "causal"]
    return f"{value:.1f}x at {FAR:,} tokens{', causal' * (order == 'causal')} ({record.link})"


def untrained(expression: str) -> str:
    """The cosine of a MiniLM's sentence embeddings with the mechanism swapped in and nothing trained, and its speed."""
    record = newest("costs")
    cosine = next(row["sentence_cosine"] for row in record.held["rows"] if row["mechanism"] == expression)
    faster = attention_gains(record, FAR)[expression]
    return f"cosine {cosine:.3f} at {record.meta['length']} tokens, {faster:.1f}x at {FAR:,} ({record.link})"


def converted(kind: str) -> str:
    """The cosine of a conversion's embeddings, untrained and trained, and the speed, on the longest texts judged."""
    record = newest(f"convert-{kind}")
    longest, stages = max(row["length"] for row in record.held["prices"]), record.held["figures"]
    groups = record.held["conversion"].get("by_group", {})
    if (group := f"other text, {longest}") in groups.get("tuned", {}):
        stages = {stage: found[group] for stage, found in groups.items() if group in found}
    before, after = (stages[stage]["sentence_cosine"] for stage in ("swapped", "tuned"))
    faster = attention_gains(record, longest)["converted"]
    return f"cosine {before:.3f}, trained {after:.3f}; {faster:.1f}x at {longest:,} tokens ({record.link})"


def state(expression: str) -> str:
    """What a token costs late in ``generate()``, beside exact attention with its cache."""
    record = newest("generation")
    own, exact = (record.held["mechanisms"][name][-1] for name in (expression, EXACT))
    time = f"{own['milliseconds']:.1f} ms a token for {exact['milliseconds']:.1f} at {own['position']:,}"
    return f"{time}, {own['bytes'] / MIB:.2f} MiB for {exact['bytes'] / MIB:.0f} ({record.link})"


def result(study: str, expression: str, exact: str = "") -> str:
    """What a mechanism learnt in a study, beside exact attention, of another study where that learnt more there."""
    record, beside = newest(f"study-{study}"), newest(f"study-{exact or study}")
    own, best = fmean(learned(record)[expression]), fmean(learned(beside)[EXACT])
    also = f", {beside.link}" if exact else ""
    return f"{own:.2f} {record.meta['metric']} for exact attention's {best:.2f} ({record.link}{also})"
