"""Packed sequences over 4 processes, and states into and out of several processes, are those of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fast_attention import ByLength, LinearAttention, Local, packed
from fast_attention.decoding import leaves
from fast_attention.parallel import Shards, attend, decode
from tests.cases import bind, qkv, some_keys
from tests.parallel import HEADS, LENGTHS, cut, differences, gradients, join, largest, leave, message, spread, wrong
from tests.parallel.test_parallel import TRIED

SEQUENCES, WORLD = (2, 5, 0, 1, 3), 4
SIZES = LENGTHS[WORLD]


def packed_difference(mechanism: Any, is_causal: bool) -> str:
    """What differs from one process, of outputs and gradients."""
    w, rank = bind(mechanism, heads=HEADS).w, dist.get_rank()
    torch.manual_seed(3)
    whole, mask = [x.requires_grad_() for x in qkv(11, heads=HEADS)], some_keys(2, 11)
    direction = torch.randn(2, HEADS, 11, 8, dtype=torch.float64)
    parts = [cut(x, SIZES).detach().requires_grad_() for x in whole]
    shards, key_mask = Shards(dist.group.WORLD, rank, (*SIZES,), (*SIZES,)), cut(mask, SIZES, -1)
    out = attend(mechanism, parts[0], parts[1], parts[2], w, group=shards, is_causal=is_causal, key_mask=key_mask,
                 lengths=SEQUENCES)  # fmt: skip
    sequences = packed.Packing(SEQUENCES, SEQUENCES)
    run = partial(mechanism, w=w, is_causal=is_causal)
    wanted = packed.attend(run, whole[0], whole[1], whole[2], sequences, mask)
    learned = [x for x in leaves(w) if x.requires_grad]
    here = gradients(out, [*parts, *learned], cut(direction, SIZES))
    there = gradients(wanted, [*whole, *learned], direction)
    return differences((out, here[:3], here[3:]), (wanted, there[:3], there[3:]), [SIZES] * 4)


def state_difference(mechanism: Any) -> str:
    """What differs from one process where all read two parts of a prompt one after another, and one then goes on."""
    w, group = bind(mechanism, heads=HEADS).w, dist.group.WORLD
    torch.manual_seed(4)
    (q, k, v), mask = qkv(26, heads=HEADS), some_keys(2, 26)
    state, outs = None, []
    for first in (0, 11):
        here = [cut(x[..., first : first + 11, :], SIZES) for x in (q, k, v)]
        key_mask = cut(mask[..., first : first + 11], SIZES, -1)
        out, state = decode(mechanism, here[0], here[1], here[2], w, state, group=group, key_mask=key_mask)
        outs.append(out)
    last = [x[..., 22:, :] for x in (q, k, v)]
    out, _ = mechanism.decode(*last, w, state, key_mask=mask[..., 22:])
    one, two, three = mechanism.decode(q, k, v, w, key_mask=mask)[0].split([11, 11, 4], -2)
    pairs = [(outs[0], cut(one, SIZES)), (outs[1], cut(two, SIZES)), (out, three)]
    worst = max(largest(a - b) for a, b in pairs)
    return "" if worst < 1e-11 else f"{worst}"


def refusals(rank: int) -> list[str]:
    """Errors of packed calls that fit no row, or not one another, and of states that cannot be joined."""
    q, group = torch.randn(1, HEADS, 3, 8), dist.group.WORLD
    linear, changing = LinearAttention(), ByLength(long=Local(3), above=4)
    wrong_lengths: Any = ((2, 3), (3 + rank, 3), (4.5,))
    calls: list[Any] = [
        lambda lengths=lengths: attend(linear, q, q, q, group=group, lengths=lengths) for lengths in wrong_lengths
    ]
    calls.append(lambda: decode(Local(3), q[:, :3], q[:, :3], q[:, :3], group=group))
    calls.append(lambda: decode(changing, q, q, q, group=group))
    return [message(call) for call in calls]


def process(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    told: dict[str, str] = {}
    for mechanism in TRIED:
        for is_causal in mechanism.traits.modes:
            told[f"{mechanism!r} {is_causal}"] = packed_difference(mechanism, is_causal)
        if mechanism.traits.memory and type(mechanism).__name__ != "ByLength":
            told[f"state of {mechanism!r}"] = state_difference(mechanism)
        if wrong("".join(told.values())):
            break
    leave((told, refusals(rank)), folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("processes")
    spread(process, (WORLD, str(folder)), WORLD)
    return [torch.load(folder / str(rank)) for rank in range(WORLD)]


def test_packed_sequences_and_states_are_those_of_one_process(results: list[Any]) -> None:
    told = {key: value for each, _ in results for key, value in each.items() if value}
    assert not told, told


def test_what_does_not_fit_is_refused_on_all_processes(results: list[Any]) -> None:
    for _, (sums, different, numbers, heads, form) in results:
        assert f"the sum of lengths is 5 and there are {3 * WORLD} tokens" in sums
        assert "processes describe different packed sequences" in different
        assert "lengths must be whole numbers" in numbers
        assert "What would work: a number of processes that divides 3" in heads
        assert "changes the form of its state after some tokens" in form
