"""Decoding states: picked for beams, saved and restored, never changed in place, of one size at any position."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fast_attention import catalogue, decoding
from fast_attention.counting import count_operations, peak_bytes
from tests.cases import bind, qkv

STREAMING = [name for name in catalogue.names() if catalogue.default(name).traits.memory]
OF_INPUTS = (  # of which a state could hold the tensors that were handed in
    "Manhattan(feature_map=PositiveExp(), query_dim=None)",
    "Manhattan(distance='l1')",
    "Adapted(mechanism=Softmax(), adapts='qk')",
)
FLAT = [name for name in STREAMING if catalogue.default(name).traits.memory != "growing"]


class Counted(NamedTuple):
    """The state of somebody else's mechanism."""

    count: torch.Tensor


def _some(name: str, batch: int = 3) -> tuple[Any, Any, Any]:
    bound, inputs = bind(name), qkv(12, batch=batch)
    _, state = bound.decode(*(x[:, :, :9] for x in inputs))
    return bound, [x[:, :, 9:] for x in inputs], state


@pytest.mark.parametrize("name", STREAMING)
def test_beams_are_picked_and_go_on_alone(name: str) -> None:
    bound, rest, state = _some(name)
    index = torch.tensor([2, 0, 0, 1, 2])
    out, _ = bound.decode(*(x[index] for x in rest), decoding.select(state, index))
    whole, _ = bound.decode(*rest, state)
    torch.testing.assert_close(out, whole[index], rtol=1e-10, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", STREAMING)
def test_a_state_is_a_value(name: str) -> None:
    """Decoding on from a state leaves it as it was, so that an older one can be taken up again."""
    bound, rest, state = _some(name)
    kept = copy.deepcopy(state)
    first, _ = bound.decode(*rest, state)
    for part, before in zip(decoding.leaves(state), decoding.leaves(kept), strict=True):
        assert torch.equal(part, before)
    assert torch.equal(bound.decode(*rest, state)[0], first)


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", [*STREAMING, *OF_INPUTS])
def test_a_state_keeps_what_was_read(name: str, masked: bool) -> None:
    """Whatever is written later into the tensors that were handed in, or into the outputs."""
    bound, inputs = bind(name), qkv(12)
    mask = torch.rand(2, 12) > 0.3 if masked else None
    state, outs = None, []
    for new in (slice(0, 5), slice(5, 6), slice(6, 12)):
        given, visible = [x[:, :, new].clone() for x in inputs], None if mask is None else mask[:, new].clone()
        out, state = bound.decode(*given, state, key_mask=visible)
        outs.append(out.clone())
        for x in (*given, out, *([] if visible is None else [visible])):
            x.fill_(float("nan"))
    whole = bound(*inputs, is_causal=True, key_mask=mask)
    torch.testing.assert_close(torch.cat(outs, -2), whole, rtol=1e-9, atol=1e-11)
    if bound.mechanism.traits.memory == "constant":
        _, k, v = (x.clone() for x in inputs)
        state = bound.mechanism.summarise(k, v, bound.w, key_mask=mask)
        before = copy.deepcopy(state)
        for x in (k, v):
            x.fill_(float("nan"))
        assert all(map(torch.equal, decoding.leaves(state), decoding.leaves(before)))


@pytest.mark.parametrize("name", STREAMING)
def test_a_state_is_saved_and_restored_to_the_bit(name: str, tmp_path: Path) -> None:
    bound, rest, state = _some(name)
    decoding.save(state, tmp_path / "state.pt")
    again = decoding.load(tmp_path / "state.pt")
    assert type(again) is type(state)
    assert torch.equal(bound.decode(*rest, again)[0], bound.decode(*rest, state)[0])
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


def test_numbers_of_any_width_pick_the_same() -> None:
    """Bytes too, which torch takes for a mask."""
    bound, rest, state = _some("LinearAttention")
    index = torch.tensor([2, 0, 1])
    expected = bound.decode(*(x[index] for x in rest), decoding.select(state, index))[0]
    for dtype in (torch.uint8, torch.int8, torch.int32):
        got = bound.decode(*(x[index] for x in rest), decoding.select(state, index.to(dtype)))[0]
        assert torch.equal(got, expected)


def test_a_state_of_a_foreign_mechanism_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the module that defines it is imported; else the file is not the reason to import it."""
    state = decoding.State("Mine()", (1,), 2, (8,), "torch.float32", (), Counted(torch.ones(1, 2)))
    decoding.save(state, tmp_path / "state.pt")
    held = decoding.load(tmp_path / "state.pt").content
    assert isinstance(held, Counted)
    assert torch.equal(held.count, torch.ones(1, 2))
    monkeypatch.delitem(sys.modules, __name__)
    with pytest.raises(ValueError, match=r"import the module tests.nn.test_decoding first"):
        decoding.load(tmp_path / "state.pt")


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    _, _, state = _some("LinearAttention")
    with pytest.raises(ValueError, match="reaches from 0 to 3; the state's batch is 3"):
        decoding.select(state, torch.tensor([0, 3]))
    with pytest.raises(TypeError, match=r"torch.Tensor of whole numbers; got list"):
        decoding.select(state, [0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="row of whole numbers"):
        decoding.select(state, torch.tensor([0.5]))
    file = tmp_path / "state.pt"
    for content in (
        {"format": "other"},
        {"format": "fast-attention state 2", "state": None},
        {"format": "fast-attention state 3", "state": {"kind": "os:system", "parts": []}},
    ):
        torch.save(content, file)
        with pytest.raises(ValueError, match="holds no decoding state"):
            decoding.load(file)
    file.write_bytes(b"not a file of torch")
    with pytest.raises(ValueError, match="holds no decoding state"):
        decoding.load(file)
    with pytest.raises(FileNotFoundError):
        decoding.load(tmp_path / "missing.pt")


@pytest.mark.parametrize("name", STREAMING)
def test_a_state_of_another_mechanism_batch_heads_or_widths_is_refused(name: str) -> None:
    """Both are named; what is no state of decoding is refused as well."""
    bound, rest, state = _some(name, batch=2)
    other = "LinearAttention(eps=0.5)" if name == "LinearAttention" else "LinearAttention()"
    _, foreign = bind(other).decode(*rest)
    wrong = [
        (foreign, rest, rf"of {re.escape(other)}, batch \(2,\).*this call is of {name}\(\)"),
        (state, [x[:1] for x in rest], r"batch \(2,\).*this call is .*batch \(1,\)"),
        (decoding.select(state, torch.tensor([0])), rest, r"batch \(1,\).*this call is .*batch \(2,\)"),
        (state.content, rest, "hand over what decode"),
        ((state, state), rest, "hand over what decode"),
        ({"k": rest[1]}, rest, "hand over what decode"),
    ]
    for given, inputs, said in wrong:
        with pytest.raises(ValueError, match=said):
            bound.decode(*inputs, given)
    if not bound.mechanism.needs_weights:
        heads = [x[:, :1] for x in rest]
        with pytest.raises(ValueError, match=r"2 heads.*1 heads"):
            bound.mechanism.decode(*heads, state=state)
        with pytest.raises(ValueError, match="widths"):
            bound.mechanism.decode(*(x[..., :4] for x in rest), state=state)


@pytest.mark.parametrize("name", STREAMING)
def test_a_state_of_another_draw_or_dtype_is_refused(name: str) -> None:
    """Both are named; one that was saved and loaded is of its draw."""
    bound, rest, state = _some(name)
    with pytest.raises(ValueError, match=r"float64.*this call is .*float32"):
        bind(name, dtype=torch.float32).decode(*(x.float() for x in rest), state)
    if not bound.mechanism.traits.random:
        return
    torch.manual_seed(11)
    bound.redraw()
    with pytest.raises(ValueError, match=r"drawn at random: .*this call is .*drawn at random: "):
        bound.decode(*rest, state)
    if bound.mechanism.traits.memory == "constant":
        later = bound.mechanism.summarise(*rest[1:], bound.w)
        with pytest.raises(ValueError, match="drawn at random"):
            bound.mechanism.combine(state, later)


@pytest.mark.parametrize("name", STREAMING)
def test_an_empty_stretch_leaves_the_state_as_it_is(name: str) -> None:
    bound, rest, state = _some(name)
    nothing = [x[:, :, :0] for x in rest]
    out, after = bound.decode(*nothing, state)
    assert out.shape == (3, 2, 0, 8)
    assert torch.equal(bound.decode(*rest, after)[0], bound.decode(*rest, state)[0])
    _, started = bound.decode(*nothing)
    assert torch.equal(bound.decode(*rest, started)[0], bound.decode(*rest)[0])


@pytest.mark.parametrize("name", FLAT)
def test_a_token_costs_the_same_at_any_position(name: str) -> None:
    """Counted operations and memory of one token, and the state's size, after 640 and 5,760 tokens (blocks of 128)."""
    bound = bind(name, max_len=8192, dtype=torch.float32)
    token = qkv(1, dtype=torch.float32)
    costs, state = [], None
    for stretch in (640, 5120):
        _, state = bound.decode(*qkv(stretch, dtype=torch.float32), state)
        size = sum(x.nbytes for x in decoding.leaves(state))
        now = state
        costs.append(
            (count_operations(lambda: bound.decode(*token, now)), peak_bytes(lambda: bound.decode(*token, now)), size)
        )
    assert costs[0] == costs[1]
