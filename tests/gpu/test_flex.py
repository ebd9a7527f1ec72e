"""Windows and chosen blocks by FlexAttention, uncompiled or compiled for a CPU: masks against ours, mechanisms, limits.

Its gradients exist on a GPU only, where the self-check compares them before they are used.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import BigBird, BlockLocal, Local, Sinkhorn, attention
from fast_attention.engine import masks, trace
from fast_attention.functional import implementation
from fast_attention.gpu import flex, patterns
from fast_attention.mechanism import Attention
from fast_attention.traits import Shape

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex, "_kinds", set())
    if device.type == "cpu":
        monkeypatch.setattr(flex, "compiled", lambda: flex_attention)


def dense(pattern: flex.Pattern, length: int, keys: int) -> Tensor:
    """Which keys FlexAttention would read, pair by pair: the kinds of blocks, and inside those of parts the pairs."""
    mask = flex.block_mask(pattern, flex.rounded(length), flex.rounded(keys))
    heads = len(pattern.some)
    shape = 1, heads, flex.rounded(length), flex.rounded(keys)
    some = torch.zeros(shape, dtype=torch.bool)
    for number, names, parts in (
        (mask.kv_num_blocks, mask.kv_indices, True), (mask.full_kv_num_blocks, mask.full_kv_indices, False),
    ):  # fmt: skip
        for h in range(heads):
            for row in range(shape[2] // flex.SIZE):
                for block in names[0, h, row, : number[0, h, row]].tolist():
                    i = torch.arange(row * flex.SIZE, (row + 1) * flex.SIZE)[:, None]
                    j = torch.arange(block * flex.SIZE, (block + 1) * flex.SIZE)[None]
                    b = torch.zeros((), dtype=torch.long)
                    pairs = pattern.visible(b, b + h, i, j)
                    assert bool(pairs.any())  # no block is read for nothing
                    assert bool(pairs.all()) != parts
                    some[0, h, i, j] = pairs
    assert not some[:, :, length:].any()
    return some[0, :, :length, :keys]


@pytest.mark.parametrize(("length", "keys"), [(700, 700), (300, 700), (512, 512)])
@pytest.mark.parametrize(("left", "right"), [(256, 0), (5, 3), (200, 300), (0, 0)])
def test_windows_are_our_bands(length: int, keys: int, left: int, right: int) -> None:
    q, k = torch.empty(1, 1, length, 16), torch.empty(1, 1, keys, 16)
    band = masks.band(length, keys - length, 0, left=left, right=right, device=q.device)
    assert torch.equal(dense(patterns.window(q, k, left=left, right=right), length, keys)[0], band)


@pytest.mark.parametrize("size", [64, 48, 200])
@pytest.mark.parametrize("is_causal", [True, False])
def test_neighbouring_blocks(size: int, is_causal: bool) -> None:
    q, k = torch.empty(1, 1, 300, 16), torch.empty(1, 1, 700, 16)
    at, to = torch.arange(400, 700)[:, None], torch.arange(700)[None]
    expected = (to // size >= at // size - 2) & ((to <= at) if is_causal else to // size <= at // size + 1)
    found = dense(patterns.blocks(q, k, size, before=2, after=1, is_causal=is_causal), 300, 700)
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("size", [64, 32])
@pytest.mark.parametrize("is_causal", [True, False])
def test_tables_of_blocks(size: int, is_causal: bool) -> None:
    length, number = 700, -(-700 // size)
    table = torch.randint(-1, number, (2, 1, number, 3))
    q = torch.empty(2, 1, length, 16)
    at = torch.arange(length) // size
    expected = torch.stack([(table[h, 0, at, :, None] == at).any(1) for h in range(2)])
    expected[:, :size], full = True, torch.zeros(1, 1, 1, 1, dtype=torch.long)
    if is_causal:
        expected = expected.tril()
    found = dense(patterns.chosen(q, table, full, size=size, is_causal=is_causal), length, length)
    assert torch.equal(found, expected)


MECHANISMS = [Local(window=(40, 7)), BlockLocal(block_size=48), BigBird(block_size=64), BigBird(num_global_tokens=70)]
MECHANISMS += [Sinkhorn(block_size=64)]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_mechanisms_are_their_plain_forms(mechanism: Attention[Any, Any], is_causal: bool, masked: bool) -> None:
    torch.manual_seed(3)
    w = mechanism.weights(Shape(2, 16, 1100))
    q, k, v = (torch.randn(2, 2, 1100, 16).to(torch.float16) for _ in range(3))
    mask = torch.rand(2, 1, 1100) > 0.2
    mask[1, :, 900:] = False
    if masked and isinstance(mechanism, Local | BlockLocal):  # others' last rows are made by torch's fused attention
        k, v = (x.masked_fill(~mask[..., None], float("nan")) for x in (k, v))
    call = {"is_causal": is_causal, "key_mask": mask if masked else None}
    with trace.recorded() as steps:
        out = mechanism.attend(q, k, v, w, **call).detach()
    with implementation("reference"):
        k, v = (x.nan_to_num() for x in (k, v))
        expected = mechanism.attend(q, k, v, w, **call).detach()
    used = any(step.path == f"{trace.KERNEL}: FlexAttention" for step in steps)
    assert used == (not isinstance(mechanism, Sinkhorn))  # whose blocks are sorted by their weights, not chosen
    assert float((out.double() - expected.double()).abs().max()) < 3e-3


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k, v = (torch.randn(1, 2, 1100, 16).to(torch.float16) for _ in range(3))
    out = attention(q, k, v, Local(window=20), key_mask=torch.arange(1100)[None] >= 500)
    assert not out[..., :480, :].any()
    assert bool(out[..., 480:, :].any(-1).all())


def test_queries_may_be_fewer_than_keys() -> None:
    q, k, v = torch.randn(1, 2, 1030, 16), torch.randn(1, 2, 1500, 16), torch.randn(1, 2, 1500, 32)
    q, k, v = (x.to(torch.float16) for x in (q, k, v))
    out = attention(q, k, v, Local(window=100), is_causal=True, impl="triton")
    expected = attention(q, k, v, Local(window=100), is_causal=True, impl="reference")
    assert float((out.double() - expected.double()).abs().max()) < 3e-3


def test_what_it_does_not_serve_runs_by_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    x, wide = torch.randn(1, 1, 1100, 16).half(), torch.randn(1, 1, 1100, 48).half()
    refused = [
        (x.float(), {}, "float32"), (wide, {}, "other widths"), (x[..., :900, :], {}, "fewer than 1024"),
        (x, {"dropout": 0.1}, "dropout"),
    ]  # fmt: skip
    for q, settings, words in refused:
        call = {"is_causal": True, "key_mask": None, "attn_mask": None, "dropout": 0.0, **settings}
        with trace.recorded() as steps:
            Local(window=20).attend_masked(q, q, q, (), **call)
        assert any(words in step.why for step in steps)
        assert not any(step.path.startswith(trace.KERNEL) for step in steps)
    monkeypatch.setattr(flex, "KINDS", 1)
    attention(x, x, x, Local(window=20), impl="triton")
    attention(x[..., :1050, :], x[..., :1050, :], x[..., :1050, :], Local(window=9), impl="triton")  # rounded alike
    longer = torch.randn(1, 1, 2100, 16).half()
    with pytest.raises(NotImplementedError, match="more than 1 kinds of shapes"):
        attention(longer, longer, longer, Local(window=20), impl="triton")


def test_lengths_are_rounded_to_a_few() -> None:
    sizes = {flex.rounded(n) for n in range(1024, 65537)}
    assert len(sizes) == 6 * flex.STEPS + 1
    assert all(size % flex.SIZE == 0 for size in sizes)
    assert all(n <= flex.rounded(n) <= 1.25 * n for n in range(1024, 65537, 7))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_one_compilation_serves_every_window_and_mask(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("compiled for a CPU here; on a GPU the mechanisms' tests compile it")
    from torch._dynamo.utils import counters

    monkeypatch.undo()
    counters.clear()
    q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
    for i, (left, right) in enumerate([(40, 10), (100, 0), (7, 3)]):
        mask = torch.rand(1, 2, 300) > 0.1 * i
        out = flex.attend(q, k, v, patterns.window(q, k, left=left, right=right), mask, scale=None)
        band = masks.band(300, 0, 0, left=left, right=right, device=q.device) & mask[..., None, :]
        expected = (q @ k.mT / 4).masked_fill(~band, float("-inf")).softmax(-1).nan_to_num() @ v
        assert float((out - expected).abs().max()) < 2e-6
    assert counters["stats"]["unique_graphs"] == 1
