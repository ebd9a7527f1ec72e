"""``swap(model)`` where positions, sinks and soft caps change the scores: the same results, no scores of all pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fast_attention import core, swap, swap_back
from fast_attention.engine.masks import masked_softmax
from fast_attention.integrations import calls
from fast_attention.integrations.exact.attention import attend
from fast_attention.integrations.visible import Visibility
from tests.hf import families
from tests.hf.families import T5, VOCABULARY

needs_core = pytest.mark.skipif(bool(core.unavailable()), reason=core.unavailable() or "it serves")
SAME, GRADIENTS = 2e-5, 1e-4  # relative differences that rounding explains
EXACT = 1e-10  # in float64, for T5 and its kin: their scores have no scale, which makes rounding large in random models
IDS = torch.randint(3, VOCABULARY, (3, 41), generator=torch.Generator().manual_seed(0))
RIGHT = torch.ones_like(IDS)
RIGHT[0, 33:] = RIGHT[1, 20:] = 0
LEFT = RIGHT.flip(-1)
GEMMA: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "intermediate_size": 48, "sliding_window": 8, "attn_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 8, "dropout_rate": 0.0, "pad_token_id": 0,
}  # fmt: skip
SEQ2SEQ: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: families.config_of(name) for name in families.SEQ2SEQ},
    "LongT5": lambda: transformers.LongT5Config(**T5, local_radius=4),
    "Bart": lambda: transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, max_position_embeddings=64,
    ),
    "T5Gemma": lambda: transformers.T5GemmaConfig(
        encoder=transformers.T5GemmaModuleConfig(**GEMMA), decoder=transformers.T5GemmaModuleConfig(**GEMMA),
        vocab_size=VOCABULARY, dropout_rate=0.0,
    ),
}  # fmt: skip
SCORES = ("Bloom", "Mpt", "Gemma2", "GptOss")  # causal models: ALiBi, soft caps, sinks


def _only_by_core(name: str) -> bool:
    """Whether a model's scores have a soft cap, which only the core computes without all pairs, and it is not here."""
    return name in ("Gemma2", "T5Gemma") and bool(core.unavailable())


def seq2seq(name: str, kind: str = "Model", **settings: Any) -> Any:
    """A tiny encoder-decoder, or its encoder, in evaluation."""
    torch.manual_seed(3)
    config = SEQ2SEQ[name]()
    for key, value in settings.items():
        setattr(config, key, value)
    model = families.spread(getattr(transformers, f"{families.CLASSES.get(name, name)}{kind}")(config).eval())
    return model if name == "T5Gemma" else model.double()


def causal(name: str, length: int = 128) -> Any:
    """A tiny causal model, in evaluation."""
    settings = {"max_seq_len": length} if name == "Mpt" else {"max_position_embeddings": length}
    return families.decoder(name, **settings)


def outputs(model: Any, mask: Tensor | None = None, decoder: int = 29, **settings: Any) -> Tensor:
    """The last hidden states of the tokens."""
    if model.config.is_encoder_decoder and hasattr(model, "decoder"):
        given = {"decoder_input_ids": IDS[:, :decoder].flip(1), "use_cache": False, **settings}
        return model(input_ids=IDS, attention_mask=mask, **given).last_hidden_state
    found = model.base_model(input_ids=IDS, attention_mask=mask, **settings).last_hidden_state
    return found if mask is None else found[mask.bool()]


def tolerance(name: str, rounding: float = SAME) -> float:
    return EXACT if name in SEQ2SEQ and name != "T5Gemma" else rounding


def away(wanted: Tensor, got: Tensor) -> float:
    return float((wanted.double() - got.double()).abs().max() / wanted.double().abs().max())


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """What a swapped model gives in its original form, and in ours at any length."""
    with calls.original():
        wanted = run()
    with calls.forced():
        return wanted, run()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoders_give_what_they_gave(name: str, attention: str) -> None:
    """Padded at either end; with as many tokens in the decoder as in the encoder, and with others."""
    if attention == "sdpa" and name in ("SwitchTransformers", "LongT5", "T5Gemma"):
        pytest.skip("transformers has only its eager attention")
    if _only_by_core(name):
        pytest.skip("nothing to gain without the core")
    model = seq2seq(name)
    model.set_attn_implementation(attention)
    plain = outputs(model)
    report = swap(model)
    assert report.gains, report
    with calls.original():
        assert torch.equal(outputs(model), plain)
    for mask in (None, RIGHT, LEFT):
        for decoder in (29, 41):
            assert away(*both(lambda mask=mask, decoder=decoder: outputs(model, mask, decoder))) < tolerance(name)
    assert swap_back(model)
    assert torch.equal(outputs(model), plain)


