"""Goals of a conversion: each layer's output, the teacher's readings of a text, and the figures that are reported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.conversion.outcome import Figures
from fast_attention.mechanism import Unsupported
from fast_attention.value import Value, at_least

Batch = dict[str, Tensor]  # what a Hugging Face model's forward takes
Scores = dict[str, Tensor]  # by their names, (N,) each: one for every sentence or token of a batch
IGNORED = -100  # the label of a token that is not predicted


def run(model: Any, batch: Batch, **options: bool) -> Any:
    """Run a forward pass without a cache."""
    known = inspect.signature(model.forward).parameters
    return model(**batch, **options, **({"use_cache": False} if "use_cache" in known else {}))


def hidden(model: Any, batch: Batch) -> tuple[Tensor, ...]:
    """The hidden states before the first block and behind every block, (B, L, D) each."""
    states = getattr(run(model, batch, output_hidden_states=True), "hidden_states", None)
    if not states:
        raise Unsupported(
            f"{type(model).__name__} gives no hidden states, which a model that is not a decoder with a head of tokens "
            "learns and is judged by. What would work: one encoder of it"
        )
    return states


def tokens(batch: Batch) -> Tensor | None:
    """Mask (B, L) of the positions that are tokens; None: all."""
    mask = batch.get("attention_mask")
    return None if mask is None or bool(mask.all()) else mask.bool()


def pooled(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the tokens of each sequence, (B, L, D) to (B, D), in float32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        return x.mean(1)
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def error(output: Tensor, reference: Tensor, mask: Tensor | None) -> Tensor:
    """Mean squared error over the reference's variance, on tokens only: 0 is equal, 1 no better than a constant."""
    if mask is not None and mask.shape == reference.shape[:2]:
        output, reference = output[mask], reference[mask]
    output, reference = output.float(), reference.float()
    return (output - reference).pow(2).mean() / reference.var().clamp_min(1e-12)


def layers_of(model: Any) -> dict[str, Any]:
    """The mechanisms of a swapped model, by the names of its layers."""
    from fast_attention.integrations import attention  # which imports transformers

    return attention.layers_of(model)


