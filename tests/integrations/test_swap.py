"""Models of Hugging Face and of torch: the same with exact attention swapped in, honest with any other mechanism."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

import fast_attention
from fast_attention import cache_argument, swap, swap_back
from fast_attention.conformance.robustness import difference_in_step
from fast_attention.integrations.report import span
from fast_attention.mechanism import Unsupported

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
POSITIONS = {"max_position_embeddings": 128}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 99}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 99, "max_position_embeddings": 128, "pad_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 2,
    "d_ff": 48,
    "vocab_size": 99,
    "decoder_start_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 128}
VIT = {**{k: v for k, v in SMALL.items() if k != "vocab_size"}, "image_size": 16, "patch_size": 4}

ENCODERS = {
    "Bert": ("BertModel", "BertConfig", {**SMALL, **POSITIONS}),
    "Roberta": ("RobertaModel", "RobertaConfig", {**SMALL, "max_position_embeddings": 130}),
    "DistilBert": ("DistilBertModel", "DistilBertConfig", {**DISTIL, **POSITIONS}),
    "Electra": ("ElectraModel", "ElectraConfig", {**SMALL, **POSITIONS, "embedding_size": 32}),
    "Albert": ("AlbertModel", "AlbertConfig", {**SMALL, **POSITIONS, "embedding_size": 16}),
    "ModernBert": (
        "ModernBertModel",
        "ModernBertConfig",
        {
            **SMALL,
            **POSITIONS,
            "num_hidden_layers": 3,
            "local_attention": 8,
            "pad_token_id": 1,
            "global_attn_every_n_layers": 3,
        },
    ),
    "Esm": (
        "EsmModel",
        "EsmConfig",
        {**SMALL, "max_position_embeddings": 130, "pad_token_id": 1, "position_embedding_type": "rotary"},
    ),
}
DECODERS = {
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SMALL, **POSITIONS}),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "vocab_size": 99,
            **POSITIONS,
            "word_embed_proj_dim": 32,
        },
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, **POSITIONS, **GROUPED}),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SMALL, **POSITIONS, **GROUPED}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**SMALL, **POSITIONS, **GROUPED, "sliding_window": 6}),
}
OTHERS = {
    "Bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
    "Vit": ("ViTModel", "ViTConfig", VIT),
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    "Mpt": (
        "MptForCausalLM", "MptConfig", {"d_model": 48, "n_layers": 2, "n_heads": 6, "vocab_size": 99, "max_seq_len": 64}
    ),
}  # fmt: skip
ALL = {**ENCODERS, **DECODERS, **OTHERS}
QUICK = ("Bert", "GPT2", "Llama")  # one of each kind, in `make test`


def kinds(*names: str) -> pytest.MarkDecorator:
    every = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]
    return pytest.mark.parametrize("name", every)


# The first releases that call these models' attention through the interface; those before are refused.
SINCE = {"ModernBert": "5.7", "T5": "5.15"}


def build(name: str, **settings: Any) -> Any:
    kind, config, sizes = ALL[name]
    torch.manual_seed(3)
    model = getattr(transformers, kind)(getattr(transformers, config)(**{**sizes, **settings})).eval()
    if Version(transformers.__version__) < Version(SINCE.get(name, "0")):
        with pytest.raises(Unsupported, match=f"{kind} does not call its attention through transformers' attention"):
            swap(model, "Softmax")
        pytest.skip(f"transformers {transformers.__version__} calls {name}'s attention directly: refused by name")
    return model


def inputs(model: Any, length: int = 21, *, padded: str = "") -> dict[str, Tensor]:
    """Token numbers, padded on the right or left; pixels; both sides of an encoder-decoder."""
    torch.manual_seed(5)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    given = {"input_ids": torch.randint(5, 99, (2, length))}
    if padded:
        seen = torch.ones(2, length, dtype=torch.long)
        seen[0, : length // 3] = 0
        given["attention_mask"] = seen if padded == "left" else seen.flip(1)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(5, 99, (2, 9))
    return given


def out(model: Any, given: dict[str, Tensor]) -> Tensor:
    found = model(**given)
    return found.logits if "logits" in found else found.last_hidden_state


def real(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Without the outputs of padding."""
    seen = given.get("attention_mask")
    return x if seen is None or x.shape[1] != seen.shape[1] else x[seen.bool()]