@torch.no_grad()
@pytest.mark.parametrize("name", ["T5", "MT5", "UMT5"])
def test_encoders_with_distances_skip_padding(name: str) -> None:
    model = seq2seq(name, "EncoderModel")
    assert swap(model).skips_padding
    for mask in (RIGHT, LEFT):
        wanted, got = both(lambda mask=mask: model(input_ids=IDS, attention_mask=mask).last_hidden_state)
        assert not got[~mask.bool()].any(), "padding was computed"
        assert away(wanted[mask.bool()], got[mask.bool()]) < EXACT


@torch.no_grad()
@pytest.mark.parametrize("name", ["T5", "UMT5"])
def test_generated_tokens_are_the_same(name: str) -> None:
    model = seq2seq(name, "ForConditionalGeneration")
    swap(model)
    for settings in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        given = {"attention_mask": RIGHT, "max_new_tokens": 12, "do_sample": False, **settings}
        assert torch.equal(*both(lambda given=given: model.generate(IDS, **given))), settings


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # its name before 5.2x
@pytest.mark.parametrize("checkpoints", [None, "reentrant", "other"])
@pytest.mark.parametrize("name", ["T5", "UMT5", "Bloom", "Mpt"])
def test_gradients_are_the_same(name: str, checkpoints: str | None) -> None:
    """Of every weight, the tables of distances among them."""
    model = seq2seq(name) if name in SEQ2SEQ else causal(name)
    weights = dict(model.named_parameters())
    swap(model)
    model.train()
    if checkpoints is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        outputs(model, RIGHT, use_cache=False).square().mean().backward()
        return {each: p.grad.clone() for each, p in weights.items() if p.grad is not None}

    wanted, got = both(gradients)
    largest = max(float(x.abs().max()) for x in wanted.values())
    assert wanted.keys() == got.keys()
    assert {x for x in weights if "relative_attention_bias" in x} <= {*wanted}
    for each, gradient in wanted.items():
        assert float((gradient - got[each]).abs().max()) < tolerance(name, GRADIENTS) * largest, each


@torch.no_grad()
@pytest.mark.parametrize("name", ["T5", "UMT5", "Bloom", "Mpt"])
def test_bfloat16_is_as_near_as_the_original(name: str) -> None:
    model = seq2seq(name) if name in SEQ2SEQ else causal(name)
    exact = outputs(model, RIGHT)
    model.bfloat16()
    swap(model)
    errors = [(x.float() - exact).square().mean().sqrt() for x in both(lambda: outputs(model, RIGHT))]
    assert errors[1] <= 1.1 * errors[0]


@torch.no_grad()
@pytest.mark.parametrize("by", ["argument", "config"])
@pytest.mark.parametrize("name", ["T5", "UMT5", "T5Gemma", *SCORES])
def test_attention_matrices_are_those_of_the_model(name: str, by: str) -> None:
    model = seq2seq(name) if name in SEQ2SEQ else causal(name).base_model
    if name not in ("Bloom", "Mpt"):
        model.set_attn_implementation("eager")
    given = {"input_ids": IDS, "use_cache": False}
    given |= {"decoder_input_ids": IDS} if name in SEQ2SEQ else {}
    kinds = ["decoder_attentions", "encoder_attentions", "cross_attentions"] if name in SEQ2SEQ else ["attentions"]
    wanted = model(**given, output_attentions=True)
    if by == "config":
        for part in model.modules():
            if isinstance(part, transformers.PreTrainedModel):
                part.config.output_attentions = True
    gains = by == "argument" and not _only_by_core(name)
    assert swap(model).gains == gains, "a model that always gives them has nothing to gain"
    with calls.forced():
        found = model(**given, **({"output_attentions": True} if by == "argument" else {}))
    for kind in kinds:
        assert len(wanted[kind]) == len(found[kind]) > 0
        assert all(torch.equal(a, b) for a, b in zip(wanted[kind], found[kind], strict=True)), kind


def test_dropped_weights_are_the_originals() -> None:
    """T5's scores with dropout are held, as they were; the same numbers are drawn."""
    model = seq2seq("T5", dropout_rate=0.5).train()
    swap(model)

    def run() -> Tensor:
        torch.manual_seed(0)
        return outputs(model)

    assert torch.equal(*both(run))


