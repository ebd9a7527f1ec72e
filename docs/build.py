"""Writes what is made of code and records: ``python docs/build.py``; with ``--check`` it names what is stale.

A page says where: what stands between ``<!-- build: NAME ARGUMENTS -->`` and ``<!-- end -->`` is the result of the
function NAME. Pictures, the pages of mechanisms and those of reproductions are files of their own.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

import measured
import pictures

from fast_attention import Attention, Mixer, catalogue, files
from fast_attention.catalogue import KNOWN
from fast_attention.lab.verdicts import LONG
from fast_attention.refusals import granting

ROOT = Path(__file__).resolve().parent.parent
DOCS, MECHANISMS = ROOT / "docs", ROOT / "docs" / "mechanisms"
NARROW = "\u00a0"  # a space at which no line of a table breaks
sys.path.insert(0, str(ROOT))  # experiments/ and tests/ are of the checkout, not of the package


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    heads = list(heads)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def grouped(heads: Iterable[str], groups: dict[str, list[Any]], level: str = "") -> str:
    """A short table for each group, under its heading; without a level, under a line in bold."""
    heads = list(heads)
    lines = (f"{level} {title}" if level else f"**{title}**" for title in groups)
    return "\n\n".join(f"{line}\n\n{table(heads, rows)}" for line, rows in zip(lines, groups.values(), strict=True))


def times(value: float) -> str:
    """How many times, in few digits: 0.04x, 0.9x, 8.6x, 120x."""
    return f"{value:.0f}x" if value >= 99.5 else f"{value:.1f}x" if value >= 0.095 else f"{value:.2f}x"


def linked(expression: str) -> str:
    """An expression as a link to the page of its mechanism."""
    name = expression.split("(")[0]
    alone = name in catalogue.names() and " + " not in expression
    return f"[`{expression}`](ideas/{name}.md)" if alone else f"`{expression}`"


# docs/choose.md and docs/costs.md, from records


BANDS = {10: "10 times as fast and more", 5: "5 to 10 times as fast", 1: "1 to 5 times as fast", 0: "slower"}


def lengths(length: str) -> str:
    """Gains at one length of every mechanism that was timed there, in tables by gain, the fastest first."""

    def cell(order: dict[bool, tuple[float, measured.Record]], is_causal: bool) -> str:
        return f"{times(order[is_causal][0])} ({order[is_causal][1].link})" if is_causal in order else "-"

    ranked = sorted(measured.at_length(int(length)).items(), key=lambda item: -max(item[1].values())[0])
    groups: dict[str, list[Any]] = {}
    for name, order in ranked:
        gain = max(order.values())[0]
        band = next(words for least, words in BANDS.items() if gain >= least)
        groups.setdefault(f"{int(length):,} tokens, {band}", []).append(
            (linked(name), cell(order, False), cell(order, True))
        )
    return grouped(("forward", "not causal", "causal"), groups)


def learned() -> str:
    """What studies found, a table a task: exact attention, no mixing, and the best of the rest."""
    groups: dict[str, list[Any]] = {}
    for study in measured.studies():
        means = measured.learned(study)
        controls = [f"{means.pop(name):.3f}" for name in (measured.EXACT, measured.ALONE)]
        sign = -1 if study.meta["metric"] == "accuracy" else 1
        best = [f"`{name}` {mean:.3f}" for name, mean in sorted(means.items(), key=lambda each: sign * each[1])[:6]]
        task = f"`{study.meta['task']}`, {study.meta['metric']}"
        under = f"{measured.conditions(study)} ({study.link})"
        groups.setdefault(task, []).append((under, *controls, f"{', '.join(best)}; of {len(means)}"))
    return grouped(("trained for", "exact attention", "no mixing", "the best, of how many"), groups)


def swapped() -> str:
    """What a swap without training does to a real model, and what it costs there."""
    record = measured.newest("costs")
    prices, rows = {(row["model"], row["length"]): row for row in record.held["prices"]}, []
    near = measured.nearest(record, record.meta["length"])

    def ratio(over: str, under: str, what: str) -> str:
        return f"{prices[over, near][what] / prices[under, near][what]:.2f}x" if what in prices[under, near] else "-"

    for row in sorted(record.held["rows"], key=lambda row: -row.get("sentence_cosine", -2.0)):
        cells = [f"`{row['mechanism']}`{' +' * row.get('learned', False)}"]
        if "sentence_cosine" in row:
            name = row["mechanism"]
            cells += [f"{row['sentence_cosine']:.3f} ({row['worst_sentence_cosine']:.3f})"]
            cells += [f"{row['token_cosine']:.3f}"]
            cells += [ratio("original", name, what) for what in ("seconds", "attention_seconds")]
            cells += [ratio(name, "original", "bytes")]
        rows.append(cells if cells[1:] else [*cells, f"cannot: {row['note']}", *[""] * 4])
    heads = ("mechanism", "cosine of passages (worst)", "of tokens", "time", "of attention", "memory")
    about = f"{record.meta['model']}, {record.meta['passages']} passages of {record.meta['length']} tokens"
    about += f"; time and memory of one of {near}"
    return f"{table(heads, rows)}\n\n{about}; {record.machine} (`records/{record.name}`)."


def priced() -> str:
    """What a swapped model costs by length: its time, and that of its attention modules."""
    record = measured.newest("costs")
    prices = {(row["model"], row["length"]): row for row in record.held["prices"]}
    lengths = sorted({length for _, length in prices})

    def cell(name: str, length: int) -> str:
        own, exact = prices[name, length], prices["original", length]
        both = [f"{exact[what] / own[what]:.2f}x" for what in ("seconds", "attention_seconds") if own.get(what)]
        return " / ".join(both) or "-"

    names = [row["mechanism"] for row in record.held["rows"] if (row["mechanism"], lengths[-1]) in prices]
    speed = {name: prices["original", lengths[-1]]["seconds"] / prices[name, lengths[-1]]["seconds"] for name in names}
    rows = [(f"`{name}`", *(cell(name, n) for n in lengths)) for name in sorted(names, key=lambda name: -speed[name])]
    return table(("model / its attention", *(f"{length:,} tokens" for length in lengths)), rows)


def conversions() -> str:
    """What conversions won back."""
    rows = [row for row in measured.qualities() if " converted: " in row[0]]
    cells = [(question, linked(own), *rest, record.link) for question, own, *rest, record in rows]
    return table(("measured", "mechanism", "result", "original", "record"), cells)


WAYS = {  # of a record of retrieval -> what a document becomes
    "original, cut to 512 tokens": "the embedding of its first 512 tokens",
    "mean of the 512-token chunks": "the mean of the embeddings of its 512-token chunks",
    "best of the 512-token chunks, a vector each": "the embeddings of its 512-token chunks: the nearest counts",
    "extended, exact": "the embedding of all its tokens in one pass, by exact attention",
}


def retrieved() -> str:
    """How well each way of embedding a document finds it."""
    found, record = measured.retrieval()
    rows = []
    for way, row in found.items():
        name = way.removeprefix("extended, untrained ")
        said = WAYS.get(way, "the embedding of all its tokens in one pass, converted as below")
        said = f"the embedding of all its tokens in one pass, by an untrained `{name}`" if name != way else said
        speed = "-" if "cut" in way else f"{row['tokens_per_second']:,.0f}"  # it is of all tokens, and reads 512
        rows.append((said, *(f"{row[key]:.3f}" for key in ("recall_at_1", "mrr")), speed))
    rows.sort(key=lambda row: row[1], reverse=True)
    heads = ("a document becomes", "recall at 1", "MRR", "tokens a second")
    about = f"{record.meta['documents']} manuals of Debian packages; {record.machine} ({record.link})."
    return f"{table(heads, rows)}\n\n{about}"


def late() -> str:
    """How well late chunks find a document, beside chunks that are encoded alone, and what they cost."""
    record = measured.newest("late-chunks*")
    rows = [
        (row["way"], f"{row['chunk']}", row["use"], f"{row['recall_at_1']:.3f}", f"{row['mrr']:.3f}",
         f"{row['gained']}, {row['lost']}" if "gained" in row else "", f"{row['seconds']:.0f}")
        for row in sorted(record.held["rows"], key=lambda row: -row["recall_at_1"])
    ]  # fmt: skip
    heads = ("a document becomes", "tokens", "of these", "recall at 1", "MRR", "gained, lost", "seconds")
    about = f"{record.meta['passages']} passages of {record.meta['documents']} manuals, "
    about += f"{record.meta['tokens']['least']:,} to {record.meta['tokens']['most']:,} tokens each, read "
    about += f"{record.meta['reads']} at once; {record.machine} ({record.link})."
    return f"{table(heads, rows)}\n\n{about}"


def chosen() -> str:
    """What blocks and windows, untrained, leave of a model's embeddings of long texts, by length."""
    record = measured.newest("chosen-blocks")
    rows = record.held["rows"]
    lengths = sorted({row["length"] for row in rows})
    cells = {row["model"]: [f"`{row['model']}`" if row["model"].endswith(")") else row["model"]] for row in rows}
    for row in sorted(rows, key=lambda row: row["length"]):
        cells[row["model"]].append(f"{row['cosine']:.3f} ({row['to_exact']:.3f})")
    heads = ("MiniLM reads at once by", *(f"{length:,} tokens" for length in lengths))
    return f"{table(heads, cells.values())}\n\n{record.machine} ({record.link})."


