"""Goals of a conversion: the loss that the fine-tune trains on, and the figures that are reported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.conversion import teachers
from fast_attention.conversion.outcome import Figures
from fast_attention.conversion.reads import Batch, hidden, pooled, run, tokens
from fast_attention.tasks.task import IGNORED

Scores = dict[str, Tensor]  # by their names, (N,) each: one for every sentence, token or target of a batch


class HeldOutBatch(NamedTuple):
    """A batch that is never trained on, and the original's output for it."""

    batch: Any
    reference: Tensor | None
    sentences: Tensor | None = None  # the embeddings that are asked for, (B, D)


class Goal(ABC):
    """The loss and the figures of a converted model."""

    name: str

    @abstractmethod
    def prepare(self, original: Any, batches: Sequence[Any]) -> list[HeldOutBatch]:
        """Held-out batches with the original's outputs, to measure on."""

    @abstractmethod
    def loss(self, model: Any, original: Any, batch: Any) -> Tensor:
        """The loss of the fine-tune."""

    @abstractmethod
    def scores(self, model: Any, held: HeldOutBatch) -> Scores:
        """What is measured of a batch."""

    @abstractmethod
    def figures(self, scores: Scores) -> Figures:
        """The figures of the scores of all batches; ``loss`` is the one that a budget limits."""

    def measure(self, model: Any, held: Sequence[HeldOutBatch]) -> Figures:
        """The figures of a model."""
        return self.measure_groups(model, {"": held})[0]

    @torch.no_grad()
    def measure_groups(
        self, model: Any, groups: Mapping[str, Sequence[HeldOutBatch]]
    ) -> tuple[Figures, dict[str, Figures]]:
        """The figures of a model on all batches, and on those of each group."""
        scores = {name: _joined(self.scores(model, each) for each in held) for name, held in groups.items()}
        return self.figures(_joined(scores.values())), {name: self.figures(each) for name, each in scores.items()}


def _joined(scores: Iterable[Scores]) -> Scores:
    rows = [*scores]
    return {name: torch.cat([each[name] for each in rows]) for name in rows[0]}


class LanguageModel(Goal):
    """Next-token prediction: nats per token and, with ``distil``, distillation from the original.

    Args:
        distil: Weight of the divergence of the model's distribution from the original's.
    """

    name = "language model"

    def __init__(self, distil: float = 0.0) -> None:
        self.distil = distil

    def prepare(self, original: Any, batches: Sequence[Batch]) -> list[HeldOutBatch]:
        """Batches as they are: the text is its own reference."""
        return [HeldOutBatch(batch, None) for batch in batches]

    def loss(self, model: Any, original: Any, batch: Batch) -> Tensor:
        """Nats per token, and ``distil`` times the Kullback-Leibler divergence of the original's distribution."""
        logits, targets, valid = _predictions(model, batch)
        if not valid.any():
            raise ValueError("a batch to train on has no token to predict: give texts of two tokens or more")
        loss = F.cross_entropy(logits[valid], targets[valid])
        if not self.distil:
            return loss
        with torch.no_grad():
            reference = _predictions(original, batch)[0][valid].log_softmax(-1)
        output = logits[valid].log_softmax(-1)
        return loss + self.distil * F.kl_div(output, reference, log_target=True, reduction="batchmean")

    def scores(self, model: Any, held: HeldOutBatch) -> Scores:
        """Nats of every token."""
        logits, targets, valid = _predictions(model, held.batch)
        return {"nats": F.cross_entropy(logits[valid], targets[valid], reduction="none")}

    def figures(self, scores: Scores) -> Figures:
        """``loss``: nats per token."""
        return {"loss": mean(scores["nats"])}


class HiddenStates(Goal):
    """Similarity to the teacher's hidden states, token by token, and to its sentence embeddings.

    The loss that a budget limits is 2 - the mean cosine of the sentence embeddings: the original's is 1, and a budget
    of 1.02 asks for a cosine of 0.98.
    """

    name = "likeness to the original"

    def __init__(self, teacher: teachers.Teacher = "original") -> None:
        self.teacher = teachers.of(teacher)

    def prepare(self, original: Any, batches: Sequence[Batch]) -> list[HeldOutBatch]:
        """Batches with the teacher's last hidden states and embeddings."""
        read = (self.teacher.read(original, batch) for batch in batches)
        return [HeldOutBatch(batch, each.states[-1], each.sentences) for batch, each in zip(batches, read, strict=True)]

    def loss(self, model: Any, original: Any, batch: Batch) -> Tensor:
        """Errors of the hidden states behind every block, and 1 - cosine of the sentence embeddings."""
        reference = self.teacher.read(original, batch)
        outputs, mask = [x.float() for x in hidden(model, batch)], tokens(batch)
        layers = [error(a, b, mask) for a, b in zip(outputs[1:], reference.states[1:], strict=True)]
        likeness = F.cosine_similarity(pooled(outputs[-1], mask), reference.sentences.float(), dim=-1)
        return torch.stack(layers).mean() + 1 - likeness.mean()

    def scores(self, model: Any, held: HeldOutBatch) -> Scores:
        """Cosines to the original: of the sentence embeddings and of single tokens."""
        assert held.reference is not None
        assert held.sentences is not None
        output, mask = hidden(model, held.batch)[-1].float(), tokens(held.batch)
        each = F.cosine_similarity(output, held.reference.float(), dim=-1)
        return {
            "sentences": F.cosine_similarity(pooled(output, mask), held.sentences.float(), dim=-1),
            "tokens": each.flatten() if mask is None else each[mask],
        }

    def figures(self, scores: Scores) -> Figures:
        """Mean and least cosine of the sentence embeddings, mean cosine of single tokens."""
        sentence = mean(scores["sentences"])
        worst = float(scores["sentences"].min())
        return {
            "loss": 2 - sentence, "sentence_cosine": sentence, "worst_sentence_cosine": worst,
            "token_cosine": mean(scores["tokens"]),
        }  # fmt: skip


def mean(x: Tensor) -> float:
    """The mean of some scores; 0 if there are none."""
    return float(x.double().mean()) if len(x) else 0.0


def is_language_model(model: Any) -> bool:
    """Whether a model is a decoder with a head of tokens, by its class."""
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def error(output: Tensor, reference: Tensor, mask: Tensor | None) -> Tensor:
    """Mean squared error over the reference's variance, on tokens only: 0 is equal, 1 no better than a constant.

    Args:
        output: (B, L, D).
        reference: The same shape.
        mask: Which positions are tokens, (B, L); None: all.
    """
    if mask is not None and mask.shape == reference.shape[:2]:
        output, reference = output[mask], reference[mask]
    output, reference = output.float(), reference.float()
    return (output - reference).pow(2).mean() / reference.var().clamp_min(1e-12)


def _predictions(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, L - 1, V) in float32, the tokens that they predict, and which of those count."""
    logits = run(model, batch).logits[:, :-1].float()
    targets, mask = batch.get("labels", batch.get("input_ids")), tokens(batch)
    if targets is None:
        raise ValueError(f"a batch of {', '.join(batch)} names no tokens to predict: give labels, or input_ids")
    targets = targets[:, 1:]
    valid = targets != IGNORED
    return logits, targets, valid if mask is None else valid & mask[:, 1:] & mask[:, :-1]
