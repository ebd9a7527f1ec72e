"""The core's softmax of tiles: what plans let a query see, outputs and gradients beside all scores in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import BlockLocal, BlockLocal2d, Local, Local2d, core
from fast_attention.engine import tiles, trace
from fast_attention.engine.tiles import Plan
from fast_attention.integrations.exact import big_bird, longformer
from fast_attention.mechanisms.sinkhorn import sinkhorn
from fast_attention.mechanisms.sparse import grid
from tests.sparse.test_local import near
from tests.sparse.test_local2d import visible_keys

FORWARD, BACKWARD = 2e-6, 5e-6  # relative to the largest number, of float32
BORDERS = (1, 5, 47, 48, 49, 95, 97, 288, 289, 333)  # around tiles of 48 and 96 queries, and segments of 288
needs_core = pytest.mark.skipif(bool(core.unavailable()), reason=core.unavailable() or "it serves")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote holds NaN."""
    torch.manual_seed(3)
    torch._C._set_deterministic_algorithms(True)  # fills new memory; torch's own function imports its compiler too
    assert torch.zeros(1).new_empty(3).isnan().all()
    yield
    torch._C._set_deterministic_algorithms(False)


def sees(plan: Plan, seen: Tensor) -> None:
    """The plan is sound, and says what the formula does: how often each query sees each key."""
    length, keys = seen.shape[-2:]
    for of_batch in plan.tiles.tolist():
        for of_head in of_batch:
            assert [row for row, *_ in of_head] == [0, *(end for _, end, *_ in of_head[:-1])]
            assert of_head[-1][1] == length
            for row, end, first, last in of_head:
                assert 0 < end - row <= tiles.MOST_ROWS
                ranges = [tuple(x) for x in plan.ranges[first:last, :2].tolist()]
                assert all(0 <= a <= b for a, b in ranges)
                assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    counts = plan.counts(length, keys)
    assert torch.equal(counts, seen.int().expand_as(counts))


@pytest.mark.parametrize(("length", "keys"), [(1, 1), (5, 200), (49, 49), (97, 97), (289, 289), (200, 64), (333, 400)])
def test_plans_of_bands(length: int, keys: int) -> None:
    for m in (Local(0), Local(20), Local((3, 0)), Local((0, 50)), Local((130, 7)), Local(10**12)):
        left, right = m.sides
        sees(tiles.window(length, keys, left, right), near(m, length, keys, False, "cpu"))
        sees(tiles.window(length, keys, left, 0), near(m, length, keys, True, "cpu"))
    for m in (BlockLocal(64), BlockLocal(5, 2, 1), BlockLocal(150, 1, 0), BlockLocal(1, 0, 2), BlockLocal(700)):
        for is_causal in (False, True):
            plan = tiles.blocks(length, keys, m.block_size, m.before, m.after, is_causal)
            sees(plan, near(m, length, keys, is_causal, "cpu"))
    offset = torch.arange(keys) - torch.arange(keys - length, keys)[:, None]
    sees(tiles.every_key(length, keys, True), offset <= 0)
    sees(tiles.every_key(length, keys, False), offset < keys + length)


