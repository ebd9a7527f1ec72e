"""What a conversion has to know of a model, whichever library it is of: its attention layers, its loss, its batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fast_attention.conversion.goals import Goal
from fast_attention.integrations.swapping import pretrained
from fast_attention.mechanism import Mechanism, Unsupported
from fast_attention.nn.bound import Bound
from fast_attention.nn.models import Model

Batch = Any  # tensors by name, as a Hugging Face model's forward takes them; a ``tasks.Batch`` for one of this library


class Kind(Protocol):
    """How models of one library are converted. It holds nothing of a model."""

    def original(self, model: Any) -> Any:
        """A frozen copy as it was before any conversion, which is undone in the model, too."""
        ...

    def layers(self, model: Any) -> dict[str, Bound]:
        """The mechanisms of the attention layers, by the names of the modules that are given the layers' inputs."""
        ...

    def put(self, model: Any, mechanism: Mechanism[Any, Any], names: Sequence[str]) -> dict[str, str]:
        """A mechanism into those layers, in place; those that it cannot serve, each with the reason.

        Raises:
            Unsupported: It can serve none of them.
        """
        ...

    def keep(self, model: Any, original: Any, mechanism: Any, names: Sequence[str], kept: Sequence[str]) -> None:
        """The original's own layers, weights included, in place of ``kept``; the other ``names`` stay as they are."""
        ...

    def embeddings(self, model: Any) -> Iterable[nn.Parameter]:
        """What the fine-tune leaves as it is."""
        ...

    def goal(self, model: Any, distil: float) -> Goal:
        """What the model is judged by."""
        ...

    def placed(self, batch: Batch, device: torch.device) -> Batch:
        """A batch on a device."""
        ...

    def run(self, model: Any, batch: Batch) -> Any:
        """A forward pass."""
        ...

    def tokens(self, batch: Batch) -> Tensor | None:
        """Which places are tokens, (B, L); None: all."""
        ...


def of(model: Any) -> Kind:
    """The kind of a model.

    Raises:
        Unsupported: It is of neither library.
    """
    if isinstance(model, Model):
        from fast_attention.conversion.own import Own

        return Own()
    if "" in pretrained(model):
        from fast_attention.conversion.hugging_face import HuggingFace

        return HuggingFace()
    raise Unsupported(
        f"convert takes a Hugging Face model or a fast_attention.nn.models.Model, and {type(model).__name__} is "
        "neither. What would work: swap(...), and training the model as it was trained"
    )
