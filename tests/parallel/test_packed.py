"""Packed sequences over 4 processes, and states into and out of several processes, are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fast_attention.parallel.packing import packed_over
from fast_attention.parallel.strategy import Call, Sizes

from fast_attention import BigBird, ByLength, Unsupported, packed
from fast_attention.parallel import attend, collectives, decode, shards, strategy
from fast_attention.parallel.states import leaves
from tests.cases import ATTENTIONS, bind, qkv, some_keys
from tests.parallel import leave, spread, wrong
from tests.parallel.test_parallel import HEADS, LENGTHS, cut

SEQUENCES = (2, 5, 0, 1, 3)


def packed_difference(mechanism: Any, rank: int, world: int, is_causal: bool) -> str:
    """What differs from one process, of outputs, gradients and bytes."""
    w = bind(mechanism, heads=HEADS).w
    torch.manual_seed(3)
    inputs, mask = qkv(11, heads=HEADS), some_keys(2, 11) if mechanism.traits.padding else None
    direction = torch.randn(2, HEADS, 11, 8, dtype=torch.float64)
    whole = [x.clone().requires_grad_() for x in inputs]
    parts = [cut(x, rank, world).clone().requires_grad_() for x in inputs]
    key_mask = None if mask is None else cut(mask, rank, world, -1)
    group = shards(dist.group.WORLD, LENGTHS[world][rank])
    q, k, v = parts
    with collectives.counted() as traffic:
        out = attend(mechanism, q, k, v, w, group=group, is_causal=is_causal, key_mask=key_mask, lengths=SEQUENCES)
    sequences = packed.Packing(SEQUENCES, SEQUENCES)
    spread = packed_over(strategy(mechanism, is_causal), sequences)
    declared = spread.sends(Call(mechanism, w, group, is_causal, key_mask), Sizes(2, HEADS, 8, 8, 8))

    def run(*x: Any, key_mask: Any) -> Any:
        return mechanism(*x, w, is_causal=is_causal, key_mask=key_mask)

    q, k, v = whole
    wanted = packed.attend(run, q, k, v, sequences, mask)
    learned = [x for x in leaves(w) if x.requires_grad]
    grads, all_grads = (
        list(torch.autograd.grad(y, [*x, *learned], d, materialize_grads=True, allow_unused=True))
        for y, x, d in ((out, parts, cut(direction, rank, world)), (wanted, whole, direction))
    )
    for i, grad in enumerate(grads[3:], start=3):
        grads[i] = grad.contiguous()
        dist.all_reduce(grads[i])
    error = float((out - cut(wanted, rank, world)).detach().abs().max())
    wanted_grads = [*(cut(x, rank, world) for x in all_grads[:3]), *all_grads[3:]]
    slopes = [float((a - b).abs().max() / b.abs().max().clamp_min(1)) for a, b in zip(grads, wanted_grads, strict=True)]
    if error > 1e-12 or max(slopes) > 1e-11:
        return f"outputs {error}, gradients {slopes}"
    same = mask is not None and (isinstance(mechanism, ByLength) or (isinstance(mechanism, BigBird) and not is_causal))
    same = same or traffic.bytes == declared
    return "" if same else f"{traffic.bytes} bytes and {declared} declared"


def state_difference(mechanism: Any, rank: int, world: int) -> str:
    """What differs from one process where all read two parts of a prompt one after another, and one then goes on."""
    w = bind(mechanism, heads=HEADS).w
    torch.manual_seed(4)
    inputs, mask = qkv(26, heads=HEADS), some_keys(2, 26) if mechanism.traits.padding else None
    state, outs = None, []
    for first in (0, 11):
        here = [cut(x[..., first : first + 11, :], rank, world) for x in inputs]
        key_mask = None if mask is None else cut(mask[..., first : first + 11], rank, world, -1)
        q, k, v = here
        out, state = decode(mechanism, q, k, v, w, state, group=dist.group.WORLD, key_mask=key_mask)
        outs.append(out)
    last_mask = None if mask is None else mask[..., 22:]
    out, _ = mechanism.decode(*(x[..., 22:, :] for x in inputs), w, state, key_mask=last_mask)
    wanted, _ = mechanism.decode(*inputs, w, key_mask=mask)
    one, two, last = wanted.split([11, 11, 4], -2)
    pairs = [(outs[0], cut(one, rank, world)), (outs[1], cut(two, rank, world)), (out, last)]
    errors = [float((a - b).detach().abs().max()) for a, b in pairs]
    return "" if max(errors) < 1e-11 else str(errors)


def refusals(rank: int) -> list[str]:
    """Errors of packed calls that fit no row, or not one another."""
    mechanism = next(m for m in ATTENTIONS if repr(m) == "LinearAttention()")
    q = torch.randn(1, HEADS, 3, 8)
    messages = []
    for lengths in ((2, 3), (3 + rank, 3), (4.5,)):
        try:
            attend(mechanism, q, q, q, group=dist.group.WORLD, lengths=lengths)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            messages.append(str(error))
    try:
        decode(next(m for m in ATTENTIONS if repr(m) == "Local(window=3)"), *(q[:, :3],) * 3, group=dist.group.WORLD)
    except Unsupported as error:
        messages.append(str(error))
    return messages


def process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    results: dict[str, Any] = {}
    for mechanism in ATTENTIONS:
        for is_causal in mechanism.traits.modes:
            results[f"{mechanism!r} {is_causal}"] = packed_difference(mechanism, rank, world, is_causal)
        if mechanism.traits.memory:
            results[f"state of {mechanism!r}"] = state_difference(mechanism, rank, world)
        if wrong("".join(results.values())):
            break
    torch.save((results, refusals(rank)), f"{folder}/{rank}")
    leave()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("processes")
    spread(process, (4, str(folder)), 4)
    return [torch.load(folder / str(rank)) for rank in range(4)]


def test_packed_sequences_and_states_are_those_of_one_process(results: list[Any]) -> None:
    told = {key: value for each, _ in results for key, value in each.items() if value}
    assert not told, told


def test_what_does_not_fit_is_refused_on_all_processes(results: list[Any]) -> None:
    for _, messages in results:
        sums, different, numbers, heads = messages
        assert f"the sum of lengths is 5 and there are {3 * len(results)} tokens" in sums
        assert "processes describe different packed sequences" in different
        assert "lengths must be whole numbers" in numbers
        assert "What would work: a number of processes that divides 3" in heads
