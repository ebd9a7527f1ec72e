"""Inputs of the gate: a result of the right shape and dtype, or a line that refuses; any padding, any state."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from fast_attention import Attention, Bound, Shape, Unsupported, catalogue
from tests.fuzz.kit import fuzz

NAMES = catalogue.names()
STREAMING = [name for name in NAMES if catalogue.default(name).traits.memory]
ATTENTIONS = [name for name in NAMES if isinstance(catalogue.default(name), Attention)]
MADE: dict[str, Bound] = {}
SIZES = st.sampled_from([0, 1, 2, 3, 5])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
DEVICES = st.sampled_from(["cpu", "cpu", "cpu", "cpu", "meta"])


def _bound(name: str) -> Bound:
    torch.manual_seed(0)
    return MADE.setdefault(name, Bound(name, Shape(2, 4, 16)))


@st.composite
def tensors(draw: Any) -> Any:
    """Usually something that fits, sometimes anything."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.sampled_from([None, 3.0, "q", [[1.0]], torch.ones(4).numpy()]))
    usual = draw(st.integers(0, 3)) > 0
    batch, length = draw(st.sampled_from([(), (0,), (2,), (2,), (2, 1)])), draw(st.sampled_from([0, 1, 5, 5, 5]))
    shape = (*batch, 2, length, 4) if usual else tuple(draw(st.lists(SIZES, max_size=5)))
    return torch.ones(
        shape, dtype=draw(DTYPES) if not usual else torch.float32, device="cpu" if usual else draw(DEVICES)
    )


MASKS = st.none() | st.none() | st.sampled_from([
    torch.ones(5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool), torch.ones(2, 2, 5, dtype=torch.bool),
    torch.ones(2, 5), torch.ones(5, device="meta", dtype=torch.bool), "mask", torch.ones(0, dtype=torch.bool),
])  # fmt: skip


@fuzz(
    "inputs of the gate", examples=250, name=st.sampled_from(NAMES), q=tensors(), k=st.none() | st.none() | tensors(),
    v=st.none() | st.none() | tensors(), key_mask=MASKS, causal=st.sampled_from([False, True, True, "no", 1]),
    dropout=st.sampled_from([0.0, 0.0, 0.0, 2.0, "a"]), attn_mask=MASKS, stream=st.booleans(),
)  # fmt: skip
def test_a_result_that_fits_or_a_refusal(
    name: str, q: Any, k: Any, v: Any, key_mask: Any, causal: Any, dropout: Any, attn_mask: Any, stream: bool
) -> None:
    bound = _bound(name)
    k, v = q if k is None else k, q if v is None else v
    attends = isinstance(bound.mechanism, Attention)
    if isinstance(q, torch.Tensor) and not attends and q.ndim > 2:
        q = q.transpose(-3, -2).flatten(-2)
    inputs = (q, k, v) if attends else (q,)
    with torch.no_grad():
        try:
            if stream and attends:
                out, _ = bound.decode(*inputs, key_mask=key_mask)
            else:
                out = bound(*inputs, is_causal=causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout)
        except (ValueError, TypeError, Unsupported) as error:
            refusal = str(error)
        else:
            refusal = ""
    assert "\n" not in refusal
    if refusal:
        return
    assert out.shape == ((*q.shape[:-1], v.shape[-1]) if attends else q.shape)
    assert out.dtype == q.dtype
    assert out.device == q.device


@fuzz(
    "what padding holds", examples=40, name=st.sampled_from(STREAMING), where=st.integers(0, 2**9 - 1),
    value=st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e19]) | st.floats(width=32),
    both=st.booleans(),
)  # fmt: skip
def test_padding_holds_anything(name: str, where: int, value: float, both: bool) -> None:
    """Outputs, gradients and the outputs after a state are those of zeros there."""
    bound, mask = _bound(name), torch.tensor([[bool(where >> i & 1) for i in range(9)]])
    torch.manual_seed(where)
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    answers = []
    for filled in (0.0, value):
        hidden = ~mask[:, None, :, None]
        x = [q, k.masked_fill(hidden, filled) if both else k, v.masked_fill(hidden, filled)]
        x = [y.clone().requires_grad_() for y in x]
        out = bound(*x, is_causal=True, key_mask=mask)
        grads = torch.autograd.grad(out.sin().sum(), x, allow_unused=True, materialize_grads=True)
        _, state = bound.decode(*(y[:, :, :5] for y in x), key_mask=mask[:, :5])
        after, _ = bound.decode(*(y[:, :, 5:] for y in x), state, key_mask=mask[:, 5:])
        answers.append((out, *grads, after))
    for ours, zeros in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(ours, zeros)


@fuzz(
    "states of decoding", examples=60, name=st.sampled_from(STREAMING), other=st.sampled_from(STREAMING),
    batch=st.sampled_from([1, 2, 3]), part=st.integers(0, 4),
    junk=st.none() | st.sampled_from([(), 1, "state", {}, [None], (1, 2, 3, 4, 5)]),
)  # fmt: skip
def test_a_state_goes_on_or_is_refused(name: str, other: str, batch: int, part: int, junk: Any) -> None:
    torch.manual_seed(0)
    x = [torch.randn(2, 2, 3, 4) for _ in range(3)]
    given = tuple([y[:1].expand(batch, -1, -1, -1) for y in x])
    _, state = _bound(other).decode(*given)
    spoilt = state if junk is None else state._replace(**{state._fields[part]: junk}) if part < 4 else junk
    try:
        out, _ = _bound(name).decode(*x, spoilt)
    except ValueError as error:
        refusal = str(error)
    else:
        assert (other, batch) == (name, 2)
        assert junk is None
        assert out.shape == (2, 2, 3, 4)
        return
    assert "\n" not in refusal
    assert "state" in refusal
