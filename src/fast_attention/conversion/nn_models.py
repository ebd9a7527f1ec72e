"""Conversion of this library's own models, judged by the task that they were trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.conversion import teachers
from fast_attention.conversion.goals import Goal, HeldOutBatch, Scores, mean
from fast_attention.conversion.outcome import Figures
from fast_attention.integrations import crossover
from fast_attention.mechanism import Mechanism, Unsupported
from fast_attention.nn import saving
from fast_attention.nn.bound import Bound
from fast_attention.nn.models import Model
from fast_attention.nn.token_mixer import TokenMixer
from fast_attention.tasks.task import IGNORED, Batch


class LibraryAdapter:
    """Conversion of a model that ``train`` made. See ``adapters.Adapter``."""

    def original(self, model: Model) -> Model:
        """A frozen copy of the model, whose layers replace those that are put back."""
        return copy.deepcopy(model).eval().requires_grad_(False)

    def layers(self, model: Model) -> dict[str, Bound]:
        """The mechanisms of the token mixers."""
        return {name: mixer.attention for name, mixer in _mixers(model).items()}

    def put(self, model: Model, mechanism: Mechanism[Any, Any], names: Sequence[str]) -> dict[str, str]:
        """Replace token mixers, copying their projections; the reasons for those that cannot be replaced."""
        reasons: dict[str, str] = {}
        for name, mixer in _mixers(model).items():
            if name in names:
                try:
                    model.set_submodule(name, _replacement(model, mixer, mechanism))
                except Unsupported as error:
                    reasons[name] = f"{error}{_learned(model, mechanism)}"
        if len(reasons) == len(names):
            raise Unsupported(next(iter(reasons.values())) if reasons else "keep names every layer: none is left")
        model.config = model.present_config()
        return reasons

    def keep(self, model: Model, original: Model, mechanism: Any, names: Sequence[str], kept: Sequence[str]) -> None:
        """Put copies of the original's token mixers back."""
        for name in kept:
            model.set_submodule(name, copy.deepcopy(original.get_submodule(name)))
        model.config = model.present_config()

    def restore(self, model: Model, original: Model) -> None:
        """Put copies of all the original's token mixers back, and load its weights."""
        self.keep(model, original, None, (), [*_mixers(original)])
        model.load_state_dict(original.state_dict())

    def exact_below(self, model: Model, original: Model, names: Sequence[str], tokens: int) -> Callable[[], None]:
        """Copies of the original's token mixers, whose projections exact attention needs, with the layers' weights."""
        before = {name: model.get_submodule(name) for name in names}
        for name in names:
            exact, like = _mixers(original)[name], model.embedding.weight
            bound = crossover.limited(_mixers(model)[name].attention, exact.attention, tokens, like)
            mixer = exact.with_mechanism(bound.mechanism)
            mixer.attention.adopt(bound.w)
            model.set_submodule(name, mixer.train(model.training))
        model.config = model.present_config()

        def undo() -> None:
            for name, mixer in before.items():
                model.set_submodule(name, mixer)
            model.config = model.present_config()

        return undo

    def bind(self, model: Model, name: str, bound: Bound) -> None:
        """Let a token mixer run this."""
        _mixers(model)[name].attention = bound

    def is_causal(self, model: Model, name: str) -> bool:
        """All layers are, or none."""
        return model.config.causal

    def embeddings(self, model: Model) -> Iterable[nn.Parameter]:
        """The token embedding, which a head may share."""
        return model.embedding.parameters()

    def goal(self, model: Model, distil: float, teacher: teachers.Teacher) -> TaskLoss:
        """The task's own loss."""
        teachers.whole(teacher, model)
        return TaskLoss(distil)

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """The batch on a device."""
        if not isinstance(batch, Batch):
            raise ValueError(f"a batch is a fast_attention.tasks.Batch, as task.batch(i) gives it; got {type(batch)}")
        return batch.to(device)

    def run(self, model: Model, batch: Batch) -> Tensor:
        """Logits."""
        return model(batch.tokens, batch.key_mask)

    def tokens(self, batch: Batch) -> Tensor | None:
        """The batch's padding mask."""
        return batch.key_mask


class TaskLoss(Goal):
    """The task's loss: nats per target and, with ``distil``, distillation from the original.

    Args:
        distil: Weight of the divergence of the model's distribution from the original's.
    """

    name = "its own task"

    def __init__(self, distil: float = 0.0) -> None:
        self.distil = distil

    def prepare(self, original: Model, batches: Sequence[Batch]) -> list[HeldOutBatch]:
        """Batches with the original's predictions."""
        with torch.no_grad():
            return [HeldOutBatch(batch, _predictions(original, batch)[0].argmax(-1)) for batch in batches]

    def loss(self, model: Model, original: Model, batch: Batch) -> Tensor:
        """Nats per target, and ``distil`` times the Kullback-Leibler divergence of the original's distribution."""
        logits, targets = _predictions(model, batch)
        loss = F.cross_entropy(logits, targets)
        if not self.distil:
            return loss
        with torch.no_grad():
            reference = _predictions(original, batch)[0].log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), reference, log_target=True, reduction="batchmean")
        return loss + self.distil * divergence

    def scores(self, model: Model, held: HeldOutBatch) -> Scores:
        """Of every target: its nats, whether the answer is right, whether it is the original's."""
        logits, targets = _predictions(model, held.batch)
        predicted = logits.argmax(-1)
        nats = F.cross_entropy(logits, targets, reduction="none")
        return {"nats": nats, "right": predicted == targets, "same": predicted == held.reference}

    def figures(self, scores: Scores) -> Figures:
        """``loss``: nats per target; the fractions of right answers, and of the original's answers."""
        loss, right, same = (mean(scores[name]) for name in ("nats", "right", "same"))
        return {"loss": loss, "accuracy": right, "same_answer": same}


def _predictions(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (targets, classes) in float32 at all positions with a target, and the targets."""
    logits, targets = model(batch.tokens, batch.key_mask).float().flatten(0, -2), batch.targets.flatten()
    has_target = targets != IGNORED
    return logits[has_target], targets[has_target]


def _mixers(model: Model) -> dict[str, TokenMixer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, TokenMixer)}


def _replacement(model: Model, mixer: TokenMixer, mechanism: Mechanism[Any, Any]) -> TokenMixer:
    if mixer.mechanism == mechanism:
        raise Unsupported(f"the layer runs {mechanism!r} already: ask for another mechanism")
    if trait := mechanism.traits.denying(model.config.causal):
        raise mechanism.refuse("a causal model" if model.config.causal else "a model that is not causal", trait)
    saving.check_readable(mechanism)
    return mixer.with_mechanism(mechanism)


def _learned(model: Model, mechanism: Mechanism[Any, Any]) -> str:
    """What would take a mechanism that may not see rotated queries and keys."""
    rotated = model.config.positions == "rotary" and not mechanism.traits.rotary
    return " Or a model that was trained with positions='learned'." if rotated else ""
