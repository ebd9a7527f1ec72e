"""``Bound``: a mechanism and a shape make a module with parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention import catalogue
from fast_attention.engine.fusion import Fusion, fusing
from fast_attention.mechanism import Attention, Mechanism, Shape, Unsupported
from fast_attention.value import one_of


class Bound(nn.Module):
    """A mechanism and its weights as a module: learned weights are parameters, drawn or fixed ones are buffers.

    Both are in the ``state_dict``, so a saved model keeps its random features. Call it as the mechanism itself:
    ``bound(q, k, v, is_causal=, key_mask=)`` for an attention, ``bound(x, is_causal=, key_mask=)`` for a mixer.

    Args:
        mechanism: A mechanism, or its name or repr.
        shape: Heads, width per head and, for mechanisms with ``traits.bounded``, the longest sequence.
        tied: Another ``Bound`` of an equal mechanism and shape, to share its weights (Linformer's layerwise sharing).
        compile: ``"auto"`` lets ``torch.compile`` fuse elementwise parts where a compiler works and that pays: the
            first call with new sizes takes seconds. ``fast_attention.explain`` tells what ran.

    Raises:
        ValueError: The shape lacks ``max_len``, ``tied`` holds another mechanism or shape, or ``compile`` is no mode.
    """

    def __init__(
        self,
        mechanism: Mechanism[Any, Any] | str,
        shape: Shape,
        *,
        tied: Bound | None = None,
        compile: Fusion = "off",
    ) -> None:
        super().__init__()
        one_of(self, "compile", compile, Fusion)
        self.fusion: Fusion = compile
        self.mechanism: Any = catalogue.parse(mechanism)
        self.shape = shape
        if self.mechanism.traits.bounded and shape.max_len < 1:
            raise ValueError(f"{self.mechanism!r} has weights for a longest sequence: give Shape(..., max_len=...)")
        if tied is not None and (tied.mechanism, tied.shape) != (self.mechanism, shape):
            raise ValueError(f"tied weights are of {tied.mechanism!r}, {tied.shape}; not {self.mechanism!r}, {shape}")
        weights: Any = self.mechanism.weights(shape) if tied is None else tied.w
        self._layout = _layout(weights)
        for name, tensor in _leaves(weights):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    @property
    def w(self) -> Any:
        """The weights as the mechanism takes them."""
        return self._assemble(self._layout, "")

    def _assemble(self, layout: Any, prefix: str) -> Any:
        if layout is None:
            return None
        if layout is Tensor:
            return getattr(self, prefix)
        kind, names, subtrees = layout
        values = [
            self._assemble(subtree, f"{prefix}_{name}" if prefix else name)
            for name, subtree in zip(names, subtrees, strict=True)
        ]
        return tuple(values) if kind is tuple else kind(*values)

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw the random weights again, in place, from torch's global generator; learned weights stay."""
        for name, fresh in _leaves(self.mechanism.redrawn(self.w, self.shape)):
            if not isinstance(fresh, nn.Parameter):
                self.get_buffer(name).copy_(fresh)

    @torch.no_grad()
    def adopt(self, weights: Any) -> None:
        """Take the values of these weights, in place, such as ``mechanism.calibrated(q, k, bound.w)`` returns.

        Raises:
            ValueError: They are not of this module's kind and sizes.
        """
        current, given = dict(_leaves(self.w)), dict(_leaves(weights))
        sizes, given_sizes = ({name: tuple(t.shape) for name, t in tree.items()} for tree in (current, given))
        if type(weights) is not type(self.w) or sizes != given_sizes:
            raise ValueError(f"{self.mechanism!r}, {self.shape} has weights {sizes}; got {given_sizes}")
        for name, tensor in given.items():
            current[name].copy_(tensor)

    def forward(
        self,
        *inputs: Tensor,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Call the mechanism with these weights: ``(q, k, v)`` for an attention, ``(x)`` for a mixer.

        Raises:
            ValueError: Sizes disagree with the shape this module was built for.
            Unsupported: The mechanism's traits deny what was asked.
        """
        self._check(inputs)
        if self.fusion == "off" or torch.compiler.is_compiling():
            return self._call(inputs, is_causal, key_mask, attn_mask, dropout)
        with fusing(self.fusion):
            return self._call(inputs, is_causal, key_mask, attn_mask, dropout)

    def _call(
        self, inputs: tuple[Tensor, ...], is_causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None,
        dropout: float,
    ) -> Tensor:  # fmt: skip
        mechanism = self.mechanism
        if isinstance(mechanism, Attention):
            q, k, v = inputs
            return mechanism(
                q, k, v, self.w, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout
            )
        if attn_mask is not None or dropout != 0.0:
            raise mechanism.refuse("an arbitrary attn_mask or attention dropout", "mask")
        return mechanism(inputs[0], self.w, is_causal=is_causal, key_mask=key_mask)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """``mechanism.decode`` with these weights."""
        if not isinstance(self.mechanism, Attention):
            raise self.mechanism.refuse("decoding", "memory")
        self._check((q, k, v))
        return self.mechanism.decode(q, k, v, self.w, state, key_mask=key_mask)

    def __prepare_scriptable__(self) -> Bound:
        """Called by ``torch.jit.script``, also for a model that holds this module.

        Raises:
            Unsupported: Always, naming what serves instead.
        """
        raise Unsupported(
            f"{self.mechanism!r} cannot be read by torch.jit.script. What would work: torch.compile(model) "
            "or torch.export.export(model, inputs)"
        )

    def extra_repr(self) -> str:
        """The mechanism and its shape."""
        return f"{self.mechanism!r}, {self.shape}"

    def _check(self, inputs: tuple[Tensor, ...]) -> None:
        first, shape, wanted = inputs[0], self.shape, 3 if isinstance(self.mechanism, Attention) else 1
        if len(inputs) != wanted:
            raise TypeError(f"{self.mechanism!r} takes {'q, k, v' if wanted == 3 else 'x'}; got {len(inputs)} tensors")
        if wanted == 3:
            self._check_heads(inputs)
        elif isinstance(first, Tensor) and first.ndim > 1 and first.shape[-1] != shape.width:
            raise ValueError(f"x has width {first.shape[-1]} and this module was built for {shape.width} ({shape})")

    def _check_heads(self, inputs: tuple[Tensor, ...]) -> None:
        """Raise unless q, k and v have the weights' heads, and q and k, where they are read, the weights' width."""
        heads, width, reads = self.shape.heads, self.shape.head_dim, self.mechanism.traits.reads
        for name, x in zip("qkv", inputs, strict=True):
            if not isinstance(x, Tensor) or x.ndim < 3:
                continue  # the mechanism's validation says what is wrong
            got = (x.shape[-3], x.shape[-1] if name in reads and name != "v" else width)
            if got != (heads, width):
                transposed = x.shape[-2] == heads and x.shape[-3] != heads
                raise ValueError(
                    f"{name} has (heads, width) {(x.shape[-3], x.shape[-1])} and this module was built for {self.shape}"
                    + (f": its shape is {tuple(x.shape)}, did you mean {name}.transpose(1, 2)?" if transposed else "")
                )


def _leaves(weights: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(weights, Tensor):
        yield prefix, weights
    elif weights is not None:
        for name, subtree in zip(_names(weights), weights, strict=True):
            yield from _leaves(subtree, f"{prefix}_{name}" if prefix else name)


def _layout(weights: Any) -> Any:
    """The tree of NamedTuples around the tensors, without the tensors."""
    if weights is None or isinstance(weights, Tensor):
        return None if weights is None else Tensor
    return type(weights), _names(weights), tuple(_layout(subtree) for subtree in weights)


def _names(weights: Any) -> tuple[str, ...]:
    return type(weights)._fields if type(weights) is not tuple else tuple(str(i) for i in range(len(weights)))
