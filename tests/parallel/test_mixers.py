"""Mixers over 2 and 4 processes give what one process gives, and send as many bytes as they declare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fast_attention import Bound, Shape
from fast_attention.mechanisms.mixers.mlp_mixer import MLPMixer
from fast_attention.parallel import collectives, mix, shards, strategy
from fast_attention.parallel.strategy import Call, Sizes
from tests.cases import MIXERS, bind, some_keys
from tests.parallel import leave, spread

LENGTHS = {2: [6, 5], 4: [3, 0, 6, 2]}


def cut(x: Any, rank: int, world: int, axis: int = -2) -> Any:
    return x.split(LENGTHS[world], axis)[rank]


def slopes(out: Tensor, inputs: Any, direction: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(out, inputs, direction, materialize_grads=True, allow_unused=True)]


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def compare(mechanism: Any, rank: int, world: int, is_causal: bool, masked: bool, width: int) -> str:
    """What differs from one process; of weights the sum of the processes' shares counts."""
    bound = bind(mechanism, heads=1, head_dim=width)
    torch.manual_seed(3)
    x, direction = torch.randn(2, 11, width, dtype=torch.float64), torch.randn(2, 11, width, dtype=torch.float64)
    mask = some_keys(2, 11) if masked else None
    whole, shard = x.clone().requires_grad_(), cut(x, rank, world).clone().requires_grad_()
    key_mask = None if mask is None else cut(mask, rank, world, -1)
    with collectives.counted() as counted:
        agreed = shards(dist.group.WORLD, shard.shape[-2])
        agreement = counted.bytes
        out = mix(mechanism, shard, bound.w, group=agreed, is_causal=is_causal, key_mask=key_mask)
    call = Call(mechanism, bound.w, agreed, is_causal, key_mask)
    declared = strategy(mechanism, is_causal).sends(call, Sizes(2, 1, width, width, 8))
    wanted = mechanism(whole, bound.w, is_causal=is_causal, key_mask=mask)
    weights = [*bound.parameters()]
    ours = slopes(out, [shard, *weights], cut(direction, rank, world))
    theirs = slopes(wanted, [whole, *weights], direction)
    theirs[0] = cut(theirs[0], rank, world)
    for grad in ours[1:]:
        dist.all_reduce(grad)
    error = largest(out - cut(wanted, rank, world))
    slope = max(largest(a - b) / max(1.0, largest(b)) for a, b in zip(ours, theirs, strict=True))
    if error > 1e-12 or slope > 1e-11:
        return f"outputs {error}, gradients {slope}"
    sent_bytes = counted.bytes - agreement
    return "" if sent_bytes == declared else f"{sent_bytes} bytes, declared {declared}"


def refusal(mechanism: Any, x: Tensor, w: Any, **options: Any) -> str:
    try:
        mix(mechanism, x, w, group=dist.group.WORLD, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    results: dict[Any, Any] = {}
    for mechanism in MIXERS:
        traits = mechanism.traits
        for is_causal in traits.modes:
            for masked in [False, True] if traits.padding else [False]:
                for width in (8, 3):  # 3 channels, of which some processes then hold none
                    key = repr(mechanism), is_causal, masked, width
                    results[key] = compare(mechanism, rank, world, is_causal, masked, width)
    torch.manual_seed(3)
    x = torch.randn(2, 6, 8)
    short = Bound(MLPMixer(), Shape(1, 8, max_len=8)).w
    results["long"] = refusal(MLPMixer(), x, short)
    results["one"] = refusal(MLPMixer(), x[0, 0] if rank else x, short)
    results["causal"] = refusal(MLPMixer(), x, short, is_causal=True)
    results["half"] = mix(MIXERS[0], x.bfloat16(), group=dist.group.WORLD).dtype
    torch.save(results, f"{folder}/{rank}")
    leave()


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder: Path = tmp_path_factory.mktemp("processes")
    spread(process, (request.param, str(folder)), request.param)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(request.param)]


def test_shards_are_one_process(results: list[dict[Any, Any]]) -> None:
    wrong = [(*key, value) for each in results for key, value in each.items() if isinstance(key, tuple) and value]
    assert not wrong
    assert len(results[0]) > 30


def test_all_processes_refuse(results: list[dict[Any, Any]]) -> None:
    """Also those whose own tokens are sound."""
    for each in results:
        assert "max_len=8 tokens and got" in each["long"]
        assert "Unsupported: MLPMixer() does not support is_causal=True" in each["causal"]
        assert each["half"] == torch.bfloat16
    assert "arguments of process 1 were refused there" in results[0]["one"]
    assert all("x must be (..., tokens, width)" in each["one"] for each in results[1:])
