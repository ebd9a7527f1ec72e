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

from fast_attention import Bound, MultiheadAttention, Shape, TokenMixer, Unsupported, attention, explain
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.parallel import counted, parallelize, shards
from tests.parallel import leave, spread

LENGTHS = {2: [8, 6], 4: [5, 1, 6, 2]}
LENGTH, WIDTH, HEADS = 14, 16, 4
LINEAR = "LinearAttention"


def mixer(mechanism: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: TokenMixer(WIDTH, HEADS, mechanism, max_len=32, **settings)


def layer(mechanism: str) -> nn.Module:
    encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    encoder.self_attn = MultiheadAttention(  # type: ignore[assignment]
        WIDTH, HEADS, batch_first=True, mechanism=mechanism
    )
    return encoder


def model(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: Model(ModelConfig(**{"vocab_size": 11, "width": WIDTH, "heads": HEADS, "max_len": 32, **settings}))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "a mixer, causal, grouped, rotary": mixer("FavorPlus(num_features=5)", num_kv_heads=2, rotary=True),
    "a mixer of heads": mixer("Softmax()", rotary=True),
    "torch's layer": lambda: layer("Local(window=3)"),
    "a decoder with learned positions and a convolution": model(
        mechanism=("LinearAttention()", "Local(window=3)"), causal=True, conv=4
    ),
    "a decoder with rotary positions": model(mechanism="Local(window=3)", causal=True, positions="rotary"),
    "a reversible decoder": model(mechanism="LinearAttention()", causal=True, positions="sinusoidal", reversible=True),
    "a decoder of gates": model(mechanism="GMLP()", causal=True),
    "an encoder with classes": model(mechanism="LearnedFeatures(num_features=5)", head="classes", classes=3),
}


def inputs(name: str) -> Tensor:
    torch.manual_seed(1)
    decoder = "coder" in name
    return torch.randint(11, (2, LENGTH)) if decoder else torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)


def called(name: str, module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    if name == "torch's layer":
        return module(x, src_key_padding_mask=~mask)
    if isinstance(module, TokenMixer):
        return module(x, is_causal="causal" in name, key_mask=mask)
    return module(x, mask)


def compared(name: str, rank: int, world: int) -> float:
    """The largest difference to one process, of outputs and of parameters' gradients."""
    torch.manual_seed(0)
    whole = MODULES[name]().double()
    spread = parallelize(copy.deepcopy(whole), dist.group.WORLD)
    x, mask = inputs(name), torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, :2] = mask[1, 9:] = False
    here = (part.split(LENGTHS[world], 1)[rank] for part in (x, mask))
    wanted, out = called(name, whole, x, mask), called(name, spread, *here)
    torch.manual_seed(2)
    direction = torch.randn_like(wanted)
    local = direction if "classes" in name else direction.split(LENGTHS[world], 1)[rank]
    wanted.backward(direction)
    out.backward(local / world if "classes" in name else local)
    whole_out = wanted if "classes" in name else wanted.split(LENGTHS[world], 1)[rank]
    worst = (out - whole_out).abs().max()
    for one, other in zip(whole.parameters(), spread.parameters(), strict=True):
        if one.grad is None:
            assert other.grad is None
            continue
        assert other.grad is not None
        total = other.grad.clone()
        dist.all_reduce(total)
        worst = torch.maximum(worst, (total - one.grad).abs().max() / one.grad.abs().max().clamp_min(1))
    return float(worst)


def calls(rank: int, world: int) -> float:
    """``group=`` on ``attention`` and on ``Bound``, keys with fewer heads."""
    torch.manual_seed(3)
    q, k, v = torch.randn(2, HEADS, LENGTH, 8), torch.randn(2, 2, LENGTH, 8), torch.randn(2, 2, LENGTH, 8)
    here: Any = [x.split(LENGTHS[world], -2)[rank] for x in (q, k, v)]
    group = dist.group.WORLD
    options: Any = {"is_causal": True, "enable_gqa": True}
    bound = Bound("BlockLocal(block_size=4)", Shape(HEADS, 8))
    pairs = [
        (
            attention(q, k, v, "LinearAttention", **options),
            attention(here[0], here[1], here[2], "LinearAttention", **options, group=group),
        ),
        (bound(q, k, v, **options), bound(here[0], here[1], here[2], **options, group=group)),
    ]
    return max(float((one.split(LENGTHS[world], -2)[rank] - other).abs().max()) for one, other in pairs)


def prefilled(rank: int, world: int) -> float:
    """A prompt is read by all processes in two parts, then one goes on alone: the largest difference to one process."""
    worst = 0.0
    for positions in ("learned", "rotary"):
        torch.manual_seed(0)
        mechanism = ("FavorPlus(num_features=5)", "Local(window=3)")
        config = ModelConfig(
            11, mechanism, width=WIDTH, heads=HEADS, positions=positions, causal=True, conv=3, max_len=40
        )
        whole = Model(config).double()
        for parameter in whole.parameters():
            parameter.data.normal_(std=0.3)
        spread = parallelize(copy.deepcopy(whole), dist.group.WORLD)
        tokens, state, outs = torch.randint(11, (2, 2 * LENGTH + 3)), None, []
        for first in (0, LENGTH):
            out, state = spread.decode(tokens[:, first : first + LENGTH].split(LENGTHS[world], 1)[rank], state)
            outs.append(out)
        outs.append(parallelize(spread, None).decode(tokens[:, 2 * LENGTH :], state)[0])
        parts = whole.decode(tokens)[0].split([LENGTH, LENGTH, 3], 1)
        wanted = [*(part.split(LENGTHS[world], 1)[rank] for part in parts[:2]), parts[2]]
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in zip(outs, wanted, strict=True)))
    return worst


def packed(rank: int, world: int) -> float:
    """Packed sequences through a module with rotary positions: the largest difference to one process."""
    torch.manual_seed(0)
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True, mechanism="Local(window=3)", rotary=True).double()
    x, options = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64), {"lengths": (4, 6, 3, 1), "need_weights": False}
    here = x.split(LENGTHS[world], 1)[rank]
    out, _ = module(here, here, here, is_causal=True, group=dist.group.WORLD, **options)
    wanted, _ = module(x, x, x, is_causal=True, **options)
    return float((out - wanted.split(LENGTHS[world], 1)[rank]).detach().abs().max())


def explained(rank: int, world: int) -> str:
    """What ``explain`` says of a call over processes, and how many bytes were counted."""
    q = torch.randn(1, HEADS, 3, 8)
    group = shards(dist.group.WORLD, 3)
    with counted() as traffic:
        text = str(explain("LinearAttention()", q, q, q, is_causal=True, group=group))
    return f"{text}\n{traffic.bytes // 2}"


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (Unsupported, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


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
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    results: dict[str, Any] = {name: compared(name, rank, world) for name in MODULES}
    results |= {"calls": calls(rank, world), "prefilled": prefilled(rank, world), "packed": packed(rank, world)}
    results |= {"explained": explained(rank, world), "refused": refused(rank)}
    torch.save(results, f"{folder}/{rank}")
    leave()


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("processes")
    spread(process, (request.param, str(folder)), request.param)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(request.param)]


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
