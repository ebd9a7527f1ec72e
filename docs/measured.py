"""What the records say of speed, memory and quality, by the names that mechanisms have today."""

from __future__ import annotations

import functools
import itertools
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
    """A record, with what it holds of mechanisms that the library has today."""

    name: str  # of its file
    held: dict[str, Any]
    meta: dict[str, Any]  # settings, machine and versions
    machine: str  # processor, threads and version of torch
    link: str  # to the file, from a page in docs/


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

    held = json.loads(path.read_text(encoding="utf-8"), object_hook=known)
    meta = {"hardware": "?", "threads": "?", "torch": "?"} | held["meta"]
    machine = f"{meta['hardware']}, {meta['threads']} threads, torch {meta['torch']}"
    return Record(path.name, held, meta, machine, f"[{date}](../records/{path.name})")


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


def speeds() -> list[tuple[Record, list[Speed]]]:
    """The newest benchmark and all records beside exact attention, the newest first."""
    bench, keys = newest("bench"), ("mechanism", "is_causal", "training", "length", "ratio", "new_ms")
    own = {row["name"]: row["is_causal"] for row in bench.held["rows"] if row["owner"] == "fast-attention"}
    found = [(bench, [
        Speed(cell["mechanism"].removesuffix(", causal"), own[cell["mechanism"]], what == "training", cell["length"],
              1 / cell[f"{what}_ratio"], cell[f"{what}_ms"])
        for cell in bench.held["cells"]
        for what in ("forward", "training")
        if cell["mechanism"] in own and ", projected" not in cell["mechanism"] and cell[f"{what}_ratio"]
    ])]  # fmt: skip
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


def model_gains(record: Record, length: int) -> dict[str, float]:
    """The original's time over each model's in a record of costs."""
    seconds = {row["model"]: row["seconds"] for row in record.held["prices"] if row["length"] == length}
    return {name: seconds["original"] / each for name, each in seconds.items() if each}


def nearest(record: Record, length: int) -> int:
    """The length of a record of costs at which models were timed that is nearest to another one."""
    return min((row["length"] for row in record.held["prices"]), key=lambda each: abs(each - length))


# Quality


def qualities() -> list[tuple[str, str, str, str, Record]]:
    """Results of mechanisms: question, settings, answer, that of exact attention, record."""
    found, costs, blocks = [], newest("costs"), newest("chosen-blocks")
    rows = [row for row in costs.held["rows"] if "sentence_cosine" in row]
    cosines = [(row["mechanism"], row["sentence_cosine"], costs.meta["length"], costs) for row in rows]
    cosines += [(row["model"], row["to_exact"], row["length"], blocks) for row in blocks.held["rows"]]
    for expression, cosine, length, record in cosines:
        question = f"swapped into a MiniLM, untrained: cosine of passages of {length:,} tokens"
        found.append((question, expression, f"{cosine:.3f}", "1.000", record))
    for record in records("convert-*"):
        figures, model = record.held["figures"], record.meta["model"].split(" (")[0].split("/")[-1]
        measure = "sentence_cosine" if "sentence_cosine" in figures["tuned"] else "bits_per_byte"
        question = f"{model} converted: {'cosine of embeddings' if 'cosine' in measure else 'bits per byte'}"
        question += f", texts of up to {record.meta['length']:,} tokens"
        answer = f"{figures['swapped'][measure]:.4f}, trained {figures['tuned'][measure]:.4f}"
        exact = f"{figures['original'][measure]:.4f}"
        found.append((question, record.held["conversion"]["mechanism"], answer, exact, record))
    for record in studies():
        means = learned(record)
        exact = f"{means.pop(EXACT):.3f}; no mixing {means.pop(ALONE):.3f}"
        question = f"trained on `{record.meta['task']}`, {conditions(record)}: "
        found += [(question + record.meta["metric"], key, f"{mean:.3f}", exact, record) for key, mean in means.items()]
    return found


def studies() -> list[Record]:
    """The newest study of every name."""
    return [*{record.name[11:]: record for record in records("study-*")}.values()]


def learned(record: Record) -> dict[str, float]:
    """What each mechanism of a study reached, the mean over its seeds."""
    values: dict[str, list[float]] = {}
    for row in record.held["results"]:
        if row["value"] is not None and row["status"] != "failed":
            values.setdefault(row["mechanism"], []).append(row["value"])
    return {name: fmean(each) for name, each in values.items()}


def conditions(record: Record) -> str:
    """How long a study trained each mechanism, and what stood around it, as far as recorded."""
    given, model = dict(itertools.pairwise(record.meta["command"])), record.meta["model"]
    time = next((f"{given[f'--{unit}']} {unit}" for unit in ("minutes", "steps") if f"--{unit}" in given), "its steps")
    positions = f", {model['positions']} positions".replace("none", "no") if model.get("positions") else ""
    return time + positions + (f", a convolution of {model['conv']} tokens" if model.get("conv") else "")


# Single figures, which pages name where they stand


def gain(expression: str, order: str = "") -> str:
    """Exact attention's time over a mechanism's, in the newest record that has it."""
    value, record = at_length()[expression][order == "causal"]
    return f"{value:.1f}x at {FAR:,} tokens{', causal' * (order == 'causal')} ({record.link})"


def untrained(expression: str) -> str:
    """The cosine of a MiniLM's sentence embeddings with a mechanism swapped in, untrained; that model's speed."""
    record = newest("costs")
    cosine = next(row["sentence_cosine"] for row in record.held["rows"] if row["mechanism"] == expression)
    at, length = record.meta["length"], nearest(record, record.meta["length"])
    faster = model_gains(record, length)[expression]
    return f"cosine {cosine:.3f} at {at} tokens, the model {faster:.1f}x at {length} ({record.link})"


def converted(kind: str) -> str:
    """The cosine of a conversion's embeddings, untrained and trained, and the model's speed, on the longest texts."""
    record = newest(f"convert-{kind}")
    longest, groups = max(row["length"] for row in record.held["prices"]), record.held["conversion"]["by_group"]
    before, after = (groups[stage][f"other text, {longest}"]["sentence_cosine"] for stage in ("swapped", "tuned"))
    faster = model_gains(record, longest)["converted"]
    return f"cosine {before:.3f}, trained {after:.3f}; the model {faster:.1f}x, at {longest:,} tokens ({record.link})"


def retrieval() -> tuple[dict[str, dict[str, Any]], Record]:
    """What the newest retrieval with chunks measured, by the way in which a document becomes a vector."""
    record = newest("retrieval*")
    return {row["way"]: row for row in record.held["rows"]}, record


def state(expression: str) -> str:
    """What a token costs late in ``generate()``, beside exact attention with its cache."""
    record = newest("generation")
    own, exact = (record.held["mechanisms"][name][-1] for name in (expression, EXACT))
    time = f"{own['milliseconds']:.1f} ms a token for {exact['milliseconds']:.1f} at {own['position']:,}"
    return f"{time}, {own['bytes'] / MIB:.2f} MiB for {exact['bytes'] / MIB:.0f} ({record.link})"


def processor(kind: str) -> str:
    """The processor of the newest record of a kind, and how many of its cores were used."""
    meta = newest(kind).meta
    name = " ".join(re.sub(r"\((?:R|TM)\)|\b(?:CPU|Processor)\b", " ", meta["hardware"]).split())
    return f"{name}, {meta['threads']} of {meta['cores']} cores"