def decision() -> str:
    """What to take for texts beyond a model's positions, as ``advise`` and ``compare`` print it."""
    whole = "BlockLocal(block_size=256)"
    return " ".join(LONG).replace(whole, f"`{whole}`")


def written() -> str:
    """Time of a token and the cache's size in ``generate()``, by position."""
    record = measured.newest("generation")
    positions = [f"{row['position']:,}" for row in record.held["mechanisms"][measured.EXACT]]
    cells = {
        name: [f"{row['milliseconds']:.1f} ms, {row['bytes'] / measured.MIB:.2f} MiB" for row in rows]
        for name, rows in record.held["mechanisms"].items()
    }
    about = f"{record.meta['model']}; {record.machine} (`records/{record.name}`)."
    return f"{table(('mechanism', *positions), [(linked(name), *row) for name, row in cells.items()])}\n\n{about}"


# README and docs/guides/swap.md: the same results, faster

MODELS = {  # of a record of whole models -> what it is called
    "modernbert": "ModernBERT", "gemma3": "Gemma 3", "llama": "Llama", "mistral": "Mistral", "t5": "T5 encoder",
    "minilm": "MiniLM", "longformer": "Longformer",
}  # fmt: skip
FIRST = {
    "forward": "",
    "one padded batch": ", 32 padded texts, log scale",
    "one padded batch, even lengths": ", 32 padded texts, evenly spread",
}


