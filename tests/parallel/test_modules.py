"""Modules over 2 and 4 processes are modules in one: outputs, parameters' gradients, positions, copies, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fast_attention import Bound, MultiheadAttention, Shape, TokenMixer, attention, explain
from fast_attention.nn.reversible import Reversible, ReversibleSequence
from fast_attention.parallel import counted, parallelize, shards
from tests.parallel import HEADS, cut, gradients, join, largest, leave, message, spread

LENGTHS = {2: [8, 6], 4: [5, 1, 6, 2]}
LENGTH, WIDTH = 14, 16


class Decoder(nn.Module):
    """Tokens to logits through causal layers, by sums of inputs and outputs."""

    def __init__(self, *mechanisms: str, **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([TokenMixer(WIDTH, HEADS, m, max_len=32, **settings) for m in mechanisms])

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, is_causal=True, key_mask=mask)
        return x

    def decode(self, tokens: Tensor, states: list[Any]) -> tuple[Tensor, list[Any]]:
        x, after = self.embedding(tokens), []
        for layer, state in zip(self.layers, states, strict=True):
            out, state = layer.decode(x, state)
            x, after = x + out, [*after, state]
        return x, after


class Swapped(nn.Module):
    """Torch's layer with our attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        attention: Any = MultiheadAttention(WIDTH, HEADS, batch_first=True, mechanism="Local(window=3)")
        self.layer.self_attn = attention

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x, src_key_padding_mask=~mask)


class Undone(nn.Module):
    """Reversible blocks, which compute their inputs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = ReversibleSequence([
            Reversible(TokenMixer(WIDTH, HEADS, "LinearAttention"), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        ])  # fmt: skip

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.blocks(x, is_causal=True, key_mask=mask)


class Grouped(nn.Module):
    """A layer with fewer heads of keys than of queries."""

    def __init__(self, mechanism: str, is_causal: bool, **settings: Any) -> None:
        super().__init__()
        self.is_causal, self.mixer = is_causal, TokenMixer(WIDTH, HEADS, mechanism, rotary=True, **settings)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.mixer(x, is_causal=self.is_causal, key_mask=mask)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "a causal layer with grouped heads": lambda: Grouped("FavorPlus(num_features=5)", True, num_kv_heads=2),
    "a layer by heads": lambda: Grouped("Softmax()", False),
    "torch's layer": Swapped,
    "a decoder": lambda: Decoder("LinearAttention()", "Local(window=3)"),
    "a decoder with rotary positions": lambda: Decoder("Local(window=3)", rotary=True),
    "reversible layers": Undone,
}


def compared(name: str, world: int) -> float:
    """The largest difference to one process, of outputs and of parameters' gradients."""
    torch.manual_seed(0)
    whole = MODULES[name]().double()
    spread = parallelize(copy.deepcopy(whole), dist.group.WORLD)
    torch.manual_seed(1)
    x = torch.randint(11, (2, LENGTH)) if "decoder" in name else torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, :2] = mask[1, 9:] = False
    lengths = LENGTHS[world]
    wanted, out = whole(x, mask), spread(cut(x, lengths, 1), cut(mask, lengths, 1))
    direction, worst = torch.randn_like(wanted), largest(out - cut(wanted, lengths, 1))
    theirs = gradients(wanted, [*whole.parameters()], direction)
    ours = gradients(out, [*spread.parameters()], cut(direction, lengths, 1))
    for one, share in zip(theirs, ours, strict=True):
        dist.all_reduce(share)
        worst = max(worst, largest(share - one) / max(1.0, largest(one)))
    return worst


def calls(world: int) -> float:
    """``group=`` on ``attention`` and on ``Bound``, keys with fewer heads."""
    torch.manual_seed(3)
    q, k, v = torch.randn(2, HEADS, LENGTH, 8), torch.randn(2, 2, LENGTH, 8), torch.randn(2, 2, LENGTH, 8)
    lengths, group, options = LENGTHS[world], dist.group.WORLD, {"is_causal": True, "enable_gqa": True}
    bound: Any = Bound("BlockLocal(block_size=4)", Shape(HEADS, 8))
    worst = 0.0
    for run in (lambda q, k, v, **more: attention(q, k, v, "LinearAttention", **more), bound):
        out = run(*(cut(x, lengths) for x in (q, k, v)), **options, group=group)
        worst = max(worst, largest(cut(run(q, k, v, **options), lengths) - out))
    return worst