def gradients(model: Any, x: Tensor) -> tuple[Tensor | None, ...]:
    """Of a sum with different weights: squares behind a norm would not move."""
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(11))
    return torch.autograd.grad((x * weights).sum(), list(model.parameters()), allow_unused=True)


@kinds(*ALL)
@pytest.mark.parametrize("padded", ["", "right", "left"])
@pytest.mark.parametrize("training", [False, True])
def test_exact_attention_changes_nothing(name: str, padded: str, training: bool) -> None:
    """Outputs and, in training mode without dropout, gradients."""
    model = build(name)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for setting in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(part, setting, None), float):
                setattr(part, setting, 0.0)
    model.train(training)
    given = inputs(model, padded=padded)
    before = out(model, given)
    slopes = gradients(model, real(before, given))
    report = swap(model, "Softmax")
    assert report.replaced, report
    assert not report.unchanged, report
    after = out(model, given)
    torch.testing.assert_close(real(after, given), real(before, given), atol=1e-5, rtol=1e-4)
    scale = max(float(a.abs().max()) for a in slopes if a is not None)
    for a, b in zip(slopes, gradients(model, real(after, given)), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-5 * scale, rtol=1e-3)
    assert swap_back(model)
    assert torch.equal(out(model, given), before)


@kinds(*DECODERS, "Bart", "T5", "Bloom", "Mpt")
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_exact_attention_generates_the_same(name: str, how: dict[str, Any]) -> None:
    model = build(name)
    given = inputs(model, 11, padded="left")
    given.pop("decoder_input_ids", None)
    wanted = {"max_new_tokens": 12, "min_new_tokens": 12, **how}
    torch.manual_seed(9)
    before = model.generate(**given, **wanted)
    swap(model, "Softmax")
    torch.manual_seed(9)
    assert torch.equal(model.generate(**given, **wanted), before)


@kinds("GPT2", "Llama", "OPT", "Mistral")
@pytest.mark.parametrize(
    "mechanism",
    [
        "LinearAttention",
        "FavorPlus(num_features=16)",
        "Local(window=(5, 0))",
        "AFTSimple",
        "Hybrid(near=BlockLocal(block_size=4), far=LearnedFeatures(num_features=8))",
    ],
)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_state_generates_what_recomputation_does(name: str, mechanism: str, how: dict[str, Any]) -> None:
    """With left padding; a mechanism that sees more than the model's window is refused there."""
    model = build(name)
    if name == "Mistral" and not mechanism.startswith("Local"):
        with pytest.raises(Unsupported, match="sees 5 tokens back only"):
            swap(model, mechanism)
        wider = build(name, sliding_window=12)
        assert "beyond 12 tokens, the layer's window, it refuses" in str(swap(wider, mechanism))
        assert out(wider, inputs(wider, 12)).isfinite().all()
        with pytest.raises(Unsupported, match="sees 11 tokens back only"):
            out(wider, inputs(wider, 13))
        return
    swap(model, mechanism)
    given = inputs(model, 11, padded="left")
    wanted = {"max_new_tokens": 12, "min_new_tokens": 12, **how}
    cached = model.generate(**given, **wanted)
    assert torch.equal(cached, model.generate(**given, **wanted, use_cache=False))


def test_a_state_has_one_size(recwarn: pytest.WarningsRecorder) -> None:
    from fast_attention.integrations.cache import StateLayer

    model = build("Llama")
    swap(model, "LinearAttention")
    sizes = set()
    for length in (5, 60):
        cache = model(torch.randint(5, 99, (2, length)), use_cache=True)[cache_argument.name_of(model.forward)]
        assert all(isinstance(layer, StateLayer) for layer in cache.layers)
        assert cache.get_seq_length() == length
        sizes.add(sum(x.numel() for layer in cache.layers for x in fast_attention.decoding.leaves(layer.state)))
    assert len(sizes) == 1


