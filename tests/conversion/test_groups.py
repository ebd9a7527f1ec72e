"""Figures of groups of held-out batches: each is that of its own batches, and a page shows them by stage."""

from __future__ import annotations

import copy

import pytest

from fast_attention.lab.converting import page
from fast_attention.lab.converting.record import Converted
from tests.conversion.plain import convert
from tests.conversion.test_conversion import HELD, MECHANISM, STEPS, batch, bert, decoder
from tests.conversion.test_convert_own import batch as own_batch
from tests.conversion.test_convert_own import model as own_model


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_group_has_the_figures_of_its_own_batches(name: str) -> None:
    model = bert(0, 1) if name == "bert" else decoder(name)
    alone = [convert(copy.deepcopy(model), MECHANISM, batch, [each], settings=STEPS).figures for each in HELD]
    whole = convert(copy.deepcopy(model), MECHANISM, batch, HELD, settings=STEPS)
    told = convert(model, MECHANISM, batch, {"short": HELD[:1], "long": HELD[1:]}, settings=STEPS)
    assert whole.by_group == {}
    for when, figures in whole.figures.items():
        assert told.figures[when] == pytest.approx(figures, abs=1e-6)
        groups = [told.by_group[when][group] for group in ("short", "long")]
        for each, wanted in zip(groups, alone, strict=True):
            assert each == pytest.approx(wanted[when], abs=1e-6)
    assert told.by_group["tuned"]["short"]["loss"] != told.by_group["tuned"]["long"]["loss"]


def test_a_page_shows_them_by_stage() -> None:
    told = convert(bert(0, 1), MECHANISM, batch, {"short": HELD[:1], "long": HELD[1:]}, settings=STEPS)
    record = Converted({"bits_per_byte_of_a_nat": None}, told)
    table = page.groups(record)
    assert table.rows[0].cells == [
        "short", *(f"{told.by_group[when]['short']['sentence_cosine']:.4f}" for when in record.stages)
    ]  # fmt: skip
    assert "swapped, untrained" in table.heads
    assert [row.cells[0] for row in table.rows] == ["short", "long"]


def test_a_model_of_this_library_has_groups_too() -> None:
    held = [own_batch(1001), own_batch(1002)]
    told = convert(own_model(), MECHANISM, own_batch, {"a": held[:1], "b": held[1:]}, settings=STEPS)
    for when, figures in told.figures.items():
        assert figures["accuracy"] == pytest.approx(sum(each["accuracy"] for each in told.by_group[when].values()) / 2)


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"held_out\['long'\] is empty"):
        convert(bert(0), MECHANISM, batch, {"short": HELD, "long": []}, settings=STEPS)
    with pytest.raises(ValueError, match="held_out is empty"):
        convert(bert(0), MECHANISM, batch, {}, settings=STEPS)
