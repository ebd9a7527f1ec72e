"""Shows a conversion: tables on the terminal and the page."""

from __future__ import annotations

from fast_attention.conversion.outcome import mean_of_others
from fast_attention.lab import pages
from fast_attention.lab.converting import drawings
from fast_attention.lab.converting.record import FIGURES, STAGES, Converted
from fast_attention.lab.numbers import Number, bytes_of, count, exactly, factor, fixed, milliseconds
from fast_attention.lab.pages import Figure, Folded, Section, Words
from fast_attention.lab.tables import Table

LEAST_GAIN = 0.001  # of the loss: what a part must be worth
_STAGES = "The original is the line."
_LAYERS = """Left: squared error of a layer's output over its variance, on the original's own inputs; right: the loss
with this layer alone put back to the original's."""
_COSTS = """Forward passes of one sequence, interleaved. Beyond the model's positions their numbers begin anew, which
tells times and no quality. Attention: the modules with their projections."""


def stages(record: Converted) -> Table:
    """The model's quality at every stage, and how far its layers were off."""
    by_stage = {when: record.figures(when) for when in record.stages}
    names = list(by_stage["original"]) if by_stage else []
    rows = []
    for when, figures in by_stage.items():
        errors = list(record.conversion.errors.get(when, {}).values())
        none = fixed(0.0, ".0f") if when == "original" else "-"
        mean = fixed(sum(errors) / len(errors), ".3f") if errors else none
        rows.append([STAGES[when], *(fixed(figures[name], ".4f") for name in names), mean])
    return Table(["stage", *(FIGURES[name] for name in names), "mean error of a layer"], rows)


def groups(record: Converted) -> Table:
    """The first figure of each group of held-out passages at every stage."""
    by_stage = {when: record.by_group(when) for when in record.stages}
    names = list(next(iter(by_stage.values()))) if len(by_stage) else []
    if len(names) < 2:
        return Table([""], [])
    figure = next(iter(record.figures("original")))
    rows = [[name, *(fixed(each[name][figure], ".4f") for each in by_stage.values())] for name in names]
    return Table([FIGURES[figure], *(STAGES[when] for when in by_stage)], rows)


def ablations(record: Converted) -> Table:
    """The first figure of each group, as converted and with either part of a Hybrid off."""
    held = record.conversion
    if not held.ablations:
        return Table([""], [])
    figure, whole = next(iter(record.figures("original"))), record.by_group(held.best)
    variants = {"as converted": whole or {"": record.figures(held.best)}}
    variants |= {words: record.ablations(words) for words in held.ablations}
    rows = [
        [name or "all", *(fixed(groups[name][figure], ".4f") for groups in variants.values())]
        for name in variants["as converted"]
    ]
    return Table([FIGURES[figure], *variants], rows)


def layers(record: Converted) -> Table:
    """What every layer runs, its error at every stage, and the loss if that layer alone were as it was."""
    held, rows = record.conversion, []
    measured = [when for when in STAGES if when in held.errors]
    for name in held.layers:
        runs = held.mechanism if name in held.converted else f"{record.before(name)}: {held.kept[name]}"
        errors = [fixed(held.errors[when].get(name), ".3f") for when in measured]
        rows.append([name, runs, *errors, fixed(held.put_back.get(name), ".4f")])
    titles = [f"error, {STAGES[when]}" for when in measured]
    return Table(["layer", "runs", *titles, f"loss if {record.untouched}"], rows, left=[1])


def costs(record: Converted) -> Table:
    """Time and memory of a forward pass before and after, at every length."""
    heads = ["tokens", "original", "converted", "speed", "attention, original", "attention, converted", "its speed",
             "memory, original", "memory, converted"]  # fmt: skip
    rows: list[list[str]] = []
    for length in dict.fromkeys(row["length"] for row in record.costs):
        cells: list[str] = [count(length)]
        pair = [row for row in record.costs if row["length"] == length]
        for name in ("seconds", "attention_seconds"):
            before, after = times = [row.get(name) for row in pair]
            cells += [milliseconds(None if time is None else 1000 * time) for time in times]
            cells.append(factor(None if before is None or after is None else after / before))
        rows.append([*cells, *(bytes_of(row.get("bytes")) for row in pair)])
    return Table(heads, rows)