@pytest.mark.parametrize("mechanism", ["Softmax", "ReLUAttention", "LinearAttention"])
def test_a_cache_of_a_fixed_size(mechanism: str) -> None:
    """Serves mechanisms that take a mask of every pair; one that keeps a state says why it cannot."""
    model = build("Llama")
    swap(model, mechanism)
    given, wanted = inputs(model, 11, padded="left"), {"max_new_tokens": 5, "min_new_tokens": 5}
    if mechanism == "LinearAttention":
        with pytest.raises(
            Unsupported, match="StaticLayer memory for all tokens: generate without cache_implementation"
        ):
            model.generate(**given, **wanted, cache_implementation="static")
    else:
        fixed = model.generate(**given, **wanted, cache_implementation="static")
        assert torch.equal(fixed, model.generate(**given, **wanted))


@pytest.mark.parametrize(
    "mechanism", ["LinearAttention", "Local(window=(3, 0))", "Softmax", "FavorPlus(num_features=8)"]
)
def test_packed_sequences_are_kept_apart(mechanism: str) -> None:
    model = build("Llama")
    swap(model, mechanism)
    a, b = torch.randint(5, 99, (1, 7)), torch.randint(5, 99, (1, 10))
    places = torch.cat([torch.arange(7), torch.arange(10)])[None]
    packed = model(torch.cat([a, b], 1), position_ids=places, use_cache=False).logits
    apart = torch.cat([model(x, use_cache=False).logits for x in (a, b)], 1)
    torch.testing.assert_close(packed, apart, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("kind", "config", "sizes"), [
    ("FNetModel", "FNetConfig", {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 99}),
    ("LongformerModel", "LongformerConfig", {**SMALL, "attention_window": 4, **POSITIONS}),
    ("BigBirdModel", "BigBirdConfig", {**SMALL, **POSITIONS}),
    ("ReformerModel", "ReformerConfig", {"vocab_size": 99}),
    ("NystromformerModel", "NystromformerConfig", {**SMALL, **POSITIONS}),
    ("LEDModel", "LEDConfig", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
                               "decoder_attention_heads": 4, "vocab_size": 99, "attention_window": 4}),
    ("DebertaV2Model", "DebertaV2Config", {**SMALL, **POSITIONS}),
])  # fmt: skip
def test_what_cannot_be_swapped_is_refused_by_name(kind: str, config: str, sizes: dict[str, Any]) -> None:
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    with pytest.raises(Unsupported, match=kind):
        swap(model, "Softmax")
    assert not swap_back(model)


def test_causal_layers_keep_what_is_not_causal_out() -> None:
    model = build("Bart")
    report = swap(model, "Linformer(rank=4)")
    assert [layer.name.split(".")[-1] for layer in report.unchanged] == ["self_attn"] * 2
    assert all("decoder" in layer.name and "the layer is causal" in layer.why for layer in report.unchanged)
    assert len(report.replaced) == 4
    assert "attention layers replaced" in str(report)
    with pytest.raises(Unsupported, match="no attention layer of GPT2LMHeadModel was swapped: the layer is causal"):
        swap(build("GPT2"), "Linformer")


def test_layers_by_pattern() -> None:
    model = build("Bert")
    before = out(model, inputs(model))
    report = swap(model, {"*layer.1.*": "Local(window=2)"})
    assert [layer.mechanism for layer in report.layers] == ["Softmax()", "Local(window=2)"]
    assert report.unchanged[0].why == "no pattern names it"
    assert not torch.allclose(out(model, inputs(model)), before, atol=1e-4)
    swap_back(model)
    assert torch.equal(out(model, inputs(model)), before)