def same_results(*asked: str) -> str:
    """How many times as fast ``swap(model)`` makes whole models, and how far outputs are apart.

    Args:
        asked: Lengths, and the models of the record if not all.
    """
    record, rows = measured.newest("whole-models"), dict[str, dict[int, Any]]()
    lengths = [each for each in asked if each.isdigit()]
    for row in record.held["rows"]:
        if row["what"] in FIRST and (row["case"] in asked or len(lengths) == len(asked)):
            rows.setdefault(MODELS[row["case"]] + FIRST[row["what"]], {})[row["length"]] = row
    columns = [int(length) for length in lengths]
    cells = [
        (name, *(times(own[n]["times"]) if n in own else "-" for n in columns),
         f"{max(row['difference'] for row in own.values()):.0e}")
        for name, own in rows.items()
    ]  # fmt: skip
    return table(("times as fast", *(f"{n:,} tokens" for n in columns), "outputs differ by"), cells)


def other_work() -> str:
    """What ``swap(model)`` gains beside forward passes of one text: training, memory, modules, sorted batches."""
    record, cells = measured.newest("whole-models"), []
    for row in record.held["rows"]:
        if row["what"] not in FIRST:
            kind = "bytes" if "bytes" in row else "seconds"
            both = (row[each] / measured.MIB if kind == "bytes" else row[each] for each in (kind, f"swapped_{kind}"))
            took = [f"{value:,.0f} MiB" if kind == "bytes" else f"{value:.2f} s" for value in both]
            cells.append((MODELS[row["case"]], row["what"], f"{row['length']:,}", *took, times(row["times"])))
    about = f"{record.machine} ({record.link})."
    heads = ("model", "what", "tokens", "transformers", "`swap(model)`", "gain")
    return f"{table(heads, cells)}\n\n{about}" if cells else f"The newest record has forward passes only: {about}"


INSTEAD = {  # a way of a record -> when it is the answer
    "transformers, float32": "texts of one short length",
    "swap(model)": "the results have to stay; mixed or long texts",
    "ONNX Runtime, float32": "a program without PyTorch",
    "ONNX Runtime, int8": "short texts of one length, and your task bears the error",
    "torch, dynamic int8": "as above, in PyTorch",
    "torch, dynamic int8, swap(model)": "mixed or long texts, and your task bears the error",
}
SHOWN = (
    ("minilm", "128 tokens"),
    ("minilm", "32 texts"),
    ("modernbert", "2,048 tokens"),
    ("modernbert", "8,192 tokens"),
)


