"""Models of any mechanism: streaming, positions, padding, heads, saving, generating."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Attention, Unsupported, catalogue, counting
from fast_attention.nn import generation, saving
from fast_attention.nn.generation import Sampling
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.nn.positions import rotate, sinusoids
from fast_attention.nn.token_mixer import TokenMixer

EVERY: list[Any] = [catalogue.default(name) for name in catalogue.names()]
STREAMING = [m for m in EVERY if isinstance(m, Attention) and m.traits.memory]
TURNED = [m for m in EVERY if isinstance(m, Attention) and m.traits.rotary]
SMALL = {"FavorPlus()": "FavorPlus(num_features=16)", "Favor()": "Favor(num_features=16)"}


def model(mechanism: Any = "Softmax()", **options: Any) -> Model:
    torch.manual_seed(3)
    text = SMALL.get(repr(mechanism), mechanism if isinstance(mechanism, str | tuple) else repr(mechanism))
    settings: dict[str, Any] = {"vocab_size": 11, "width": 16, "heads": 2, "max_len": 40, **options}
    made = Model(ModelConfig(mechanism=text, **settings)).double().eval()
    for parameter in made.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))  # far from the start, where everything is small
    return made


def tokens(*shape: int) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("reversible", [False, True])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
@pytest.mark.parametrize("mechanism", STREAMING, ids=repr)
def test_a_stream_gives_what_the_whole_gives(mechanism: Any, positions: str, reversible: bool) -> None:
    if positions == "rotary" and not mechanism.traits.rotary:
        with pytest.raises(Unsupported, match="rotary"):
            model(mechanism, positions="rotary")
        return
    decoder = model(mechanism, causal=True, positions=positions, reversible=reversible)
    x = tokens(2, 23)
    whole, state, parts = decoder(x), None, []
    for stretch in x.split([5, 1, 1, 13, 3], -1):
        out, state = decoder.decode(stretch, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mechanism", TURNED, ids=repr)
def test_rotary_scores_tell_distances_only(mechanism: Any) -> None:
    """An estimate by random features or hashing has its own noise at every place: there, its norms and mean."""
    torch.manual_seed(0)
    mixer = TokenMixer(16, 2, mechanism).double().eval()
    x = torch.randn(2, 19, 16, dtype=torch.float64)
    here, there = ([rotate(t, start) for t in mixer._project(x)[:2]] for start in (0, 57))
    dots = [q @ k.mT for q, k in (here, there)]
    torch.testing.assert_close(dots[0], dots[1], rtol=1e-9, atol=1e-10)
    if mechanism.traits.random and repr(mechanism) != "BigBird()":
        return
    v = torch.randn(2, 2, 19, 8, dtype=torch.float64)
    torch.testing.assert_close(mixer.attention(*here, v), mixer.attention(*there, v), rtol=1e-9, atol=1e-10)


def test_where_rotary_is_refused_scores_would_tell_places() -> None:
    mixer = TokenMixer(16, 2, "LinearAttention").double()
    q, k, v = (torch.randn(1, 2, 19, 8, dtype=torch.float64) for _ in range(3))
    here, there = (mixer.attention(rotate(q, start), rotate(k, start), v) for start in (0, 57))
    assert (here - there).abs().max() > 1e-3


def test_rotation_and_sinusoids_are_the_formulas() -> None:
    x = torch.randn(7, 6, dtype=torch.float64)
    found, waves = rotate(x, 4), sinusoids(7, 6, 4)
    for place in range(7):
        for i in range(3):
            angle = (place + 4) * 10_000 ** (-i / 3)
            turn = torch.polar(torch.ones((), dtype=torch.float64), torch.tensor(angle, dtype=torch.float64))
            pair = torch.complex(x[place, i], x[place, i + 3]) * turn
            torch.testing.assert_close(torch.complex(found[place, i], found[place, i + 3]), pair)
            expected = torch.stack([turn.imag, turn.real])
            torch.testing.assert_close(waves[place, 2 * i : 2 * i + 2], expected)
    with pytest.raises(ValueError, match="odd"):
        rotate(torch.randn(3, 5))


@pytest.mark.parametrize("head", ["tokens", "classes"])
@pytest.mark.parametrize("reversible", [False, True])
@pytest.mark.parametrize("mechanism", [m for m in EVERY if m.traits.padding], ids=repr)
def test_padding_changes_nothing(mechanism: Any, reversible: bool, head: str) -> None:
    if mechanism.traits.spans:
        pytest.skip("laid out over the padded length")
    options = {"head": head, "classes": 3 if head == "classes" else 0, "reversible": reversible}
    encoder = model(mechanism, positions="sinusoidal", causal=mechanism.traits.modes[0], **options)
    x = tokens(2, 17)
    key_mask = torch.ones(2, 17, dtype=torch.bool)
    key_mask[0, 13:] = False
    padded, alone = encoder(x, key_mask)[0], encoder(x[:1, :13])[0]
    torch.testing.assert_close(padded if head == "classes" else padded[:13], alone, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mechanism", EVERY, ids=repr)
def test_every_parameter_learns(mechanism: Any) -> None:
    causal = mechanism.traits.modes[0]
    encoder = model(mechanism, layers=2, positions="learned", max_len=24, causal=causal).train()
    encoder(tokens(2, 24)).log_softmax(-1)[..., 3].sum().backward()
    still = [name for name, p in encoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not [name for name in still if "attention" not in name], still


@pytest.mark.parametrize("mechanism", ["Softmax()", "FavorPlus(num_features=8)", "LSH(bucket_size=4)"])
def test_reversible_models_have_the_ordinary_gradients(mechanism: str) -> None:
    encoder = model(mechanism, reversible=True, layers=4, causal=True, positions="learned").train()
    parameters = list(encoder.parameters())

    def ordinary(x: Tensor) -> Tensor:
        one = two = encoder.places(encoder.embedding(x))  # type: ignore[misc]
        for block in encoder.blocks.blocks:
            one, two = block(one, two, is_causal=True)
        return encoder.out(encoder.norm((one + two) / 2))

    found, expected = (
        torch.autograd.grad(call(tokens(2, 23)).log_softmax(-1)[..., 3].sum(), parameters)
        for call in (encoder, ordinary)
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_reversible_depth_costs_no_memory() -> None:
    def peak(layers: int, reversible: bool) -> int:
        encoder = model("Local(window=32)", layers=layers, reversible=reversible, width=32, max_len=2048).train()
        x = tokens(1, 2048)
        return counting.peak_bytes(lambda: encoder(x).sum().backward())

    assert peak(12, True) <= 1.3 * peak(2, True)
    assert peak(12, False) > 3 * peak(2, False)


def test_layers_of_different_kinds() -> None:
    mixed = model(("Local(window=4)", "FavorPlus(num_features=8)"), layers=5)
    kinds = [type(block.f.mixer.mechanism).__name__ for block in mixed.blocks]
    assert kinds == ["Local", "FavorPlus", "Local", "FavorPlus", "Local"]
    assert mixed.config.mechanism == ("Local(window=4)", "FavorPlus(num_features=8)")
    with pytest.raises(Unsupported, match="causal"):
        model(("Softmax()", "Linformer()"), causal=True)


def test_tied_weights_are_one() -> None:
    one, two = model(), model(tied=False)
    assert one.out.weight is one.embedding.weight
    assert two.out.weight is not two.embedding.weight


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 15}, "multiple of heads"),
        ({"head": "classes"}, "classes"),
        ({"head": "words"}, "head"),
        ({"positions": "relative"}, "positions"),
        ({"layers": 0}, "layers"),
        ({"mechanism": "Sofmax()"}, "Softmax"),
        ({"mechanism": ()}, "mechanism"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_settings_that_make_no_model(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, KeyError), match=words):
        ModelConfig(**{"vocab_size": 11, "width": 16, "heads": 2, **options})


@pytest.mark.parametrize(
    ("mechanism", "width", "wanted"),
    [
        ("Softmax()", 16, "rotary"),
        (("Local(window=4)", "FavorPlus(num_features=8)"), 16, "rotary"),
        (("Local(window=4)", "LinearAttention()"), 16, "learned"),
        ("FNet()", 16, "learned"),
        ("Softmax()", 14, "learned"),  # heads of 7 channels have no pairs to rotate
    ],
)
def test_automatic_positions_are_rotary_where_every_layer_can(
    mechanism: Any, width: int, wanted: str, tmp_path: Path
) -> None:
    made = model(mechanism, width=width)
    assert made.config.positions == wanted
    assert made.config == model(mechanism, positions=wanted, width=width).config
    saving.save(made, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["positions"] == wanted
    assert torch.equal(saving.load(tmp_path)(tokens(2, 9)), made(tokens(2, 9)))


def test_too_long_a_sequence_is_named() -> None:
    with pytest.raises(ValueError, match="40 tokens and got 41"):
        model(positions="learned")(tokens(1, 41))


@pytest.mark.parametrize(
    "mechanism", ["FavorPlus(num_features=8)", "LSH(bucket_size=4)", "BigBird(block_size=4)", "RandomSynthesizer()"]
)
@pytest.mark.parametrize("reversible", [False, True])
def test_saved_and_loaded_to_the_bit(mechanism: str, reversible: bool, tmp_path: Path) -> None:
    made = model((mechanism, "Softmax()"), reversible=reversible).float()
    saving.save(made, tmp_path)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again = saving.load(tmp_path)
    assert torch.equal(before, torch.get_rng_state())  # loading draws from nobody's generator
    assert again.config == made.config
    assert torch.equal(again(tokens(2, 23)), made(tokens(2, 23)))
    assert json.loads((tmp_path / "config.json").read_text())["mechanism"][0] == repr(catalogue.parse(mechanism))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_damaged_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no model"):
        saving.load(tmp_path)
    made = model().float()
    saving.save(made, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (whole[:-50], b"", whole[:4] + b"x" + whole[5:]):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match="no sound model"):
            saving.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no sound model"):
        saving.load(tmp_path)


def test_what_was_changed_is_told_by_its_hash(tmp_path: Path) -> None:
    saving.save(model(("Local(window=4)", "Softmax()")).float(), tmp_path)
    weights, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, text = weights.read_bytes(), settings.read_text()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"{weights} is damaged: its SHA-256 is"):
        saving.load(tmp_path)
    weights.write_bytes(whole)
    for old, new, words in (
        ("Local(window=4)", "Local(window=5)", "config.json is not what was written"),
        ('"sha256"', '"sha512"', "None was saved"),
        ("fast-attention model 1", "fast-attention model 2", "its format is not"),
        ('model 1",\n "version": "', 'model 2",\n "version": "9', "use the later version"),
        ("fast-attention model 1", "fast-attention modem 1", "its format is not"),
    ):
        assert old in text
        settings.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=words):
            saving.load(tmp_path)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("mechanism", ["Softmax()", "Local(window=3)", "FavorPlus(num_features=8)", "AFTSimple()"])
def test_generation_is_recomputation(mechanism: str, positions: str) -> None:
    """Prompts of unequal length in one batch give what each gives alone, read anew for every token."""
    if positions == "rotary" and not catalogue.parse(mechanism).traits.rotary:
        return
    decoder = model(mechanism, causal=True, positions=positions)
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
    found = generation.generate(decoder, prompts, new_tokens=9)
    for prompt, made in zip(prompts, found, strict=True):
        line = list(prompt)
        for _ in range(9):
            line.append(int(decoder(torch.tensor([line]))[0, -1].argmax()))
        assert made == line[len(prompt) :]


def test_generation_without_a_state() -> None:
    """A mechanism that cannot stream is read anew each time."""
    decoder = model("BigBird(block_size=4)", causal=True)
    assert not decoder.streams
    (made,) = generation.generate(decoder, [[1, 2, 3]], new_tokens=6)
    line = [1, 2, 3]
    for _ in range(6):
        line.append(int(decoder(torch.tensor([line]))[0, -1].argmax()))
    assert made == line[3:]


def test_beams_find_the_likeliest() -> None:
    """With as many beams as there are lines, the best of all lines."""
    decoder = model("FavorPlus(num_features=8)", causal=True, vocab_size=4)
    prompt = [1, 3]
    (found,) = generation.generate(decoder, [prompt], new_tokens=4, beams=64)

    @torch.no_grad()
    def chance(line: tuple[int, ...]) -> float:
        logits = decoder(torch.tensor([[*prompt, *line]]))[0].log_softmax(-1)
        return sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(line))

    best = max(itertools.product(range(4), repeat=4), key=chance)
    assert tuple(found) == best
    greedy = generation.generate(decoder, [prompt], new_tokens=4)[0]
    assert chance(tuple(found)) >= chance(tuple(greedy)) - 1e-12


def test_a_stop_token_ends_each_line_for_itself() -> None:
    decoder = model(causal=True)
    free = generation.generate(decoder, [[1], [2, 5], [9]], new_tokens=12, sampling=Sampling(), seed=4)
    stop = free[0][3]
    stopped = generation.generate(decoder, [[1], [2, 5], [9]], new_tokens=12, sampling=Sampling(), seed=4, stop=stop)
    for whole, cut in zip(free, stopped, strict=True):
        assert cut == (whole[: whole.index(stop) + 1] if stop in whole else whole)


def test_sampling_follows_its_settings() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    many = logits.expand(20_000, -1)
    source = torch.Generator().manual_seed(0)

    def shares(sampling: Sampling) -> list[float]:
        drawn = sampling.choose(many, source)
        return (torch.bincount(drawn, minlength=4) / len(drawn)).tolist()

    assert shares(Sampling()) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.015)
    assert shares(Sampling(top_k=2)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.015)
    assert shares(Sampling(top_p=0.79)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.015)
    assert shares(Sampling(top_p=0.81)) == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0], abs=0.015)
    squares = torch.tensor([0.5, 0.3, 0.15, 0.05]).square()
    assert shares(Sampling(temperature=0.5)) == pytest.approx((squares / squares.sum()).tolist(), abs=0.015)
    assert shares(Sampling(temperature=0.0)) == [1, 0, 0, 0]
    for wrong in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**wrong)


def test_what_cannot_generate_says_so() -> None:
    with pytest.raises(ValueError, match="decoder"):
        generation.generate(model(), [[1]])
    with pytest.raises(ValueError, match="at least one token"):
        generation.generate(model(causal=True), [[1], []])
    with pytest.raises(ValueError, match="40"):
        generation.generate(model(causal=True, positions="learned"), [[1, 2]], new_tokens=40)


def test_an_encoder_decodes_nothing() -> None:
    with pytest.raises(Unsupported, match="only a model with causal=True decodes"):
        model().decode(torch.zeros(1, 2, dtype=torch.long))