@pytest.mark.parametrize(
    "mechanism", ["FavorPlus(num_features=16)", "Linformer(rank=4)", "LinearAttention", "LSH(bucket_size=4)"]
)
@pytest.mark.parametrize("training", [False, True])
def test_padding_is_inert_in_a_swapped_model(mechanism: str, training: bool) -> None:
    model = build("Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train(training)
    swap(model, mechanism)
    given = inputs(model, padded="right")
    other = {**given, "input_ids": torch.where(given["attention_mask"].bool(), given["input_ids"], 7)}
    torch.testing.assert_close(real(out(model, given), given), real(out(model, other), given), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["Bert", "Llama", "GPT2"])
def test_a_saved_model_is_the_same_and_nobody_elses(name: str, tmp_path: Path) -> None:
    model = build(name)
    given = inputs(model)
    swap(model, "FavorPlus(num_features=16)")
    before = out(model, given)
    model.save_pretrained(tmp_path)
    torch.manual_seed(77)
    again = fast_attention.from_pretrained(tmp_path)
    assert torch.equal(out(again, given), before)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(out(fast_attention.from_pretrained(tmp_path / "again"), given), before)
    assert torch.equal(out(type(model).from_pretrained(tmp_path), given), before)
    swap_back(model)
    model.save_pretrained(tmp_path / "exact")
    assert type(model).from_pretrained(tmp_path / "exact")


@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_no_other_attention_runs_in_silence(name: str) -> None:
    """Where the implementation was set behind the back of a swap: told at the next call, undone by ``swap_back``."""
    model = build(name)
    given = inputs(model)
    before = out(model, given)
    for behind in (lambda: model.config.__setattr__("_attn_implementation", "sdpa"),
                   lambda: model.set_attn_implementation("eager")):  # fmt: skip
        swap(model, "LinearAttention")
        behind()
        with pytest.raises(RuntimeError, match=r"swapped for LinearAttention\(\), and other attention ran"):
            out(model, given)
        assert swap_back(model)
        assert torch.equal(out(model, given), before)


def test_an_unswapped_copy_says_so() -> None:
    model = build("Bert")
    swap(model, "LinearAttention")
    twin = copy.deepcopy(model)
    torch.testing.assert_close(out(twin, inputs(twin)), out(model, inputs(model)))
    assert swap_back(twin)
    assert out(model, inputs(model)).isfinite().all()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(32, 4, 2, 2, 48, dropout=0.0, batch_first=True)

    def forward(self, a: Tensor, b: Tensor, mask: Tensor | None = None) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(b.shape[1])
        return self.model(
            a, b, tgt_mask=causal, src_key_padding_mask=mask, memory_key_padding_mask=mask, tgt_is_causal=True
        )


@pytest.mark.parametrize("training", [False, True])
def test_torch_transformers_are_the_same(training: bool) -> None:
    torch.manual_seed(0)
    model = Stack().train(training)
    a, b = torch.randn(2, 13, 32), torch.randn(2, 7, 32)
    mask = torch.arange(13) >= torch.tensor([[13], [9]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = model(a, b, mask)
        report = swap(model, "Softmax")
        assert len(report.replaced) == 6
        torch.testing.assert_close(model(a, b, mask), before, atol=1e-5, rtol=1e-4)
        names = {name for name, _ in model.named_parameters()}
        assert swap_back(model)
        assert {name for name, _ in model.named_parameters()} == names
        assert torch.equal(model(a, b, mask), before)
        report = swap(model, "LinearAttention")
        assert len(report.replaced) == 6
        assert not torch.allclose(model(a, b, mask), before, atol=1e-4)


@pytest.mark.slow
def test_torch_transformers_under_threads_autocast_and_compile() -> None:
    """With padding and a causal decoder: calls and gradients at the same time, autocast, and one graph."""
    torch.manual_seed(0)
    model, mask = Stack().eval(), torch.arange(13) >= torch.tensor([[13], [9]])
    model.model.encoder.layers, model.model.decoder.layers = (
        model.model.encoder.layers[:1],
        model.model.decoder.layers[:1],
    )
    swap(model, "FavorPlus(num_features=16)")
    given = [(torch.randn(2, 13, 32), torch.randn(2, 7, 32)) for _ in range(3)]

    def job(run: Any, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        out = run(a, b, mask)
        return out.detach(), *gradients(model, out)

    assert difference_in_step([lambda x=x: job(model, *x) for x in given], model) < 1e-5
    before = job(model, *given[0])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(job(model, *given[0])[0].float(), before[0], atol=0.1, rtol=0.1)
    torch.compiler.reset()
    after = job(torch.compile(model, fullgraph=True, backend="aot_eager"), *given[0])
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_torch_decoders_refuse_by_name() -> None:
    report = swap(Stack(), "Linformer(rank=4)", max_len=32)
    assert all("decoder" in layer.name and layer.name.endswith("self_attn") for layer in report.unchanged)
    assert len(report.replaced) == 4
    assert all("a decoder's own attention is causal" in layer.why for layer in report.unchanged)
    with pytest.raises(Unsupported, match=r"holds no Hugging Face model, no nn\.MultiheadAttention"):
        swap(nn.Linear(3, 3), "Softmax")


def test_only_what_a_swap_put_there_goes_back() -> None:
    """With the dropout and the mode that it had; a mechanism that somebody put there by hand stays."""
    model = nn.ModuleDict({
        "theirs": nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True),
        "by_hand": fast_attention.MultiheadAttention(16, 2, batch_first=True, mechanism="LinearAttention"),
    }).eval()  # fmt: skip
    x = torch.randn(2, 5, 16)
    before = model["theirs"](x, x, x)[0]
    report = swap(model.train(), "FavorPlus")
    assert "the model drops 0.3" in str(report)
    assert swap_back(model.eval())
    assert type(model["theirs"]) is nn.MultiheadAttention
    assert (model["theirs"].dropout, model["theirs"].training) == (0.3, False)
    assert torch.equal(model["theirs"](x, x, x)[0], before)
    assert repr(model["by_hand"].attention.mechanism) == "LinearAttention()"
    assert not swap_back(model)


def test_a_part_that_cannot_be_swapped_is_told() -> None:
    fnet = transformers.FNetModel(transformers.FNetConfig(hidden_size=32, num_hidden_layers=1, vocab_size=99))
    report = swap(nn.ModuleDict({"a": build("Bert"), "b": fnet}), "LinearAttention")
    assert {layer.name.split(".")[0] for layer in report.replaced} == {"a"}
    assert "FNetModel called no attention" in str(report)


def test_a_swap_that_fails_leaves_nothing_behind() -> None:
    model = nn.ModuleDict({"a": build("Bert"), "b": nn.MultiheadAttention(16, 2)})
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match="longest sequence"):
        swap(model, "Linformer(rank=4)")  # the second has no max_len to tell
    assert [name for name, _ in model.named_modules()] == names


def test_a_window_inside_packed_sequences_is_seen() -> None:
    """Where the longest sequence is none of those that the first, the middle and the last token belong to."""
    model = build("Mistral", sliding_window=12)
    places = torch.cat([torch.arange(n) for n in (3, 15, 10, 10, 3)])[None]
    tokens = torch.randint(5, 99, places.shape)
    before = model(tokens, position_ids=places, use_cache=False).logits
    swap(model, "Softmax")
    after = model(tokens, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)
    swap(model, "LinearAttention")
    with pytest.raises(Unsupported, match="the layer sees 11 tokens back only"):
        model(tokens, position_ids=places, use_cache=False)


def test_reports_are_printed_in_100_columns() -> None:
    model = build("Bert")
    wide = "Hybrid(near=BlockLocal(block_size=64), far=LearnedFeatures(num_features=32, scale=0.5), first=2, last=2)"
    for mechanism in (wide, {"*.0.*": "FavorPlus(num_features=128)"}):
        text = str(swap(model, mechanism))
        assert max(map(len, text.splitlines())) <= 100, text
    assert "encoder.layer.0-1.attention.self (2 layers): 4 heads of 8\n" in str(swap(model, "LinearAttention()"))


def test_layers_in_a_row_have_one_name() -> None:
    assert span(["a.3.b"]) == "a.3.b"
    assert span(["a.8.b", "a.9.b", "a.10.b"]) == "a.8-10.b (3 layers)"
    assert span(["a.0.b", "a.2.b"]) == "a.0.b ... a.2.b (2 layers)"
    assert span(["a.0.b1", "a.1.b2"]) == "a.0.b1 ... a.1.b2 (2 layers)"
    assert span(["a.0.own", "a.0.cross"]) == "a.0.own ... a.0.cross (2 layers)"