def instead() -> str:
    """Six ways to run an encoder on a CPU: when each is the answer, its speed by transformers', and its outputs."""
    record = measured.newest("instead")
    rows = {(row["case"], row["texts"], row["way"]): row for row in record.held["rows"]}
    columns = [each for each in SHOWN if (*each, "swap(model)") in rows]

    def speed(case: str, texts: str, way: str) -> str:
        own, exact = rows[case, texts, way], rows[case, texts, "transformers, float32"]
        return times(own["tokens_per_second"] / exact["tokens_per_second"]) if not own["note"] else "too large"

    cells = []
    for way, when in INSTEAD.items():
        own = [row for (case, _, each), row in rows.items() if (case, each) == ("minilm", way) and not row["note"]]
        off, cosine = max(row["difference"] for row in own), min(row["cosine"] for row in own)
        worst = f"{off:.0e}" if off else "0", f"{cosine:.3f}"
        name = f"`{way}`" if way == "swap(model)" else way.replace(", swap(model)", " and `swap(model)`")
        cells.append((name, when, *(speed(*each, way) for each in columns), *worst))
    heads = ["way", "the answer for", *(f"{MODELS[case]}, {texts}" for case, texts in columns)]
    heads += ["MiniLM's outputs differ by", "cosine"]
    return f"{table(heads, cells)}\n\nTokens per second, over transformers'. {record.machine} ({record.link})."


def recommended() -> str:
    """Three recommendations for README beside exact attention: time and quality at one length, from one record."""
    study = measured.newest("study-byte-lm-learned")
    steps: dict[str, list[float]] = {}
    for each in study.held["results"]:
        steps.setdefault(each["mechanism"], []).append(each["step_seconds"])
    learnt = measured.learned(study)
    takes = {
        "WKV()": "a language model of long texts",
        "Local(window=64) + WKV()": "the same, with exact attention to near tokens",
        "Local(window=64)": "near tokens alone",
        measured.EXACT: "(exact attention, by torch's kernel)",
    }
    rows = [
        (words, f"`{name}`", times(fmean(steps[measured.EXACT]) / fmean(steps[name])), f"{learnt[name]:.2f}")
        for name, words in takes.items()
    ]
    heads = ("you train", "take", f"training step at {measured.FAR:,} tokens", "bits per byte, lower is better")
    return f"{table(heads, rows)}\n\nRecord: [{study.name[11:-5]}](records/{study.name})."


# records/README.md

KINDS = {  # what a record's name begins with -> what it is, and the program where the record has its options only
    "against-exact": ("in turns with exact attention", "python -m benchmarks.against_exact"),
    "bench": ("every mechanism, the machine's limits, published packages", ""),
    "by-position": ("bits per byte by position, a small Llama extended", ""),
    "chosen-blocks": ("chosen blocks, windows and a Hybrid in MiniLM, untrained", ""),
    "compiled": ("every mechanism under torch.compile", "python -m benchmarks.compiled"),
    "convert": ("a pretrained model converted", ""),
    "cores": ("time against threads, beside busy processes, and parallel regions", ""),
    "costs": ("every mechanism swapped into MiniLM, untrained", "python -m benchmarks.real_model"),
    "gates": ("one commit beside an earlier one", "python benchmarks/gates.py"),
    "generation": ("tokens written by `generate()`", "python -m benchmarks.generation"),
    "instead": ("`swap(model)` beside ONNX Runtime and int8", ""),
    "late-chunks": ("late chunks beside chunks encoded alone, 150 manuals", ""),
    "long-texts": ("a converted model at 512 to 32,768 tokens", ""),
    "reproduce": ("a paper's figure", ""),
    "retrieval": ("which of 300 manuals a passage is of", ""),
    "study": ("what mechanisms learn", ""),
    "whole-models": ("whole models before and after `swap(model)`", ""),
    "window-and-mask": ("a window of pixels beside the same as a mask", "python -m benchmarks.against_exact"),
}
QUESTIONS = {  # heading of a table -> the kinds of its records
    "Mechanisms beside exact attention": ("against-exact",),  # a table for each machine: its commands are long
    "Times of mechanisms": ("bench", "compiled", "cores", "gates", "generation", "window-and-mask"),
    "Whole models": ("whole-models", "instead", "costs", "chosen-blocks", "by-position"),
    "Converted models": ("convert",),
    "Converted models, by length": ("long-texts",),
    "Documents found": ("retrieval", "late-chunks"),
    "What mechanisms learn": ("study",),
    "Figures of papers": ("reproduce",),
}


