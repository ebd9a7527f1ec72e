"""Models with positions in their scores: T5's learned tables, ALiBi; exact, in windows, and refused by name."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fast_attention import from_pretrained, swap, swap_back
from fast_attention.integrations import relative
from fast_attention.mechanism import Unsupported
from tests.integrations.test_swap import gradients, inputs, out, real

transformers = pytest.importorskip("transformers")

# Buckets so few and narrow that small inputs have distances in all of them.
T5 = {
    "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48, "vocab_size": 99, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
MODELS = {
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
    "MT5": ("MT5EncoderModel", "MT5Config", T5),
    "UMT5": ("UMT5ForConditionalGeneration", "UMT5Config", T5),
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    "Mpt": (
        "MptForCausalLM", "MptConfig", {"d_model": 48, "n_layers": 2, "n_heads": 6, "vocab_size": 99, "max_seq_len": 64}
    ),
}  # fmt: skip
WITH_DECODER = ("T5", "UMT5", "Bloom", "Mpt")
BY_INTERFACE = Version("5.15")  # the first release in which the T5s call their attention through the interface


def build(name: str, **settings: Any) -> Any:
    if "T5" in name and Version(transformers.__version__) < BY_INTERFACE:
        pytest.skip(f"transformers {transformers.__version__} calls {name}'s attention directly: refused by name")
    kind, config, sizes = MODELS[name]
    torch.manual_seed(3)
    model = getattr(transformers, kind)(getattr(transformers, config)(**{**sizes, **settings})).eval()
    for parameter, weight in model.named_parameters():
        if "relative_attention_bias" in parameter:
            torch.nn.init.normal_(weight)
    return model


def table(model: Any) -> Tensor:
    """The bias of the encoder's or the only layers: T5's table."""
    return model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight


@contextmanager
def windowed(model: Any, window: int) -> Iterator[None]:
    """The model's own attention with everything outside a window masked, but not where it reads another sequence."""
    code, kept = sys.modules[type(model).__module__], {}

    def narrowed(make: Any, *, is_causal: bool) -> Any:
        def made(**given: Any) -> Any:
            mask = make(**given)
            if given.get("encoder_hidden_states") is not None:
                return mask
            length, cache = given["inputs_embeds"].shape[1], given.get("cache", given.get("past_key_values"))
            keys = length + (cache.get_seq_length() if cache is not None else 0)
            distance = torch.arange(keys) - torch.arange(keys - length, keys)[:, None]
            outside = (distance.abs() > window) | (is_causal & (distance > 0))
            if mask is None:
                return ~outside[None, None]
            if mask.dtype == torch.bool:
                return mask & ~outside
            return mask.masked_fill(outside, torch.finfo(mask.dtype).min)

        return made

    for name in ("create_causal_mask", "create_bidirectional_mask"):
        if hasattr(code, name):
            kept[name] = getattr(code, name)
            setattr(code, name, narrowed(kept[name], is_causal="causal" in name))
    try:
        yield
    finally:
        for name, make in kept.items():
            setattr(code, name, make)


