"""The interface by which a conversion uses models of different libraries: attention layers, loss, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fast_attention.conversion.goals import Goal
from fast_attention.conversion.teachers import Chunks, Teacher
from fast_attention.integrations import crossover
from fast_attention.integrations.swapping import pretrained
from fast_attention.mechanism import Mechanism, Unsupported
from fast_attention.mechanisms.dense.softmax import Softmax
from fast_attention.nn.bound import Bound
from fast_attention.nn.models import Model

Batch = Any  # tensors by name, as a Hugging Face model's forward takes them; a ``tasks.Batch`` for one of this library

Groups = Mapping[str, Sequence[Batch]]  # what is held out; "" is the name of all if they are not in groups


def groups_of(held_out: Sequence[Batch] | Groups) -> Groups:
    """Held-out batches by their groups.

    Raises:
        ValueError: There are none, or none in a group, or it is a single batch.
    """
    if isinstance(held_out, Mapping) and any(isinstance(x, Tensor) for x in held_out.values()):
        raise ValueError("held_out is one batch: give a list of batches, such as [batch], or lists of them by name")
    groups = dict(held_out) if isinstance(held_out, Mapping) else {"": held_out}
    empty = [f"[{name!r}]" if name else "" for name, batches in groups.items() if not batches]
    if empty or not groups:
        which = "".join(empty[:1])
        raise ValueError(f"held_out{which} is empty: give at least one batch that the training does not see")
    return groups


class Adapter(Protocol):
    """The operations on models of one library that a conversion needs. It keeps no state."""

    def original(self, model: Any) -> Any:
        """A frozen copy of the model without any conversion, which is undone in the model, too."""
        ...

    def layers(self, model: Any) -> dict[str, Bound]:
        """The mechanisms of the attention layers, by the names of the modules that take the layers' inputs."""
        ...

    def put(self, model: Any, mechanism: Mechanism[Any, Any], names: Sequence[str]) -> dict[str, str]:
        """Put a mechanism into the layers ``names``, in place; those that it cannot serve, each with the reason.

        Raises:
            Unsupported: It can serve none of them.
        """
        ...

    def keep(self, model: Any, original: Any, mechanism: Any, names: Sequence[str], kept: Sequence[str]) -> None:
        """Put the original's layers, weights included, in place of ``kept``; the other ``names`` stay as they are."""
        ...

    def restore(self, model: Any, original: Any) -> None:
        """Make a model what it was before its conversion, weights included."""
        ...

    def exact_below(self, model: Any, original: Any, names: Sequence[str], tokens: int) -> Callable[[], None]:
        """Let exact attention serve the queries of the layers ``names`` that see at most so many tokens.

        Returns:
            What undoes that.
        """
        ...

    def bind(self, model: Any, name: str, bound: Bound) -> None:
        """Let a layer run this mechanism with these weights, with the layer's own projections."""
        ...

    def is_causal(self, model: Any, name: str) -> bool:
        """Whether a layer is causal."""
        ...

    def embeddings(self, model: Any) -> Iterable[nn.Parameter]:
        """The embeddings, which the fine-tune leaves as they are."""
        ...

    def goal(self, model: Any, distil: float, teacher: Teacher) -> Goal:
        """The model's loss and figures.

        Raises:
            ValueError: The model has no use for such a teacher, or for ``distil``.
        """
        ...

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """The batch on a device.

        Raises:
            ValueError: It is no batch of this library's models.
        """
        ...

    def run(self, model: Any, batch: Batch) -> Any:
        """A forward pass."""
        ...

    def tokens(self, batch: Batch) -> Tensor | None:
        """Mask (B, L) of the positions that are tokens; None: all."""
        ...


def of(model: Any) -> Adapter:
    """The adapter for a model.

    Raises:
        Unsupported: It is of neither library.
    """
    if isinstance(model, Model):
        from fast_attention.conversion.nn_models import LibraryAdapter

        return LibraryAdapter()
    if "" in pretrained(model):
        from fast_attention.conversion.hugging_face import HuggingFaceAdapter

        return HuggingFaceAdapter()
    raise Unsupported(
        f"convert takes a Hugging Face model or a fast_attention.nn.models.Model, and {type(model).__name__} is "
        "neither. What would work: swap(...), and training the model as it was trained"
    )


def crossover_of(
    adapter: Adapter,
    model: Any,
    before: Mapping[str, Bound],
    names: Sequence[str],
    teacher: Teacher,
    watch: Callable[[dict[str, Any]], None],
) -> int | None:
    """The tokens up to which exact attention is faster on this machine than what the layers ``names`` run.

    At most a chunk of a teacher that reads in chunks: beyond it exact attention sees what that teacher never does. None
    where a layer ran another mechanism ``before``, with weights that were trained for that.
    """
    if trained := [before[name].mechanism for name in names if not isinstance(before[name].mechanism, Softmax)]:
        watch({"message": f"no exact attention for short inputs: the model was trained with {trained[0]!r}"})
        return None
    watch({"measuring": "up to which length exact attention is faster"})
    bound, like = adapter.layers(model)[names[0]], next(model.parameters())
    is_causal = adapter.is_causal(model, names[0])
    tokens = crossover.crossover(bound.mechanism, bound.shape, like, is_causal=is_causal)
    return min(tokens, teacher.tokens) if isinstance(teacher, Chunks) else tokens