def recorded() -> str:
    """Every record: what it is of, the command that repeats it and what of that is gone, date and machine."""
    groups: dict[tuple[int, str], list[Any]] = {}
    for path in sorted(measured.RECORDS.glob("*.json")):
        meta = json.loads(path.read_text(encoding="utf-8"))["meta"]
        kind = next(kind for kind in KINDS if path.name[11:].startswith(kind))
        (what, program), given = KINDS[kind], meta.get("command", [meta.get("old", "")])
        if kind == "reproduce":
            program, given = f"python -m experiments.reproductions.{meta['reproduction']}", given[3:]
        gone = [part for part in given if re.match(r"[A-Z]\w*\(", part) and not measured.today(part, path.name[:10])]
        words = re.sub(r" --(?:resume|restart|out \S+)", "", f"{program} {shlex.join(given)}".strip())
        again = f"`{words}`" + f"; gone or changed since: {', '.join(f'`{part}`' for part in gone)}" * bool(gone)
        again = {"bench": "`make bench`", "study": "`python -m experiments.study`"}.get(kind, again)
        about = f": `{meta.get('task') or meta.get('reproduction')}`" * (kind in ("study", "reproduce"))
        machine = f"{meta['hardware']}, {meta['threads']} of {meta['cores']} cores" if "hardware" in meta else "-"
        place, heading = next((at, each) for at, each in enumerate(QUESTIONS) if kind in QUESTIONS[each])
        heading += f", {meta['hardware']}" if kind == "against-exact" else ""
        when = f"{path.name[:10]}, {machine}"
        groups.setdefault((place, heading), []).append(
            (f"[{path.stem[11:]}](./{path.name})", what + about, again, when)
        )
    heads = ("file", "what", "command that repeats it now", "date, machine")
    return grouped(heads, {heading: rows for (_, heading), rows in sorted(groups.items())}, "##")


# The page of a mechanism: its idea, pattern, settings, limits and what was measured

DENIED = {  # trait -> what cannot be done without it
    "causal": "No causal order: no decoder, no language model.",
    "bidirectional": "Causal only: calls without `is_causal=True` are refused, and so are encoders.",
    "padding": "No `key_mask`: sequences of one length in a batch, or packed ones.",
    "cross": "Self-attention only: as many queries as keys, of the same tokens.",
    "mask": "No arbitrary `attn_mask`, and no dropout of weights: scores are never in the open.",
    "rotary": "Rotary positions mean nothing to it: its weights are no function of `q . k`.",
    "memory": "No decoding token by token.",
    "matrix": "No attention map: its outputs are no `A v` with one matrix for all channels.",
}
PLACES = {  # traits.positions -> what follows
    "relative": "",
    "absolute": "Positions count from each sequence's first visible token, so that padding in front changes nothing.",
    "grid": "No padding in front: a `key_mask` that hides a sequence's first tokens is refused.",
}
HELD = {  # trait -> what follows where it is granted
    "needs_max_len": "Its weights are for at most `max_len` tokens; longer inputs are refused.",
    "learned": "It has weights to train: until then its results say nothing of a pretrained model.",
    "random": "It holds random draws, which change its results from seed to seed; they are saved with the model.",
    "sees_padding": "It is laid out over the padded length: a padded input is not computed as the shorter one.",
}


def settings(mechanism: Any) -> str:
    """A table of the settings, with their defaults and what the Args of the class's docstring say of them."""
    listed = re.search(r"^Args:\n(.*?)(?:^\w[\w ]*:\n|\Z)", inspect.getdoc(type(mechanism)) or "", flags=re.M | re.S)
    entries = re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", listed[1] if listed else "", flags=re.M)
    plain = [
        (names.split(", "), " ".join(text.replace("``", "`").replace("|", "\\|").split())) for names, text in entries
    ]
    said = {name: text for names, text in plain for name in names}
    rows = [(f"`{each.name}`", f"`{getattr(mechanism, each.name)!r}`", said[each.name]) for each in fields(mechanism)]
    return table(("setting", "default", "meaning"), rows) if rows else "None."