@pytest.mark.parametrize(("length", "size"), [(1, 1), (20, 1), (49, 16), (333, 16), (333, 100)])
def test_plans_of_chosen_blocks(length: int, size: int) -> None:
    """Blocks that are named twice, that name none, and queries at both ends that see all keys."""
    number = -(-length // size)
    table = torch.randint(-1, number, (2, 2, number, 4))
    table[0, 1, number // 2] = -1
    block, key = torch.arange(length) // size, torch.arange(length)
    named = (table[:, :, block, :, None] == block).any(-2)
    for is_causal, full in ((False, None), (True, None), (False, torch.tensor([[[[0, number - 1, -1]]]]))):
        ends = torch.zeros(length, dtype=torch.bool) if full is None else (block == 0) | (block == number - 1)
        seen = (named | ends[:, None]) & ((key <= key[:, None]) if is_causal else torch.tensor(True))
        sees(tiles.chosen(table.clone(), length, full, size=size, is_causal=is_causal), seen)


GRIDS = [
    (Local2d(30, 26, window=3), 780),
    (Local2d(17, 41, window=(5, 3), num_prefix_tokens=5), 702),
    (Local2d(width=19, window=3, dilation=(2, 3)), 631),
    (Local2d(width=100, window=(1, 3), num_prefix_tokens=1), 450),
    (Local2d(width=3, window=(5, 3)), 700),
    (BlockLocal2d(24, 24, block_size=8, shift=4), 576),
    (BlockLocal2d(width=31, block_size=(2, 9), shift=(1, 3), num_prefix_tokens=2), 1000),
]


@pytest.mark.parametrize(("m", "length"), GRIDS, ids=repr)
def test_plans_of_grids(m: Any, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of tokens that the core reads, places of no token among them."""
    given: dict[str, Any] = {}

    def noted(*_: Any, **settings: Any) -> Tensor:
        given.update(settings)
        return torch.zeros(1, 1, length, 1)

    monkeypatch.setattr(grid, "_in_grid", noted)
    m(*(torch.zeros(1, 1, length, 1, dtype=torch.bfloat16) for _ in "qkv"))
    settings = (length, *(given[name] for name in ("width", "leading", "down", "across")))
    plan, order = grid._grid_plan(*settings), grid._order(*settings)
    if order is None:
        sees(plan, visible_keys(m, length))
        return
    total = len(order.tokens)
    counts = plan.counts(total, total)[0, 0]
    assert torch.equal(order.tokens[order.places], torch.arange(length))
    assert order.exists.sum() == length
    assert torch.equal(counts[order.places][:, order.places], visible_keys(m, length).int())


@pytest.mark.parametrize("size", [1, 4, 130])
@pytest.mark.parametrize("is_causal", [False, True])
def test_plans_of_sorted_blocks(size: int, is_causal: bool) -> None:
    for blocks, start in ((1, 0), (3, 0), (3, 2)):
        length, first = blocks * size, start * size
        own, key = torch.arange(length) // size, torch.arange(first + length)
        near_ones = own[:, None] + start == key // size
        if is_causal:
            near_ones &= key <= torch.arange(length)[:, None] + first
        beside = (
            (own[:, None] == own) & (not is_causal or own + start > 0)[:, None] if is_causal else own[:, None] == own
        )
        seen = torch.cat([near_ones, beside], -1)
        sees(sinkhorn._tiles_of_own_and_sorted(length, seen.shape[-1], size, first, is_causal), seen)


def test_plans_of_windows_with_global_keys() -> None:
    for length, reach, columns in (
        (1, 3, ()),
        (130, 7, (0, 1, 60, 129)),
        (130, 0, (5,)),
        (97, 200, (3,)),
        (300, 40, ()),
    ):
        i, j = torch.arange(length)[:, None], torch.arange(length)
        seen = (i - j).abs() <= reach
        seen[:, list(columns)] = True
        sees(longformer.plan(length, reach, longformer.intervals(list(columns))), seen)
    block = torch.arange(144) // 16
    seen = ((block[:, None] - block).abs() <= 1).int()
    seen[:, [*range(16), *range(128, 144)]] = 1
    drawn = torch.randint(0, 9, (3, 9, 2))
    drawn[:, 4] = 3  # twice
    seen = seen + (drawn[:, block, :, None] == block).sum(-2)
    q = torch.zeros(3, 144, 1)
    sees(big_bird.plan(q, q, drawn, size=16), seen[None])


def sliding(q: Tensor, k: Tensor, *, left: int, right: int) -> Plan:
    return tiles.window(q.shape[-2], k.shape[-2], left, right)


def named(q: Tensor, k: Tensor, table: Tensor, *, size: int) -> Plan:
    return tiles.chosen(table.clone(), k.shape[-2], size=size, is_causal=False)


def tensors(
    length: int, keys: int, width: int, values: int, heads: tuple[int, int] = (2, 2), batch: int = 2
) -> list[Tensor]:
    """Queries, keys and values, and what their output's gradient is."""
    sizes = (heads[0], length, width), (heads[1], keys, width), (heads[1], keys, values), (heads[0], length, values)
    return [torch.randn(batch, *size) for size in sizes]


def results(run: Any, given: list[Tensor | None], gradient: Tensor, *tables: Tensor, **settings: Any) -> list[Tensor]:
    """The output and the gradients of everything that has one."""
    leaves = [x.detach().requires_grad_() if x is not None and x.is_floating_point() else x for x in given]
    out = run(*leaves, *tables, **settings)
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, gradient)]


def agree(plans: Any, given: list[Tensor | None], gradient: Tensor, *tables: Tensor, **settings: Any) -> None:
    """The core's numbers are those of all scores at once, in float64."""
    settings = {"scale": 0.3, **settings}
    operation = tiles.operation(None, plans)
    ours = results(operation, given, gradient, *tables, **settings)
    double = [x.double() if x is not None and x.is_floating_point() else x for x in given]
    theirs = results(operation.reference, double, gradient.double(), *tables, **settings)
    assert given[0] is not None
    with_sinks, wide = given[6] is not None, given[0].dtype == torch.float32
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        rounding = (BACKWARD if number else FORWARD) if wide else 4 * torch.finfo(given[0].dtype).eps
        # that of sinks is a sum over all queries, whose terms cancel: against the largest gradient of the call
        beside = theirs[1:] if with_sinks and number == len(theirs) - 1 else [b]
        largest = max(float(x.abs().max()) for x in beside)
        assert float((a.double() - b).abs().max()) <= rounding * largest, f"{number}: {a} and {b}"


def extras(q: Tensor, k: Tensor, *, span: int, vectors: bool = True) -> list[Tensor | None]:
    """A mask that hides keys, numbers and vectors of some offsets, sinks."""
    heads = q.shape[1]
    mask = torch.rand(q.shape[0], 1, k.shape[-2]) < 0.6
    mask[0, :, : k.shape[-2] // 2] = False  # whole windows of queries see nothing
    return [
        mask,
        torch.randn(heads, span),
        torch.randn(heads, span, q.shape[-1]) if vectors else None,
        torch.randn(heads),
    ]


@needs_core
@pytest.mark.parametrize("length", BORDERS)
def test_lengths_around_the_borders_of_tiles(length: int) -> None:
    """With nothing, and with a mask, offsets' numbers, sinks and a cap; more keys than queries, and fewer."""
    for keys in {length, length + 61, max(length - 30, 1)}:
        q, k, v, gradient = tensors(length, keys, 16, 16)
        agree(sliding, [q, k, v, *[None] * 4], gradient, left=20, right=3)
        more = extras(q, k, span=31, vectors=False)
        agree(sliding, [q, k, v, *more], gradient, left=20, right=9, first=keys - length - 20, cap=2.0)


@needs_core
def test_long_sequences() -> None:
    """Segments that share keys with later ones, whose gradients are added in turn."""
    q, k, v, gradient = tensors(1500, 1500, 8, 8, (1, 1), batch=1)
    for left, right in ((10, 10), (400, 0)):
        agree(sliding, [q, k, v, *[None] * 4], gradient, left=left, right=right)


@needs_core
@pytest.mark.parametrize("width", [4, 8, 16])
def test_widths_of_tokens_and_of_vectors(width: int) -> None:
    """Odd widths, other ones of values, and several chunks of keys: 192 keys of width 256 are packed at a time."""
    native = torch.ops.fast_attention_core.use_width(width)
    try:
        if native > core.native_width():
            pytest.skip("this processor has no vectors of that width")
        for size, values in ((1, 1), (5, 7), (33, 33), (64, 100), (100, 1), (256, 5)):
            q, k, v, gradient = tensors(97, 230 if size < 256 else 500, size, values, batch=1)
            more = extras(q, k, span=61)
            for rest in ([None] * 4, more, [more[0], *more[1:3], None]):
                agree(sliding, [q, k, v, *rest], gradient, left=300, right=90, first=100, scale=size**-0.5)
    finally:
        torch.ops.fast_attention_core.use_width(core.native_width())


@needs_core
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_heads_of_any_layout(groups: int) -> None:
    q, k, v, gradient = tensors(130, 130, 24, 8, (4, groups))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k, v = torch.cat([k, v], -1).split([24, 8], -1)  # views of rows that hold both
    v, gradient = v.mT.contiguous().mT, gradient.transpose(1, 3).contiguous().transpose(1, 3)
    k = k[:1].expand(2, -1, -1, -1)
    for rest in ([None] * 4, extras(q, k, span=40)):
        agree(sliding, [q, k, v, *rest], gradient, left=30, right=9, first=-30)
    agree(sliding, [q[0], k[0], v[0], *[None] * 4], gradient[0], left=30, right=9)
    every_third = (torch.rand(2, 1, 390) < 0.6)[..., ::3]
    agree(sliding, [q, k, v, every_third, *[None] * 3], gradient, left=30, right=9)
    table = torch.randint(-1, 9, (2, 4, 9, 3))  # every head reads other keys of its group
    agree(named, [q, k, v, *extras(q, k, span=100)], gradient, table, size=16, first=-50)


@needs_core
def test_keys_that_count_several_times() -> None:
    q, k, v, gradient = tensors(144, 144, 16, 16, batch=1)
    agree(big_bird.plan, [q, k, v, *[None] * 4], gradient, torch.randint(0, 9, (2, 9, 3)), size=16)


@needs_core
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    """Sums of float32, rounded once; terms of float32 keep its digits."""
    q, k, v, gradient = (x.to(dtype) for x in tensors(289, 289, 40, 24))
    for rest in ([None] * 4, extras(q, k, span=31)):
        agree(sliding, [q, k, v, *rest], gradient, left=20, right=10, first=-20)


@needs_core
@pytest.mark.parametrize("scale", [0.125, 40.0])
def test_outputs_of_bfloat16_have_the_error_of_their_rounding(scale: float) -> None:
    """Products of bfloat16 numbers are exact, and weights have twice its digits: also where scores are thousands."""
    q, k, v = (x.bfloat16() for x in tensors(333, 400, 70, 40)[:3])
    operation, nothing = tiles.operation(None, sliding), [None] * 4
    ours = operation(q, k, v, *nothing, scale=scale, left=90, right=40).double()
    exact = operation.reference(*(x.double() for x in (q, k, v)), *nothing, scale=scale, left=90, right=40)
    half_a_digit = torch.finfo(torch.bfloat16).eps / 2
    assert ((ours - exact).abs() <= 1.05 * half_a_digit * exact.abs() + 1e-4).all()


@needs_core
@pytest.mark.parametrize("rate", [0.1, 0.7])
def test_dropped_weights_are_those_of_the_hash(rate: float) -> None:
    for length, width in ((97, 16), (500, 256)):
        q, k, v, gradient = tensors(length, length, width, 16)
        given = [q, k, v, *extras(q, k, span=31)]
        seed = (5 << 40) + length
        agree(sliding, given, gradient, left=20, right=300, first=-20, dropout=rate, seed=seed, scale=width**-0.5)
    kept = tiles.keeps(9, 4, 64, 99, rate).double()
    assert abs(kept.mean() - (1 - rate)) < 0.01
    assert torch.equal(kept, tiles.keeps(9, 4, 64, 99, rate).double())
    assert (kept != tiles.keeps(9 + (1 << 32), 4, 64, 99, rate)).double().mean() > 0.1
    assert (kept[0] != kept[1]).double().mean() > 0.1


@needs_core
def test_large_and_hidden_numbers() -> None:
    """Scores of thousands, hidden keys that hold anything finite, and queries that see nothing get zeros."""
    q, k, v, gradient = tensors(100, 100, 16, 16)
    large, settings = [60 * q, 60 * k, v, *[None] * 4], {"left": 9, "right": 9, "scale": 0.3}
    operation = tiles.operation(None, sliding)
    ours, theirs = (results(run, large, gradient, **settings) for run in (operation, operation.reference))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
    assert all(x.isfinite().all() for x in ours)
    mask = (torch.arange(100) >= 50).expand(2, 1, -1)
    loud = [x.masked_fill(~mask[..., None], -1e30).requires_grad_() for x in (k, v)]
    out = operation(q, *loud, mask, None, None, None, **settings)
    assert not out[:, :, :41].any()
    agree(sliding, [q, k, v, mask, *[None] * 3], gradient, left=9, right=9)
    assert torch.equal(out, operation(q, k, v, mask, None, None, None, **settings))
    for x in torch.autograd.grad(out, loud, gradient):
        assert x.isfinite().all()
        assert not x[:, :, :50].any()


@needs_core
@pytest.mark.parametrize("groups", [1, 3])
def test_equal_bits_for_any_number_of_threads(groups: int) -> None:
    q, k, v, gradient = tensors(700, 700, 16, 16, (3, groups))
    more, before = extras(q, k, span=71), torch.get_num_threads()
    table = torch.randint(-1, 44, (2, 3, 44, 5))
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            of_all = list[Tensor]()
            for rest in ([None] * 4, [more[0], None, None, more[3]], more):
                settings = {"left": 40, "right": 30, "first": -40, "scale": 0.3}
                of_all += results(tiles.operation(None, sliding), [q, k, v, *rest], gradient, **settings)
            of_all += results(tiles.operation(None, named), [q, k, v, *[None] * 4], gradient, table, size=16, scale=0.3)
            found.append(of_all)
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@needs_core
def test_second_derivatives_are_those_of_the_plain_form() -> None:
    q, k, v, _ = (x.requires_grad_() for x in tensors(30, 30, 8, 8))
    run = tiles.operation(None, sliding)
    first = torch.autograd.grad(
        run(q, k, v, *[None] * 4, left=5, right=2, scale=0.3).sin().sum(), (q, k, v), create_graph=True
    )
    plain = torch.autograd.grad(
        run.reference(q, k, v, *[None] * 4, left=5, right=2, scale=0.3).sin().sum(), (q, k, v), create_graph=True
    )
    for a, b in zip(
        *(torch.autograd.grad(sum(x.square().sum() for x in each), (q, k, v)) for each in (first, plain)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_without_the_core_the_reference_runs_and_says_so() -> None:
    q = torch.randn(1, 1, 5, 8)
    run, given = tiles.operation(None, sliding, path="all scores"), {"left": 1, "right": 1, "scale": 1.0}
    with core.switched_off(), trace.recorded() as steps:
        out = run(q, q, q, *[None] * 4, **given)
    assert torch.equal(out, run.reference(q, q, q, *[None] * 4, **given))
    assert [(step.path, step.why) for step in steps] == [("all scores", "turned off here")]
    assert tiles.unsupported(q.double()) == (core.unavailable() or "numbers of more than 32 bits")
    with core.switched_off():
        assert tiles.unsupported(q) == "turned off here"


@needs_core
def test_refused_sizes_reach_no_memory() -> None:
    q, k = torch.randn(1, 3, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match="heads do not fit"):
        tiles.operation(None, sliding)(q, k, k, *[None] * 4, left=1, right=1, scale=1.0)
