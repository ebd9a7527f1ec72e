"""Two processes that call with different arguments are told so, both of them, and wait for nobody."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fast_attention import (
    Bound,
    CosFormer,
    LinearAttention,
    LogAttention,
    Shape,
    Softmax,
    TokenMixer,
    attention,
)
from fast_attention.parallel import attend, decode, parallelize
from tests.parallel import leave, message, spread
from tests.parallel.own import OwnSlopes, Slopes


def attended(mechanism: Any, q: Any, w: Any = (), **options: Any) -> Any:
    return attend(mechanism, q, q, q, w, group=dist.group.WORLD, **options)


def follows(state: Any, q: Any) -> Any:
    return decode(LinearAttention(), q, q, q, (), state, group=dist.group.WORLD)


def twice(mechanism: Any) -> Any:
    q = torch.randn(1, 4, 3, 8, requires_grad=True)
    return torch.autograd.grad(attended(mechanism, q, is_causal=True).sum(), q, create_graph=True)


def calls(rank: int) -> dict[str, Callable[[], Any]]:
    """What differs between the processes, by a word of the error."""
    first, q = rank == 0, torch.ones(1, 4, 3, 8)
    state = LinearAttention().decode(q, q, q)[1]
    outside = dist.new_group([0])
    return {
        "the mechanism": lambda: attended(LinearAttention() if first else LogAttention(), q),
        "is_causal": lambda: attended(Softmax(), q, is_causal=first),
        "sizes or dtypes": lambda: attended(LinearAttention(), q if first else q.double()),
        "of width 8": lambda: attended(LinearAttention(), q if first else torch.ones(2, 4, 3, 8)),
        "gradients": lambda: torch.set_grad_enabled(first)(lambda: attended(LinearAttention(), q))(),
        "the state": lambda: follows(state if first else None, q),
        "at most max_len=4": lambda: attended(CosFormer(), q, CosFormer().weights(Shape(4, 8, 4)), is_causal=True),
        "different weights": lambda: attended(OwnSlopes(), q, Slopes(torch.full((4,), float(rank)))),
        "every process needs a token": lambda: attended(LinearAttention(), q if first else q[..., :0, :]),
        "not in the group": lambda: attend(Softmax(), q, q, q, group=outside),
        "no second derivatives": lambda: twice(Softmax()),
        "there are no second derivatives": lambda: twice(LinearAttention()),
        "got int": lambda: attend(Softmax(), q, q, q, group=3),
        "got str": lambda: parallelize(TokenMixer(8, 4, "Softmax"), "gloo"),
    }


def prompted(rank: int, mechanism: str, is_causal: bool) -> float:
    """Gradients of tokens that one process alone trains, as those of a prompt before a frozen text."""
    torch.manual_seed(0)
    module, x = TokenMixer(16, 4, mechanism).double().requires_grad_(False), torch.randn(2, 7, 16).double()
    whole = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(module(whole, is_causal=is_causal).square().sum(), whole)
    here = x.split([3, 4], 1)[rank].clone().requires_grad_(rank == 0)
    parallelize(module, dist.group.WORLD)(here, is_causal=is_causal).square().sum().backward()
    return 0.0 if here.grad is None else float((here.grad - wanted[:, :3]).abs().max())


def diverged() -> float:
    """Weights without a number are as equal as others."""
    torch.manual_seed(0)
    bound, q = Bound("LearnedFeatures(num_features=4)", Shape(4, 8)), torch.ones(1, 4, 3, 8)
    for tensor in bound.state_dict().values():
        tensor.fill_(float("nan"))
    module = nn.ModuleList([bound])
    return float(parallelize(module, dist.group.WORLD)[0](q, q, q).isnan().all())


def longest(rank: int) -> float:
    """Weights that depend on the longest sequence are drawn for that of all processes."""
    q, worst = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), 0.0
    here = q.split([3, 5], -2)[rank]
    for name in ("CosFormer()", "RandomSynthesizer(trainable=False)"):
        for lengths in (None, (2, 6)):
            torch.manual_seed(1)
            wanted = attention(q, q, q, name, is_causal=True, lengths=lengths).split([3, 5], -2)[rank]
            torch.manual_seed(1)
            out = attention(here, here, here, name, is_causal=True, lengths=lengths, group=dist.group.WORLD)
            worst = max(worst, float((out - wanted).abs().max()))
    return worst


def no_sequences() -> int:
    """How many numbers the gradient of a batch of no sequences has."""
    q = torch.randn(0, 4, 3, 8, requires_grad=True)
    attended(LinearAttention(), q, is_causal=True).sum().backward()
    assert q.grad is not None
    return q.grad.numel()


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=limit)
    results: dict[str, Any] = {"said": {word: message(call) for word, call in calls(rank).items()}}
    pairs = [(name, is_causal) for name in ("LinearAttention", "Local(window=3)", "Softmax") for is_causal in (0, 1)]
    results["prompted"] = max(prompted(rank, name, bool(is_causal)) for name, is_causal in pairs)
    results |= {"diverged": diverged(), "longest": longest(rank), "no sequences": no_sequences()}
    leave(results, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("processes")
    spread(process, (str(folder),), 2)
    return [torch.load(folder / str(rank)) for rank in range(2)]


def test_what_differs_is_said_on_both(results: list[dict[str, Any]]) -> None:
    for word, first in results[0]["said"].items():
        both = [first, results[1]["said"][word]]
        assert all(word in text for text in both) or (word == "not in the group" and word in both[1]), (word, both)


def test_tokens_that_one_process_trains_get_their_gradient(results: list[dict[str, Any]]) -> None:
    assert all(each["prompted"] < 1e-10 for each in results), [each["prompted"] for each in results]


def test_weights_are_drawn_for_the_longest_sequence(results: list[dict[str, Any]]) -> None:
    assert all(each["longest"] < 1e-5 and each["no sequences"] == 0 for each in results), results


def test_weights_that_diverged_are_equal(results: list[dict[str, Any]]) -> None:
    assert all(each["diverged"] for each in results)
