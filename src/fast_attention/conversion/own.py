"""Converting models of this library, which ``train`` makes: each layer is given another mechanism, and the model is
judged by the task that it was trained on."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.conversion.goals import Held
from fast_attention.conversion.outcome import Figures
from fast_attention.mechanism import Mechanism, Unsupported
from fast_attention.nn.bound import Bound
from fast_attention.nn.models import Model
from fast_attention.nn.token_mixer import TokenMixer
from fast_attention.tasks.task import IGNORED, Batch


class Own:
    """A run of ``train``. See ``kinds.Kind``."""

    def original(self, model: Model) -> Model:
        """The model itself: whatever it runs is what its layers fall back on."""
        return copy.deepcopy(model).eval().requires_grad_(False)

    def layers(self, model: Model) -> dict[str, Bound]:
        """By the names of their token mixers."""
        return {name: mixer.attention for name, mixer in _mixers(model).items()}

    def put(self, model: Model, mechanism: Mechanism[Any, Any], names: Sequence[str]) -> dict[str, str]:
        """By new token mixers, with copies of the projections of those before."""
        refused: dict[str, str] = {}
        for name, mixer in _mixers(model).items():
            if name in names:
                try:
                    model.set_submodule(name, _instead(model, mixer, mechanism))
                except Unsupported as error:
                    refused[name] = str(error)
        if len(refused) == len(names):
            raise Unsupported(next(iter(refused.values())) if refused else "keep names every layer: none is left")
        _told(model)
        return refused

    def keep(self, model: Model, original: Model, mechanism: Any, names: Sequence[str], kept: Sequence[str]) -> None:
        """By copies of the original's token mixers."""
        for name in kept:
            model.set_submodule(name, copy.deepcopy(original.get_submodule(name)))
        _told(model)

    def embeddings(self, model: Model) -> Iterable[nn.Parameter]:
        """Of the tokens, which a head may share."""
        return model.embedding.parameters()

    def goal(self, model: Model, distil: float) -> TaskLoss:
        """The answers that the task wants."""
        return TaskLoss(distil)

    def placed(self, batch: Batch, device: torch.device) -> Batch:
        """All of it."""
        return batch.to(device)

    def run(self, model: Model, batch: Batch) -> Tensor:
        """Logits."""
        return model(batch.tokens, batch.key_mask)

    def tokens(self, batch: Batch) -> Tensor | None:
        """By the mask of padding."""
        return batch.key_mask


class TaskLoss:
    """The task's own answers: nats per target, and beside it, if wished, the original's distribution.

    Args:
        distil: Weight of the divergence of the model's distribution from the original's.
    """

    name = "its own task"

    def __init__(self, distil: float = 0.0) -> None:
        self.distil = distil

    def hold(self, original: Model, batches: Sequence[Batch]) -> list[Held]:
        """With the original's answers."""
        with torch.no_grad():
            return [Held(batch, _answers(original, batch)[0].argmax(-1)) for batch in batches]

    def loss(self, model: Model, original: Model, batch: Batch) -> Tensor:
        """Nats per target, and ``distil`` times the Kullback-Leibler divergence of the original's distribution."""
        logits, targets = _answers(model, batch)
        loss = F.cross_entropy(logits, targets)
        if not self.distil:
            return loss
        with torch.no_grad():
            wanted = _answers(original, batch)[0].log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        return loss + self.distil * divergence

    @torch.no_grad()
    def measure(self, model: Model, held: Sequence[Held]) -> Figures:
        """``loss``: nats per target over all batches; the shares of right answers, and of the original's."""
        total, right, alike, count = 0.0, 0, 0, 0
        for batch, wanted in held:
            logits, targets = _answers(model, batch)
            given = logits.argmax(-1)
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
            right, alike = right + int((given == targets).sum()), alike + int((given == wanted).sum())
            count += len(targets)
        count = max(count, 1)
        return {"loss": total / count, "accuracy": right / count, "same_answer": alike / count}


def _answers(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (targets, kinds) in float32 of all that is asked, and the targets."""
    logits, targets = model(batch.tokens, batch.key_mask).float().flatten(0, -2), batch.targets.flatten()
    asked = targets != IGNORED
    return logits[asked], targets[asked]


def _mixers(model: Model) -> dict[str, TokenMixer]:
    return {name: part for name, part in model.named_modules() if isinstance(part, TokenMixer)}


def _instead(model: Model, mixer: TokenMixer, mechanism: Mechanism[Any, Any]) -> TokenMixer:
    if mixer.mechanism == mechanism:
        raise Unsupported(f"the layer runs {mechanism!r} already: ask for another mechanism")
    if model.config.causal and not mechanism.traits.causal:
        raise mechanism.refuse("a causal model", "causal")
    return mixer.with_mechanism(mechanism)


def _told(model: Model) -> None:
    """The model's settings name what its layers run now."""
    names = tuple(repr(mixer.mechanism) for mixer in _mixers(model).values())
    model.config = replace(model.config, mechanism=names if len({*names}) > 1 else names[0])
