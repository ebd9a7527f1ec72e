"""``late_chunks``: means of tokens that saw the whole document, against the model's own token vectors."""

from __future__ import annotations

import itertools
import string
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import extend, late_chunks, swap
from fast_attention.integrations.late_chunking import windows

transformers = pytest.importorskip("transformers")
READS, ROOM = 24, 22  # tokens at once, and those without [CLS] and [SEP]
SHORT = "a cat sat on a mat"  # 13 tokens: one for each letter
LONG = " ".join(f"{a}{b} {b}{a}" for a, b in zip(string.ascii_lowercase, string.ascii_lowercase[5:], strict=False))


def letters(**settings: Any) -> Any:
    """A fast tokenizer with a token for each letter: words have several, as word pieces do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.ascii_lowercase, *(f"##{x}" for x in string.ascii_lowercase)]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    marks = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=marks
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **names, **{"model_max_length": READS, **settings}
    )


def bert(kind: str = "BertModel", **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(
        **sizes, vocab_size=56, max_position_embeddings=READS, initializer_range=0.4, **settings
    )
    return getattr(transformers, kind)(config).eval()


def own(model: Any, ids: list[int]) -> Tensor:
    """The model's vectors of tokens, without those of [CLS] and [SEP]."""
    with torch.no_grad():
        return model(torch.tensor([[2, *ids, 3]])).last_hidden_state[0, 1:-1]


def numbers(text: str) -> list[int]:
    return letters()(text, add_special_tokens=False, verbose=False)["input_ids"]


def test_chunks_of_a_document_that_fits_are_means_of_the_models_own_tokens() -> None:
    model = bert()
    found, tokens = late_chunks(model, SHORT, 5, tokenizer=letters()), own(model, numbers(SHORT))
    means = torch.stack([tokens[:5].mean(0), tokens[5:10].mean(0), tokens[10:].mean(0)])
    assert torch.allclose(found.vectors, means, atol=1e-6)
    assert [each.tokens for each in found] == [range(5), range(5, 10), range(10, 13)]
    assert [each.text for each in found] == ["a cat s", "at on a", "mat"]
    for each, vector in zip(found, found.vectors, strict=True):
        assert each.text == SHORT[each.start : each.end]
        assert torch.equal(each.vector, vector)
    alone = late_chunks(model, "at on a", 5, tokenizer=letters()).vectors[0]
    assert not torch.allclose(alone, means[1], atol=1e-2), "a chunk that saw its neighbours is another one"


@pytest.mark.parametrize("room", [1, 2, 7, 22, 510])
def test_windows_take_each_token_once_from_the_nearest_middle(room: int) -> None:
    for count in (1, room - 1, room, room + 1, 2 * room - 1, 2 * room + 1, 5 * room + 3):
        if count < 1:
            continue
        made = windows(count, room)
        assert [i for _, taken in made for i in taken] == [*range(count)]
        assert {len(seen) for seen, _ in made} == {min(room, count)}
        assert made[0][0].start == 0
        assert made[-1][0].stop == count
        for (first, _), (second, _) in itertools.pairwise(made):
            assert first.stop - second.start >= room // 4, "neighbours share a quarter"
        for seen, taken in made:
            for i in taken:
                assert i in seen
                away = abs(2 * i + 1 - seen.start - seen.stop)
                assert away <= min(abs(2 * i + 1 - other.start - other.stop) for other, _ in made)
    assert len(windows(room + 1, room)) == 2


