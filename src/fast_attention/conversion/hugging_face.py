"""Conversion of Hugging Face models, by swapping their attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.conversion import goals, reads, teachers
from fast_attention.integrations import crossover, swap, swap_back
from fast_attention.integrations.swapped import CHILD, layers_of
from fast_attention.mechanism import Mechanism, Unsupported
from fast_attention.nn.bound import Bound


class HuggingFaceAdapter:
    """Conversion of a pretrained encoder or decoder. See ``adapters.Adapter``."""

    def original(self, model: Any) -> Any:
        """A frozen copy with exact attention, called through this library, as in the layers that stay exact."""
        if model.config.is_encoder_decoder:
            raise Unsupported(
                f"convert takes an encoder or a decoder, and {type(model).__name__} is both. What would work: its "
                "encoder"
            )
        swap_back(model)
        original = copy.deepcopy(model).eval().requires_grad_(False)
        swap(original, "Softmax")
        return original

    def layers(self, model: Any) -> dict[str, Bound]:
        """The mechanisms of a swapped model."""
        return {name: swapped.bound for name, swapped in layers_of(model).items()}

    def put(self, model: Any, mechanism: Mechanism[Any, Any], names: Sequence[str]) -> dict[str, str]:
        """Swap the layers ``names``; the reasons for those that stay exact."""
        wanted: dict[str, Any] = dict.fromkeys(names, mechanism)
        return {layer.name: layer.why for layer in swap(model, wanted).kept if layer.name in names}

    def keep(self, model: Any, original: Any, mechanism: Any, names: Sequence[str], kept: Sequence[str]) -> None:
        """Swap again without ``kept``, and load all weights again."""
        state = {name: x.clone() for name, x in model.state_dict().items()}
        swap(model, {name: mechanism for name in names if name not in kept})
        prefixes = tuple(f"{name}.{CHILD}." for name in kept)
        state = {name: x for name, x in state.items() if not name.startswith(prefixes)}
        for name in kept:
            state |= {f"{name}.{key}": x for key, x in original.get_submodule(name).state_dict().items()}
        model.load_state_dict(state)

    def restore(self, model: Any, original: Any) -> None:
        """Swap back, and load the original's weights."""
        swap_back(model)
        state = original.state_dict()
        model.load_state_dict({name: state[name] for name in model.state_dict()})

    def exact_below(self, model: Any, original: Any, names: Sequence[str], tokens: int) -> Callable[[], None]:
        """Put the layers' mechanisms, with their weights, behind exact attention; what undoes that."""
        bounds, like = {name: self.layers(model)[name] for name in names}, next(model.parameters())
        exact = self.layers(original)
        for name, bound in bounds.items():
            self.bind(model, name, crossover.limited(bound, exact[name], tokens, like))

        def undo() -> None:
            for name, bound in bounds.items():
                self.bind(model, name, bound)

        return undo

    def bind(self, model: Any, name: str, bound: Bound) -> None:
        """Let a layer run this."""
        layers_of(model)[name].bound = bound

    def is_causal(self, model: Any, name: str) -> bool:
        """As transformers' attention modules say."""
        return bool(getattr(model.get_submodule(name), "is_causal", False))

    def embeddings(self, model: Any) -> Iterable[nn.Parameter]:
        """The input embeddings."""
        return model.get_input_embeddings().parameters()

    def goal(self, model: Any, distil: float, teacher: teachers.Teacher) -> goals.Goal:
        """The text's loss for a decoder with a head of tokens, the teacher's hidden states for every other model."""
        if not goals.is_language_model(model):
            if distil:
                raise ValueError(
                    f"distil={distil!r} is for language models; {type(model).__name__} learns from the original's "
                    "hidden states alone: distil=0.0"
                )
            return goals.HiddenStates(teacher)
        teachers.whole(teacher, model)
        return goals.LanguageModel(distil)

    def to_device(self, batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Move every tensor of a batch, each of whose texts has a token: means over none are no numbers."""
        if not isinstance(batch, Mapping) or not all(isinstance(x, Tensor) for x in batch.values()):
            shown = {name: type(x).__name__ for name, x in batch.items()} if isinstance(batch, Mapping) else type(batch)
            raise ValueError(f"a batch is tensors by name, as the model takes them: {{'input_ids': ...}}; got {shown}")
        mask = batch.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not mask.any(-1).all():
            row = mask.any(-1).tolist().index(False)
            raise ValueError(f"text {row} of a batch has no token, its attention_mask is all padding: leave it out")
        return {name: x.to(device) for name, x in batch.items()}

    def run(self, model: Any, batch: dict[str, Tensor]) -> Any:
        """A forward pass without a cache."""
        return reads.run(model, batch)

    def tokens(self, batch: dict[str, Tensor]) -> Tensor | None:
        """The batch's padding mask."""
        return reads.tokens(batch)
