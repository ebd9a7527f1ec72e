"""What a swapped model does when it is called, it does by ``model.forward(...)``, as sentence-transformers calls it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from fast_attention import cache_argument, swap, swap_back
from fast_attention.integrations import forward_pass
from fast_attention.lab.loading import default_model
from tests.integrations.test_swap import ALL, build, inputs, kinds

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
SKIPPED = "LinearAttention"  # a mechanism for skip_padding, which serves a packed row as one of texts


def tensors(found: Any) -> list[Tensor]:
    """All tensors of a model's output but those of caches, in order."""
    if isinstance(found, Tensor):
        return [found]
    parts = [x for name, x in found.items() if "past" not in name] if isinstance(found, dict) else found
    return [x for part in parts if isinstance(part, dict | tuple | list | Tensor) for x in tensors(part)]


def answer(call: Callable[..., Any], given: dict[str, Any]) -> list[Tensor] | str:
    """What a call gives, or the kind of its error."""
    try:
        return tensors(call(**given))
    except (TypeError, RuntimeError, NotImplementedError) as error:
        return type(error).__name__


@torch.no_grad()
@kinds(*ALL)
def test_forward_does_what_a_call_does(name: str) -> None:
    """Padding, tensors that merely pass through: nothing depends on how the model was called."""
    model = build(name)
    given = {"padded": inputs(model, padded="right"), "whole": inputs(model)}
    given["more"] = {**given["whole"], "token_embeddings": torch.randn(2, 21, 32)}
    original = {case: answer(model.forward, each) for case, each in given.items()}
    swap(model, "Softmax")
    for case, each in given.items():
        called, forwarded = answer(model, each), answer(model.forward, each)
        assert isinstance(called, str) == isinstance(original[case], str), f"{case}: {called}"
        assert isinstance(forwarded, str) == isinstance(called, str), f"{case}: {forwarded}"
        assert len(forwarded) == len(called), case
        if not isinstance(called, str) and not isinstance(forwarded, str):
            assert all(torch.equal(a, b) for a, b in zip(forwarded, called, strict=True)), case
            if case != "padded":
                torch.testing.assert_close(forwarded, original[case], atol=2e-5, rtol=1e-3)
    assert swap_back(model)
    assert "forward" not in vars(model)


@torch.no_grad()
@kinds(*ALL)
def test_forward_gives_the_attention_matrices(name: str) -> None:
    """Those that the model's own eager attention gives, as many and in the same places."""
    model = build(name)
    given = {**inputs(model), "output_attentions": True}
    model.set_attn_implementation("eager")
    eager = model.forward(**given)
    swap(model, "Softmax")
    for found in (model(**given), model.forward(**given)):
        for key in (key for key in eager if key.endswith("attentions")):
            assert len(found[key]) == len(eager[key]), key
            torch.testing.assert_close(found[key], eager[key], atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_forward_skips_padding_and_reads_packed_rows() -> None:
    model = build("Bert")
    given = inputs(model, padded="right")
    ids = torch.arange(5, 20)[None]
    packed = {"input_ids": ids, "position_ids": torch.cat([torch.arange(9), torch.arange(6)])[None]}
    for skip_padding in (False, True):
        swap(model, SKIPPED, skip_padding=skip_padding)
        for each in (given, packed):
            assert torch.equal(model.forward(**each)[0], model(**each)[0])
        alone = model.forward(ids[:, 9:], position_ids=torch.arange(6)[None])[0]
        torch.testing.assert_close(model.forward(**packed)[0][:, 9:], alone, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_generate_and_tools_find_the_signature_of_the_model() -> None:
    model = build("Llama")
    own = inspect.signature(model.forward)
    swap(model, "LinearAttention")
    assert inspect.signature(model.forward) == own
    ids = torch.arange(5, 15)[None]
    name: Any = cache_argument.name_of(model.forward)
    behind: dict[str, Any] = {name: model.forward(ids[:, :6], use_cache=True)[name]}
    rest = model.forward(ids[:, 6:], **behind).logits
    torch.testing.assert_close(rest, model.forward(ids).logits[:, 6:], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_replica_calls_itself() -> None:
    """``nn.DataParallel`` copies a module's attributes, of which the forward pass is one."""
    swap(model := build("Bert"), "LinearAttention")
    replica = model._replicate_for_data_parallel()
    assert replica.forward.args[0] is replica
    for name, part in model.named_children():
        setattr(replica, name, part)
    given = inputs(model)
    assert torch.equal(replica(**given)[0], model(**given)[0])


@torch.no_grad()
def test_many_models_are_compiled_in_one_process() -> None:
    """Each has code of its own: torch keeps two compiled forms of one code here, and refuses the third."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            swap(model := build("Bert", num_hidden_layers=1), "LinearAttention")
            given = inputs(model)
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(**given)[0], model(**given)[0], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_another_librarys_forward_around_ours_outlives_the_swap() -> None:
    """accelerate's mixed precision, put in before the swap or after it, taken away before or after swapping back."""
    given = inputs(build("Bert"))
    exact = build("Bert")(**given)[0]
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of tests before this one
    for swapped_first in (True, False):
        model, accelerator = build("Bert"), accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        if swapped_first:
            swap(model, "LinearAttention")
            model = accelerator.prepare_model(model)
        else:
            model = accelerator.prepare_model(model)
            swap(model, "LinearAttention")
        assert len(model.forward(**given, output_attentions=True).attentions) == 2
        assert swap_back(model)
        torch.testing.assert_close(model(**given)[0], exact, atol=0.1, rtol=0)
        assert not torch.equal(model(**given)[0], exact), "in half precision"
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        torch.testing.assert_close(model(**given)[0], exact)
        assert not isinstance(model.forward, forward_pass.Forward) or swapped_first


@torch.no_grad()
def test_sentence_transformers_features_are_used_twice() -> None:
    """Its modules write their outputs into the dictionary that they were given, and hand all of it to the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(default_model(), device="cpu")
    prepare = getattr(model, "preprocess", None) or model.tokenize
    features = prepare(["A text of some words.", "Rain"])
    exact = model(dict(features))["sentence_embedding"]
    swap(model, "Softmax")
    for _ in range(3):
        found = model(features)
        torch.testing.assert_close(found["sentence_embedding"], exact, atol=1e-5, rtol=1e-4)
    given = {**features, "prompt_length": torch.tensor(2), "mine": torch.ones(2, 3)}
    torch.testing.assert_close(model(given)["sentence_embedding"], exact, atol=1e-5, rtol=1e-4)
    inner = next(part for part in model.modules() if isinstance(part, transformers.PreTrainedModel))
    shown = inner.forward(features["input_ids"], output_attentions=True).attentions
    assert len(shown) == inner.config.num_hidden_layers
