"""Swapped models on packed rows: what they give for each text alone, however transformers says that a row is packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import cache_argument, swap
from fast_attention.mechanism import Unsupported

transformers = pytest.importorskip("transformers")
from tests.integrations.test_swap import build  # noqa: E402

LENGTHS = (7, 10, 1, 7)
STARTS = {"Roberta": 2}  # whose positions begin behind that of padding
FORMS = ["borders", "numbers", "positions", "all"]


def texts(seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 99, (1, n), generator=draw) for n in LENGTHS]


def row(parts: list[Tensor], form: str = "all", start: int = 0) -> dict[str, Any]:
    """What transformers' collator makes of the texts, or some of it."""
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    given = dict(collator([{"input_ids": x[0].tolist()} for x in parts]))
    given["position_ids"] = given["position_ids"] + start
    borders = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    kept = {"borders": borders, "numbers": ("seq_idx",), "positions": (), "all": (*borders, "seq_idx")}[form]
    return {name: given[name] for name in ("input_ids", "position_ids", *kept)}


def alone(model: Any, parts: list[Tensor]) -> Tensor:
    """Each text by itself, with the positions that the model gives it."""
    return torch.cat([model(x)[0] for x in parts], 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        ("Llama", "LinearAttention"),
        ("Llama", "Softmax"),
        ("Llama", "FavorPlus(num_features=8)"),
        ("Llama", "Local(window=3)"),
        ("GPT2", "LSH(num_hashes=1, bucket_size=4)"),
        ("OPT", "LinearAttention"),
        ("Qwen3", "AFTSimple"),
        ("Mistral", "Softmax"),
        ("Mistral", "Local(window=(3, 0))"),
        ("Bert", "LinearAttention"),
        ("Bert", "Softmax"),
        ("Bert", "Linformer(rank=4)"),
        ("Bert", "Sinkhorn(block_size=4)"),
        ("Roberta", "Local(window=3)"),
        ("DistilBert", "LinearAttention"),
        ("Albert", "LinearAttention"),
        ("Electra", "BigBird(block_size=2)"),
        ("ModernBert", "Softmax"),
        ("ModernBert", {"*.0.*": "LinearAttention"}),
    ],
    ids=str,
)
def test_packed_texts_are_those_alone(name: str, mechanism: Any, form: str) -> None:
    """Outputs and gradients, in training mode without dropout and in evaluation; with a cache where that is usual."""
    model = build(name)
    swap(model, mechanism)
    parts = texts()
    with torch.no_grad():
        wanted = alone(model, parts)
        torch.testing.assert_close(model(**row(parts, form, STARTS.get(name, 0)))[0], wanted, atol=2e-5, rtol=1e-4)
        changed = [x if i != 1 else 103 - x for i, x in enumerate(parts)]
        moved = model(**row(changed, form, STARTS.get(name, 0)))[0] - wanted
        assert moved[:, LENGTHS[0] : sum(LENGTHS[:2])].abs().amax() > 1e-3
        moved[:, LENGTHS[0] : sum(LENGTHS[:2])] = 0
        assert moved.abs().amax() < 2e-5
    parameters = [x for x in model.parameters() if x.requires_grad]
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    gradients = []
    for call in (lambda: model(**row(parts, form, STARTS.get(name, 0)))[0], lambda: alone(model, parts)):
        gradients.append(torch.autograd.grad(call().square().sum(), parameters, allow_unused=True))
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_several_packed_rows(name: str) -> None:
    """The borders run on from row to row; texts have numbers and positions row by row."""
    model = build(name)
    swap(model, "LinearAttention")
    parts = texts()
    rows = torch.stack([torch.cat([parts[0], parts[1]], 1)[0], torch.cat([parts[1], parts[3]], 1)[0]])
    at = [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((7, 10), (10, 7))]
    lists = {
        "cu_seq_lens_q": torch.tensor([0, 7, 17, 27, 34], dtype=torch.int32),
        "seq_idx": torch.tensor([[0] * 7 + [1] * 10, [0] * 10 + [1] * 7]),
    }
    with torch.no_grad():
        one = [model(x)[0] for x in (parts[0], parts[1], parts[3])]
        wanted = torch.cat([torch.cat([one[0], one[1]], 1), torch.cat([one[1], one[2]], 1)])
        for given in ({}, *({key: x} for key, x in lists.items())):
            found = model(rows, position_ids=torch.stack(at), use_cache=False, **given)[0]
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_borders_without_positions_and_beside_padding() -> None:
    """A mask of tokens hides keys in their text; a text's neighbours stay unseen."""
    model = build("Llama")  # rotary: positions matter by their differences alone
    swap(model, "Local(window=30)")
    parts = texts()
    given = row(parts, "borders")
    del given["position_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(**given)[0], alone(model, parts), atol=2e-5, rtol=1e-4)
        mask = torch.ones(1, sum(LENGTHS), dtype=torch.long)
        mask[0, 3] = 0
        found = model(**given, attention_mask=mask, use_cache=False)[0]
        first = model(parts[0], attention_mask=mask[:, :7], position_ids=torch.arange(7)[None], use_cache=False)[0]
        shown = torch.arange(7) != 3
        torch.testing.assert_close(found[:, :7][:, shown], first[:, shown], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(found[:, 7:], alone(model, parts)[:, 7:], atol=2e-5, rtol=1e-4)


def test_a_mask_of_ones_says_that_a_row_is_one_text() -> None:
    """As in transformers' own masks: then positions may repeat for another reason."""
    model = build("Bert")
    exact = model(**row(texts(), "positions"))[0]  # transformers' sdpa, which knows nothing of packed encoders
    swap(model, "Softmax")
    given = row(texts(), "positions")
    torch.testing.assert_close(model(**given, attention_mask=torch.ones(1, sum(LENGTHS)))[0], exact)
    assert (model(**given)[0] - exact).abs().max() > 1e-3
    given["position_ids"] = torch.arange(sum(LENGTHS))[None] // 2  # which never fall: one text
    packed = model(**given)[0]
    torch.testing.assert_close(packed, model(**given, attention_mask=torch.ones(1, sum(LENGTHS)))[0])


def test_attention_matrices_of_a_packed_row() -> None:
    model = build("Bert")
    swap(model, "LinearAttention")
    parts = texts()
    whole = model(**row(parts), output_attentions=True).attentions[0]
    numbers = torch.repeat_interleave(torch.tensor(LENGTHS))
    assert not whole[..., numbers[:, None] != numbers].any()
    torch.testing.assert_close(whole[..., 7:17, 7:17], model(parts[1], output_attentions=True).attentions[0])


@pytest.mark.parametrize("mechanism", ["LinearAttention", "Softmax", "Local(window=3)"])
def test_packed_texts_cannot_be_decoded(mechanism: str) -> None:
    model = build("Llama")
    swap(model, mechanism)
    given, name = row(texts(), "borders"), cache_argument.name_of(model.forward)
    with torch.no_grad():
        cache = model(**given, use_cache=True)[name]
        step = torch.tensor([[7]])
        with pytest.raises(Unsupported, match=r"cannot be decoded.*padded batch, one text in a row"):
            model(step, **{name: cache}, cu_seq_lens_q=given["cu_seq_lens_q"] + 1)
        if mechanism == "LinearAttention":
            with pytest.raises(Unsupported, match=r"LinearAttention.*no state of the packed texts"):
                model(step, **{name: cache})
            cache = model(texts()[0], use_cache=True)[name]
            with pytest.raises(Unsupported, match=r"25 new tokens behind 7 in a cache.*cannot be decoded"):
                model(**row(texts()), **{name: cache})
            with pytest.raises(Unsupported, match="packed texts behind 7 tokens in a cache"):
                model(**row(texts(), "positions"), **{name: cache})


def test_bad_borders_are_named() -> None:
    model = build("Bert")
    swap(model, "LinearAttention")
    given = row(texts(), "borders")
    for borders, said in [
        ([0, 7, 5, 18, 25], r"cu_seq_lens_q\[2\] is 5 and cu_seq_lens_q\[1\] is 7"),
        ([0, 7, 17, 18, 24], r"cu_seq_lens_q\[4\] is 24 and there are 25 tokens"),
        ([1, 7, 17, 18, 25], r"cu_seq_lens_q\[0\] is 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            model(**{**given, "cu_seq_lens_q": torch.tensor(borders, dtype=torch.int32)})
    with pytest.raises(ValueError, match=r"seq_idx has shape \(1, 24\); it must be \(1, 25\)"):
        model(given["input_ids"], seq_idx=torch.zeros(1, 24, dtype=torch.int32))


def test_compiled_models_refuse_by_name() -> None:
    for name, given in (("Llama", row(texts())), ("Bert", row(texts()))):
        torch.compiler.reset()
        model = build(name, num_hidden_layers=1)
        swap(model, "LinearAttention")
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad(), pytest.raises(Exception, match=r"cu_seq_lens_q.*the model uncompiled"):
            compiled(**given)
        with torch.no_grad(), pytest.raises(RuntimeError, match="sequences packed in one row"):
            compiled(**row(texts(), "positions"), **({"use_cache": False} if name == "Llama" else {}))
        if name == "Bert":  # positions of one text
            ids = torch.cat(texts(), 1)
            at = torch.arange(ids.shape[1])[None]
            torch.testing.assert_close(compiled(ids, position_ids=at)[0], model(ids)[0])


def test_a_model_that_keeps_borders_to_itself() -> None:
    """They are taken from the call of the model, where its layers do not hand them on."""
    model = build("Bert")
    swap(model, "LinearAttention")
    parts = texts()
    given = {**row(parts, "borders"), "attention_mask": torch.ones(1, sum(LENGTHS))}
    encoder, forward = model.encoder, model.encoder.forward
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids")
    encoder.forward = lambda *args, **kwargs: forward(*args, **{k: x for k, x in kwargs.items() if k not in names})
    with torch.no_grad():
        torch.testing.assert_close(model(**given)[0], alone(model, parts), atol=2e-5, rtol=1e-4)