@torch.no_grad()
@pytest.mark.parametrize("name", ["T5", "UMT5", "Bloom", "Gemma2", "GptOss"])
def test_short_inputs_run_what_ran(name: str) -> None:
    """To the bit: padded and not."""
    model = seq2seq(name) if name in SEQ2SEQ else causal(name)
    swap(model)
    for mask in (None, RIGHT):
        with calls.original():
            wanted = outputs(model, mask)
        assert torch.equal(outputs(model, mask), wanted)


class Largest(TorchDispatchMode):
    """Notes the numbers of the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes() // x.itemsize)
        return result


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", ["T5", "UMT5", "Bloom", "Mpt", "Gemma2", "GptOss"])
def test_long_inputs_hold_no_scores_of_all_pairs(name: str, trains: bool) -> None:
    if core.unavailable() and (name == "Gemma2" or (trains and name in SEQ2SEQ)):
        pytest.skip("without the core torch's own function runs under soft caps, and learned numbers are a mask")
    length = 1024
    model = seq2seq(name) if name in SEQ2SEQ else causal(name, length).base_model
    swap(model)
    ids = torch.randint(3, VOCABULARY, (1, length))
    given = {"input_ids": ids, "use_cache": False} | ({"decoder_input_ids": ids} if name in SEQ2SEQ else {})

    exact = model(**given).last_hidden_state.detach()
    model.float()  # the core's numbers; those of T5 are rounded much, with or without it

    def run() -> Tensor:
        with torch.set_grad_enabled(trains):
            out = model(**given).last_hidden_state
        if trains:
            out.square().mean().backward()
        return out.detach()

    sizes = []
    with calls.original(), Largest() as largest:
        wanted = run()
    sizes.append(largest.size)
    with Largest() as largest:
        got = run()
    sizes.append(largest.size)
    assert away(exact, got) < 2 * away(exact, wanted) + SAME
    assert sizes[0] >= length**2 > sizes[1]


@needs_core
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("length", "keys", "back", "ahead"),
    [(70, 70, None, 0), (70, 70, 9, 0), (66, 90, 30, 0), (70, 70, 5, 12), (65, 33, None, None), (70, 70, 70, 69)],
)
def test_soft_caps(length: int, keys: int, back: int | None, ahead: int | None, groups: int) -> None:
    """Against the formula in float64, with gradients of both orders."""
    double = [torch.randn(2, h, n, 3, dtype=torch.float64, requires_grad=True)
              for h, n in ((4, length), (groups, keys), (groups, keys))]  # fmt: skip
    single = [x.detach().float().requires_grad_() for x in double]
    q, k, v = double
    scores = 1.5 * torch.tanh(q @ k.repeat_interleave(4 // groups, 1).mT * 0.7 / 1.5)
    offset = torch.arange(keys) - torch.arange(keys - length, keys)[:, None]
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    hidden = hidden if back is None else hidden | (offset < -back)
    hidden = hidden if ahead is None else hidden | (offset > ahead)
    weights = masked_softmax(scores, ~hidden)
    wanted = (weights @ v.repeat_interleave(4 // groups, 1)).transpose(1, 2)
    seen = Visibility(_no_mask, keys_left=back, keys_right=ahead, is_causal=ahead == 0)
    got = attend(*single, seen, scale=0.7, cap=1.5)
    assert away(wanted.detach(), got.detach()) < 2e-6
    above = torch.randn_like(wanted)
    pairs = ((wanted, double), (got, single))
    first = [torch.autograd.grad(out, x, above.to(out), create_graph=True) for out, x in pairs]
    second = [
        torch.autograd.grad(sum(x.square().sum() for x in each), x)
        for each, x in zip(first, (double, single), strict=True)
    ]
    for found, rounding in ((first, 5e-6), (second, 5e-5)):
        for a, b in zip(*found, strict=True):
            assert away(a.detach(), b.detach()) < rounding


def _no_mask() -> Tensor:
    raise AssertionError("nobody asks for a dense mask")


@torch.no_grad()
def test_compiled_models_run_what_ran() -> None:
    """UMT5 makes its own of the bias in every layer."""
    model = seq2seq("UMT5", "EncoderModel")
    swap(model)
    with calls.original():
        wanted = outputs(model)
    got = torch.compile(model, backend="eager")(input_ids=IDS).last_hidden_state
    assert away(wanted, got) < EXACT
