"""The result of a conversion: the mechanism of every layer, and what was measured at every stage."""

from __future__ import annotations

from dataclasses import dataclass, field

Figures = dict[str, float]  # "loss" is the one that a budget limits


TRAINED = "trained text"  # how the names of groups begin that are of a source of the training passages


def mean_of_others(groups: dict[str, Figures]) -> float:
    """The mean loss of groups, those of a source that is trained on left out unless there are no others."""
    others = [each["loss"] for name, each in groups.items() if not name.startswith(TRAINED)]
    losses = others or [each["loss"] for each in groups.values()]
    return sum(losses) / len(losses)


@dataclass
class Conversion:
    """The result of a conversion. Layers are named as in ``model.named_modules()``.

    Figures and errors are of the held-out batches, under ``"original"``, ``"swapped"`` (before any training),
    ``"transferred"`` and ``"tuned"``; the model has the weights of the ``best`` of the last three. A figure ``loss`` is
    nats per token of a language model, nats per target of a model of this library, and 2 - the mean cosine of the
    sentence embeddings to those that are asked for of any other model.
    """

    goal: str
    mechanism: str
    layers: list[str]  # all attention layers
    kept: dict[str, str]  # those that stayed as they were, each with the reason
    runs: dict[str, str] = field(default_factory=dict)  # what each layer of the original runs
    figures: dict[str, Figures] = field(default_factory=dict)
    by_group: dict[str, dict[str, Figures]] = field(default_factory=dict)  # of each group that was held out
    ablations: dict[str, dict[str, Figures]] = field(default_factory=dict)  # "far part off", ...: of each group
    exact_up_to: int | None = None  # tokens up to which exact attention serves
    best: str = ""  # the stage whose weights the model has
    steps: int = 0  # of training, in all stages
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # of each layer's output, over its variance
    whole: float | None = None  # the loss before the choice, on the batches for choosing
    put_back: dict[str, float] = field(default_factory=dict)  # that loss with a single original layer, by its name
    limit: float | None = None  # the largest loss that the budget allows
    chosen: dict[str, float] = field(default_factory=dict)  # layers put back for the budget, the loss after each
    curves: dict[str, list[list[float]]] = field(default_factory=dict)  # of a stage: step, seconds, training loss
    status: str = "running"  # "complete" or "interrupted" in the end

    def judged(self, stage: str) -> float:
        """The loss by which stages are compared: the mean over the groups of texts that are not trained on."""
        groups = self.by_group.get(stage, {})
        return mean_of_others(groups) if groups else self.figures[stage]["loss"]

    @property
    def converted(self) -> list[str]:
        """The layers that run the mechanism."""
        return [name for name in self.layers if name not in self.kept]
