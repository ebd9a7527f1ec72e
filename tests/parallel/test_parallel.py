"""One sequence over 2 and 4 processes gives what one process gives: outputs, gradients, refusals, bytes, leaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fast_attention import BigBird, ByLength, Unsupported
from fast_attention.parallel import Shards, attend, bigbird, collectives, partial, shards, strategy
from fast_attention.parallel.states import leaves
from fast_attention.parallel.strategy import Call, Sizes
from tests.cases import ATTENTIONS, bind, qkv, some_keys
from tests.parallel import leave, spread, wrong

LENGTHS = {2: [6, 5], 4: [3, 1, 5, 2]}
HEADS = 4
WAYS = {m: (type(m), *(strategy(m, is_causal) for is_causal in m.traits.modes)) for m in ATTENTIONS}
EACH = [*{way: m for m, way in WAYS.items()}.values()]  # mechanisms and strategies: what two processes are tried with


def cut(x: Any, rank: int, world: int, axis: int = -2) -> Any:
    return x.split(LENGTHS[world], axis)[rank]


def compare(mechanism: Any, rank: int, world: int, is_causal: bool, masked: bool) -> str:
    """What differs from one process; ``refused`` where the mechanism is refused by name."""
    bound = bind(mechanism, heads=HEADS)
    torch.manual_seed(3)
    inputs, mask = qkv(11, heads=HEADS), some_keys(2, 11) if masked else None
    direction = torch.randn(2, HEADS, 11, 8, dtype=torch.float64)
    whole = [x.clone().requires_grad_() for x in inputs]
    parts = [cut(x, rank, world).clone().requires_grad_() for x in inputs]
    key_mask = None if mask is None else cut(mask, rank, world, -1)
    lengths = shards(dist.group.WORLD, LENGTHS[world][rank], device=inputs[0].device)
    call = Call(mechanism, bound.w, lengths, is_causal, key_mask)
    q, k, v = parts
    try:
        with collectives.counted() as traffic:
            out = attend(mechanism, q, k, v, bound.w, group=lengths, is_causal=is_causal, key_mask=key_mask)
    except Unsupported as error:
        return "refused" if repr(mechanism) in str(error) and "What would work" in str(error) else str(error)
    declared = strategy(mechanism, is_causal).sends(call, Sizes(2, HEADS, 8, 8, 8))
    wanted = mechanism(*whole, bound.w, is_causal=is_causal, key_mask=mask)
    weights = [x for x in leaves(bound.w) if x.requires_grad]
    grads, all_grads = (
        list(torch.autograd.grad(y, [*x, *weights], d, materialize_grads=True, allow_unused=True))
        for y, x, d in ((out, parts, cut(direction, rank, world)), (wanted, whole, direction))
    )
    grads = [x.contiguous() for x in grads]  # numbers are reduced in the order of memory
    for grad in grads[3:]:
        dist.all_reduce(grad)
    error = (out - cut(wanted, rank, world)).abs().max().item()
    wanted_grads = [*(cut(x, rank, world) for x in all_grads[:3]), *all_grads[3:]]
    sizes = [x.abs().max().clamp_min(1) for x in all_grads]
    slopes = [((a - b).abs().max() / c).item() for a, b, c in zip(grads, wanted_grads, sizes, strict=True)]
    if error > 1e-12 or max(slopes) > 1e-11:
        return f"outputs {error}, gradients {slopes}"
    if masked and (isinstance(mechanism, ByLength) or (isinstance(mechanism, BigBird) and not is_causal)):
        return ""  # which tokens are sent depends on the mask
    return "" if traffic.bytes == declared else f"{traffic.bytes} bytes and {declared} declared"


def leaks(mechanism: Any, rank: int, world: int) -> str:
    """How far future tokens, or masked ones of another rank, move an output; empty where they do not."""
    w = bind(mechanism, heads=HEADS).w
    torch.manual_seed(3)
    first = [cut(x, rank, world) for x in qkv(11, heads=HEADS)]
    other = [x + 9.0 if rank == world - 1 else x for x in first]
    mask, traits = torch.full((2, first[0].shape[-2]), rank < world - 1), mechanism.traits
    cases: list[Any] = [{"is_causal": True}] * traits.causal
    cases += [{"key_mask": mask}] * (traits.padding and traits.bidirectional)
    if traits.causal and traits.padding:
        cases.append({"is_causal": True, "key_mask": mask})
    texts = []
    for options in cases:
        group = shards(dist.group.WORLD, LENGTHS[world][rank])
        a, b = (attend(mechanism, *x, w, group=group, **options) for x in (first, other))
        moved = float((a - b).detach().abs().max())
        if rank < world - 1 and not moved <= 1e-14:  # the order of a sum's terms may differ
            texts.append(f"{', '.join(options)}: {moved}")
    return "; ".join(texts)


def traffic(name: str, length: int) -> int:
    mechanism = next(m for m in ATTENTIONS if repr(m) == name)
    w = bind(mechanism, heads=8, head_dim=64, max_len=1600, dtype=torch.float32).w
    x = torch.randn(1, 8, length, 64)
    with collectives.counted() as sums:
        attend(mechanism, x, x, x, w, group=dist.group.WORLD, is_causal=True)
    return sums.bytes


def empty(world: int) -> float:
    """Without tokens on process 1, and half as many bits: the largest difference to one process."""
    rank, lengths = dist.get_rank(), (5, 0, 4, 2)[:world]
    worst = 0.0
    for name in ("AFTLocal(window=3)", "AFTConv()"):
        mechanism = next(m for m in ATTENTIONS if repr(m) == name)
        w, inputs = (
            bind(mechanism, heads=HEADS, dtype=torch.float32).w,
            [x.bfloat16() for x in qkv(sum(lengths), heads=HEADS)],
        )
        parts = [x.split(lengths, -2)[rank].clone().requires_grad_() for x in inputs]
        group = Shards(dist.group.WORLD, rank, lengths, lengths)
        out = attend(mechanism, parts[0], parts[1], parts[2], w, group=group)
        out.float().sum().backward()
        assert parts[1].grad is not None
        wanted = mechanism(*inputs, w).split(lengths, -2)[rank]
        worst = max(worst, *(out - wanted).abs().flatten().tolist(), 0.0)
    return worst


def blocks(world: int) -> list[float]:
    """Longer shards, none on process 1, keys in parts: differences of outputs and keys' gradients, and of bytes."""
    rank, lengths = dist.get_rank(), (21, 0, 3, 17)[:world]
    partial.SCORES, bigbird.NUMBERS, worst = 100, 5000, []
    mechanism = BigBird(block_size=4, window_blocks=1, num_random_blocks=1)
    w = bind(mechanism, heads=3).w
    inputs = qkv(sum(lengths), heads=3)
    mask = torch.rand(2, sum(lengths)) > 0.3
    mask[:, -1] = True  # then a mask moves no block
    for is_causal in (False, True):
        parts, whole = ([x.clone().requires_grad_() for x in each]
                        for each in ([x.split(lengths, -2)[rank] for x in inputs], inputs))  # fmt: skip
        group = Shards(dist.group.WORLD, rank, lengths, lengths)
        call = Call(mechanism, w, group, is_causal, mask.split(lengths, -1)[rank])
        with collectives.counted() as sums:
            out = attend(mechanism, parts[0], parts[1], parts[2], w, group=group, is_causal=is_causal,
                         key_mask=call.key_mask)  # fmt: skip
        wanted = mechanism(*whole, w, is_causal=is_causal, key_mask=mask)
        for y in (out, wanted):
            y.square().sum().backward()
        pairs = [(out, wanted), *((a.grad, b.grad) for a, b in zip(parts, whole, strict=True))]
        worst += [(a - b.split(lengths, -2)[rank]).abs().sum().item() for a, b in pairs]
        worst.append(abs(sums.bytes - strategy(mechanism, is_causal).sends(call, Sizes(2, 3, 8, 8, 8))))
    return worst


