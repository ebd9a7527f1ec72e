"""Packed sequences: what one call for each gives, no leak across borders, and bad borders named."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Attention, Bound, MultiheadAttention, Rotary, Shape, Unsupported, attention, explain, packed
from tests.cases import KINDS, bind, qkv, uncached

LENGTHS = (5, 3, 5, 1, 0, 7, 3)  # equal ones apart, a single token, an empty one
BORDERS = [0, *itertools.accumulate(LENGTHS)]
TOKENS = BORDERS[-1]
CROSS = [m for m in KINDS if isinstance(m, Attention) and m.traits.cross]
Parts = tuple[Tensor, ...]


def cu_seqlens(device: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(BORDERS, dtype=dtype, device=device)


def orders(mechanism: Any) -> list[bool]:
    return mechanism.traits.modes


def inputs_of(mechanism: Any, device: Any, length: int = TOKENS) -> Parts:
    if isinstance(mechanism, Attention):
        return qkv(length, device=device)
    return (torch.randn(2, length, 16, dtype=torch.float64).to(device),)


def apart(bound: Bound, inputs: Parts, *, queries: Any = LENGTHS, keys: Any = LENGTHS, **options: Any) -> Tensor:
    """One call for each sequence, from nothing but slices."""
    outs = []
    for i in range(len(queries)):
        rows = [x[..., sum(n[:i]) : sum(n[: i + 1]), :] for x, n in zip(inputs, (queries, keys, keys), strict=False)]
        outs.append(bound(*rows, **options))
    return torch.cat(outs, -2)


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_packed_is_one_call_for_each_sequence(mechanism: Any, device: torch.device) -> None:
    """Outputs and the gradients of inputs and weights."""
    bound = bind(mechanism, device=device)
    for is_causal in orders(mechanism):
        inputs = tuple(x.requires_grad_() for x in inputs_of(mechanism, device))
        leaves = (*inputs, *bound.parameters())
        got = bound(*inputs, is_causal=is_causal, cu_seqlens=cu_seqlens(device))
        wanted = apart(bound, inputs, is_causal=is_causal)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)
        direction = torch.randn_like(got)
        both = [torch.autograd.grad(x, leaves, direction, materialize_grads=True, allow_unused=True)
                for x in (got, wanted)]  # fmt: skip
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_no_sequence_moves_another(mechanism: Any, device: torch.device) -> None:
    """To the bit, in float32, where the fast paths run: sequences two and three change, of which three has a twin."""
    bound = bind(mechanism, device=device, dtype=torch.float32)
    for is_causal in orders(mechanism):
        inputs = [x.float() for x in inputs_of(mechanism, device)]
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[..., BORDERS[1] : BORDERS[3], :].normal_()
        before, after = (bound(*x, is_causal=is_causal, lengths=LENGTHS) for x in (inputs, changed))
        same = torch.ones(TOKENS, dtype=torch.bool)
        same[BORDERS[1] : BORDERS[3]] = False
        assert torch.equal(before[..., same, :], after[..., same, :])
        assert not torch.equal(before[..., ~same, :], after[..., ~same, :])


@pytest.mark.parametrize("mechanism", CROSS, ids=repr)
def test_keys_may_be_packed_otherwise(mechanism: Any, device: torch.device) -> None:
    keys = (4, 6, 4, 2, 3, 0, 1)
    bound, (q, _, _) = bind(mechanism, device=device), qkv(TOKENS, device=device)
    _, k, v = qkv(sum(keys), device=device)
    pair = (cu_seqlens(device), torch.tensor([0, *itertools.accumulate(keys)], device=device))
    for is_causal in orders(mechanism):
        got = bound(q, k, v, is_causal=is_causal, cu_seqlens=pair)
        wanted = apart(bound, (q, k, v), keys=keys, is_causal=is_causal)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)
        assert torch.equal(got, bound(q, k, v, is_causal=is_causal, lengths=(list(LENGTHS), keys)))


@pytest.mark.parametrize("mechanism", [m for m in KINDS if m.traits.padding], ids=repr)
def test_keys_may_be_masked_besides(mechanism: Any, device: torch.device) -> None:
    bound, inputs = bind(mechanism, device=device), inputs_of(mechanism, device)
    mask = torch.rand(2, TOKENS, device=device) > 0.3
    order = {"is_causal": mechanism.traits.modes[0]}
    got = bound(*inputs, lengths=LENGTHS, key_mask=mask, **order)
    wanted = [
        bound(*(x[..., start:end, :] for x in inputs), key_mask=mask[:, start:end], **order)
        for start, end in itertools.pairwise(BORDERS)
    ]
    torch.testing.assert_close(got, torch.cat(wanted, -2), rtol=1e-10, atol=1e-11)


def test_attention_takes_both_forms_without_and_with_a_batch(device: torch.device) -> None:
    q, k, v = qkv(TOKENS, device=device)
    wanted = apart(Bound("Softmax", Shape(2, 8)), (q, k, v))
    for given in (cu_seqlens(device), cu_seqlens(device, torch.int64)):
        torch.testing.assert_close(attention(q, k, v, cu_seqlens=given), wanted)
    for sizes in (LENGTHS, list(LENGTHS), torch.tensor(LENGTHS, device=device)):
        torch.testing.assert_close(attention(q, k, v, lengths=sizes), wanted)
    torch.testing.assert_close(attention(q[0], k[0], v[0], lengths=LENGTHS), wanted[0])
    several = [x.expand(3, *x.shape) for x in (q, k, v)]
    torch.testing.assert_close(attention(*several, lengths=LENGTHS), wanted.expand(3, *wanted.shape))
    grouped = attention(q, k[:, :1], v[:, :1], lengths=LENGTHS, enable_gqa=True, scale=0.3)
    repeated = (x[:, :1].expand_as(q) for x in (k, v))
    torch.testing.assert_close(grouped, attention(q, *repeated, lengths=LENGTHS, scale=0.3))
    assert attention(q[..., :0, :], k[..., :0, :], v[..., :0, :], cu_seqlens=cu_seqlens(device)[:1]).shape[-2] == 0
    assert attention(q[:0], k[:0], v[:0], lengths=LENGTHS).shape == (0, *q.shape[1:])
    torch.manual_seed(0)
    drawn = attention(q, k, v, "FavorPlus", lengths=LENGTHS)  # one set of features for all
    assert drawn.isfinite().all()


def test_equal_lengths_are_one_batch_and_the_fused_kernel_gets_four_axes() -> None:
    q, k, v = (x.float() for x in qkv(TOKENS, batch=1))
    kernels = explain("Softmax", q, k, v).kernels
    assert len(kernels) == 1
    bound = Bound("Softmax", Shape(2, 8))
    said = explain(bound, q, k, v, lengths=LENGTHS).kernels
    assert said.keys() == kernels.keys()
    assert [*said.values()] == [4], "5 and 5, 3 and 3, 1, 7; nothing of the empty one"


MULTIHEAD: list[dict[str, Any]] = [{}, {"rotary": True}, {"num_kv_heads": 2, "rotary": True}, {"kdim": 6, "vdim": 6}]


@pytest.mark.parametrize("options", MULTIHEAD, ids=str)
@pytest.mark.parametrize("mechanism", ["Softmax", "ReLUAttention", "Local(window=2)"])
def test_multihead(mechanism: str, options: dict[str, Any], device: torch.device) -> None:
    """Rotary positions begin anew in every sequence; batches of packed rows and a row alone."""
    torch.manual_seed(0)
    module = MultiheadAttention(16, 4, batch_first=True, mechanism=mechanism, **options).to(device, torch.float64)
    x = torch.randn(2, TOKENS, 16, dtype=torch.float64, device=device)
    other = torch.randn(2, TOKENS, 6, dtype=torch.float64, device=device) if "kdim" in options else x
    for is_causal in (False, True):
        call: dict[str, Any] = {"need_weights": False, "is_causal": is_causal}
        got, none = module(x, other, other, cu_seqlens=cu_seqlens(device), **call)
        assert none is None
        wanted = []
        for start, end in itertools.pairwise(BORDERS):
            rows = (y[:, start:end] for y in (x, other, other))
            wanted.append(module(*rows, **call)[0])
        torch.testing.assert_close(got, torch.cat(wanted, 1))
        alone, _ = module(x[0], other[0], other[0], lengths=LENGTHS, **call)
        torch.testing.assert_close(alone, got[0])
    if "rotary" in options:
        at = torch.randint(0, 50, (2, TOKENS), device=device)
        got, _ = module(x, x, x, lengths=LENGTHS, positions=at, need_weights=False)
        wanted = [module(*[x[:, a:b]] * 3, positions=at[:, a:b], need_weights=False)[0]
                  for a, b in itertools.pairwise(BORDERS)]  # fmt: skip
        torch.testing.assert_close(got, torch.cat(wanted, 1))


def test_multihead_across(device: torch.device) -> None:
    torch.manual_seed(0)
    module = MultiheadAttention(16, 4, batch_first=True, rotary=True).to(device, torch.float64)
    x, y = (torch.randn(1, n, 16, dtype=torch.float64, device=device) for n in (8, 11))
    got, _ = module(x, y, y, lengths=((3, 5), (4, 7)), need_weights=False)
    wanted = [module(x[:, :3], *[y[:, :4]] * 2, need_weights=False), module(x[:, 3:], *[y[:, 4:]] * 2)]
    torch.testing.assert_close(got, torch.cat([out for out, _ in wanted], 1))
    ignored = torch.zeros(1, 11, dtype=torch.bool, device=device)
    ignored[0, 2] = True
    masked, _ = module(x, y, y, ignored, lengths=((3, 5), (4, 7)), need_weights=False)
    wanted[0] = module(x[:, :3], *[y[:, :4]] * 2, ignored[:, :4])
    torch.testing.assert_close(masked, torch.cat([out for out, _ in wanted], 1))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens": torch.tensor([1, 4, 10])}, r"cu_seqlens\[0\] is 1.*must be 0"),
    ({"cu_seqlens": torch.tensor([0, 7, 5, 10])}, r"cu_seqlens\[2\] is 5 and cu_seqlens\[1\] is 7: entries must rise"),
    ({"cu_seqlens": torch.tensor([0, 4, 9])}, r"cu_seqlens\[2\] is 9 and there are 10 tokens"),
    ({"cu_seqlens": torch.tensor([0, 4, 11])}, r"cu_seqlens\[2\] is 11 and there are 10 tokens"),
    ({"cu_seqlens": torch.tensor([[0, 10]])}, r"cu_seqlens has shape \(1, 2\).*\(sequences \+ 1,\)"),
    ({"cu_seqlens": torch.tensor([]).int()}, r"cu_seqlens has shape \(0,\)"),
    ({"cu_seqlens": torch.tensor([0.0, 10.0])}, r"cu_seqlens is torch.float32: give int32 or int64"),
    ({"cu_seqlens": torch.tensor([0, 10], device="meta")}, "cu_seqlens is on the meta device"),
    ({"cu_seqlens": [0, 4, 10]}, "cu_seqlens must be a torch.Tensor.*list"),
    ({"cu_seqlens": torch.tensor([0, 10]), "lengths": (10,)}, "cu_seqlens and lengths.*one of them"),
    ({"cu_seqlens": (torch.tensor([0, 4, 10]), torch.tensor([0, 10]))}, "cu_seqlens_q has 2.*cu_seqlens_k has 1"),
    ({"cu_seqlens": (torch.tensor([0, 4, 10]), torch.tensor([0, 12, 10]))}, r"cu_seqlens_k\[2\] is 10.*\[1\] is 12"),
    ({"lengths": (4, 5)}, "the sum of lengths is 9 and there are 10 tokens"),
    ({"lengths": (12, -2)}, r"lengths\[1\] is -2"),
    ({"lengths": (4, 6.0)}, r"lengths must be whole numbers.*6\.0"),
    ({"lengths": 10}, "lengths must be whole numbers.*got 10"),
    ({"lengths": torch.tensor([[10]])}, r"lengths has shape \(1, 1\)"),
    ({"lengths": (10,), "attn_mask": torch.ones(10, 10) > 0}, "packed sequences take no attn_mask.*is_causal"),
    ({"lengths": (10,), "key_mask": torch.ones(2, 9) > 0}, r"key_mask has shape \(2, 9\).*\(2, 10\)"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_borders_are_named(options: dict[str, Any], said: str) -> None:
    q, k, v = qkv(10)
    for call in (attention, Bound("Softmax", Shape(2, 8))):
        with pytest.raises((ValueError, TypeError), match=said):
            call(q, k, v, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_does_not_go_with_packed_sequences_is_refused() -> None:
    q, k, v = qkv(10)
    with pytest.raises(ValueError, match=r"10 packed queries and 12 keys: give cu_seqlens as a pair"):
        attention(q, *qkv(12)[1:], cu_seqlens=torch.tensor([0, 10]))
    with pytest.raises(ValueError, match="k has 10 tokens and v has 9"):
        attention(q, k, v[..., :9, :], lengths=(10,))
    with pytest.raises(Unsupported, match=r"Linformer.*is_causal=True"):
        bind("Linformer(rank=4)")(q, k, v, is_causal=True, lengths=(4, 6))
    with pytest.raises(ValueError, match="at most max_len=32 tokens and got 40"):
        bind("Linformer(rank=4)")(*qkv(44), lengths=(4, 40))
    bind("Linformer(rank=4)")(*qkv(44), lengths=(22, 22))  # longer together than any may be
    x = torch.randn(10, 16)
    with pytest.raises(ValueError, match="need_weights=False"):
        MultiheadAttention(16, 4)(x, x, x, lengths=(4, 6))
    with pytest.raises(Unsupported, match="add_zero_attn"):
        MultiheadAttention(16, 4, add_zero_attn=True)(x, x, x, lengths=(4, 6), need_weights=False)
    with pytest.raises(ValueError, match="no attn_mask"):
        MultiheadAttention(16, 4)(x, x, x, lengths=(4, 6), need_weights=False, attn_mask=torch.ones(10, 10).triu(1) > 0)
    dynamic = Rotary(rope_type="dynamic", factor=2.0, original_max_position_embeddings=5)
    with pytest.raises(Unsupported, match=r"one has 6 tokens.*'yarn' or 'linear'"):
        MultiheadAttention(16, 4, rotary=dynamic)(x, x, x, lengths=(4, 6), need_weights=False)
    nested = torch.nested.as_nested_tensor([x, x])
    with pytest.raises(ValueError, match="without masks and cu_seqlens"):
        MultiheadAttention(16, 4, batch_first=True)(nested, nested, nested, lengths=(4, 6), need_weights=False)


@pytest.mark.slow
def test_compiled_with_lengths_as_numbers() -> None:
    q, k, v = qkv(TOKENS, batch=1)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    softmax = bind("Softmax").mechanism
    wanted = attention(q, k, v, softmax, is_causal=True, lengths=LENGTHS)
    torch.testing.assert_close(compiled(q, k, v, softmax, is_causal=True, lengths=LENGTHS), wanted)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="lengths="):
        compiled(q, k, v, softmax, is_causal=True, cu_seqlens=cu_seqlens("cpu"))
    broken = torch.compile(attention, backend="eager")  # parts of it are compiled, and the numbers read between them
    torch.testing.assert_close(broken(q, k, v, softmax, is_causal=True, cu_seqlens=cu_seqlens("cpu")), wanted)


@pytest.mark.slow
def test_exported_with_lengths_as_numbers() -> None:
    bound = bind("LinearAttention")
    q, k, v = qkv(TOKENS)
    with uncached():
        program = torch.export.export(bound, (q, k, v), {"is_causal": True, "lengths": LENGTHS})
        torch.testing.assert_close(
            program.module()(q, k, v, is_causal=True, lengths=LENGTHS), bound(q, k, v, is_causal=True, lengths=LENGTHS)
        )
        with pytest.raises(Exception, match="lengths="):
            torch.export.export(bound, (q, k, v), {"cu_seqlens": cu_seqlens("cpu")})


def test_many_sequences_are_found_by_one_pass() -> None:
    """Borders of thousands of sequences cost what they are, not their square."""
    sequences = packed.packing(torch.arange(0, 50_001, 5), None, 50_000, 50_000)
    assert sequences is not None
    assert [len(group) for group in sequences.groups()] == [10_000]
    q, k, v = qkv(50_000, batch=1, heads=1, width=2, dtype=torch.float32)
    out = attention(q, k, v, lengths=sequences.queries)
    torch.testing.assert_close(out[..., -5:, :], attention(*(x[..., -5:, :] for x in (q, k, v))))