def refusals(mechanism: Any) -> str:
    """What the traits deny, in words, and which mechanisms grant it, as the error says."""
    kind = Attention if isinstance(mechanism, Attention) else Mixer
    skipped, lines = () if kind is Attention else ("cross", "mask", "rotary", "matrix"), []
    for trait, words in DENIED.items():
        if trait not in skipped and not getattr(mechanism.traits, trait):
            others = ", ".join(f"[`{name}`]({name}.md)" for name in granting(kind, trait, mechanism)[:6])
            lines.append(f"- {words}" + (f" What would work: {others}." if others else ""))
    lines += ["- It mixes whole tokens: no queries, no heads, no cross attention, no attention map."] * (kind is Mixer)
    lines += [f"- {words}" for trait, words in HELD.items() if getattr(mechanism.traits, trait)]
    lines += [f"- {words}" for words in (PLACES[mechanism.traits.positions],) if words]
    return "\n".join(lines) or "Nothing that exact attention can."


def figures(name: str) -> str:
    """Tables of everything that the records say of a mechanism."""
    parts, known = ["### Time", "Exact attention's time over its own: above 1 it is faster."], set()
    for record, rows in measured.speeds():
        own = [row for row in rows if row.expression.startswith(f"{name}(") and row[:4] not in known]
        known |= {row[:4] for row in own}
        columns, cells = sorted({row.length for row in own}), dict[Any, dict[int, str]]()
        for row in own:
            words = f"`{row.expression}`", ("training" if row.training else "forward") + ", causal" * row.is_causal
            ms = f"{row.milliseconds:,.0f}" if row.milliseconds >= 100 else f"{row.milliseconds:.3g}"
            cells.setdefault(words, {})[row.length] = f"{times(row.gain)}{NARROW}({ms}{NARROW}ms)"
        if own:
            body = [(*words, *(each.get(n, "-") for n in columns)) for words, each in cells.items()]
            parts += [f"{record.machine} ({record.link}):", table(("settings", "pass", *map(str, columns)), body)]
    found = [each for each in measured.qualities() if re.search(rf"(?<!\w){name}(?!\w)", each[1])]
    groups: dict[str, list[Any]] = {}
    for question, own, *rest, record in found:
        asked, what = re.fullmatch(r"(trained on `.*?`|[^:]*)(?:, |: )(.*)", question).groups()  # type: ignore[union-attr]
        groups.setdefault(asked[:1].upper() + asked[1:], []).append((what, f"`{own}`", *rest, record.link))
    if groups:
        parts += ["### Quality", grouped(("measured", "settings", "result", "exact attention", "record"), groups)]
    text = "\n\n".join(parts) if known or groups else "No record has it yet."
    return text.replace("](../records", "](../../records")


def loops(name: str) -> str:
    """The oracle of a mechanism, with the helpers of its file that it calls: float64 loops over one head."""
    from tests.oracles import ORACLES

    shown, pending = list[str](), [ORACLES[name]]
    file = Path(inspect.getfile(ORACLES[name])).resolve().relative_to(ROOT)
    while pending:
        function = pending.pop()
        source = inspect.getsource(function).rstrip()
        shown = [source, *(each for each in shown if each != source)]
        called = (getattr(inspect.getmodule(function), each, None) for each in re.findall(r"(\w+)\(", source))
        pending += [
            each for each in called
            if inspect.isfunction(each) and each.__module__ == function.__module__ and each is not function
        ]  # fmt: skip
    code = "\n\n\n".join(shown)
    words = f"`{file}` computes the formula in float64, one head in loops. It imports nothing of the library."
    return f"{words} Tests compare every setting with it.\n\n```python\n{code}\n```"


def page(name: str) -> str:
    """The page of a mechanism; its picture is drawn apart."""
    mechanism = catalogue.default(name)
    ideas = re.split(r"^## (.+)\n", (DOCS / "ideas" / f"{name}.md").read_text(encoding="utf-8"), flags=re.M)
    held = {heading.strip(): body.strip() for heading, body in zip(ideas[1::2], ideas[2::2], strict=True)}
    first = (inspect.getdoc(type(mechanism)) or "").split("\n\n")[0].replace("``", "`").replace("\n", " ")
    _, alt, caption = pictures.pattern(name)
    paper = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", mechanism.traits.paper)
    parts = [f"# {name}", first, "## Idea", held["Idea"], "## Formula", f"```text\n{mechanism.traits.formula}\n```"]
    file = Path(inspect.getfile(type(mechanism))).resolve().relative_to(ROOT)
    parts += [f"Time `{mechanism.traits.cost}` ([letters](../mechanisms.md)). Source: {paper}. File: `{file}`."]
    parts += ["## Pattern", f"![{alt}]({name}.svg)", caption, "## Settings", settings(mechanism)]
    parts += ["## What it cannot do", refusals(mechanism)]
    parts += [each for key in ("Limits", "Known faults elsewhere") if key in held for each in (f"## {key}", held[key])]
    shown = f"```{{eval-rst}}\n.. autoclass:: fast_attention.{name}\n   :no-index:\n   :members:\n```"
    parts += ["## Measured", figures(name), "## In loops", loops(name), "## Class", shown]
    return "\n\n".join(parts) + "\n"