def gain(record: Converted) -> list[str]:
    """What was gained where nothing was learnt from, in steps and losses, and what a Hybrid's far part is worth."""
    held = record.conversion
    if not held.best:
        return []
    where = "on texts of another source" if len(held.by_group.get(held.best, {})) > 1 else "on the held-out passages"
    before, after = (held.judged(when) for when in ("swapped", held.best))
    if held.best == "swapped":
        tried = ", ".join(f"{STAGES[when]} {held.judged(when):.4f}" for when in record.stages[2:])
        first = f"{held.steps:,} steps, and nothing was gained {where}: the loss is {before:.4f} without training"
        sentences = [f"{first}, {tried}. The model is the untrained swap."]
    else:
        sentences = [f"{held.steps:,} steps; {where} the loss fell from {before:.4f}, untrained, to {after:.4f}."]
    if "far part off" in held.ablations:
        off = mean_of_others(held.ablations["far part off"])
        earns = f"without it the loss is {off:.4f}, with it {after:.4f}"
        sentences.append(f"The far part earns {'nothing' if off <= after + LEAST_GAIN else 'its place'}: {earns}.")
    return sentences


def choice(record: Converted) -> list[str]:
    """The choice of layers in words."""
    held, budget = record.conversion, record.meta["budget"]
    if not held.put_back or held.whole is None:
        return []
    best = min(held.put_back, key=lambda name: held.put_back[name])
    sentences = [
        f"Measured after the transfer, on passages of their own: loss {held.whole:.4f}; best left {record.untouched} "
        f"is {best}, with which it is {held.put_back[best]:.4f}."
    ]
    if budget is not None and held.limit is not None:
        chosen = ", then ".join(f"{name} (loss {loss:.4f})" for name, loss in held.chosen.items())
        kept = f"{record.untouched} stay {chosen}" if chosen else f"no layer needs to stay {record.untouched}"
        sentences.append(f"Budget {budget:g}, a loss of {held.limit:.4f}: {kept}. Chosen before the fine-tune.")
    return sentences


def _quality(record: Converted) -> list[Table]:
    return [table for table in (stages(record), groups(record), ablations(record)) if table.rows]


def curves(record: Converted) -> Table:
    """The numbers of the training curves."""
    rows = [
        [stage, count(int(step)), fixed(seconds, ".1f"), Number(exactly(loss), loss)]
        for stage, points in record.conversion.curves.items()
        for step, seconds, loss in points
    ]
    return Table(["stage", "step", "seconds", "loss"], rows)


def tables(record: Converted) -> list[Table]:
    """The tables of a conversion."""
    return [table for table in (*_quality(record), layers(record), costs(record)) if table.rows]


def html(record: Converted) -> str:
    """The page."""
    meta, held = record.meta, record.conversion
    facts = {
        "Model": f"{meta['model']}, {len(held.layers)} attention layers, {len(held.converted)} converted",
        "Mechanism": held.mechanism + ("" if held.exact_up_to or record.untouched == "exact" else ", at every length"),
        "Judged by": f"{held.goal}, {meta['passages']} passages of {meta['length']} tokens that no training saw",
        "Text": meta["text"],
        "Training": f"{meta['settings']}, {meta['batch_size']} passages a batch",
        "Budget": "none" if meta["budget"] is None else f"{meta['budget']:g} times the original's loss",
        "Loss": meta["loss"],
        **({"Teacher": meta["teacher"]} if meta.get("teacher") else {}),
        **({"Positions": meta["positions"]} if meta.get("positions") else {}),
    }
    sections = []
    if record.stages:
        gained, lead = ([Words(each, "lead") for each in words(record)] for words in (gain, choice))
        sections += [
            Section(
                "Quality",
                [
                    *gained,
                    Figure(drawings.stages(record), _STAGES),
                    *_quality(record),
                ],
            ),
            Section("Layer by layer", [*lead, Figure(drawings.layers(record), _LAYERS), layers(record)]),
        ]
    if record.costs:
        sections.append(Section("Costs", [Figure(drawings.costs(record), _COSTS), costs(record)]))
    if held.curves:
        figure = Figure(drawings.curves(record), "Running means of the losses.")
        sections.append(Section("While training", [figure, Folded("Every point of the curves", curves(record))]))
    opens = meta.get("opened_by", "fast_attention.from_pretrained")
    intro = [
        *pages.partial({**meta, "status": held.status}, "conversion"),
        pages.where(meta, f"{meta['model']}, {len(held.converted)} of {len(held.layers)} layers to {held.mechanism}"),
    ]
    last = [pages.run(meta, facts), pages.again(meta, record.data, f"The model: {opens} on this folder.")]
    return pages.page("convert", [*sections, *last], intro)
