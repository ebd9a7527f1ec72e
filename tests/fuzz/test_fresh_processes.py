"""Swapped models of any family, mechanism and option, saved: a process to which nothing was told before opens them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from fast_attention import Unsupported, catalogue, swap
from tests.cases import CASES
from tests.fresh import NEEDED, told
from tests.fuzz.kit import fuzz
from tests.integrations.test_fresh_process import LOADED, OURS, seen
from tests.integrations.test_swap import build, inputs
from tests.integrations.test_swap_saving import AUTO

pytestmark = NEEDED
OPTIONS: list[dict[str, Any]] = [{}, {"exact_up_to": 5}, {"skip_padding": True}, {"max_len": 64}]
CASE = st.tuples(
    st.sampled_from([*AUTO]), st.sampled_from([*catalogue.names(), *map(repr, CASES)]), st.sampled_from(OPTIONS),
    st.sampled_from([LOADED, OURS]),
)  # fmt: skip


def written(folder: Path, family: str, mechanism: str, options: dict[str, Any]) -> bool:
    """Whether a model of the family takes the mechanism; then it lies in the folder, with what it computes."""
    torch.manual_seed(0)
    model = build(family)
    with contextlib.suppress(Unsupported, ValueError):
        swap(model, mechanism, **{"max_len": 64, **options})
        seen(model, folder, inputs(model)).save_pretrained(folder)
        return True
    return False


@fuzz("fresh processes", examples=2, cases=st.lists(CASE, min_size=4, max_size=8))
def test_a_fresh_process_opens_what_was_saved(cases: list[tuple[str, str, dict[str, Any], str]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        asked = []
        for number, (family, mechanism, options, code) in enumerate(cases):
            folder = Path(place) / str(number)
            folder.mkdir()
            if written(folder, family, mechanism, options):
                asked.append((f"{number}: {family} {mechanism} {options}", str(folder), code.format(AUTO[family])))
        found = told(asked)
    assert found.keys() == {name for name, *_ in asked}
    assert not any(found.values()), found