def draws(rank: int) -> str:
    torch.manual_seed(rank)
    mechanism = next(m for m in ATTENTIONS if repr(m) == "Softmax()")
    q = torch.randn(1, HEADS, 3, 8)
    try:
        attend(mechanism, q, q, q, (torch.randn(4),), group=dist.group.WORLD)
    except Exception as error:
        return str(error)
    return ""


def process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    results: dict[Any, Any] = {}
    for mechanism in ATTENTIONS if world > 2 else EACH:
        traits = mechanism.traits
        for is_causal in traits.modes:
            for masked in [False, True] if traits.padding else [False]:
                results[repr(mechanism), is_causal, masked] = compare(mechanism, rank, world, is_causal, masked)
        if wrong("".join(value for key, value in results.items() if isinstance(key, tuple))):
            break
        results["leaks"] = {**results.get("leaks", {}), repr(mechanism): leaks(mechanism, rank, world)}
    results |= {"draws": draws(rank), "empty": empty(world), "blocks": blocks(world)}
    names = ("LinearAttention()", "Local(window=3)", "AFTLocal(window=3)")
    results |= {"bytes": [(traffic(name, 40), traffic(name, 400)) for name in names]}
    torch.save(results, f"{folder}/{rank}")
    leave()


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder: Path = tmp_path_factory.mktemp("processes")
    spread(process, (request.param, str(folder)), request.param)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(request.param)]


def test_shards_are_one_process(results: list[dict[Any, Any]]) -> None:
    """Also that the ranks agree on who is refused, and that most are served."""
    cases = [{key: value for key, value in each.items() if isinstance(key, tuple)} for each in results]
    told = [(key, value) for each in cases for key, value in each.items() if value not in ("", "refused")]
    assert not told, {str(key) + value for key, value in told}
    assert all(value == "" for each in cases for value in each.values())


def test_nothing_leaks(results: list[dict[Any, Any]]) -> None:
    told = {name: text for each in results for name, text in each["leaks"].items() if text}
    assert not told, told


def test_bytes_of_states_are_independent_of_the_length(results: list[dict[Any, Any]]) -> None:
    for each in results:
        (short, long), *windows = each["bytes"]
        assert 0 < short == long <= 1.05 * len(results) * 8 * 64 * (64 + 2) * 4
        assert all(0 <= one == other <= 2 * 8 * 64 * 4 * 2 * (1 + len(results)) for one, other in windows)


def test_a_process_may_hold_no_token(results: list[dict[Any, Any]]) -> None:
    assert all(each["empty"] <= 0.02 for each in results), [each["empty"] for each in results]


def test_bigbird_over_longer_shards(results: list[dict[Any, Any]]) -> None:
    assert all(max(each["blocks"]) < 1e-10 for each in results), [each["blocks"] for each in results]


def test_different_weights_raise(results: list[dict[Any, Any]]) -> None:
    assert all("different weights" in each["draws"] for each in results)
