"""Tools that take a model of transformers take a swapped one: Trainer, pipelines, accelerate, PEFT and others."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from fast_attention import from_pretrained, swap, swap_back
from fast_attention.engine import trace
from fast_attention.integrations.attention import layers_of
from fast_attention.lab.loading import default_model

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages among themselves

MECHANISM = "FavorPlus(num_features=16)"
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 128, "vocab_size": 384,
}  # fmt: skip
TEXTS = ["a cat sat on the mat", "proteins fold into shapes, most of them within seconds", "rain"]


def classifier(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.BertConfig(**SIZES, num_labels=3)
    model = transformers.BertForSequenceClassification(config).eval()
    swap(model, MECHANISM)
    return model


def rows(number: int = 12) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(5, 99, (9,), generator=draw), "labels": torch.tensor(i % 3)} for i in range(number)
    ]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    model.eval()
    found = model(input_ids=torch.stack([row["input_ids"] for row in rows()]))
    return found.logits if "logits" in found else found.last_hidden_state


def is_swapped(model: Any) -> bool:
    return {repr(part.bound.mechanism) for part in layers_of(model).values()} == {MECHANISM}


def trainer(model: Any, out: Path, steps: int, **settings: Any) -> Any:
    given = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "logging_steps": 2, **settings}
    arguments = transformers.TrainingArguments(
        str(out), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], disable_tqdm=True,
        use_cpu=True, seed=3, dataloader_pin_memory=False, **given,
    )  # fmt: skip
    scores = iter([0.1, 0.9, 0.2, 0.3])  # the second is the best
    return transformers.Trainer(
        model, arguments, train_dataset=rows(), eval_dataset=rows(4), compute_metrics=lambda given: {"s": next(scores)}
    )


@pytest.mark.parametrize("loaded", [False, True])
def test_trainer_goes_back_to_the_best_model(loaded: bool, tmp_path: Path) -> None:
    model = classifier()
    if loaded:
        model.save_pretrained(tmp_path / "first")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "first")
    first = logits(model)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "s", "greater_is_better": True}
    trained = trainer(model, tmp_path / "runs", 8, **best)
    trained.train()
    assert Path(trained.state.best_model_checkpoint).name == "checkpoint-4"
    places = {n: transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "runs" / f"checkpoint-{n}")
              for n in (4, 8)}  # fmt: skip
    assert torch.equal(logits(model), logits(places[4]))
    assert not torch.allclose(logits(model), logits(places[8]), atol=1e-4)
    assert not torch.allclose(logits(model), first, atol=1e-4)
    trained.save_model(str(tmp_path / "kept"))
    assert torch.equal(logits(from_pretrained(tmp_path / "kept")), logits(model))


def test_trainer_resumes(tmp_path: Path) -> None:
    whole = classifier()
    trainer(whole, tmp_path / "whole", 6).train()
    trainer(classifier(), tmp_path / "halves", 6, eval_strategy="no").train()
    for late in (tmp_path / "halves").glob("checkpoint-6"):
        late.rename(tmp_path / "late")
    again = classifier(seed=5)
    done = trainer(again, tmp_path / "halves", 6).train(resume_from_checkpoint=True)
    assert done.global_step == 6
    assert is_swapped(again)
    late = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "late")
    assert torch.equal(logits(again), logits(late)), "random features and all"


def test_pipelines(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=384, n_positions=64, eos_token_id=1)
    model = transformers.GPT2LMHeadModel(config).eval()
    swap(model, "LinearAttention")
    tokenizer = transformers.ByT5Tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    pipe = transformers.pipeline("text-generation", model=str(tmp_path), device="cpu")
    asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    ids = tokenizer("a cat", return_tensors="pt")["input_ids"]
    wanted = tokenizer.decode(model.generate(ids, **asked)[0], skip_special_tokens=True)
    assert pipe("a cat", **asked)[0]["generated_text"] == wanted


def test_accelerate(tmp_path: Path) -> None:
    model = classifier()
    accelerator = accelerate.Accelerator(cpu=True)
    ready, optimiser = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    batch = {name: torch.stack([row[name] for row in rows()]) for name in ("input_ids", "labels")}
    accelerator.backward(ready(**batch).loss)
    optimiser.step()
    bare = accelerator.unwrap_model(ready)
    bare.save_pretrained(
        tmp_path / "model", is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(ready), safe_serialization=True,
    )  # fmt: skip
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    assert torch.equal(logits(load(tmp_path / "model")), logits(bare))
    assert torch.equal(logits(load(tmp_path / "model", device_map="auto")), logits(bare))
    places = {"bert.embeddings": "cpu", "bert.encoder": "disk", "bert.pooler": "cpu", "classifier": "cpu"}
    offloaded = load(tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded", offload_buffers=True)
    assert any(x.is_meta for x in offloaded.parameters())
    assert torch.equal(logits(offloaded), logits(bare))
    accelerator.save_state(tmp_path / "state")
    bare.classifier.weight.data += 1
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(logits(load(tmp_path / "model")), logits(bare))


def test_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    classifier().save_pretrained(tmp_path / "base")
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], init_lora_weights=False)
    model = peft.get_peft_model(load(tmp_path / "base"), settings)
    before = {name: x.clone() for name, x in model.named_parameters()}
    trained = trainer(model, tmp_path / "runs", 4, eval_strategy="no")
    trained.train()
    moved = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert moved
    assert all("lora" in name or "classifier" in name for name in moved)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    by_name = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=3)
    assert torch.equal(logits(by_name), logits(model))
    assert is_swapped(by_name.base_model.model)
    exact = load(tmp_path / "base")
    assert swap_back(exact)
    exact.save_pretrained(tmp_path / "exact")
    in_place = load(tmp_path / "exact")
    swap(in_place, MECHANISM)
    for other in (exact, in_place):  # whose folder is not what the adapter would be trained on
        assert peft.get_peft_model(other, settings).peft_config["default"].base_model_name_or_path is None
    plain = load(tmp_path / "exact")
    swap(plain, MECHANISM)
    assert swap_back(plain)
    assert plain.name_or_path == str(tmp_path / "exact")
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(load(tmp_path / "merged")), logits(merged))


def test_adapters_through_transformers_itself(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    least = getattr(pytest.importorskip("transformers.integrations.peft"), "MIN_PEFT_VERSION", "0")
    if Version(peft.__version__) < Version(least):
        pytest.skip(f"transformers {transformers.__version__} asks for peft {least}, and {peft.__version__} is here")
    classifier().save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], init_lora_weights=False)
    inside = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    inside.add_adapter(settings)
    inside.save_pretrained(tmp_path / "inside")
    assert {path.name for path in (tmp_path / "inside").iterdir()} >= {"adapter_model.safetensors"}
    assert not (tmp_path / "inside" / "config.json").exists()


def test_sentence_transformers(tmp_path: Path) -> None:
    """MiniLM, swapped inside a SentenceTransformer; saved by it, loaded by it, encoding in processes of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(default_model(), device="cpu")
    exact = torch.as_tensor(model.encode(TEXTS))
    assert "6 of 6 attention layers replaced" in str(swap(model, {"*": MECHANISM}))
    wanted = torch.as_tensor(model.encode(TEXTS))
    assert not torch.allclose(wanted, exact, atol=1e-3)
    model.save_pretrained(str(tmp_path / "model"))
    again = library.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    with trace.recorded() as steps:
        found = torch.as_tensor(again.encode(TEXTS))
    assert steps
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    pool = again.start_multi_process_pool(["cpu"])
    try:
        apart = torch.as_tensor(again.encode(TEXTS, pool=pool))
    finally:
        again.stop_multi_process_pool(pool)
    torch.testing.assert_close(apart, wanted, atol=1e-6, rtol=1e-5)
    half = library.SentenceTransformer(str(tmp_path / "model"), device="cpu", model_kwargs={"dtype": "bfloat16"})
    assert next(half.parameters()).dtype == torch.bfloat16
    del model, again, half
    gc.collect()
