"""The laws of whole models: sound ones keep them, and of a broken one the layer is named."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fast_attention import TokenMixer, conformance, swap
from fast_attention.conformance.robustness import run_in_step
from fast_attention.lab import command_line

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}


def llama() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=64, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    torch.manual_seed(1)
    return transformers.BertModel(transformers.BertConfig(**SIZES, max_position_embeddings=64))


def gpt2() -> Any:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def broken(report: conformance.LawReport) -> dict[str, str]:
    return {finding.law: finding.detail for finding in report.broken}


@pytest.mark.parametrize(
    "mechanism",
    [
        None, "Softmax", "LinearAttention", "FavorPlus(num_features=16)", "Local(window=(4, 0))",
        "BlockLocal(block_size=4)", "Hybrid(near=BlockLocal(block_size=4))", "RandomSynthesizer",
        "ByLength(long=BlockLocal(block_size=4), above=8)",
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [llama, bert])
def test_sound_models_keep_all_laws(make: Any, mechanism: str | None) -> None:
    model = make()
    if mechanism is not None:
        swap(model, mechanism)
    report = conformance.check_model(model)
    assert not report.broken, report
    unclaimed = {finding.law for finding in report.findings if finding.status == "not claimed"}
    assert len(unclaimed) == (0 if make is llama else 3), report
    assert model.training  # as it was


class Plain(nn.Module):
    """A module of one's own: an embedding, a layer of attention and a head."""

    def __init__(self, mechanism: str, causal: bool, vocab_size: int = 40) -> None:
        super().__init__()
        self.embedding, self.causal = nn.Embedding(vocab_size, 16), causal
        self.mixer, self.out = TokenMixer(16, 2, mechanism), nn.Linear(16, vocab_size)

    def forward(self, tokens: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.out(self.mixer(self.embedding(tokens), is_causal=self.causal, key_mask=key_mask))

    def decode(self, tokens: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        out, state = self.mixer.decode(self.embedding(tokens), state)
        return self.out(out), state


class Unmasked(Plain):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(tokens)


def statuses(model: nn.Module, **settings: Any) -> dict[str, str]:
    return {finding.law: finding.status for finding in conformance.check_model(model, **settings).findings}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mechanism", ["Softmax", "LinearAttention"])
def test_any_module_of_tokens_is_judged(mechanism: str, causal: bool) -> None:
    torch.manual_seed(0)
    found = statuses(Plain(mechanism, causal), causal=causal)
    assert {law for law, status in found.items() if status != "kept"} == {"packed sequences do not meet"} | (
        set() if causal else {"the future never moves the past", "step by step is all at once"}
    )
    found = statuses(Plain(mechanism, False), causal=True)
    assert found["the future never moves the past"] == found["step by step is all at once"] == "broken"


def test_a_module_without_masks_or_of_few_tokens_is_judged_by_what_it_reads() -> None:
    torch.manual_seed(0)
    found = statuses(Unmasked("Local(window=(3, 0))", True, vocab_size=7), causal=True, length=4)
    assert {law for law, status in found.items() if status == "not claimed"} == {
        "padding behind is inert", "padding before is inert", "padded is like shorter", "packed sequences do not meet",
        "padded in front is like shorter",
    }  # fmt: skip
    assert "broken" not in found.values()


def test_the_layer_that_sees_the_future_is_named() -> None:
    model = llama()

    class Leak(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            out, *rest = self.inner(hidden_states, *args, **kwargs)
            return out + 0.1 * hidden_states.mean(1, keepdim=True), *rest

    model.model.layers[1].self_attn = Leak(model.model.layers[1].self_attn)
    found = broken(conformance.check_model(model))
    assert "model.layers.1.self_attn" in found["the future never moves the past"]
    assert "layers.1.self_attn.inner" not in found["the future never moves the past"]
    assert "step by step is all at once" in found


def test_the_layer_that_ignores_padding_is_named() -> None:
    model = bert()
    layer = model.encoder.layer[2].attention.self
    plain = layer.forward
    layer.forward = lambda hidden_states, attention_mask=None, **rest: plain(hidden_states, None, **rest)
    found = broken(conformance.check_model(model))
    assert {*found} == {
        "padding behind is inert", "padding before is inert", "padded is like shorter",
        "padded in front is like shorter",
    }  # fmt: skip
    assert "encoder.layer.2.attention.self" in found["padding behind is inert"]


def test_what_it_cannot_judge_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear: give a model of transformers that reads tokens"):
        conformance.check_model(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Linear has no torch"):
        conformance.check_model(nn.Linear(2, 2), causal=True)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path / "llama")
    assert command_line.run(["check", str(tmp_path / "llama"), "--mechanism", "LinearAttention"]) == 0
    said = capsys.readouterr()
    assert "3 of 3 attention layers replaced" in said.err
    assert "the future never moves the past" in said.out
    bert().save_pretrained(tmp_path / "bert")
    assert command_line.run(["check", str(tmp_path / "bert"), "--json"]) == 0
    assert {finding["status"] for finding in json.loads(capsys.readouterr().out)} == {"kept", "not claimed"}
    assert command_line.run(["check", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    assert command_line.run(["check", str(tmp_path / "llama"), "--mechanism", "Linformer"]) == 2
    assert "the layer is causal" in capsys.readouterr().err
    assert command_line.run(["check", "Softmax", "--mechanism", "Linformer"]) == 2
    assert "--mechanism is swapped into a model, and Softmax is none" in capsys.readouterr().err


def test_what_lies_here_is_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may be called as a mechanism is; what is neither is told as what it looks like."""
    monkeypatch.chdir(tmp_path)
    bert().save_pretrained(tmp_path / "Softmax")
    assert command_line.run(["check", "Softmax", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) < 15
    for asked, said in {"FavorPlos": "Did you mean", "performer": "FavorPlus", "a-b": "no such folder"}.items():
        assert command_line.run(["check", asked]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("mechanism", ["LinearAttention", "FavorPlus(num_features=16)", "Local(window=(4, 0))"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_threads_generate_what_they_do_one_after_another(kind: str, mechanism: str) -> None:
    """Each its own text, with left padding, beams and samples of their own; beside them one that asks for matrices."""
    model = llama() if kind == "llama" else gpt2()
    swap(model.eval(), mechanism)
    given = [torch.randint(5, 99, (1, 9), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    seen = torch.ones(1, 9, dtype=torch.long)

    def generate(i: int) -> torch.Tensor:
        mask = seen.index_fill(1, torch.arange(2 * i), 0)
        return model.generate(
            given[i], attention_mask=mask, max_new_tokens=6, min_new_tokens=6, num_beams=1 + i % 2, pad_token_id=0
        )

    def shown(i: int) -> torch.Tensor:
        return model(given[i], use_cache=False, output_attentions=True).attentions[0]

    jobs = [*(partial(generate, i) for i in range(4)), *(partial(shown, i) for i in range(2))]
    with torch.no_grad():
        alone = [job() for job in jobs]
        beside = run_in_step(jobs, model)
    for a, b in zip(beside, alone, strict=True):
        torch.testing.assert_close(a, b)
        assert a.shape == b.shape


def test_an_interrupt_leaves_nothing_behind() -> None:
    """A call that a KeyboardInterrupt ended does not reach into the next, which asks for no matrices."""
    model = llama()
    swap(model.eval(), "LinearAttention")
    tokens = torch.randint(5, 99, (1, 9), generator=torch.Generator().manual_seed(1))
    before = model(tokens).logits

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(tokens, output_attentions=True)
    handle.remove()
    assert model(tokens).get("attentions") is None
    assert torch.equal(model(tokens).logits, before)