def prefilled(world: int) -> float:
    """A prompt is read by all processes in two parts, then one goes on alone: the largest difference to one process."""
    worst, lengths = 0.0, LENGTHS[world]
    for rotary in (False, True):
        torch.manual_seed(0)
        whole = Decoder("FavorPlus(num_features=5)", "Local(window=3)", rotary=rotary).double()
        spread = parallelize(copy.deepcopy(whole), dist.group.WORLD)
        tokens, states, outs = torch.randint(11, (2, 2 * LENGTH + 3)), [None, None], []
        for first in (0, LENGTH):
            out, states = spread.decode(cut(tokens[:, first : first + LENGTH], lengths, 1), states)
            outs.append(out)
        outs.append(parallelize(spread, None).decode(tokens[:, 2 * LENGTH :], states)[0])
        parts = whole.decode(tokens, [None, None])[0].split([LENGTH, LENGTH, 3], 1)
        wanted = [*(cut(part, lengths, 1) for part in parts[:2]), parts[2]]
        worst = max(worst, *(largest(a - b) for a, b in zip(outs, wanted, strict=True)))
    return worst


def packed(world: int) -> float:
    """Packed sequences through a module with rotary positions: the largest difference to one process."""
    torch.manual_seed(0)
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True, mechanism="Local(window=3)", rotary=True).double()
    x, options = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64), {"lengths": (4, 6, 3, 1), "need_weights": False}
    here = cut(x, LENGTHS[world], 1)
    out, _ = module(here, here, here, is_causal=True, group=dist.group.WORLD, **options)
    return largest(out - cut(module(x, x, x, is_causal=True, **options)[0], LENGTHS[world], 1))


def explained() -> str:
    """What ``explain`` says of a call over processes, and how many bytes were counted."""
    q, group = torch.randn(1, HEADS, 3, 8), shards(dist.group.WORLD, 3)
    with counted() as traffic:
        text = str(explain("LinearAttention()", q, q, q, is_causal=True, group=group))
    return f"{text}\n{traffic.bytes // 2}"


def refused(rank: int) -> dict[str, str]:
    x = torch.randn(1, 3, WIDTH)
    torch.manual_seed(rank)
    drawn = TokenMixer(WIDTH, HEADS, "FavorPlus(num_features=5)")
    torch.manual_seed(0)
    alike = TokenMixer(WIDTH, HEADS, "FavorPlus(num_features=5)")
    mha = MultiheadAttention(WIDTH, HEADS, batch_first=True)
    return {
        "different weights": message(lambda: parallelize(drawn, dist.group.WORLD)),
        "no layer": message(lambda: parallelize(nn.Linear(2, 2), dist.group.WORLD)),
        "pickled": message(lambda: pickle.dumps(parallelize(alike, dist.group.WORLD))),
        "matrix": message(lambda: mha(x, x, x, group=dist.group.WORLD)),
        "a mask": message(lambda: alike(x, attn_mask=torch.ones(3, 3, dtype=torch.bool))),
        "one process": message(lambda: pickle.dumps(parallelize(alike, None))),
    }


def process(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    results: dict[str, Any] = {name: compared(name, world) for name in MODULES}
    results |= {"calls": calls(world), "prefilled": prefilled(world), "packed": packed(world)}
    leave({**results, "explained": explained(), "refused": refused(rank)}, folder)


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("processes")
    spread(process, (request.param, str(folder)), request.param)
    return [torch.load(folder / str(rank)) for rank in range(request.param)]


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_those_of_one_process(results: list[dict[str, Any]], name: str) -> None:
    assert all(each[name] <= 1e-11 for each in results), [each[name] for each in results]


def test_calls_take_a_group(results: list[dict[str, Any]]) -> None:
    assert all(each["calls"] < 1e-5 for each in results)


def test_a_prompt_is_read_by_many_and_one_goes_on(results: list[dict[str, Any]]) -> None:
    assert all(each["prefilled"] < 1e-10 for each in results), [each["prefilled"] for each in results]


def test_packed_sequences_count_their_own_positions(results: list[dict[str, Any]]) -> None:
    assert all(each["packed"] < 1e-11 for each in results), [each["packed"] for each in results]


def test_explain_says_what_is_sent(results: list[dict[str, Any]]) -> None:
    for each in results:
        text, _, count = each["explained"].rpartition("\n")
        assert f"over {len(results)} processes: states (bytes {int(count):,}): one all-gather of states" in text, text


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("different weights", "processes 0 and 1 hold different weights"),
        ("no layer", "no layer that can be spread"),
        ("pickled", "cannot be pickled"),
        ("matrix", "need_weights=False"),
        ("a mask", "an attn_mask over several processes"),
    ],
)
def test_refusals(results: list[dict[str, Any]], case: str, words: str) -> None:
    assert all(words in each["refused"][case] for each in results), results[0]["refused"]
    assert all(each["refused"]["one process"] == "" for each in results)
