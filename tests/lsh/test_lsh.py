"""LSH attention beyond the oracle: exact special cases, sets at length, the hash's statistics, decoding, limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention import LSH, Unsupported, catalogue
from fast_attention.decoding import State
from fast_attention.functional import lsh_attention
from fast_attention.mechanisms.lsh.lsh import LOG
from fast_attention.mechanisms.lsh.reference import arrange, buckets
from tests.cases import bind, qkv, some_keys
from tests.oracles.lsh import reachable

VALUES = [
    LSH(num_hashes=3, num_buckets=4, bucket_size=4),
    LSH(num_hashes=2, num_buckets=(2, 2), bucket_size=3, correct_duplicates=False),
    LSH(num_hashes=1, num_buckets=2, bucket_size=5, scale=0.4),
]
SORTED = [
    LSH(num_hashes=3, num_buckets=4, bucket_size=4, layout="sorted"),
    LSH(num_hashes=2, num_buckets=8, bucket_size=6, layout="sorted", attend_across_buckets=True),
]


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def shared(q: Tensor, v: Tensor, often: Tensor, scale: float = 1.0) -> Tensor:
    """Shared-QK softmax where key j counts ``often[i, j]`` times, 1e5 off the diagonal; a row of zeros gives zeros."""
    logits = scale * q @ (q / q.norm(dim=-1, keepdim=True)).mT
    logits = logits - 1e5 * torch.eye(q.shape[-2], dtype=q.dtype, device=q.device) + often.log()
    return logits.softmax(-1).nan_to_num(0.0) @ v


def into_one_bucket(q: Tensor, rounds: int, halves: int) -> tuple[Tensor, Tensor]:
    """Queries with a positive first coordinate, and rotations that look at nothing else."""
    q = torch.cat([q[..., :1].abs() + 0.1, q[..., 1:]], -1)
    rotations = torch.zeros(q.shape[-3], rounds, q.shape[-1], halves, dtype=q.dtype, device=q.device)
    rotations[:, :, 0, 0] = 1
    return q, rotations


@pytest.mark.parametrize("layout", ["ranked", "sorted"])
@pytest.mark.parametrize("rounds", [1, 4])
def test_13_one_bucket_and_one_chunk_is_shared_softmax(rounds: int, layout: Any, device: torch.device) -> None:
    for length in (1, 2, 19, 40):
        q, _, v = qkv(length, device=device)
        q, rotations = into_one_bucket(q, rounds, 2)
        ones = torch.ones(length, length, dtype=torch.float64, device=device)
        same(lsh_attention(q, v, rotations, num_buckets=4, bucket_size=length, layout=layout), shared(q, v, ones))
        if layout == "ranked":
            out = lsh_attention(q, v, rotations, num_buckets=4, bucket_size=length, is_causal=True)
            same(out, shared(q, v, ones.tril()))


@pytest.mark.parametrize("is_causal", [False, True])
def test_13_rounds_with_one_chunk_are_softmax_over_their_union(is_causal: bool, device: torch.device) -> None:
    m = LSH(num_hashes=4, num_buckets=4, bucket_size=50)
    bound, (q, k, v) = bind(m, device=device), qkv(50, device=device)
    hashes = buckets(q, bound.w.rotations, (4,))
    union = (hashes[..., :, None] == hashes[..., None, :]).any(-3).double()
    same(bound(q, k, v, is_causal=is_causal), shared(q, v, union.tril() if is_causal else union))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("m", VALUES + SORTED, ids=repr)
def test_13_chunked_is_dense_over_the_sets(m: LSH, masked: bool, device: torch.device) -> None:
    """Same bucket and adjacent chunk, each round's set counted once in the union, or once per round."""
    length, bound = 60, bind(m, device=device)
    q, k, v = (x.requires_grad_() for x in qkv(length, device=device))
    key_mask = some_keys(2, length, device) if masked else None
    sizes = m.num_buckets if isinstance(m.num_buckets, tuple) else (m.num_buckets,)
    hashes = buckets(q, bound.w.rotations, sizes).tolist()
    for is_causal in m.traits.modes:
        often = torch.zeros(2, 2, length, length, dtype=torch.float64)
        for b in range(2):
            seen = [True] * length if key_mask is None else key_mask[b].tolist()
            for head in range(2):
                for held in hashes[b][head]:
                    for i, keys in enumerate(reachable(m, held, seen, is_causal)):
                        often[b, head, i, list(keys)] += 1
        often = (often.clamp(max=1) if m.correct_duplicates else often).to(device)
        ours, theirs = bound(q, k, v, is_causal=is_causal, key_mask=key_mask), shared(q, v, often, m.scale)
        same(ours, theirs)
        if not masked:
            for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, v)) for x in (ours, theirs)), strict=True):
                same(a, b)


