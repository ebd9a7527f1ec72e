"""Small models: steps of decoding are one pass, weights are saved to the bit, the shipped model is what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import data, models, tasks
from experiments.models import Model, ModelConfig
from fast_attention import Unsupported

DECODERS: dict[str, dict[str, Any]] = {
    "rotary": {"mechanism": ("Softmax()", "FavorPlus(num_features=16)"), "positions": "rotary"},
    "convolved": {"mechanism": ("LinearAttention()", "Local(window=(3, 0))"), "positions": "learned", "conv": 3},
    "reversible": {"mechanism": "WKV()", "positions": "sinusoidal", "reversible": True, "conv": 2},
}


def build(**settings: Any) -> Model:
    """A model whose weights are large enough to be told apart."""
    torch.manual_seed(0)
    model = Model(ModelConfig(**{"vocab_size": 11, "width": 16, "heads": 2, "max_len": 32, "causal": True, **settings}))
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3 if name.endswith("conv.weight") else 0.2)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", DECODERS)
def test_any_split_into_steps_is_one_pass(kind: str) -> None:
    model, tokens = build(**DECODERS[kind]), torch.randint(11, (2, 20))
    whole, state, outputs = model(tokens), None, []
    for part in tokens.split([7, 1, 1, 5, 6], 1):
        out, state = model.decode(part, state)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-4, atol=1e-4)
    assert state is not None
    assert int(state.length) == 20
    later = model(torch.cat([tokens[:, :12], (tokens[:, 12:] + 1) % 11], 1))
    torch.testing.assert_close(later[:, :12], whole[:, :12], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(later[:, 12:], whole[:, 12:], atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize(
    "settings", [{"conv": 3, "mechanism": "LinearAttention()"}, {"causal": False, "head": "classes", "classes": 3}]
)
def test_padding_is_never_seen(settings: dict[str, Any]) -> None:
    model, tokens = build(**settings), torch.randint(11, (2, 12))
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    other = torch.where(mask, tokens, (tokens + 1) % 11)
    seen = mask if model.config.head == "tokens" else slice(None)
    torch.testing.assert_close(model(other, mask)[seen], model(tokens, mask)[seen])
    torch.testing.assert_close(model(tokens, mask)[1][:7], model(tokens[1:, :7])[0][:7], rtol=1e-4, atol=1e-5)


def test_the_convolution_is_its_formula_and_begins_as_nothing() -> None:
    conv, x = models.CausalConvolution(4, 3), torch.randn(2, 6, 4)
    assert torch.equal(conv(x), x)
    torch.nn.init.normal_(conv.weight)
    padded = torch.cat([torch.zeros(2, 2, 4), x], 1)
    wanted = x + sum(conv.weight[i] * padded[:, 2 - i : 8 - i] for i in range(3))
    torch.testing.assert_close(conv(x), wanted)
    half = conv(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, conv(x.bfloat16().float()).bfloat16())


def test_sinusoids_are_the_formula() -> None:
    waves = models.sinusoids(5, 6, start=7)
    for t in range(5):
        for c in range(3):
            angle = torch.tensor((7 + t) / 10_000 ** (2 * c / 6), dtype=torch.double)
            torch.testing.assert_close(waves[t, 2 * c : 2 * c + 2], torch.stack([angle.sin(), angle.cos()]))


def test_automatic_positions_are_rotary_where_all_layers_take_them() -> None:
    for mechanism, heads, positions in (
        ("Softmax", 2, "rotary"), (("Softmax", "LinearAttention"), 2, "learned"), ("Softmax", 16, "learned")
    ):  # fmt: skip
        assert ModelConfig(11, mechanism, width=16, heads=heads).positions == positions


@torch.no_grad()
def test_a_model_is_loaded_to_the_bit_with_its_random_features(tmp_path: Path) -> None:
    for settings in (DECODERS["rotary"], {"tied": False, "reads": "bytes"}):
        model, tokens = build(**settings), torch.randint(11, (1, 9))
        models.save(model, tmp_path / "model")
        before = torch.get_rng_state()
        loaded = models.load(tmp_path / "model")
        assert torch.equal(torch.get_rng_state(), before)
        assert loaded.config == model.config
        assert torch.equal(loaded(tokens), model(tokens))
        assert (loaded.out.weight is loaded.embedding.weight) == model.config.tied
    models.save(build().bfloat16(), tmp_path / "half")
    assert models.load(tmp_path / "half").out.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("what", ["weights", "settings", "setting", "missing", "newer"])
def test_damaged_models_are_refused(what: str, tmp_path: Path) -> None:
    models.save(build(), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    held = json.loads(config.read_text())
    if what == "weights":
        content = bytearray(weights.read_bytes())
        content[-3] ^= 1
        weights.write_bytes(content)
    elif what == "settings":
        config.write_text(config.read_text()[:-20])
    elif what == "setting":
        config.write_text(json.dumps({**held, "heads": 4}))
    elif what == "newer":
        config.write_text(json.dumps({**held, "format": "fast-attention model 99", "version": "9"}))
    else:
        config.unlink()
    said = {"missing": "holds no model", "newer": "was written by fast-attention 9"}.get(what, "holds no sound model")
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        models.load(tmp_path)


@torch.no_grad()
def test_the_protein_model_gives_the_logits_that_it_gave() -> None:
    model = models.load("protein-mini")
    protein = next(x for x in data.proteins() if 100 <= len(x["sequence"]) <= 140)
    assert protein["header"].startswith("sp|A4FXV4|RNP4_METM5")
    logits = model(tasks.encoded(protein["sequence"]).long()[None])
    wanted = [  # by 02d9f59
        [-0.36681893467903137, -0.7986372113227844, -0.12706264853477478, 0.2262708991765976],
        [0.22824494540691376, -0.9278738498687744, 0.12728357315063477, 0.5559210777282715],
        [0.04175360128283501, -0.6488212943077087, -0.08555462211370468, 0.2916749119758606],
    ]
    torch.testing.assert_close(logits[0, ::40, :4], torch.tensor(wanted), rtol=1e-4, atol=1e-5)
    assert float(logits.double().square().mean()) == pytest.approx(11.041117256198486, rel=1e-5)


@pytest.mark.parametrize("mechanism", ["WKV()", "BigBird(block_size=4)"])  # with a state, and without
def test_prompts_of_unequal_lengths_are_continued_as_alone(mechanism: str) -> None:
    model = build(mechanism=mechanism, positions="learned")
    assert model.streams == (mechanism == "WKV()")
    prompts = [[1, 2, 3, 4], [5]]
    together = models.generate(model, prompts, 8)
    assert together == [models.generate(model, [prompt], 8)[0] for prompt in prompts]
    with torch.no_grad():
        assert together[0][0] == int(model(torch.tensor([prompts[0]]))[0, -1].argmax())
    stopped = models.generate(model, prompts, 8, stop=together[0][2])[0]
    assert stopped == together[0][: together[0].index(together[0][2]) + 1]
    sampled = [models.generate(model, prompts, 8, seed=seed, temperature=1.0, top_p=0.9) for seed in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_samples_come_from_the_likeliest_tokens() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, -1)
    shares = torch.bincount(models.choose(logits), minlength=4) / 4000
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.03, rtol=0)
    assert set(models.choose(logits, top_k=2).tolist()) == {0, 1}
    assert set(models.choose(logits, top_p=0.7).tolist()) == {0, 1}
    assert set(models.choose(logits, temperature=0.0).tolist()) == {0}


def test_what_a_model_is_not() -> None:
    with pytest.raises(Unsupported, match="causal"):
        build(mechanism="FNet()", positions="learned")
    with pytest.raises(Unsupported, match="only a model with causal=True decodes"):
        build(causal=False).decode(torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="learned positions for 32 tokens"):
        build(positions="learned")(torch.zeros(1, 33, dtype=torch.long))
    for settings, words in (
        ({"heads": 3}, "multiple of heads"), ({"conv": 2, "causal": False}, "for decoders"),
        ({"width": 0}, "at least 1"), ({"head": "classes"}, "classes of at least 2"),
        ({"mechanism": "Performer"}, "Did you mean|FavorPlus"),
        ({"positions": "rotaty"}, "must be one of"), ({"mechanism": ()}, "at least one mechanism"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            build(**settings)