# What the code says: the table of mechanisms, what runs on a GPU, rooms


def source(paper: str) -> str:
    """A paper as a short link: first author and year, or the page of a text that has one here."""
    if "Fast Attention" in paper:
        return "[Jiang and Zuo](papers/fast_attention.md)"
    links = re.findall(r"([A-Z][\w-]*)[^;]*? (\d{4}), arXiv (\d{4}\.\d{4,5})", paper)
    return "; ".join(f"[{author} {year}](https://arxiv.org/abs/{number})" for author, year, number in links) or paper


FAMILIES = {  # heading of a table of mechanisms -> their names
    "All pairs of tokens": (
        "Softmax", "ReLUAttention", "DenseSynthesizer", "RandomSynthesizer", "FactorizedDenseSynthesizer",
        "FactorizedRandomSynthesizer", "MixtureSynthesizer",
    ),
    "Windows and blocks": ("Local", "BlockLocal", "Local2d", "BlockLocal2d", "BigBird"),
    "Chosen, hashed and sorted keys": ("Selected", "LSH", "Sinkhorn", "SortCut"),
    "Linear attention": (
        "LinearAttention", "DecayedLinearAttention", "LearnedFeatures", "T2R", "CosFormer",
    ),
    "Random features": ("Favor", "FavorPlus", "FavorPlusPlus"),
    "Landmarks and low rank": ("Linformer", "Nystrom"),
    "Keys summed channel by channel": ("AFTFull", "AFTLocal", "AFTSimple", "AFTConv", "WKV"),
    "Logarithms and distances": ("LogAttention", "Manhattan"),
    "Whole tokens, without queries": ("FNet", "GMLP", "MLPMixer"),
    "Made of others": ("Hybrid", "ByLength", "Adapted"),
}  # fmt: skip
FAMILY = {name: family for family, names in FAMILIES.items() for name in names}


def overview() -> str:
    """A table of mechanisms for each family, and the table of contents of their pages."""
    groups, yes = {family: list[Any]() for family in FAMILIES}, {True: "yes", False: "-"}
    for name in catalogue.names():
        mechanism = catalogue.default(name)
        t, label = mechanism.traits, f"[`{name}`](ideas/{name}.md)"
        cross = yes[t.cross] if isinstance(mechanism, Attention) else "mixer"
        weights = " + ".join(word for word, has in (("learned", t.learned), ("random", t.random)) if has) or "none"
        can = (yes[t.causal], yes[t.padding], cross, yes[t.mask], t.memory or "-")
        row = (label, t.cost, *can, weights + ", to max_len" * t.needs_max_len, source(t.paper))
        groups[FAMILY[name]].append(row)
    heads = ("mechanism", "time", "causal", "padding", "cross", "any mask", "decoding state", "weights", "source")
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *(f"mechanisms/{name}" for name in catalogue.names()), "```"])
    return f"{grouped(heads, groups, '###')}\n\n{toctree}"


def names() -> str:
    """The names that people know, and what to write, in a table for each family of what is written."""
    groups = {family: list[Any]() for family in FAMILIES}
    for known in KNOWN:
        note = known.note if known.exact else f"not here; this is nearest. {known.note[:1].upper()}{known.note[1:]}"
        groups[_family(known.write)].append((known.name, f"`{known.write}`", note))
    return grouped(("name", "write", ""), groups, "###")


def _family(expression: str) -> str:
    """The family of the first mechanism that an expression names; several are made of others."""
    named = [name for name in re.findall(r"\w+", expression) if name in FAMILY]
    return "Made of others" if " + " in expression else FAMILY[named[0]]


def vehicles() -> str:
    """What computes each mechanism on a GPU."""
    runs = {name: catalogue.default(name).traits.gpu for name in catalogue.names()}
    own = {each: [f"`{name}`" for name, its in runs.items() if its == each] for each in runs.values()}
    return table(("what runs on a GPU", "mechanisms"), [(each, ", ".join(its)) for each, its in own.items()])