def test_13_equal_vectors_share_a_bucket_and_opposite_ones_never(device: torch.device) -> None:
    x = torch.randn(1, 2, 100, 16, dtype=torch.float64).to(device)
    rotations = torch.randn(2, 8, 16, 8, dtype=torch.float64).to(device)
    hashes = [buckets(y, rotations, (16,)) for y in (x, 3 * x, -x)]
    assert (hashes[0] == hashes[1]).all()
    assert (hashes[0] != hashes[2]).all()
    assert (hashes[2] == (hashes[0] + 8) % 16).all()
    factored = buckets(x, rotations, (4, 12))
    assert (factored % 4 == buckets(x, rotations[..., :2], (4,))).all()
    assert (factored // 4 == buckets(x, rotations[..., 2:], (12,))).all()


def test_26_collisions_fall_with_the_angle(device: torch.device) -> None:
    """Measured shares for 16 buckets in 64 dimensions; one in 16 at right angles."""
    draws, width = 40_000, 64
    measured = []
    for angle in (0.1, 0.3, 0.6, 1.0, math.pi / 2, math.pi):
        pair = torch.zeros(1, 1, 2, width, device=device)
        pair[..., 0, 0], pair[..., 1, 0], pair[..., 1, 1] = 1.0, math.cos(angle), math.sin(angle)
        pair = pair + 1e-9  # no ties
        h = buckets(pair, torch.randn(1, draws, width, 8).to(device), (16,))
        measured.append((h[..., 0] == h[..., 1]).double().mean().item())
    assert measured == sorted(measured, reverse=True)
    assert measured == pytest.approx([0.897, 0.719, 0.488, 0.252, 1 / 16, 0.0], abs=0.01)


def test_26_buckets_are_even(device: torch.device) -> None:
    """Gaussian tokens: nearly all buckets within a factor 2 of the mean."""
    x = torch.randn(1, 1, 2048, 64).to(device)
    h = buckets(x, torch.randn(1, 50, 64, 8).to(device), (16,))
    sizes = nn.functional.one_hot(h, 16).sum(-2).double()
    assert ((sizes > 64) & (sizes < 256)).double().mean().item() > 0.9


def test_later_tokens_move_no_earlier_chunk_but_in_the_published_layout(device: torch.device) -> None:
    """Why ``layout="sorted"`` is not causal: the codes of earlier tokens change with the bucket of the last one."""
    held = torch.randint(1, 4, (1, 1, 8, 40)).to(device)
    other = held.clone()
    other[..., -1] = 0
    for ranked in (True, False):
        codes = [arrange(h, number=4, size=5, ranked=ranked).code for h in (held, other)]
        pairs = [(c[..., :39, None] - c[..., None, :39]) for c in codes]
        reach = [(p >= 0) & (p <= 1) for p in pairs]
        assert (reach[0] == reach[1]).all().item() == ranked


def test_the_published_layout_refuses_what_it_cannot_do() -> None:
    q, k, v = qkv(9)
    for m in SORTED:
        with pytest.raises(Unsupported, match=r"LSH.*causal"):
            bind(m)(q, k, v, is_causal=True)
        with pytest.raises(Unsupported, match=r"LSH.*memory"):
            bind(m).decode(q, k, v)
    with pytest.raises(ValueError, match="not causal"):
        lsh_attention(q, v, torch.randn(2, 1, 8, 2).double(), num_buckets=4, layout="sorted", is_causal=True)
    with pytest.raises(ValueError, match="attend_across_buckets"):
        lsh_attention(q, v, torch.randn(2, 1, 8, 2).double(), num_buckets=4, attend_across_buckets=True)


def test_keys_are_the_queries(device: torch.device) -> None:
    bound, (q, k, v) = bind(VALUES[0], device=device), qkv(20, device=device)
    assert (bound(q, k, v) == bound(q, 100 * k, v)).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("m", VALUES, ids=repr)
def test_20_decode_in_any_split_is_one_pass(m: LSH, masked: bool, device: torch.device) -> None:
    length, bound = 64, bind(m, device=device)
    q, k, v = qkv(length, device=device)
    key_mask = some_keys(2, length, device) if masked else None
    whole = bound(q, k, v, is_causal=True, key_mask=key_mask)
    shapes = set()
    for sizes in ([length], [1] * length, [7, 1, 30, 26], [40, 24]):
        state, outs, start = None, [], 0
        for size in sizes:
            now = slice(start, start + size)
            seen = None if key_mask is None else key_mask[:, now]
            out, state = bound.decode(q[:, :, now], k[:, :, now], v[:, :, now], state, key_mask=seen)
            outs.append(out)
            start += size
            shapes.add(tuple(part.shape for part in state.content))
        same(torch.cat(outs, -2), whole)
    assert len(shapes) == 1  # the state does not grow


def test_a_state_can_be_continued_twice(device: torch.device) -> None:
    bound, (q, k, v) = bind(VALUES[0], device=device), qkv(20, device=device)
    _, state = bound.decode(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    once = bound.decode(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], state)[0]
    bound.decode(v[:, :, 9:], v[:, :, 9:], v[:, :, 9:], state)
    same(bound.decode(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], state)[0], once)


