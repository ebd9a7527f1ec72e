"""One sequence over 2 and 4 processes gives what one process gives: outputs, gradients, refusals, few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fast_attention import Attention, Bound, Shape, Softmax, TokenMixer, catalogue
from fast_attention.decoding import leaves
from fast_attention.engine import trace
from fast_attention.parallel import Shards, attend, collectives, parallelize, run, strategy
from tests.cases import MIXERS, bind, qkv, some_keys
from tests.parallel import HEADS, LENGTHS, cut, differences, gradients, join, largest, leave, message, spread, wrong
from tests.parallel.own import OwnMean, OwnSlopes, OwnWindow

EMPTY = {2: (5, 0), 4: (5, 0, 4, 2)}
SETTINGS = (
    "LinearAttention()", "FavorPlus(num_features=5)", "Manhattan()", "DecayedLinearAttention(gate='learned')", "WKV()",
    "Adapted(mechanism=LearnedFeatures(num_features=5), rank=2)", "Local(window=3)", "Local(window=(2, 9))",
    "Local(window=2, dilation=(1, 3))", "Local(window=3, bias=TransformerXL(width=4))", "BlockLocal(block_size=4)",
    "BlockLocal(block_size=3, before=2, after=0)", "Softmax(bias=ALiBi())", "AFTFull()",
    "Favor(num_features=5, clamp=0.5)", "CosFormer()", "BigBird(block_size=2)",
    "Hybrid(near=BlockLocal(block_size=2, bias=T5Buckets()), far=FavorPlus(num_features=5))",
    "ByLength(short=Local(window=2, dilation=(1, 3)), long=LinearAttention(), above=4)",
    "Adapted(mechanism=Local(window=2, dilation=(1, 3)), rank=2)",
)  # fmt: skip
OWN = (OwnMean(), OwnWindow(), OwnSlopes())
TRIED: list[Any] = [*OWN, *map(catalogue.parse, SETTINGS)]  # what seeded faults are looked for with
DEFAULTS = [m for m in map(catalogue.default, catalogue.names()) if isinstance(m, Attention) and m not in TRIED]


def compare(
    mechanism: Any, queries: Sequence[int], keys: Sequence[int], is_causal: bool, masked: bool, device: Any = "cpu"
) -> str:  # fmt: skip
    """What differs from one process, of outputs and gradients; or the bytes that ``explain`` names from those sent."""
    rank, bound = dist.get_rank(), bind(mechanism, heads=HEADS, device=device)
    torch.manual_seed(3)
    q, k, v = (x.to(device) for x in qkv(sum(queries), sum(keys), heads=HEADS))
    mask = some_keys(2, sum(keys), device) if masked else None
    if mask is not None and mechanism.traits.positions != "grid":
        mask[0, :4] = False  # padding in front that ends in another process
    direction = torch.randn(q.shape, dtype=q.dtype).to(device)
    whole, lengths = [x.requires_grad_() for x in (q, k, v)], [queries, queries, keys, keys]
    parts = [cut(x, sizes).detach().requires_grad_() for x, sizes in zip(whole, lengths[1:], strict=True)]
    shards = Shards(dist.group.WORLD, rank, tuple(queries), tuple(keys))
    key_mask = None if mask is None else cut(mask, keys, -1)
    with collectives.counted() as traffic, trace.recorded() as steps:
        out = attend(mechanism, parts[0], parts[1], parts[2], bound.w, group=shards, is_causal=is_causal,
                     key_mask=key_mask)  # fmt: skip
    sent_bytes, name = traffic.bytes, strategy(mechanism, is_causal, masked=masked).name
    named = steps[0].path == f"over {len(queries)} processes: {name}" and steps[0].sizes == {"bytes": sent_bytes}
    wanted = mechanism(q, k, v, bound.w, is_causal=is_causal, key_mask=mask)
    learned = [x for x in leaves(bound.w) if x.requires_grad]
    here, there = (
        gradients(out, [*parts, *learned], cut(direction, queries)),
        gradients(wanted, [*whole, *learned], direction),
    )
    found = differences((out, here[:3], here[3:]), (wanted, there[:3], there[3:]), lengths)
    return found or ("" if named else f"{sent_bytes} bytes sent, and {steps[:1]}")


def compared(mechanism: Any, world: int) -> dict[str, str]:
    """What differs, causal or not, masked or not, and where a process has no token or there are fewer keys.

    Of a default, whose strategy others have been tried with, in its last direction and masked.
    """
    traits, lengths, found = mechanism.traits, LENGTHS[world], {}
    if mechanism in DEFAULTS:
        text = compare(mechanism, lengths, lengths, traits.modes[-1], traits.padding)
        return {repr(mechanism): text} if text else {}
    for is_causal in traits.modes:
        for masked in {False, traits.padding}:
            found[f"causal {is_causal}, masked {masked}"] = compare(mechanism, lengths, lengths, is_causal, masked)
    found["empty"] = compare(mechanism, EMPTY[world], EMPTY[world], traits.modes[-1], traits.padding)
    if traits.cross and traits.bidirectional:
        found["cross"] = compare(mechanism, lengths, lengths[::-1], False, False)
    return {f"{mechanism!r} {case}": text for case, text in found.items() if text}


def leaks(mechanism: Any, world: int) -> str:
    """How far future tokens, or masked ones of another rank, move an output; empty where they do not."""
    w, rank, last = bind(mechanism, heads=HEADS).w, dist.get_rank(), dist.get_rank() == world - 1
    torch.manual_seed(3)
    first = [cut(x, LENGTHS[world]) for x in qkv(11, heads=HEADS)]
    other = [x + 9.0 * last for x in first]
    mask = torch.full((2, first[0].shape[-2]), not last)
    group = Shards(dist.group.WORLD, rank, (*LENGTHS[world],), (*LENGTHS[world],))
    for options in ({"is_causal": True}, {"key_mask": mask}):
        a, b = (attend(mechanism, q, k, v, w, group=group, **options) for q, k, v in (first, other))  # type: ignore[arg-type]
        if not last and not largest(a - b) <= 1e-14:  # the order of a sum's terms may differ
            return f"{mechanism!r} {', '.join(options)}: {largest(a - b)}"
    return ""


def sent(mechanism: Any, length: int) -> int:
    x = torch.randn(1, 8, length, 64)
    with collectives.counted() as traffic:
        attend(mechanism, x, x, x, group=dist.group.WORLD, is_causal=True)
    return traffic.bytes


def refused(world: int) -> dict[str, str]:
    """Errors by name: too few heads, mixers in a call, in a layer and in a model."""
    q, group = torch.randn(1, 3, 3, 8), dist.group.WORLD
    mixers = {
        repr(m): message(lambda m=m: run(m, (torch.randn(1, 3, 8),), Bound(m, Shape(1, 8, 16)).w, group=group))
        for m in MIXERS
    }
    return {
        "heads": message(lambda: attend(Softmax(), q, q, q, group=group)),
        "model": message(lambda: parallelize(TokenMixer(8, 2, "GMLP", max_len=8), group)),
        **mixers,
    }  # fmt: skip


def process(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    told: dict[str, str] = {}
    for mechanism in TRIED + DEFAULTS * (world > 2):
        told |= compared(mechanism, world)
        if wrong("".join(told.values())):
            break
    found = [leaks(catalogue.parse(name), world) for name in SETTINGS if "WKV" not in name]
    bytes_sent = {name: (sent(catalogue.parse(name), 40), sent(catalogue.parse(name), 400))
                  for name in ("LinearAttention", "Local(window=3)")}  # fmt: skip
    leave({"told": told, "leaks": found, "bytes": bytes_sent, "refused": refused(world)}, folder)


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("processes")
    spread(process, (request.param, str(folder)), request.param)
    return [torch.load(folder / str(rank)) for rank in range(request.param)]


def test_shards_are_one_process(results: list[dict[str, Any]]) -> None:
    told = {key: value for each in results for key, value in each["told"].items()}
    assert not told, told


def test_nothing_leaks(results: list[dict[str, Any]]) -> None:
    assert not any(text for each in results for text in each["leaks"]), results


def test_bytes_are_independent_of_the_length(results: list[dict[str, Any]]) -> None:
    for each in results:
        states, windows = each["bytes"]["LinearAttention"], each["bytes"]["Local(window=3)"]
        agreeing = 112 * (len(results) - 1)
        assert 0 < states[0] == states[1] <= 1.05 * (len(results) - 1) * 8 * 64 * (64 + 2) * 4
        assert windows[0] == windows[1] <= agreeing + 8 * 3 * 64 * 2 * 4


def test_what_cannot_be_spread_is_refused_by_name(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert "What would work: a number of processes that divides 3" in each["refused"]["heads"]
        for name in ("model", *map(repr, MIXERS)):
            text = each["refused"][name]
            assert text.startswith("Unsupported: " + ("GMLP()" if name == "model" else name)), text
            assert "What would work: an attention" in text


def test_strategies_are_read_from_what_a_mechanism_says() -> None:
    names = [[strategy(m, is_causal).name for is_causal in m.traits.modes] for m in OWN]
    assert names == [["states"] * 2, ["windows"] * 2, ["heads"] * 2]
    assert [strategy(catalogue.parse("DecayedLinearAttention"), is_causal).name for is_causal in (False, True)] == [
        "heads", "states",
    ]  # fmt: skip
