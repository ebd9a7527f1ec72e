"""ByLength: rows by the number of visible keys, whole batches of mixed lengths, states that cross, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import ByLength, LinearAttention, Local, Softmax, catalogue, decoding, exporting
from fast_attention.counting import count_operations
from fast_attention.engine import trace
from fast_attention.engine.kv_cache import KVCache
from tests.cases import bind, qkv, some_keys, uncached

LONGS = [
    "LinearAttention()", "Local(window=2)", "BlockLocal(block_size=4)", "Hybrid(near=BlockLocal(block_size=2))",
    "LSH(bucket_size=4)", "Manhattan()", "DecayedLinearAttention()", "FavorPlus(num_features=5)", "AFTConv()",
    "Sinkhorn(block_size=4)", "MixtureSynthesizer()", "ByLength(long=LinearAttention(), above=13)",
]  # fmt: skip
SHORTS = ["Softmax()", "Local(window=3)", "AFTSimple()"]
PADDED = torch.ones(4, 20, dtype=torch.bool)  # sequences that cross at different steps; the last never does
PADDED[1, :6] = PADDED[2, 3] = PADDED[2, -7:] = PADDED[3, 4:] = False


def decoded(bound: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sizes: list[int]) -> tuple[Tensor, Any]:
    """The outputs of decoding in steps of these sizes, and the last state."""
    outs, state, start = [], None, 0
    for size in sizes:
        new = slice(start, start + size)
        visible = None if mask is None else mask[:, new]
        out, state = bound.decode(q[:, :, new], k[:, :, new], v[:, :, new], state, key_mask=visible)
        outs.append(out)
        start += size
    return torch.cat(outs, -2), state


@torch.no_grad()
@pytest.mark.parametrize("short", SHORTS)
@pytest.mark.parametrize("long", LONGS)
def test_any_split_is_one_pass_also_where_padding_differs(short: str, long: str) -> None:
    for above in (1, 5, 11):
        bound, inputs = bind(f"ByLength(short={short}, long={long}, above={above})"), qkv(20, batch=4)
        for mask in (None, PADDED):
            expected = bound(*inputs, is_causal=True, key_mask=mask)
            for sizes in ([20], [1] * 20, [4, 1, 3, 12], [9, 11], [19, 1]):
                found, _ = decoded(bound, *inputs, mask, sizes)
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=f"{bound.mechanism!r}, {sizes}")


def test_causal_rows_are_those_of_the_two() -> None:
    bound, (q, k, v) = bind("ByLength(long=LinearAttention(), above=6)"), qkv(11)
    out = bound(q, k, v, is_causal=True)
    first = Softmax()(q[:, :, :6], k[:, :, :6], v[:, :, :6], is_causal=True)
    assert torch.equal(out[:, :, :6], first)
    torch.testing.assert_close(out[:, :, 6:], LinearAttention()(q, k, v, is_causal=True)[:, :, 6:])


@pytest.mark.parametrize("is_causal", [False, True])
def test_up_to_above_it_is_the_short_one_to_the_bit(is_causal: bool) -> None:
    for length in (1, 5, 6):
        inputs = qkv(length, dtype=torch.float32)
        for mask in (None, some_keys(2, length)):
            found = ByLength(Softmax(), LinearAttention(), 6)(*inputs, is_causal=is_causal, key_mask=mask)
            assert torch.equal(found, Softmax()(*inputs, is_causal=is_causal, key_mask=mask))
    longer = ByLength(Softmax(), LinearAttention(), 6)(*qkv(7), is_causal=is_causal)
    assert longer.isfinite().all()


@pytest.mark.parametrize("short", SHORTS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_batch_of_mixed_lengths_is_its_sequences(short: str, is_causal: bool, grouped: bool) -> None:
    """With gradients; padded at the end, at the beginning, in between; masked throughout; leading sizes (2, 2)."""
    bound = bind(f"ByLength(short={short}, long=FavorPlus(num_features=5), above=9)")
    mask = PADDED.clone()
    mask[0] = False if short == "Softmax()" else mask[0]
    leaves = [x.requires_grad_() for x in qkv(20, batch=4)]
    shaped = [x.unflatten(0, (2, 2)) if grouped else x for x in leaves]
    whole = bound(*shaped, is_causal=is_causal, key_mask=mask.unflatten(0, (2, 2)) if grouped else mask)
    whole = whole.flatten(0, 1) if grouped else whole
    alone = torch.cat([
        bound(*(x[i : i + 1] for x in leaves), is_causal=is_causal, key_mask=mask[i : i + 1]) for i in range(4)
    ])  # fmt: skip
    torch.testing.assert_close(whole, alone)
    pairs = zip(*(torch.autograd.grad(out.sin().sum(), leaves) for out in (whole, alone)), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected)


def test_one_mask_serves_a_whole_batch() -> None:
    bound, inputs = bind("ByLength(long=LinearAttention(), above=9)"), qkv(20, batch=4)
    for is_causal in (False, True):
        for mask in (PADDED[1], PADDED[3]):
            found = bound(*inputs, is_causal=is_causal, key_mask=mask)
            torch.testing.assert_close(found, bound(*inputs, is_causal=is_causal, key_mask=mask.expand(4, -1)))


def test_short_sequences_cost_what_they_should() -> None:
    """Padded to 512 tokens among long ones, at the end or at the beginning: their rows read no more than they see."""
    q, k, v = qkv(512, batch=4, dtype=torch.float32)
    end = torch.arange(512) < torch.tensor([[512], [20], [512], [20]])
    mechanism, long = ByLength(Softmax(), Local(window=8), 32), Local(window=8)
    for is_causal in (False, True):
        for mask in (end, end.flip(-1)):
            settings: Any = {"is_causal": is_causal, "key_mask": mask}
            costs = [count_operations(lambda m=m, s=settings: m(q, k, v, **s)) for m in (mechanism, long, Softmax())]
            assert costs[0] < 1.2 * costs[1] < costs[2]


def test_a_state_is_a_cache_then_the_other_mechanisms() -> None:
    bound, (q, k, v) = bind("ByLength(long=LinearAttention(), above=8)"), qkv(12)
    _, state = decoded(bound, q, k, v, None, [8])
    assert isinstance(state.content.short, KVCache)
    assert state.content.long is None
    _, after = bound.decode(*(x[:, :, 8:] for x in (q, k, v)), state)
    assert after.content.short is None
    summary = LinearAttention().summarise(k, v).content
    for ours, theirs in zip(after.content.long, summary, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_cache_stays_until_the_last_sequence_has_crossed() -> None:
    bound, inputs = bind("ByLength(long=LinearAttention(), above=5)"), qkv(20, batch=4)
    state, kept = None, []
    for i in range(20):
        _, state = bound.decode(*(x[:3, :, i : i + 1] for x in inputs), state, key_mask=PADDED[:3, i : i + 1])
        kept.append((state.content.short is not None, state.content.long is not None))
    assert kept == [(True, False)] * 5 + [(True, True)] * 6 + [(False, True)] * 9


@pytest.mark.parametrize("tokens", [4, 7, 12])
def test_a_state_is_saved_and_picked_before_while_and_after_crossing(tokens: int, tmp_path: Path) -> None:
    bound, inputs, mask = bind("ByLength(long=FavorPlus(num_features=5), above=5)"), qkv(20, batch=4), PADDED
    _, state = decoded(bound, *inputs, mask, [tokens])
    rest = [x[:, :, tokens:] for x in inputs]
    expected, _ = bound.decode(*rest, state, key_mask=mask[:, tokens:])
    decoding.save(state, tmp_path / "state.pt")
    again = decoding.load(tmp_path / "state.pt")
    assert torch.equal(bound.decode(*rest, again, key_mask=mask[:, tokens:])[0], expected)
    index = torch.tensor([3, 0, 0])
    chosen = decoding.select(state, index)
    found, _ = bound.decode(*(x[index] for x in rest), chosen, key_mask=mask[index, tokens:])
    torch.testing.assert_close(found, expected[index])


def test_a_compiled_step_crosses() -> None:
    """Numbers are unknown then: both states are kept, behind a state that was not compiled and before another."""
    bound, inputs = bind("ByLength(long=Local(window=2), above=5)"), qkv(20, batch=4)
    torch.compiler.reset()
    step = torch.compile(bound.decode, fullgraph=True, backend="eager")
    expected = bound(*inputs, is_causal=True, key_mask=PADDED)
    _, state = decoded(bound, *inputs, PADDED, [3])
    out, state = step(*(x[:, :, 3:18] for x in inputs), state, key_mask=PADDED[:, 3:18])
    torch.testing.assert_close(out, expected[:, :, 3:18])
    last, _ = bound.decode(*(x[:, :, 18:] for x in inputs), state, key_mask=PADDED[:, 18:])
    torch.testing.assert_close(last, expected[:, :, 18:])


@pytest.mark.parametrize(
    "text", ["ByLength(long=LinearAttention(), above=8)", "ByLength(short=Local(window=2), above=8)"]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_program_serves_all_lengths_and_masks(text: str, is_causal: bool) -> None:
    """``above`` lies between the lengths; exact attention reads no more than ``above`` keys for it."""

    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bound = bind(text)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor) -> Tensor:
            return self.bound(q, k, v, is_causal=is_causal, key_mask=key_mask)

    module, names = Called(), ("q", "k", "v", "key_mask")
    length = torch.export.Dim("length", min=2, max=64)
    sizes = {name: {1 if name == "key_mask" else 2: length} for name in names}
    with uncached():
        example = dict(zip(names, (*qkv(20, batch=4), PADDED), strict=True))
        program = exporting.program(module, example, sizes).module()
    for other in (2, 7, 8, 9, 20, 33):
        q, k, v = qkv(other, batch=4)
        mask = torch.rand(4, other) > 0.4
        torch.testing.assert_close(program(q=q, k=k, v=v, key_mask=mask), module(q, k, v, mask))


def test_a_program_of_long_texts_stays_linear() -> None:
    module = bind("ByLength(long=LinearAttention(), above=8)", dtype=torch.float32)
    inputs = qkv(1024, batch=1, dtype=torch.float32)
    with uncached():
        sizes = (tuple({2: torch.export.Dim("length", min=2, max=4096)} for _ in inputs),)
        program = torch.export.export(module, inputs, dynamic_shapes=sizes).module()
    costs = [count_operations(lambda n=n: program(*qkv(n, batch=1, dtype=torch.float32))) for n in (512, 2048)]
    assert costs[1] < 4.1 * costs[0]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_it_is_right_on_both_sides(is_causal: bool, masked: bool) -> None:
    """With a graph for the lengths up to ``above`` and one for those beyond; one more where a single row is beyond."""
    bound, graphs = bind("ByLength(long=Local(window=2), above=8)"), []

    def counted(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(bound, fullgraph=True, backend=counted, dynamic=True)
    for length in (5, 20, 8, 9, 33):
        inputs, mask = qkv(length), some_keys(2, length) if masked else None
        found = compiled(*inputs, is_causal=is_causal, key_mask=mask)
        torch.testing.assert_close(found, bound(*inputs, is_causal=is_causal, key_mask=mask))
    assert len(graphs) <= 3


def test_what_ran_can_be_asked() -> None:
    mechanism = ByLength(Softmax(), LinearAttention(), 8)
    for length, is_causal, ran in (
        (8, True, "Softmax()"), (9, True, "Softmax(), then LinearAttention()"), (9, False, "LinearAttention()"),
    ):  # fmt: skip
        with trace.recorded() as steps:
            mechanism(*qkv(length), is_causal=is_causal)
        assert steps[0].path == ran


def test_traits_are_those_of_both() -> None:
    def traits(text: str) -> Any:
        return catalogue.parse(f"ByLength({text})").traits

    assert traits("long=LinearAttention()").rotary is False
    assert traits("long=FavorPlus()").rotary is True
    assert (traits("long=FavorPlus()").random, traits("short=FavorPlus(), long=Softmax()").random) == (True, True)
    assert traits("long=LinearAttention()").memory == traits("long=Local()").memory == "window"
    assert traits("long=ReLUAttention()").memory == "growing"
    assert traits("long=BigBird()").memory is None
    assert traits("long=BigBird()").cross is False
    assert traits("long=Linformer()").causal is False
    assert traits("long=FavorPlus()").approximates == "Softmax"
    assert traits("short=Local(), long=FavorPlus()").approximates == "Softmax"
    assert traits("short=LinearAttention(), long=FavorPlus()").approximates is None
    assert traits("short=DenseSynthesizer(), long=RandomSynthesizer()").inputs == "qv"
    assert traits("short=Linformer(), long=Local()").needs_max_len
    assert traits("long=Linformer()").needs_max_len


def test_weights_are_those_of_both() -> None:
    mechanism = catalogue.parse("ByLength(short=LearnedFeatures(num_features=3), long=FavorPlusPlus(num_features=4))")
    bound = bind(mechanism)
    assert {*bound.state_dict()} >= {"short_query", "short_key", "long_projection"}
    with pytest.raises(ValueError, match="for 2 heads and q has 3"):
        mechanism(*qkv(5, heads=3), bound.w)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"needs its weights: pass w="):
        mechanism(*qkv(5))  # type: ignore[call-arg]
    before = bound.w.long.projection.clone()
    q, k, _ = qkv(9)
    calibrated = mechanism.calibrated(q, k, bound.w)  # type: ignore[union-attr]
    assert not torch.equal(calibrated.long.damping, bound.w.long.damping)
    bound.redraw()
    assert not torch.equal(bound.w.long.projection, before)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ByLength(long=FNet())", r"ByLength\(long=FNet\(\)\): FNet\(\) mixes whole tokens and takes no queries"),
        ("ByLength(short=GMLP())", r"ByLength\(short=GMLP\(\)\): GMLP\(\) mixes whole tokens"),
        ("ByLength(short=3)", r"short=3\): 3 is no attention; give one such as Softmax\(\)"),
        ("ByLength(long=PositiveElu())", r"PositiveElu\(\) is no attention"),
        ("ByLength(above=0)", "above must be at least 1, a whole number"),
        ("ByLength(above=2.5)", "above must be at least 1, a whole number"),
        ("ByLength(below=3)", "no setting 'below'; its settings are: short, long, above"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        catalogue.parse(text)


def test_what_one_cannot_do_both_refuse_by_name() -> None:
    q, k, v = qkv(6)
    mask = torch.ones(6, 6, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"ByLength\(long=Linformer\(\)\) does not support is_causal=True"):
        bind("ByLength(long=Linformer())")(q, k, v, is_causal=True)
    with pytest.raises(NotImplementedError, match=r"does not support decoding \(traits.memory is None\)"):
        bind("ByLength(long=BigBird())").decode(q, k, v)
    with pytest.raises(NotImplementedError, match=r"does not support an arbitrary attn_mask"):
        ByLength()(q, k, v, attn_mask=mask)
    with pytest.raises(ValueError, match="max_len"):
        bind("ByLength(long=RandomSynthesizer())", max_len=0)