PLAIN = {
    "docs": "Guides, and the pages and pictures that build.py writes from code and records.",
    "examples": "Scripts under 60 lines, run by the tests.",
    "records": "Dated results of benchmarks, studies and conversions.",
}


def caption(folder: Path) -> str:
    """The first sentence of a folder's docstring, or of PLAIN where the folder is no package."""
    module = folder / "__init__.py"
    said = ast.get_docstring(ast.parse(module.read_text())) if module.exists() else PLAIN.get(folder.name)
    return " ".join(re.split(r"(?<=\.)\s|\n\n", said or "")[0].split()).rstrip(".:").replace("``", "")


def rooms() -> str:
    """CHARTER's tree: every package that says what it is for, folders only."""
    tops = ("src", "tests", "benchmarks", "experiments")
    packages = {path.parent for top in tops for path in (ROOT / top).rglob("__init__.py")}
    lines = []
    for folder in sorted(filter(caption, packages | {ROOT / name for name in PLAIN})):
        where = folder.relative_to(ROOT)
        depth, name = (0, where) if where.parts[0] != "src" else (len(where.parts) - 2, where.name)
        lines.append(f"{'  ' * depth}{name if depth else where.as_posix()}/".ljust(25) + caption(folder))
    return "\n".join(["```", *lines, "```"])


# Writing and checking

PARTS: dict[str, Callable[..., str]] = {part.__name__: part for part in (
    measured.gain, measured.untrained, measured.converted, measured.state, lengths, learned, decision, retrieved,
    late, chosen, swapped, priced, conversions, written, recorded, overview, names, vehicles, rooms,
    measured.processor, same_results, other_work, instead, recommended,
)}  # fmt: skip
MARK = re.compile(r"(<!-- build: (\w+)(?: ([^<>\n]*))? -->)(.*?)(<!-- end -->)", re.S)
PAGES = [
    ROOT / "README.md",
    ROOT / "CHARTER.md",
    ROOT / "records" / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("guides/*.md")),
]


def fresh(path: Path) -> str:
    """A page with its generated parts made anew; the README's figures stand without links."""

    def made(mark: re.Match[str]) -> str:
        text = PARTS[mark[2]](*mark[3].split("; ") if mark[3] else ())
        text = re.sub(r" \(\[[^]]*\]\([^)]*\)(, .*)?\)", "", text) if path.parent == ROOT else text
        text = text.replace("](../", "](../../") if path.parent.name == "guides" else text
        return mark[1] + (f"\n{text}\n" if "\n" in mark[4] else text) + mark[5]

    return MARK.sub(made, path.read_text(encoding="utf-8"))


def generated() -> dict[Path, str]:
    """Every file in the repository that is made here or holds what is made here, and its text."""
    from experiments import pages

    def drawn(draw: Callable[[measured.Record], str], record: measured.Record) -> str:
        source = f"{record.name}: {hashlib.sha256(json.dumps(record.held).encode()).hexdigest()}"
        return draw(record).replace("</svg>", f"<!-- {source} -->\n</svg>")

    made = {DOCS / "times.svg": drawn(pictures.times, measured.newest("bench"))}
    made[DOCS / "whole-models.svg"] = drawn(pictures.whole_models, measured.newest("whole-models"))
    return {path: fresh(path) for path in PAGES} | made | pages.made()


def stale() -> list[str]:
    """The files that say something else than code and records; of a picture the lines that name its records."""

    def same(path: Path, text: str) -> bool:
        lines = None if path.suffix == ".md" else -2  # versions of matplotlib draw the same record differently
        return path.exists() and path.read_text("utf-8").split("\n")[lines:] == text.split("\n")[lines:]

    return [str(path.relative_to(ROOT)) for path, text in generated().items() if not same(path, text)]


def mechanism_pages() -> None:
    """Write a page and a picture for each mechanism into docs/mechanisms, and remove those that are gone."""
    made = {f"{name}.md": page(name) for name in catalogue.names()}
    made |= {f"{name}.svg": pictures.pattern(name)[0] for name in catalogue.names()}
    MECHANISMS.mkdir(exist_ok=True)
    for path in {*MECHANISMS.iterdir()} - {MECHANISMS / name for name in made}:
        path.unlink()
    for path, text in ((MECHANISMS / name, text) for name, text in made.items()):
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # Sphinx reads what changed only
            files.write(path, text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(f"run `python docs/build.py`, stale: {', '.join(found)}" if (found := stale()) else 0)
    for path, text in generated().items():
        files.write(path, text)
    mechanism_pages()
