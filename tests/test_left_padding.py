"""Padding in front: texts are computed as the ones that begin behind it, in calls, functions, streams and graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Attention, Unsupported, attention, catalogue, decoding, functional
from tests.cases import ATTENTIONS, CASES, bind, qkv

COUNTING = [m for m in CASES if m.traits.positions == "absolute"]
NAMES = [name for name in catalogue.names() if catalogue.default(name).traits.positions == "absolute"]
STREAMING = [m for m in COUNTING if m.traits.memory]
KEYS, FIRST = 23, (7, 0, 20)  # tokens, and how many of them are padding in front


def front(keys: int = KEYS, first: tuple[int, ...] = FIRST) -> Tensor:
    return torch.arange(keys) >= torch.tensor(first)[:, None]


def inputs(mechanism: Any, length: int = KEYS) -> list[Tensor]:
    torch.manual_seed(2)
    if isinstance(mechanism, Attention):
        return list(qkv(length, KEYS, batch=len(FIRST)))
    return [torch.randn(len(FIRST), KEYS, 16, dtype=torch.float64)]


def alone(mechanism: Any, x: list[Tensor], row: int, **options: Any) -> Tensor:
    """Outputs of one text without its padding; queries are of the same tokens, or the last where they are causal."""
    begin, late = FIRST[row], FIRST[row]
    if len(x) > 1 and x[0].shape[-2] != KEYS:
        late = max(begin - (KEYS - x[0].shape[-2]), 0) if options["is_causal"] else 0
    return mechanism(x[0][row : row + 1, ..., late:, :], *(t[row : row + 1, :, begin:] for t in x[1:]), **options)


@pytest.mark.parametrize("mechanism", COUNTING, ids=repr)
def test_gradients_are_those_of_the_text_alone(mechanism: Any) -> None:
    """Of inputs and weights; what lies in the padding may be anything and gets none."""
    bound, x = bind(mechanism), [t.requires_grad_() for t in inputs(mechanism)]
    for is_causal in mechanism.traits.modes:
        dirty = [t.masked_fill(~front().view(len(FIRST), *[1] * (t.ndim - 3), KEYS, 1), float("nan")) for t in x]
        padded = [x[0] if isinstance(mechanism, Attention) else dirty[0], *dirty[1:]]
        leaves = [*x, *bound.parameters()]
        out = bound(*padded, is_causal=is_causal, key_mask=front())
        rows = [alone(bound, x, i, is_causal=is_causal) for i in range(len(FIRST))]
        losses = sum((row.sin().sum() for row in rows), torch.zeros(()))
        seen = sum((out[i, ..., begin:, :].sin().sum() for i, begin in enumerate(FIRST)), torch.zeros(()))
        both = [torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True) for loss in (seen, losses)]
        for got, wanted in zip(*both, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize(
    "mechanism", [m for m in ATTENTIONS if m.traits.cross and m.traits.bidirectional and m.traits.padding], ids=repr
)
def test_keys_of_cross_attention_count_from_the_first_visible_one(mechanism: Any, length: int) -> None:
    bound, x = bind(mechanism, max_len=48), inputs(mechanism, length)
    out = bound(*x, key_mask=front())
    for i in range(len(FIRST)):
        wanted = alone(bound, x, i, is_causal=False)[0]
        torch.testing.assert_close(out[i], wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("length", [KEYS, 6])
@pytest.mark.parametrize("shape", [(3, 2, -1, KEYS), (1, 1, KEYS), (-1, KEYS), (3, 1, -1, 1)])
@pytest.mark.parametrize("name", ["BlockLocal(block_size=4)", "RandomSynthesizer", "MixtureSynthesizer"])
def test_masks_of_pairs_move_along(name: str, shape: tuple[int, ...], length: int) -> None:
    """Boolean or additive, of any shape that broadcasts."""
    mechanism = catalogue.parse(name)
    bound, x = bind(mechanism), inputs(mechanism, length)
    pairs = torch.randn([length if n == -1 else n for n in shape], dtype=torch.float64)
    for mask in (pairs, pairs > -1.0):
        out = bound(*x, is_causal=True, key_mask=front(), attn_mask=mask)
        whole = mask.expand(3, 2, length, KEYS)
        for i, begin in enumerate(FIRST):
            late = max(begin - (KEYS - length), 0)
            part = whole[i : i + 1, :, late:, begin:]
            wanted = alone(bound, x, i, is_causal=True, attn_mask=part)
            torch.testing.assert_close(out[i : i + 1, :, late:], wanted, rtol=1e-9, atol=1e-10)
            assert not out[i, :, :late].any()


FUNCTIONS: dict[str, dict[str, Any]] = {
    "bigbird_attention": {"seeds": torch.zeros(2, dtype=torch.long), "block_size": 2},
    "block_local_attention": {"block_size": 4},
    "convolved_attention": {"E": torch.randn(2, 4).double(), "F": torch.randn(2, 4).double()},
    "linformer_attention": {"E": torch.randn(2, 4, 32).double(), "F": torch.randn(2, 4, 32).double()},
    "pooled_attention": {"rank": 4},
    "sinkhorn_attention": {"P": torch.randn(2, 8, 16).double(), "block_size": 4},
    "sortcut_attention": {"P": torch.randn(2, 8, 16).double(), "block_size": 4, "budget": 2},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_count_as_their_mechanisms_do(name: str) -> None:
    function, x = getattr(functional, name), list(qkv(KEYS, batch=3))
    out = function(*x, **FUNCTIONS[name], key_mask=front())
    for i, begin in enumerate(FIRST):
        wanted = function(*(t[i : i + 1, :, begin:] for t in x), **FUNCTIONS[name])
        torch.testing.assert_close(out[i : i + 1, :, begin:], wanted, rtol=1e-9, atol=1e-10)


def test_functions_of_one_head_or_of_tokens_count_too() -> None:
    q, k, v = (x[0, 0] for x in qkv(KEYS))
    for is_causal in (False, True):
        out = functional.block_local_attention(q, k, v, block_size=4, is_causal=is_causal, key_mask=front()[0])
        wanted = functional.block_local_attention(q[7:], k[7:], v[7:], block_size=4, is_causal=is_causal)
        torch.testing.assert_close(out[7:], wanted)
    mixer = bind("MLPMixer(token_hidden=5)")
    x = torch.randn(3, KEYS, 16, dtype=torch.float64)
    out = functional.token_mlp(x, mixer.w, key_mask=front())
    torch.testing.assert_close(out[:1, 7:], functional.token_mlp(x[:1, 7:], mixer.w))
    with pytest.raises(Unsupported, match=r"Local2d.*hides a sequence's first tokens.*padding behind"):
        functional.local2d_attention(*qkv(12), width=4, key_mask=front(12, (1, 0)))


@torch.no_grad()
@pytest.mark.parametrize("mechanism", STREAMING, ids=repr)
def test_states_of_texts_that_begin_late_are_values(mechanism: Any, tmp_path: Path) -> None:
    """They are picked for beams, saved and loaded; a text that has not begun yet is one of them."""
    bound, x = bind(mechanism), inputs(mechanism)
    _, state = bound.decode(*(t[:, :, :14] for t in x), key_mask=front()[:, :14])
    decoding.save(state, tmp_path / "state")
    index, rest = torch.tensor([2, 0, 0, 1, 2]), [t[:, :, 14:] for t in x]
    whole, _ = bound.decode(*rest, decoding.load(tmp_path / "state"), key_mask=front()[:, 14:])
    for i in range(len(FIRST)):
        wanted = alone(bound, x, i, is_causal=True)[..., -(KEYS - max(FIRST[i], 14)) :, :]
        torch.testing.assert_close(whole[i : i + 1, :, -wanted.shape[-2] :], wanted, rtol=1e-9, atol=1e-10)
    picked = decoding.select(state, index)
    out, after = bound.decode(*(t[index] for t in rest), picked, key_mask=front()[index, 14:])
    torch.testing.assert_close(out, whole[index], rtol=1e-10, atol=1e-12)
    one = decoding.select(after, torch.tensor([3]))  # the text that has no padding
    torch.testing.assert_close(
        bound.decode(*(t[1:2, :, -1:] for t in x), one)[0],
        bound.decode(*(t[1:2, :, -1:] for t in x), bound.decode(*(t[1:2] for t in x))[1])[0],
    )


@torch.no_grad()
def test_texts_that_begin_alike_are_picked_apart() -> None:
    bound, x = bind("BlockLocal(block_size=4)"), qkv(13, batch=3)
    mask, index = front(13, (2, 2, 0)), torch.tensor([1, 2, 0, 0])
    _, state = bound.decode(*(t[:, :, :9] for t in x), key_mask=mask[:, :9])
    whole, _ = bound.decode(*(t[:, :, 9:] for t in x), state)
    out, _ = bound.decode(*(t[index][:, :, 9:] for t in x), decoding.select(state, index))
    torch.testing.assert_close(out, whole[index], rtol=1e-10, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("mechanism", STREAMING[:3], ids=repr)
def test_any_leading_sizes_stream(mechanism: Any) -> None:
    bound, x, mask = bind(mechanism), inputs(mechanism), front()
    for lead, row in (((), 0), ((3, 1), slice(None))):
        shaped = [t[row].reshape(*lead, *t.shape[1:]) for t in x]
        visible, state, outs = mask[row].reshape(*lead, KEYS), None, []
        for new in (slice(0, 9), slice(9, 10), slice(10, KEYS)):
            out, state = bound.decode(*(t[..., new, :] for t in shaped), state, key_mask=visible[..., new])
            outs.append(out)
        wanted = bound(*shaped, is_causal=True, key_mask=visible)
        torch.testing.assert_close(torch.cat(outs, -2), wanted, rtol=1e-9, atol=1e-10)


class Call(torch.nn.Module):
    """A call with a mask, for graphs."""

    def __init__(self, bound: Any, is_causal: bool) -> None:
        super().__init__()
        self.bound, self.is_causal = bound, is_causal

    def forward(self, mask: Tensor, *x: Tensor) -> Tensor:
        return self.bound(*x, is_causal=self.is_causal, key_mask=mask)


@pytest.mark.parametrize("name", NAMES)
def test_graphs_count_as_calls_do(name: str) -> None:
    mechanism = catalogue.default(name)
    length = 6 if mechanism.traits.cross and mechanism.traits.causal else KEYS
    call, x = Call(bind(mechanism), mechanism.traits.modes[-1]), inputs(mechanism, length)
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for mask in (front(), front(first=(0, 0, 3))):
        torch.testing.assert_close(compiled(mask, *x), call(mask, *x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["BlockLocal(block_size=4)", "Linformer(rank=4)", "GMLP"])
def test_exported_programs_count_as_calls_do(name: str) -> None:
    mechanism = catalogue.parse(name)
    call, x = Call(bind(mechanism), mechanism.traits.modes[-1]).eval(), inputs(mechanism)
    length = torch.export.Dim("length", min=2, max=32)
    sizes = ({1: length}, tuple({x[0].ndim - 2: length} for _ in x))
    program = torch.export.export(call, (front(), *x), dynamic_shapes=sizes).module()
    for keys, first in ((KEYS, FIRST), (11, (3, 0, 9))):
        some = [t[..., :keys, :] for t in x]
        torch.testing.assert_close(
            program(front(keys, first), *some), call(front(keys, first), *some), rtol=1e-9, atol=1e-10
        )


def test_graphs_refuse_what_they_cannot_count() -> None:
    """Cross attention, and streams, of texts that begin late: the graph fails with the words of the refusal."""
    torch.compiler.reset()
    bound = bind("BlockLocal(block_size=4)")
    x = inputs(bound.mechanism, 6)
    cross = torch.compile(Call(bound, False), fullgraph=True, backend="eager")
    torch.testing.assert_close(cross(front(first=(0, 0, 0)), *x), bound(*x))
    with pytest.raises(RuntimeError, match=r"hides a sequence's first tokens.*cross attention"):
        cross(front(), *x)
    stream = torch.compile(lambda mask, *x: bound.decode(*x, key_mask=mask)[0], fullgraph=True, backend="eager")
    x = inputs(bound.mechanism)
    torch.testing.assert_close(stream(front(first=(0, 0, 0)), *x), bound(*x, is_causal=True))
    with pytest.raises(RuntimeError, match="hides a sequence's first tokens"):
        stream(front(), *x)


def test_packed_rows_count_from_the_first_visible_token_of_each() -> None:
    q, k, v = qkv(KEYS)
    mask = torch.ones(2, KEYS, dtype=torch.bool)
    mask[0, :3] = mask[1, 12:14] = False
    out = attention(q, k, v, "BlockLocal(block_size=4)", lengths=(12, 11), key_mask=mask)
    first = attention(*(x[:1, :, 3:12] for x in (q, k, v)), "BlockLocal(block_size=4)")
    second = attention(*(x[1:, :, 14:] for x in (q, k, v)), "BlockLocal(block_size=4)")
    torch.testing.assert_close(out[:1, :, 3:12], first)
    torch.testing.assert_close(out[1:, :, 14:], second)