@pytest.mark.parametrize("m", VALUES, ids=repr)
def test_the_log_is_written_into_the_chunks_and_older_states_stay(m: LSH) -> None:
    """Twice over a full log, alone and within a stretch, masked: one pass; each older state decodes on as before."""
    bound, (q, k, v), key_mask = bind(m), qkv(2 * LOG + 22), some_keys(2, 2 * LOG + 22, torch.device("cpu"))
    whole = bound(q, k, v, is_causal=True, key_mask=key_mask)
    for sizes in ([5] + [1] * (2 * LOG + 17), [5, LOG - 1, 1, LOG + 10, 7]):
        states: list[State] = []
        for again in (False, True):  # the second time from the states that the first time left behind
            start = 0
            for number, size in enumerate(sizes):
                now, state = slice(start, start + size), states[number - 1] if number else None
                out, state = bound.decode(q[:, :, now], k[:, :, now], v[:, :, now], state, key_mask=key_mask[:, now])
                same(out, whole[:, :, now])
                states += [] if again else [state]
                start += size


def test_gradients_flow_through_decoding(device: torch.device) -> None:
    bound, (q, k, v) = bind(VALUES[0], device=device), qkv(20, device=device)
    grads = []
    for sizes in ([20], [9, 6, 5]):
        x, y = q.clone().requires_grad_(), v.clone().requires_grad_()
        state, outs = None, []
        for a, b, c in zip(x.split(sizes, -2), k.split(sizes, -2), y.split(sizes, -2), strict=True):
            out, state = bound.decode(a, b, c, state)
            outs.append(out)
        grads.append(torch.autograd.grad(torch.cat(outs, -2).square().sum(), (x, y)))
    for a, b in zip(*grads, strict=True):
        same(a, b)


def test_settings_are_checked() -> None:
    bad = ("num_hashes=0", "num_buckets=3", "num_buckets=(2, 3)", "num_buckets=0", "bucket_size=0", "layout='other'")
    for setting in bad:
        with pytest.raises(ValueError, match=setting.split("=")[0]):
            catalogue.parse(f"LSH({setting})")
    with pytest.raises(ValueError, match="sorted"):
        LSH(attend_across_buckets=True)
    for m in VALUES + SORTED:
        assert catalogue.parse(repr(m)) == m