def close(model: Any, given: dict[str, Tensor], actual: Tensor, expected: Tensor, *, double: bool) -> None:
    """To float rounding. BLOOM's and MPT's softmax is in float32 whatever the model's dtype."""
    rounding = 1e-10 if double and "T5" in type(model).__name__ else 2e-6 if double else 2e-5
    torch.testing.assert_close(real(actual, given), real(expected, given), atol=rounding, rtol=rounding)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("mechanism", "case"), [
    ("Softmax()", ""), ("Softmax()", "left"), ("Softmax()", "double"), ("Local(window=99)", "right"),
    ("Local(window=4)", "left"), ("Local(window=4)", "right"), ("Local(window=4)", "double"),
])  # fmt: skip
def test_the_models_own_bias_inside_a_window(name: str, mechanism: str, case: str) -> None:
    """Outputs and gradients, those of the learned table among them; with padding, or in float64.

    There BLOOM's and MPT's own outputs are not finite with padding.
    """
    double, padded = case == "double", "" if case == "double" and "T5" not in name else case.replace("double", "left")
    window = 4 if mechanism == "Local(window=4)" else 99
    model = build(name).to(torch.float64 if double else torch.float32)
    given = inputs(model, 30, padded=padded)
    with windowed(model, window):
        expected = out(model, given)
        slopes = gradients(model, real(expected, given))
    report = swap(model, mechanism)
    assert all("EncDec" in layer.name and "Softmax" not in mechanism for layer in report.unchanged), report
    assert report.parameters == 0
    actual = out(model, given)
    close(model, given, actual, expected, double=double)
    scale = max(float(x.abs().max()) for x in slopes if x is not None)
    for x, y in zip(slopes, gradients(model, real(actual, given)), strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            torch.testing.assert_close(y, x, atol=1e-5 * scale, rtol=1e-3)
    assert swap_back(model)
    with windowed(model, window):
        assert torch.equal(out(model, given), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", WITH_DECODER)
@pytest.mark.parametrize(("mechanism", "window"), [("Softmax()", 99), ("Local(window=4)", 4)])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generated_tokens_are_the_originals(name: str, mechanism: str, window: int, how: dict[str, Any]) -> None:
    model = build(name)
    given = inputs(model, 11, padded="left")
    given.pop("decoder_input_ids", None)
    wanted = {"max_new_tokens": 14, "min_new_tokens": 14, "output_logits": True, "return_dict_in_generate": True, **how}
    torch.manual_seed(9)
    with windowed(model, window):
        before = model.generate(**given, **wanted)
    swap(model, mechanism)
    torch.manual_seed(9)
    after = model.generate(**given, **wanted)
    assert torch.equal(after.sequences, before.sequences)
    torch.testing.assert_close(after.logits, before.logits, atol=2e-5, rtol=2e-5)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return result


@torch.no_grad()
@pytest.mark.parametrize("name", ["MT5", "UMT5", "Bloom", "Mpt"])
def test_nothing_is_as_large_as_queries_times_keys(name: str) -> None:
    """Neither in the mechanism nor in the model's code before it."""
    model, length = build(name, **({"max_seq_len": 64} if name == "Mpt" else {})), 1024
    model = getattr(model, "encoder", model)
    swap(model, "Local(window=16)")
    ids = torch.randint(5, 99, (1, length))
    with Largest() as largest:
        model(ids)
    assert largest.numbers < length * length // 2


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_the_models_and_travel_with_it(name: str, tmp_path: Path) -> None:
    model = build(name)
    given, keys = inputs(model), list(model.state_dict())
    exact = out(model, given)
    swap(model, "Local(window=4)")
    before = out(model, given)
    assert list(model.state_dict()) == keys
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model.save_pretrained(tmp_path)
    for again in (from_pretrained(tmp_path), type(model).from_pretrained(tmp_path), *copies):
        assert torch.equal(out(again, given), before)
        if "T5" in name:
            table(again).add_(torch.randn(table(again).shape))
            assert not torch.allclose(out(again, given), before, atol=1e-3), "read at every call"
    assert torch.equal(out(model, given), before)
    again = from_pretrained(tmp_path)
    assert swap_back(again)
    torch.testing.assert_close(out(again, given), exact, atol=1e-6, rtol=1e-6)
    assert type(again).__module__ == type(build(name)).__module__
    assert not any(type(part).__module__.startswith("fast_attention") for part in again.modules())


def test_the_report_says_what_runs_and_whose_bias_it_is() -> None:
    report = swap(build("T5"), "Local(window=4)")
    encoder, decoder, cross = (report.layers[i] for i in (0, 2, 3))
    assert encoder.mechanism == "Local(window=4, bias=T5Buckets(num_buckets=8, max_distance=12))"
    assert decoder.mechanism.endswith("bias=T5Buckets(num_buckets=8, max_distance=12, bidirectional=False))")
    assert encoder.why == "the bias is the model's own: encoder.block.0.layer.0.SelfAttention relative_attention_bias"
    assert (cross.replaced, cross.mechanism) == (False, "Softmax()")
    assert cross.why == "the layer attends to another sequence, in which Local(window=4) has no place to begin"
    assert swap(build("Bloom"), "Local(window=4)").layers[0].mechanism == "Local(window=4, bias=ALiBi())"
    assert "MptAttention -> Softmax(bias=ALiBi())" in str(swap(build("Mpt"), "Softmax()"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mechanism", ["FavorPlus()", "LinearAttention()", "LSH()", "LogAttention()", "AFTSimple()"])
def test_what_takes_no_bias_is_refused_with_what_would_work(name: str, mechanism: str) -> None:
    """Cross attention has no positions, and may have any mechanism that reads another sequence."""
    model = build(name)
    model = model if name in ("Bloom", "Mpt") else model.encoder
    with pytest.raises(Unsupported, match=r"no attention layer .* was swapped"):
        swap(model, mechanism)
    if mechanism == "FavorPlus()":
        kind = "ALiBi" if name in ("Bloom", "Mpt") else "T5Buckets"
        said = rf"adds {kind}\(.*\) to its scores, which FavorPlus\(\) does not form .* would work: Softmax\(\), Local"
        with pytest.raises(Unsupported, match=said):
            swap(model, mechanism)


def test_another_bias_beside_the_models_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"positions of its own in its scores, T5Buckets\(.*\): leave the bias out"):
        swap(build("T5").encoder, "Local(window=4, bias=ALiBi())")


@torch.no_grad()
def test_cross_attention_takes_what_has_no_bias() -> None:
    model = build("T5")
    report = swap(model, "LinearAttention")
    assert [layer.name.split(".")[-1] for layer in report.replaced] == ["EncDecAttention"] * 2
    assert all(layer.mechanism.startswith("Softmax(bias=T5Buckets") for layer in report.unchanged)
    given = inputs(model, 11, padded="left")
    given.pop("decoder_input_ids")
    wanted = {"max_new_tokens": 8, "min_new_tokens": 8}
    assert torch.equal(model.generate(**given, **wanted), model.generate(**given, **wanted, use_cache=False))


@torch.no_grad()
@pytest.mark.parametrize("pattern", ["*block.0.layer.0*", "*block.1.layer.0*"])
def test_layers_that_form_all_scores_beside_windows(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ReLU attention takes the bias as a mask of every pair, which layers with a window before it do not compute."""
    model, wanted = build("T5"), {pattern: "Local(window=4)", "*": "ReLUAttention()"}
    given = inputs(model)
    assert "it takes the position_bias as a mask of every pair" in str(swap(model, wanted))
    mixed = out(model, given)
    monkeypatch.setattr(relative, "of", lambda model, name: None)  # all layers take it so
    swap(model, wanted)
    torch.testing.assert_close(mixed, out(model, given), atol=2e-5, rtol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["T5", "Bloom"])
def test_a_cache_of_a_fixed_size(name: str) -> None:
    model = build(name)
    given, wanted = inputs(model, 11, padded="left"), {"max_new_tokens": 8, "min_new_tokens": 8}
    given.pop("decoder_input_ids", None)
    before = model.generate(**given, **wanted, cache_implementation="static")
    swap(model, "Softmax()")
    assert torch.equal(model.generate(**given, **wanted, cache_implementation="static"), before)


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["Softmax()", "Local(window=99)"])
def test_bloom_counts_positions_by_tokens(mechanism: str) -> None:
    """So that a hole in a text has no length: it is served by a mask of every pair, and not behind a state."""
    model = build("Bloom")
    given = {**inputs(model, 20), "attention_mask": torch.ones(2, 20, dtype=torch.long), "use_cache": False}
    given["attention_mask"][0, 5:12] = 0
    before = out(model, given)
    swap(model, mechanism)
    torch.testing.assert_close(real(out(model, given), given), real(before, given), atol=2e-5, rtol=2e-5)
    if mechanism != "Softmax()":
        with pytest.raises(Unsupported, match="under a mask of every pair behind 20 tokens in a cache: pass use_c"):
            model.generate(**{**given, "use_cache": True}, max_new_tokens=3)


def test_mpt_refuses_masks_of_every_pair() -> None:
    model = build("Mpt")
    swap(model, "Softmax()")
    with pytest.raises(Unsupported, match="MPT with a mask of every pair"):
        model(torch.randint(5, 99, (1, 5)), attention_mask=torch.ones(1, 1, 5, 5).tril().bool())


@torch.no_grad()
@pytest.mark.parametrize("name", ["MT5", "Bloom"])
def test_exact_up_to_a_number_of_tokens(name: str) -> None:
    model = build(name)
    short, long = inputs(model, 12), inputs(model, 30)
    exact = out(model, short), out(model, long)
    report = swap(model, "Local(window=2)", exact_up_to=12)
    assert "Softmax(bias=" in report.layers[0].mechanism
    assert "Local(window=2, bias=" in report.layers[0].mechanism
    torch.testing.assert_close(out(model, short), exact[0], atol=2e-5, rtol=2e-5)
    assert not torch.allclose(out(model, long), exact[1], atol=1e-3)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # of BLOOM's GELU
@pytest.mark.parametrize("name", ["MT5", "UMT5", "Bloom", "Mpt"])
def test_a_compiled_model(name: str) -> None:
    model = build(name, **{layers: 1 for layers in MODELS[name][2] if "layer" in layers})
    model = getattr(model, "encoder", model)
    swap(model, "Local(window=4)")
    given = {**inputs(model, 20, padded="right"), **({} if name in ("MT5", "UMT5") else {"use_cache": False})}
    given.pop("decoder_input_ids", None)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(real(out(compiled, given), given), real(out(model, given), given), atol=2e-5, rtol=2e-5)
