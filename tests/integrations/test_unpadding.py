"""Swapped encoders that skip padding: every text gets what it gets alone, in sentence-transformers too."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention import swap, swap_back
from fast_attention.conformance.robustness import difference_in_step
from fast_attention.integrations.fresh import SKIPS
from fast_attention.lab.loading import default_model
from fast_attention.mechanism import Unsupported

transformers = pytest.importorskip("transformers")
from tests.integrations.test_swap import build  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages among themselves
LENGTHS = (7, 12, 1, 4)
WORDS = ["a", "cat", "sat", "on", "the", "mat", "while", "proteins", "fold", "into", "shapes", "within", "seconds"]
ENCODERS = ["Bert", "Roberta", "DistilBert", "Electra", "Albert", "ModernBert"]


def batch(side: str = "right") -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.ones(len(LENGTHS), max(LENGTHS), dtype=torch.long)  # 1: RoBERTa's padding
    mask = torch.zeros_like(ids)
    for i, n in enumerate(LENGTHS):
        at = slice(0, n) if side == "right" else slice(max(LENGTHS) - n, None)
        ids[i, at], mask[i, at] = torch.randint(5, 99, (n,), generator=draw), 1
    return {"input_ids": ids, "attention_mask": mask}


def both(model: Any, mechanism: Any, call: Any) -> tuple[Any, Any]:
    """What a call gives with padding, and without, with the same random features."""
    results = []
    for skip_padding in (False, True):
        torch.manual_seed(1)
        swap(model, mechanism, skip_padding=skip_padding)
        results.append(call(model))
    return results[0], results[1]


def rows_computed(model: Any) -> list[int]:
    """The tokens that each call of the first linear layer computes from now on."""
    counts: list[int] = []
    linear = next(part for name, part in model.named_modules() if isinstance(part, nn.Linear) and "pool" not in name)
    linear.register_forward_hook(lambda module, args, out: counts.append(out[..., 0].numel()))
    return counts


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ENCODERS)
def test_outputs_are_those_of_the_padded_batch(name: str, side: str) -> None:
    """Of mechanisms to which padding is inert. Hidden states and pooled output too; linear layers see tokens only."""
    given = batch(side)
    is_token = given["attention_mask"].bool()

    def call(model: Any) -> Any:
        with torch.no_grad():
            return model(**given, output_hidden_states=True)

    model = build(name)
    counts = rows_computed(model)
    plain, skipped = both(model, "Softmax" if name == "ModernBert" else "LinearAttention", call)
    assert counts[-1] == sum(LENGTHS)
    assert is_token.numel() in counts
    assert plain.keys() == skipped.keys()
    for a, b in zip(plain.hidden_states, skipped.hidden_states, strict=True):
        torch.testing.assert_close(b[is_token], a[is_token], atol=2e-5, rtol=1e-4)
        assert not b[~is_token].any()
    if side == "right" and "pooler_output" in plain:
        torch.testing.assert_close(skipped.pooler_output, plain.pooler_output, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mechanism", ["FavorPlus(num_features=8)", "Sinkhorn(block_size=4)", "Linformer(rank=4)"])
def test_every_text_gets_what_it_gets_alone(mechanism: str) -> None:
    """Also of mechanisms that are laid out over the padded length, and in training: gradients."""
    model, given = build("Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), batch()
    swap(model, mechanism, skip_padding=True)
    is_token = given["attention_mask"].bool()
    texts = [ids[mask][None] for ids, mask in zip(given["input_ids"], is_token, strict=True)]
    model.train()
    gradients = []
    for call in (
        lambda: model(**given).last_hidden_state[is_token],
        lambda: torch.cat([model(x).last_hidden_state[0] for x in texts]),
    ):
        out = call()
        gradients.append((out, *torch.autograd.grad(out.square().sum(), [*model.encoder.parameters()])))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


def test_what_stays_padded() -> None:
    """No padding, attention matrices, tuples, compiled code: the same outputs, computed as before."""
    model, given = build("Bert", num_hidden_layers=1), batch()
    swap(model, "LinearAttention", skip_padding=True)
    counts = rows_computed(model)
    with torch.no_grad():
        wanted = model(**given)
        assert counts.pop() == sum(LENGTHS)
        mask = given["attention_mask"].bool()
        shown = model(**given, output_attentions=True)
        assert shown.attentions[0].shape[-1] == max(LENGTHS)
        as_tuple = model(**given, return_dict=False)
        compiled = torch.compile(model, fullgraph=True, backend="eager")(**given)
        positional = model(given["input_ids"], given["attention_mask"])
        for out in (shown.last_hidden_state, as_tuple[0], compiled.last_hidden_state, positional.last_hidden_state):
            torch.testing.assert_close(out[mask], wanted.last_hidden_state[mask], atol=2e-5, rtol=1e-4)
        model(given["input_ids"])
        assert counts[0] == counts[1] == counts[-1] == mask.numel()
        embedded = model(inputs_embeds=model.embeddings.word_embeddings(given["input_ids"]), attention_mask=mask)
        assert counts[-1] == sum(LENGTHS)
        torch.testing.assert_close(embedded.last_hidden_state, wanted.last_hidden_state, atol=2e-5, rtol=1e-4)
        assert inspect.signature(model.forward) == inspect.signature(transformers.BertModel.forward.__get__(model))
        broken = {**given, "input_ids": given["input_ids"] + 999}
        with pytest.raises(IndexError):
            model(**broken)
        torch.testing.assert_close(model(**given).last_hidden_state, wanted.last_hidden_state)


def test_heads_save_load_and_swap_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(**sizes, vocab_size=99, max_position_embeddings=128, num_labels=3)
    model, given = transformers.BertForSequenceClassification(config).eval(), batch()
    plain, skipped = both(model, "LinearAttention", lambda model: model(**given).logits)
    torch.testing.assert_close(skipped, plain, atol=2e-5, rtol=1e-4)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert SKIPS in vars(again.base_model)
    assert torch.equal(again(**given).logits, skipped)
    base = transformers.AutoModel.from_pretrained(tmp_path).eval()
    counts = rows_computed(base)
    base(**given)
    assert counts == [sum(LENGTHS)]
    assert swap_back(again)
    assert SKIPS not in vars(again.base_model)
    swap(model, "LinearAttention")
    assert SKIPS not in vars(model.base_model)
    model.save_pretrained(tmp_path / "padded")
    assert SKIPS not in vars(transformers.AutoModel.from_pretrained(tmp_path / "padded").base_model)


def test_copies_skip_padding_themselves() -> None:
    model, given = build("Bert"), batch()
    swap(model, "LinearAttention", skip_padding=True)
    wanted = model(**given).last_hidden_state
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert SKIPS in vars(copied.base_model)
        for parameter in model.parameters():
            parameter.data.mul_(1.01)
        counts, others = rows_computed(copied), rows_computed(model)
        assert torch.equal(copied(**given).last_hidden_state, wanted)
        assert counts == [sum(LENGTHS)]
        assert not others


def test_several_threads() -> None:
    model = build("Bert")
    swap(model, "LinearAttention", skip_padding=True)
    batches = [batch(), {name: x[:2] for name, x in batch().items()}]
    jobs = [lambda given=given: (model(**given).last_hidden_state,) for given in batches]
    assert difference_in_step(jobs, model) < 1e-5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Llama", "encoders and LlamaModel is causal"),
        ("T5", "encoders and T5ForConditionalGeneration is causal"),
        ("Vit", "input_ids"),
    ],
)
def test_what_cannot_skip_padding_is_refused(name: str, said: str) -> None:
    model = build(name)
    with pytest.raises(Unsupported, match=said):
        swap(model, "Softmax", skip_padding=True)
    assert not swap_back(model), "the model is as it was"
    with pytest.raises(Unsupported, match="Hugging Face's encoders, of which Transformer holds none"):
        swap(nn.Transformer(16, 2, 1, 1, 16), "Softmax", skip_padding=True)


def test_a_model_that_mixes_tokens_elsewhere_is_found_out() -> None:
    """Its row is packed texts, over which a layer of its own takes a mean."""
    model = build("Bert")
    dense = model.encoder.layer[0].output.dense
    dense.register_forward_hook(lambda module, args, out: out + out.mean(1, keepdim=True))
    with pytest.raises(Unsupported, match="BertModel gives other outputs for packed texts than for each alone"):
        swap(model, "LinearAttention", skip_padding=True)
    assert not swap_back(model)


def test_sentence_transformers(tmp_path: Path) -> None:
    """MiniLM encodes texts of mixed lengths without padding; saved and loaded by its own calls, to the bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(default_model(), device="cpu")
    texts = [" ".join(WORDS[: 1 + 5 * i % 17] * (1 + i % 3)) for i in range(9)]
    plain, skipped = both(model, "LinearAttention", lambda model: torch.as_tensor(model.encode(texts)))
    torch.testing.assert_close(skipped, plain, atol=1e-5, rtol=1e-4)
    counts = rows_computed(model)
    model.encode(texts)
    tokens = sum(map(len, model.tokenizer(texts)["input_ids"]))
    assert counts == [tokens]
    model.save_pretrained(str(tmp_path / "model"))
    again = library.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    counts = rows_computed(again)
    assert torch.equal(torch.as_tensor(again.encode(texts)), skipped)
    assert counts == [tokens]
    again = library.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    pool = again.start_multi_process_pool(["cpu"])
    try:
        apart = torch.as_tensor(again.encode(texts, pool=pool))
    finally:
        again.stop_multi_process_pool(pool)
    torch.testing.assert_close(apart, skipped, atol=1e-6, rtol=1e-5)


def test_whether_padding_is_skipped_is_yes_or_no() -> None:
    with pytest.raises(TypeError, match="skip_padding must be True or False; got 'no'"):
        swap(nn.Linear(2, 2), "Local", skip_padding="no")  # type: ignore[arg-type]