@pytest.mark.parametrize("at_once", [1, 50, 8192])
def test_tokens_of_a_long_document_are_those_of_their_windows(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One window at a time, two or all of them."""
    monkeypatch.setattr("fast_attention.integrations.late_chunking.TOKENS_AT_ONCE", at_once)
    model, ids = bert(), numbers(LONG)
    assert len(ids) > 3 * READS
    seen = [each for each, _ in windows(len(ids), ROOM)]
    read = [own(model, ids[each.start : each.stop]) for each in seen]
    tokens = []
    for i in range(len(ids)):  # of the window in which it lies farthest from both ends
        margins = [min(i - each.start, each.stop - 1 - i) for each in seen]
        best = max(range(len(seen)), key=lambda each: (margins[each], -each))
        best = 0 if i < seen[1].start else len(seen) - 1 if i >= seen[-2].stop else best
        tokens.append(read[best][i - seen[best].start])
    found = late_chunks(model, LONG, 9, tokenizer=letters())
    assert torch.allclose(found.vectors, torch.stack([x.mean(0) for x in torch.stack(tokens).split(9)]), atol=1e-5)


def test_spans_hold_the_tokens_whose_middles_lie_in_them() -> None:
    model = bert()
    tokens = own(model, numbers(SHORT))
    found = late_chunks(model, SHORT, [(0, 5), (6, 8), (8, 18)], tokenizer=letters())  # "a cat", "sa", "t on a mat"
    assert [each.tokens for each in found] == [range(4), range(4, 6), range(6, 13)]
    assert torch.allclose(found.vectors[1], tokens[4:6].mean(0), atol=1e-6)
    assert [(each.start, each.end) for each in found] == [(0, 5), (6, 8), (8, 18)]
    words = letters()
    words.backend_tokenizer.model.continuing_subword_prefix = "~"  # no parts of words: one token for each
    for document in ("aaaa b", "b aaaa"):
        (first, second) = late_chunks(model, document, [(0, 3), (3, 6)], tokenizer=words)
        assert (first.tokens, second.tokens) == (range(1), range(1, 2)), "a token that is cut goes where its middle is"
    (gap,) = late_chunks(model, SHORT, [(9, 12)], tokenizer=letters())
    assert torch.allclose(gap.vector, tokens[7:9].mean(0), atol=1e-6), "what no span holds is read all the same"


def test_a_prompt_stands_in_front_of_every_window_and_in_no_chunk() -> None:
    model = bert()
    ids, prompt = numbers(LONG), numbers("to be")
    found = late_chunks(model, LONG, 12, tokenizer=letters(), prompt="to be ")
    seen, taken = windows(len(ids), ROOM - 4)[0]
    first = own(model, [*prompt, *ids[seen.start : seen.stop]])[4:]
    assert taken.stop >= 12
    assert torch.allclose(found.vectors[0], first[:12].mean(0), atol=1e-6)
    assert (found[0].start, found[-1].end) == (0, len(LONG))


def test_swapped_and_extended_models_are_read_as_they_are() -> None:
    model, tokenizer = bert(), letters()
    before = late_chunks(model, LONG, 20, tokenizer=tokenizer).vectors
    extend(model, 256, tokenizer=tokenizer)
    whole, tokens = late_chunks(model, LONG, 20, tokenizer=tokenizer).vectors, own(model, numbers(LONG))
    assert torch.allclose(whole, torch.stack([x.mean(0) for x in tokens.split(20)]), atol=1e-5), "in one pass"
    assert not torch.allclose(whole, before, atol=1e-2)
    swap(model, "Local(window=8)")
    swapped, tokens = late_chunks(model, LONG, 20, tokenizer=tokenizer).vectors, own(model, numbers(LONG))
    assert torch.allclose(swapped, torch.stack([x.mean(0) for x in tokens.split(20)]), atol=1e-5)
    assert not torch.allclose(swapped, whole, atol=1e-2)
    swap(headed := bert("BertForMaskedLM"), "Local(window=8)")
    tokens = own(headed.bert, numbers(SHORT))
    assert torch.allclose(late_chunks(headed, SHORT, 24, tokenizer=letters()).vectors[0], tokens.mean(0), atol=1e-6)


def test_positions_that_begin_behind_the_padding_token_are_not_counted() -> None:
    """Roberta's kind has two rows more than tokens that it reads."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.RobertaConfig(**sizes, vocab_size=56, max_position_embeddings=READS + 2, pad_token_id=1)
    model = transformers.RobertaModel(config).eval()
    found = late_chunks(model, LONG, READS, tokenizer=letters(model_max_length=10**30))
    assert found[0].tokens == range(READS)
    with pytest.raises(ValueError, match=f"chunk={READS + 1}: the model reads {READS} tokens at once"):
        late_chunks(model, LONG, READS + 1, tokenizer=letters(model_max_length=10**30))


def test_there_are_no_gradients_and_no_dropout_and_the_mode_stays() -> None:
    model = bert().train()
    model.encoder.eval()
    found = late_chunks(model, SHORT, 5, tokenizer=letters())
    assert not found.vectors.requires_grad
    assert (model.training, model.embeddings.training, model.encoder.training) == (True, True, False)
    assert torch.equal(found.vectors, late_chunks(model.eval(), SHORT, 5, tokenizer=letters()).vectors)


def test_the_result_is_an_immutable_sequence_that_prints_a_table() -> None:
    found = late_chunks(bert(), SHORT, 5, tokenizer=letters())
    assert (len(found), [*found][2], found[-1]) == (3, found[2], found[2])
    assert found[1:].vectors.shape == (2, 32)
    assert [each.start for each in found[1:]] == [found[1].start, found[2].start]
    for owner, name in ((found, "vectors"), (found[0], "start")):
        with pytest.raises(AttributeError):
            setattr(owner, name, 0)
    lines = str(found).splitlines()
    assert lines[2].split() == ["1", "7", "to", "14", "5", "to", "10", "at", "on", "a"]
    assert lines[-1] == "vectors: 3 of width 32"
    assert "tensor" not in repr(found) + repr(found[0])


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "": (5, ValueError, r"the document has no tokens: ''"),
    " \n": (5, ValueError, r"the document has no tokens: ' \\n'"),
    "0": (0, ValueError, r"chunk=0: give at least 1 token"),
    "25": (25, ValueError, r"chunk=25: the model reads 24 tokens at once; give fewer, or extend"),
    "half": (2.5, TypeError, r"chunk must be a number of tokens or a list of spans \(start, end\); got 2.5"),
    "yes": (True, TypeError, r"chunk must be a number of tokens"),
    "text": ("5", TypeError, r"chunk must be a number of tokens .* got the text '5'"),
    "none": ([], ValueError, r"chunk=\[\]: give at least one span"),
    "ints": ([5, 10], TypeError, r"chunk\[0\]=5: give two whole numbers"),
    "three": ([(0, 1), (1, 2, 3)], TypeError, r"chunk\[1\]=\(1, 2, 3\): give two whole numbers"),
    "no width": ([(0, 1), (4, 4)], ValueError, r"chunk\[1\]=\(4, 4\) is empty: its end must be above its start"),
    "no tokens": ([(0, 1), (1, 2)], ValueError, r"chunk\[1\]=\(1, 2\) is empty: no token has its middle in ' '"),
    "before": ([(-2, 3)], ValueError, r"chunk\[0\]=\(-2, 3\) leaves the text, which has 18 characters"),
    "after": ([(0, 3), (5, 19)], ValueError, r"chunk\[1\]=\(5, 19\) leaves the text, which has 18 characters"),
    "overlap": ([(0, 6), (5, 9)], ValueError, r"chunk\[1\]=\(5, 9\) overlaps chunk\[0\], which ends at 6: begin there"),
    "order": ([(5, 9), (0, 3)], ValueError, r"chunk\[1\]=\(0, 3\) is out of order: .* sort the spans"),
    "long span": ([(0, 99)], ValueError, r"chunk\[0\]=\(0, 99\) has 66 tokens, and the model reads 24 at once: cut it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(name: str) -> None:
    chunk, kind, said = REFUSED[name]
    document = LONG if name == "long span" else name if not name.strip() else SHORT
    with pytest.raises(kind, match=said):
        late_chunks(bert(), document, chunk, tokenizer=letters())


def test_models_and_tokenizers_that_cannot_be_read_are_refused_by_name() -> None:
    tokenizer = letters()
    with pytest.raises(TypeError, match="document must be a text; got 5, of type int"):
        late_chunks(bert(), 5, tokenizer=tokenizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be an nn.Module; got the text 'bert'"):
        late_chunks("bert", SHORT, tokenizer=tokenizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model must be a SentenceTransformer or a Hugging Face model; got Linear"):
        late_chunks(nn.Linear(2, 2), SHORT, tokenizer=tokenizer)
    with pytest.raises(TypeError, match="BertModel comes without its tokenizer: give tokenizer="):
        late_chunks(bert(), SHORT)
    with pytest.raises(ValueError, match="ByT5Tokenizer does not say where its tokens stand in the text: give a fast"):
        late_chunks(bert(), SHORT, tokenizer=transformers.ByT5Tokenizer())
    with pytest.raises(ValueError, match="prompt and special tokens are 86 tokens, and the model reads 24 at once"):
        late_chunks(bert(), SHORT, 5, tokenizer=tokenizer, prompt=LONG)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 56}
    t5 = transformers.T5Model(transformers.T5Config(**sizes)).eval()
    with pytest.raises(ValueError, match=r"T5Model is an encoder with a decoder: give model.get_encoder\(\)"):
        late_chunks(t5, SHORT, 5, tokenizer=tokenizer)
    unlimited = late_chunks(t5.get_encoder(), LONG, 5, tokenizer=letters(model_max_length=10**30))
    assert torch.allclose(unlimited.vectors[0], own(t5.get_encoder(), numbers(LONG))[:5].mean(0), atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("late") / "model"
    bert().save_pretrained(path)
    letters().save_pretrained(path)
    return path


def sentences(folder: Path, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("sentence_transformers")
        return library.SentenceTransformer(str(folder), device="cpu", **settings)


def with_dense(model: Any) -> Any:
    from sentence_transformers.sentence_transformer import modules

    torch.manual_seed(1)
    model.append(modules.Dense(32, 16))
    model.append(modules.Normalize())
    return model.eval()


def test_a_sentence_transformers_own_modules_make_the_vector(folder: Path) -> None:
    """What encode gives for a document of one chunk, but for [CLS] and [SEP], which stand in its mean."""
    model = with_dense(sentences(folder))
    chunk = late_chunks(model, SHORT, READS).vectors[0]
    tokens = model.encode(SHORT, output_value="token_embeddings").clone()
    made = [
        F.normalize(model[2].activation_function(model[2].linear(x.mean(0))), dim=-1) for x in (tokens, tokens[1:-1])
    ]
    assert torch.allclose(torch.as_tensor(model.encode(SHORT)), made[0], atol=1e-6), "what is compared with"
    assert torch.allclose(chunk, made[1], atol=1e-6)
    assert not torch.allclose(chunk, made[0], atol=1e-3)
    model.truncate_dim = 8
    assert torch.allclose(late_chunks(model, SHORT, READS).vectors[0], made[1][:8], atol=1e-6)


def test_a_sentence_transformers_prompt_and_length_are_used(folder: Path) -> None:
    model = sentences(folder, prompts={"query": "where is", "document": "to be "})
    plain = late_chunks(bert(), LONG, 12, tokenizer=letters(), prompt="to be ")
    assert torch.allclose(late_chunks(model, LONG, 12).vectors, plain.vectors, atol=1e-6)
    assert torch.allclose(late_chunks(model, SHORT, 5, prompt="").vectors,
                          late_chunks(bert(), SHORT, 5, tokenizer=letters()).vectors, atol=1e-6)  # fmt: skip
    extend(model, 256)
    model.prompts = {}
    tokens = own(model[0].auto_model, numbers(LONG))
    assert torch.allclose(late_chunks(model, LONG, 20).vectors[0], tokens[:20].mean(0), atol=1e-5), "in one pass"
    model.max_seq_length = 16
    assert not torch.allclose(late_chunks(model, LONG, 16).vectors[0], tokens[:16].mean(0), atol=1e-3)
    with pytest.raises(ValueError, match="chunk=17: the model reads 16 tokens at once"):
        late_chunks(model, LONG, 17)


def test_sentence_transformers_that_do_not_average_tokens_are_refused_by_name(folder: Path) -> None:
    model = sentences(folder)
    with pytest.raises(TypeError, match="a SentenceTransformer has its own"):
        late_chunks(model, SHORT, tokenizer=letters())
    model[1].pooling_mode = "cls"
    with pytest.raises(
        ValueError, match="pools by 'cls', and a chunk's vector is the mean of its tokens: give a model"
    ):
        late_chunks(model, SHORT)
    del model[1]
    with pytest.raises(ValueError, match="holds Transformer: its modules must begin with Transformer and Pooling"):
        late_chunks(model, SHORT)
