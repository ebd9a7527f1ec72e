"""The result of a conversion: the mechanism of every layer, and what was measured at every stage."""

from __future__ import annotations

from dataclasses import dataclass, field

Figures = dict[str, float]  # "loss" is the one that a budget limits


@dataclass
class Conversion:
    """The result of a conversion. Layers are named as in ``model.named_modules()``.

    Figures and errors are of the held-out batches, under ``"original"``, ``"swapped"`` (before any training),
    ``"transferred"`` and ``"tuned"``. A figure ``loss`` is nats per token of a language model, nats per target of a
    model of this library, and 2 - the mean cosine of the sentence embeddings to the original's of any other model.
    """

    goal: str
    mechanism: str
    layers: list[str]  # all attention layers
    kept: dict[str, str]  # those that stayed as they were, each with the reason
    runs: dict[str, str] = field(default_factory=dict)  # what each layer of the original runs
    figures: dict[str, Figures] = field(default_factory=dict)
    by_group: dict[str, dict[str, Figures]] = field(default_factory=dict)  # of each group that was held out
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # of each layer's output, over its variance
    whole: float | None = None  # the loss before the choice, on the batches for choosing
    put_back: dict[str, float] = field(default_factory=dict)  # that loss with a single original layer, by its name
    limit: float | None = None  # the largest loss that the budget allows
    chosen: dict[str, float] = field(default_factory=dict)  # layers put back for the budget, the loss after each
    curves: dict[str, list[list[float]]] = field(default_factory=dict)  # of a stage: step, seconds, training loss
    status: str = "running"  # "complete" or "interrupted" in the end

    @property
    def converted(self) -> list[str]:
        """The layers that run the mechanism."""
        return [name for name in self.layers if name not in self.kept]