@torch.no_grad()
def layer_errors(
    model: Any, original: Any, names: Sequence[str], batches: Sequence[Batch],
    backward: Callable[[Tensor], Any] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Every layer's mean squared error on the original's inputs, over the variance of the original's output.

    Attention transfer brings it down for all layers at once (LoLCATs, arXiv 2410.10254, which trains feature maps so).

    ``original`` is frozen and swapped to exact attention. ``backward`` adds up the gradients of a layer's error, with
    the memory of one layer at a time; None: no gradients.
    """
    measured: dict[str, list[float]] = {name: [] for name in names}

    def hooked(name: str, batch: Batch) -> Any:
        layer, mask = model.get_submodule(name), tokens(batch)

        def compare(module: nn.Module, args: Any, options: Any, output: Any) -> None:
            with torch.set_grad_enabled(backward is not None):
                wrong = error(_output(layer(*args, **options)), _output(output), mask)
                if backward is not None and wrong.requires_grad:  # a window over everything has nothing to train
                    backward(wrong)
            measured[name].append(float(wrong.detach()))

        return original.get_submodule(name).register_forward_hook(compare, with_kwargs=True)

    for batch in batches:
        with ExitStack() as hooks:
            for name in names:
                hooks.enter_context(hooked(name, batch))
            run(original, batch)
    return {name: sum(each) / max(len(each), 1) for name, each in measured.items()}


def calibrate(model: Any, original: Any, names: Sequence[str], batch: Batch) -> None:
    """Calibrate weights such as the damping of ``FavorPlusPlus`` on the queries and keys of the original's inputs."""

    def calibrate_bound(bound: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        q, k = inputs[:2]
        bound.adopt(bound.mechanism.calibrated(q, k, bound.w, key_mask=options.get("key_mask")))

    layers = layers_of(model)
    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(layers[name].bound.register_forward_pre_hook(calibrate_bound, with_kwargs=True))
        layer_errors(model, original, names, [batch])


def _output(returned: Any) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned


class Targets(NamedTuple):
    """The outputs that a converted encoder is to give for a batch."""

    states: tuple[Tensor, ...]  # hidden states before the first block and behind every one, (B, L, D) each
    sentences: Tensor  # embeddings, (B, D)


@dataclass(frozen=True, repr=False)
class Chunks(Value):
    """The original reads a long text in chunks; its embedding is the mean of theirs, weighted by their tokens.

    Args:
        tokens: Tokens of a chunk with the tokenizer's marks, as many as the original was trained to read.
        before: Marks that the tokenizer puts before a text, which every chunk gets.
        after: Marks that it puts after one.
    """

    tokens: int = 512
    before: int = 1
    after: int = 1

    def __post_init__(self) -> None:
        at_least(self, "before", self.before, 0)
        at_least(self, "after", self.after, 0)
        at_least(self, "tokens", self.tokens, self.before + self.after + 1)

    @torch.no_grad()
    def read(self, original: Any, batch: Batch) -> Targets:
        """The targets of a batch; padding gets zeros."""
        if "input_ids" not in batch:
            raise ValueError(f"teacher={self!r} cuts input_ids into chunks, and a batch has {', '.join(batch)}")
        ids, mask = batch["input_ids"], tokens(batch)
        rows = [row if mask is None else row[mask[i]] for i, row in enumerate(ids)]
        read = [self._row(original, row) for row in rows]
        padded = [tuple(F.pad(x, (0, 0, 0, ids.shape[1] - len(x))) for x in states) for states, _ in read]
        return Targets(
            tuple(torch.stack(each) for each in zip(*padded, strict=True)),
            torch.stack([sentence for _, sentence in read]),
        )

    def _row(self, original: Any, row: Tensor) -> Targets:
        """The targets of one text, without padding."""
        end = len(row) - self.after
        contents = row[self.before : end].split(self.tokens - self.before - self.after)
        parts: list[tuple[Tensor, ...]] = []
        for number, content in enumerate(contents):
            chunk = torch.cat([row[: self.before], content, row[end:]])[None]
            states = hidden(original, {"input_ids": chunk, "attention_mask": torch.ones_like(chunk)})
            first = 0 if number == 0 else self.before
            last = chunk.shape[1] - (0 if number == len(contents) - 1 else self.after)
            parts.append((*(x[0, first:last] for x in states), states[-1][0].mean(0)))
        weights = row.new_tensor([len(content) for content in contents], dtype=torch.float32) / (end - self.before)
        *layers, sentences = zip(*parts, strict=True)
        return Targets(tuple(torch.cat(each) for each in layers), weights @ torch.stack(sentences).float())


Teacher = Literal["original"] | Chunks


@torch.no_grad()
def read(teacher: Teacher, original: Any, batch: Batch) -> Targets:
    """The teacher's targets of a batch: the original reads it whole, as the converted model does, or in chunks."""
    if isinstance(teacher, Chunks):
        return teacher.read(original, batch)
    states = hidden(original, batch)
    return Targets(states, pooled(states[-1], tokens(batch)))


class HeldOutBatch(NamedTuple):
    """A batch that is never trained on, and what the teacher gives for it; None: the text is its own reference."""

    batch: Batch
    targets: Targets | None = None  # of the hidden states the last alone


@torch.no_grad()
def measure(goal: Goal, model: Any, groups: Mapping[str, Sequence[HeldOutBatch]]) -> tuple[Figures, dict[str, Figures]]:
    """The figures of a model on all batches, and on those of each group."""
    scores = {name: _joined(goal.scores(model, each) for each in batches) for name, batches in groups.items()}
    return goal.figures(_joined(scores.values())), {name: goal.figures(each) for name, each in scores.items()}


def goal_of(model: Any, teacher: Teacher) -> Goal:
    """The loss of the text for a decoder with a head of tokens, the teacher's hidden states for every other model."""
    if not isinstance(teacher, Chunks) and teacher != "original":
        raise ValueError(f"teacher={teacher!r}: give 'original' or Chunks(tokens=...)")
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return HiddenStates(teacher)
    if teacher != "original":
        raise ValueError(
            f"teacher={teacher!r} is for encoders that give embeddings; {type(model).__name__} learns from the text: "
            "teacher='original'"
        )
    return LanguageModel()


class LanguageModel:
    """Next-token prediction: nats per token."""

    name: ClassVar[str] = "language model"

    def prepare(self, original: Any, batches: Sequence[Batch]) -> list[HeldOutBatch]:
        """Batches as they are."""
        return [HeldOutBatch(batch) for batch in batches]

    def loss(self, model: Any, original: Any, batch: Batch) -> Tensor:
        """Nats per token."""
        logits, targets = self._predictions(model, batch)
        if not len(targets):
            raise ValueError("a batch to train on has no token to predict: give texts of two tokens or more")
        return F.cross_entropy(logits, targets)

    def scores(self, model: Any, batch: HeldOutBatch) -> Scores:
        """Nats of every token."""
        return {"nats": F.cross_entropy(*self._predictions(model, batch.batch), reduction="none")}

    def figures(self, scores: Scores) -> Figures:
        """``loss``: nats per token."""
        return {"loss": _mean(scores["nats"])}

    @staticmethod
    def _predictions(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (N, V) in float32 and the tokens (N,) that they predict, without padding and ignored labels."""
        logits = run(model, batch).logits[:, :-1].float()
        targets, mask = batch.get("labels", batch.get("input_ids")), tokens(batch)
        if targets is None:
            raise ValueError(f"a batch of {', '.join(batch)} names no tokens to predict: give labels, or input_ids")
        targets = targets[:, 1:]
        valid = targets != IGNORED
        valid = valid if mask is None else valid & mask[:, 1:] & mask[:, :-1]
        return logits[valid], targets[valid]


class HiddenStates:
    """Similarity to the teacher's hidden states, token by token, and to its sentence embeddings."""

    name: ClassVar[str] = "likeness to the original"

    def __init__(self, teacher: Teacher = "original") -> None:
        self.teacher: Teacher = teacher

    def prepare(self, original: Any, batches: Sequence[Batch]) -> list[HeldOutBatch]:
        """Batches with the teacher's last hidden states and embeddings."""
        targets = (read(self.teacher, original, batch) for batch in batches)
        last = (Targets(each.states[-1:], each.sentences) for each in targets)
        return [HeldOutBatch(*each) for each in zip(batches, last, strict=True)]

    def loss(self, model: Any, original: Any, batch: Batch) -> Tensor:
        """Errors of the hidden states behind every block, and 1 - cosine of the sentence embeddings."""
        reference = read(self.teacher, original, batch)
        outputs, mask = [x.float() for x in hidden(model, batch)], tokens(batch)
        layers = [error(a, b, mask) for a, b in zip(outputs[1:], reference.states[1:], strict=True)]
        likeness = F.cosine_similarity(pooled(outputs[-1], mask), reference.sentences.float(), dim=-1)
        return torch.stack(layers).mean() + 1 - likeness.mean()

    def scores(self, model: Any, batch: HeldOutBatch) -> Scores:
        """Cosines to the teacher: of the sentence embeddings and of single tokens."""
        targets = batch.targets
        assert targets is not None
        output, mask = hidden(model, batch.batch)[-1].float(), tokens(batch.batch)
        each = F.cosine_similarity(output, targets.states[-1].float(), dim=-1)
        return {
            "sentences": F.cosine_similarity(pooled(output, mask), targets.sentences.float(), dim=-1),
            "tokens": each.flatten() if mask is None else each[mask],
        }

    def figures(self, scores: Scores) -> Figures:
        """Mean and least cosine of the sentence embeddings, mean cosine of single tokens; ``loss``: 2 - the first."""
        sentence, worst = _mean(scores["sentences"]), float(scores["sentences"].min())
        likeness = {
            "sentence_cosine": sentence,
            "worst_sentence_cosine": worst,
            "token_cosine": _mean(scores["tokens"]),
        }
        return {"loss": 2 - sentence, **likeness}


Goal = LanguageModel | HiddenStates


def _joined(scores: Iterable[Scores]) -> Scores:
    rows = [*scores]
    return {name: torch.cat([each[name] for each in rows]) for name in rows[0]}


def _mean(x: Tensor) -> float:
    """The mean of some scores; 0 if there are none."""
    return float(x.double().mean()) if len(x) else 0.0
