"""What a converted model is for: a loss to train on and figures to report, of its text or of the original's outputs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.conversion.outcome import Figures

Batch = dict[str, Tensor]  # what a Hugging Face model's forward takes


class Held(NamedTuple):
    """A batch that is never trained on, and what the original makes of it."""

    batch: Any
    wanted: Tensor | None


class Goal(Protocol):
    """What a converted model is judged by."""

    name: str

    def hold(self, original: Any, batches: Sequence[Any]) -> list[Held]:
        """Batches to measure on."""
        ...

    def loss(self, model: Any, original: Any, batch: Any) -> Tensor:
        """What the fine-tune makes small."""
        ...

    def measure(self, model: Any, held: Sequence[Held]) -> Figures:
        """What a model is worth."""
        ...


class LanguageModel:
    """The next token: nats per token, and beside it, if wished, the original's distribution.

    Args:
        distil: Weight of the divergence of the model's distribution from the original's.
    """

    name = "language model"

    def __init__(self, distil: float = 0.0) -> None:
        self.distil = distil

    def hold(self, original: Any, batches: Sequence[Batch]) -> list[Held]:
        """The text itself is all there is to know."""
        return [Held(batch, None) for batch in batches]

    def loss(self, model: Any, original: Any, batch: Batch) -> Tensor:
        """Nats per token, and ``distil`` times the Kullback-Leibler divergence of the original's distribution."""
        logits, targets, told = _predictions(model, batch)
        loss = F.cross_entropy(logits[told], targets[told])
        if not self.distil:
            return loss
        with torch.no_grad():
            wanted = _predictions(original, batch)[0][told].log_softmax(-1)
        got = logits[told].log_softmax(-1)
        return loss + self.distil * F.kl_div(got, wanted, log_target=True, reduction="batchmean")

    @torch.no_grad()
    def measure(self, model: Any, held: Sequence[Held]) -> Figures:
        """``loss``: nats per token over all tokens of all batches."""
        total, count = 0.0, 0
        for each in held:
            logits, targets, told = _predictions(model, each.batch)
            total += float(F.cross_entropy(logits[told], targets[told], reduction="sum"))
            count += int(told.sum())
        return {"loss": total / max(count, 1)}


class Likeness:
    """The original's last hidden states, token by token, and their mean, which is what sentences are compared by.

    The loss that a budget is about is 2 - the mean cosine of the sentence embeddings: the original's is 1, and a budget
    of 1.02 asks for a cosine of 0.98.
    """

    name = "likeness to the original"

    def hold(self, original: Any, batches: Sequence[Batch]) -> list[Held]:
        """With the original's hidden states."""
        with torch.no_grad():
            return [Held(batch, hidden(original, batch)[-1]) for batch in batches]

    def loss(self, model: Any, original: Any, batch: Batch) -> Tensor:
        """Squared errors of the hidden states behind every block over their variance, and 1 - cosine of the mean."""
        with torch.no_grad():
            wanted = [x.float() for x in hidden(original, batch)]
        got, seen = [x.float() for x in hidden(model, batch)], tokens(batch)
        layers = [error(a, b, seen) for a, b in zip(got[1:], wanted[1:], strict=True)]
        likeness = F.cosine_similarity(pooled(got[-1], seen), pooled(wanted[-1], seen), dim=-1)
        return torch.stack(layers).mean() + 1 - likeness.mean()

    @torch.no_grad()
    def measure(self, model: Any, held: Sequence[Held]) -> Figures:
        """Cosines to the original: of the sentence embeddings, mean and least, and of single tokens."""
        sentences, single = [], []
        for batch, wanted in held:
            assert wanted is not None
            got, seen = hidden(model, batch)[-1], tokens(batch)
            sentences.append(F.cosine_similarity(pooled(got, seen), pooled(wanted, seen), dim=-1))
            each = F.cosine_similarity(got, wanted, dim=-1)
            single.append(each.flatten() if seen is None else each[seen])
        sentence = torch.cat(sentences)
        figures = {"sentence_cosine": float(sentence.mean()), "worst_sentence_cosine": float(sentence.min())}
        return {"loss": 2 - figures["sentence_cosine"], **figures, "token_cosine": float(torch.cat(single).mean())}


def is_language_model(model: Any) -> bool:
    """Whether a model is a decoder with a head of tokens, by its class."""
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def run(model: Any, batch: Batch, *, hidden_states: bool = False) -> Any:
    """A forward pass without a cache."""
    known = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in known else {}
    return model(**batch, **options, **({"output_hidden_states": True} if hidden_states else {}))


def hidden(model: Any, batch: Batch) -> tuple[Tensor, ...]:
    """The hidden states before the first block and behind every block, (B, L, D) each."""
    return run(model, batch, hidden_states=True).hidden_states


def tokens(batch: Batch) -> Tensor | None:
    """Which places are tokens, (B, L); None: all."""
    mask = batch.get("attention_mask")
    return None if mask is None or bool(mask.all()) else mask.bool()


def pooled(x: Tensor, seen: Tensor | None) -> Tensor:
    """The mean over the tokens of each sequence, (B, L, D) to (B, D)."""
    if seen is None:
        return x.mean(1)
    return (x * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)


def error(got: Tensor, wanted: Tensor, seen: Tensor | None) -> Tensor:
    """Mean squared error over the variance of what is wanted, on tokens only: 0 is equal, 1 no better than a constant.

    Args:
        got: (B, L, D).
        wanted: The same shape.
        seen: Which places are tokens, (B, L); None: all.
    """
    if seen is not None and seen.shape == wanted.shape[:2]:
        got, wanted = got[seen], wanted[seen]
    got, wanted = got.float(), wanted.float()
    return (got - wanted).pow(2).mean() / wanted.var().clamp_min(1e-12)


def _predictions(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, L - 1, V) in float32, the tokens they are about, and which of those are told (no padding)."""
    logits = run(model, batch).logits[:, :-1].float()
    targets, seen = batch["input_ids"][:, 1:], tokens(batch)
    told = torch.ones_like(targets, dtype=torch.bool) if seen is None else seen[:, 1:] & seen[:, :-1]
    return logits, targets, told
