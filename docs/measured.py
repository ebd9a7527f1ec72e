"""What the newest records say of one mechanism: rows of tables for its page and for the page that helps to choose."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from fast_attention import catalogue

RECORDS = Path(__file__).resolve().parent.parent / "records"
MIB = 2**20


class Record(NamedTuple):
    """A record: its file's name, its date, and all that it holds."""

    name: str
    held: dict[str, Any]

    @property
    def date(self) -> str:
        """The day that its name says."""
        return self.name[:10]

    @property
    def machine(self) -> str:
        """The processor, threads and version of torch."""
        meta = self.held["meta"]
        return f"{meta.get('hardware', '?')}, {meta.get('threads', '?')} threads, torch {meta.get('torch', '?')}"


@functools.cache
def records(kind: str, folder: Path = RECORDS) -> tuple[Record, ...]:
    """The records of a kind (``bench``, ``study-*``), the newest last."""
    paths = sorted(folder.glob(f"????-??-??-{kind}.json"), key=lambda path: path.stem)  # a day's second one is "-2"
    return tuple(Record(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths)


def is_of(expression: str, name: str) -> bool:
    """Whether an expression, a row of a benchmark or layers in turns are of a mechanism, perhaps inside another one."""
    return re.search(rf"(?<!\w){name}(?!\w)", expression) is not None


def of_itself(expression: str, name: str) -> bool:
    """Whether an expression is the mechanism itself, with any settings."""
    return re.match(rf"{name}\(", expression) is not None


class Speed(NamedTuple):
    """One timed case: exact attention's time over the mechanism's, and the mechanism's milliseconds."""

    expression: str
    is_causal: bool
    training: bool
    length: int
    gain: float
    milliseconds: float


def bench_speeds(record: Record) -> list[Speed]:
    """All of a benchmark that are this library's and not projected, each beside exact attention of its own order."""
    own = {row["name"]: row for row in record.held["rows"] if row["owner"] == "fast-attention"}
    speeds = []
    for cell in record.held["cells"]:
        row = own.get(cell["mechanism"])
        if row is None or cell["status"] != "measured" or ", projected" in row["name"]:
            continue
        for training, what in ((False, "forward"), (True, "training")):
            if cell.get(f"{what}_ratio"):
                gain, ms = 1 / cell[f"{what}_ratio"], cell[f"{what}_ms"]
                expression = row["name"].removesuffix(", causal")
                speeds.append(Speed(expression, row["is_causal"], training, cell["length"], gain, ms))
    return speeds


def beside_speeds(record: Record) -> list[Speed]:
    """All of a record of mechanisms beside exact attention."""
    return [
        Speed(row["mechanism"], row["is_causal"], row["training"], row["length"], 1 / row["ratio"], row["new_ms"])
        for row in record.held["rows"]
        if row.get("ratio")
    ]


def speeds(folder: Path = RECORDS) -> list[tuple[Record, list[Speed]]]:
    """The newest benchmark and all records beside exact attention, the newest first."""
    found = [(record, bench_speeds(record)) for record in records("bench", folder)[-1:]]
    found += [(record, beside_speeds(record)) for record in records("against-exact*", folder)]
    return sorted(found, key=lambda each: each[0].name.removesuffix(".json"), reverse=True)  # "-2" is the newer


def memory(name: str, folder: Path = RECORDS) -> tuple[Record, list[dict[str, Any]]]:
    """Peak memory of the newest benchmark: rows of a mechanism and of exact attention of the same order."""
    record = records("bench", folder)[-1]
    rows = [row for row in record.held["weights"] if ", projected" not in row["name"]]
    exact = {(row["name"], row["length"]): row for row in rows if row["name"].startswith("exact attention")}
    found = []
    for row in rows:
        if of_itself(row["name"], name) and row.get("forward_bytes"):
            order = ", causal" if row["name"].endswith(", causal") else ""
            found.append(row | {"exact": exact.get((f"exact attention{order}", row["length"]))})
    return record, found


class Quality(NamedTuple):
    """One statement about quality: what was asked, the mechanism's answer, and that of exact attention."""

    question: str
    expression: str
    answer: str
    exact: str
    record: Record


def qualities(name: str, folder: Path = RECORDS) -> list[Quality]:
    """What the records say of a mechanism's results: swapped untrained, converted, trained from scratch."""
    found = []
    for record in records("costs", folder)[-1:]:
        found += [
            Quality(
                f"swapped into a MiniLM, untrained: cosine of passages of {record.held['meta']['length']} tokens",
                row["mechanism"], f"{row['sentence_cosine']:.3f}", "1.000", record,
            )
            for row in record.held["rows"]
            if is_of(row["mechanism"], name) and "sentence_cosine" in row
        ]  # fmt: skip
    for record in records("chosen-blocks", folder)[-1:]:
        found += [
            Quality(
                f"{row['length']:,} tokens, untrained: cosine to the same MiniLM with exact attention",
                row["model"], f"{row['to_exact']:.3f}", "1.000", record,
            )
            for row in record.held["rows"]
            if is_of(row["model"], name)
        ]  # fmt: skip
    for record in records("convert-*", folder):
        found += _converted(record, name)
    for record in newest_studies(folder):
        found += _learned(record, name)
    return found


def _converted(record: Record, name: str) -> list[Quality]:
    """The figures of a conversion before and after training."""
    expression, figures = record.held["conversion"]["mechanism"], record.held["figures"]
    if not is_of(expression, name):
        return []
    measure = "sentence_cosine" if "sentence_cosine" in figures["tuned"] else "bits_per_byte"
    words = "cosine of embeddings" if measure == "sentence_cosine" else "bits per byte, less is better"
    answer = f"{figures['swapped'][measure]:.4f}, trained {figures['tuned'][measure]:.4f}"
    model = record.held["meta"]["model"].split(" (")[0].split("/")[-1]
    exact = f"{figures['original'][measure]:.4f}"
    return [Quality(f"{model} converted: {words}", expression, answer, exact, record)]


def newest_studies(folder: Path) -> list[Record]:
    """The newest study of every name."""
    named = {record.name[11:]: record for record in records("study-*", folder)}
    return list(named.values())


def study_values(record: Record) -> dict[str, list[float]]:
    """What each mechanism of a study reached, a value for every seed."""
    values: dict[str, list[float]] = {}
    for row in record.held["results"]:
        if row["value"] is not None and row["status"] != "failed":
            values.setdefault(row["mechanism"], []).append(row["value"])
    return values


def study_means(record: Record) -> dict[str, float]:
    """The mean over the seeds of what each mechanism of a study reached."""
    return {name: sum(each) / len(each) for name, each in study_values(record).items()}


def together(folder: Path) -> list[list[Record]]:
    """The newest studies of one task in the same time, several of each, most mechanisms first."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in newest_studies(folder):
        meta = record.held["meta"]
        groups.setdefault((meta["task"], time(meta)), []).append(record)
    return [
        sorted(group, key=lambda record: -len(record.held["meta"]["mechanisms"]))
        for group in groups.values()
        if len(group) > 1
    ]


def subject(record: Record) -> str:
    """A study's task without what it was made with, and its context."""
    meta = record.held["meta"]
    context = int(re.findall(r"context=([0-9]+)", meta["task"])[0])
    return f"{meta['task'].split('(')[0]} at {context:,}"


def _learned(record: Record, name: str) -> list[Quality]:
    """What a mechanism learnt in a study, beside exact attention and no mixing at all."""
    means, meta = study_means(record), record.held["meta"]
    better = "" if meta["metric"] == "accuracy" else ", less is better"
    question = f"trained on `{meta['task']}`, {budget(meta)}: {meta['metric']}{better}"
    exact = f"{means['Softmax()']:.3f}; no mixing {means['Local(window=0)']:.3f}"
    return [
        Quality(question, expression, f"{mean:.3f}", exact, record)
        for expression, mean in means.items()
        if is_of(expression, name) and expression not in ("Softmax()", "Local(window=0)")
    ]


def budget(meta: dict[str, Any]) -> str:
    """How long a study trained each mechanism, as its command says, and what stood around it, as far as recorded."""
    return ", ".join([time(meta), *around(meta)])


def time(meta: dict[str, Any]) -> str:
    """How long a study trained each mechanism, as its command says."""
    given = dict(zip(meta["command"], meta["command"][1:], strict=False))
    return next((f"{given[f'--{unit}']} {unit}" for unit in ("minutes", "steps") if f"--{unit}" in given), "its steps")


def around(meta: dict[str, Any]) -> list[str]:
    """What stood around the mechanisms of a study, as far as recorded."""
    model = meta["model"]
    positions = {"none": ["no positions"], None: []}.get(held := model.get("positions"), [f"{held} positions"])
    return positions + ([f"a convolution of {model['conv']} tokens"] if model.get("conv") else [])


def decoding(name: str, folder: Path = RECORDS) -> list[tuple[Record, str, list[dict[str, Any]]]]:
    """Milliseconds of a token and bytes of the state by position: in the newest benchmark, and in ``generate()``."""
    found = []
    for record in records("bench", folder)[-1:]:
        rows: dict[str, list[dict[str, Any]]] = {}
        for step in record.held["steps"]:
            if of_itself(step["name"], name) and step["seconds"] and step["batch"] == 1:
                row = {"position": step["position"], "milliseconds": step["seconds"] * 1e3}
                rows.setdefault(step["name"], []).append(row | {"bytes": step["state_bytes"]})
        found += [(record, expression, each) for expression, each in rows.items()]
    for record in records("generation", folder)[-1:]:
        own = {key: rows for key, rows in record.held["mechanisms"].items() if is_of(key, name)}
        found += [(record, f"{expression} in `generate()`", rows) for expression, rows in own.items()]
    return found


def attention_gains(record: Record, length: int) -> dict[str, float]:
    """Of a record of costs: the original's time over each model's, of the attention modules alone."""
    rows = [row for row in record.held["prices"] if row["length"] == length and row.get("attention_seconds")]
    seconds = {row["model"]: row["attention_seconds"] for row in rows}
    return {name: seconds["original"] / each for name, each in seconds.items() if name != "original"}


def times(gain: float) -> str:
    """How many times, in few digits: 0.04x, 0.9x, 8.6x, 120x."""
    return f"{gain:.0f}x" if gain >= 99.5 else f"{gain:.1f}x" if gain >= 0.095 else f"{gain:.2f}x"


def linked(expression: str) -> str:
    """An expression as a link to the page of its mechanism."""
    name = expression.split("(")[0]
    return f"[`{expression}`](ideas/{name}.md)" if name in catalogue.names() else f"`{expression}`"


def link(record: Record) -> str:
    """A record's date as a link to it."""
    return f"[{record.date}](../records/{record.name})"
