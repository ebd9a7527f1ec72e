"""The outcome of a conversion: the mechanism of every layer, and what was measured after every stage."""

from __future__ import annotations

from dataclasses import dataclass, field

Figures = dict[str, float]  # "loss" is the one by which stages are compared
STAGES = ("swapped", "transferred", "tuned")
TRAINED = "trained text"  # how the names of groups begin that are of a source of the training passages


class Diverged(ArithmeticError):
    """Raised by ``convert`` when the training loss is NaN or infinite. A lower ``lr`` is the usual remedy."""


@dataclass
class Conversion:
    """The outcome of a conversion. Layers are named as in ``model.named_modules()``.

    Figures and errors are of the held-out batches, under ``"original"``, ``"swapped"`` (before any training),
    ``"transferred"`` and ``"tuned"``. The model has the weights of the ``best`` of the last three. The figure ``loss``
    is nats per token of a language model. Of any other model it is 2 - the mean cosine of the sentence embeddings to
    those that are asked for.
    """

    goal: str
    mechanism: str
    layers: list[str]  # all attention layers
    kept: dict[str, str]  # those that stayed exact, each with the reason
    figures: dict[str, Figures] = field(default_factory=dict)
    by_group: dict[str, dict[str, Figures]] = field(default_factory=dict)  # of each group that was held out
    exact_up_to: int | None = None  # tokens up to which exact attention serves
    best: str = ""  # the stage whose weights the model has
    steps: int = 0  # of training, in all finished stages
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # of each layer's output, over its variance
    status: str = "running"  # "complete" or "interrupted" in the end

    def judged(self, stage: str) -> float:
        """The loss by which stages are compared: the mean over the groups of texts that are not trained on."""
        groups = self.by_group.get(stage, {"": self.figures[stage]})
        others = [each["loss"] for name, each in groups.items() if not name.startswith(TRAINED)]
        losses = others or [each["loss"] for each in groups.values()]
        return sum(losses) / len(losses)

    @property
    def converted(self) -> list[str]:
        """The layers that run the mechanism."""
        return [name for name in self.layers if name not in self.kept]
