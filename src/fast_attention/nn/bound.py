"""``Bound``: a mechanism and a shape make a module with parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fast_attention import catalogue, parallel
from fast_attention.biases.sinks import SINKS_ARE_TAKEN, TakesSinks
from fast_attention.engine import heads
from fast_attention.engine.precision import rebuild
from fast_attention.mechanism import Attention, Mechanism, Shape, Unsupported
from fast_attention.packed import CuSeqlens, Lengths
from fast_attention.parallel.spreading import Spread


class Bound(Spread, nn.Module):
    """A mechanism and its weights as a module: learned weights are parameters, drawn or fixed ones are buffers.

    Both are in the ``state_dict``, so a saved model keeps its random features. Call it as the mechanism itself:
    ``bound(q, k, v, is_causal=, key_mask=)`` for an attention, ``bound(x, is_causal=, key_mask=)`` for a mixer; also on
    packed sequences, with ``cu_seqlens=`` or ``lengths=``.

    Args:
        mechanism: A mechanism, or its name or repr.
        shape: Heads, width per head and, for mechanisms with ``traits.needs_max_len``, the longest sequence.
        tied: Another ``Bound`` of an equal mechanism and shape, to share its weights (Linformer's layerwise sharing).

    Raises:
        TypeError: ``shape`` is none.
        ValueError: The shape lacks ``max_len``, or ``tied`` holds another mechanism or shape.
    """

    def __init__(self, mechanism: Mechanism[Any, Any] | str, shape: Shape, *, tied: Bound | None = None) -> None:
        super().__init__()
        self.mechanism: Any = catalogue.parse(mechanism)
        self.shape = shape
        if not isinstance(shape, Shape):
            raise TypeError(f"shape is a Shape(heads=..., head_dim=..., max_len=...); got {shape!r}")
        if self.mechanism.traits.needs_max_len and shape.max_len < 1:
            raise ValueError(f"{self.mechanism!r} has weights for a longest sequence: give its tokens by max_len=...")
        if tied is not None and (tied.mechanism, tied.shape) != (self.mechanism, shape):
            raise ValueError(f"tied weights are of {tied.mechanism!r}, {tied.shape}; not {self.mechanism!r}, {shape}")
        weights: Any = self.mechanism.weights(shape) if tied is None else tied.w
        named = dict(_leaves(weights))
        self._is_weightless, names = not named, iter(named)
        self._names = tree_map_only(Tensor, lambda _: next(names), weights)
        for name, tensor in named.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    @property
    def w(self) -> Any:
        """The weights as the mechanism takes them."""
        return () if self._is_weightless else self._assemble(self._names)

    def _assemble(self, names: Any) -> Any:
        """A tree of weights, from one with the names of the tensors."""
        if isinstance(names, tuple):
            return rebuild(names, [self._assemble(each) for each in names])
        return None if names is None else getattr(self, names)

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw the random weights again, in place, from torch's global generator; learned weights stay."""
        for name, fresh in _leaves(self.mechanism.redrawn(self.w, self.shape)):
            if not isinstance(fresh, nn.Parameter):
                self.get_buffer(name).copy_(fresh)

    def reset_parameters(self) -> None:
        """Draw all weights again, in place, learned ones too: what ``to_empty`` left of a module on the meta device."""
        self.adopt(self.mechanism.weights(self.shape))

    @torch.no_grad()
    def adopt(self, weights: Any) -> None:
        """Take the values of these weights, in place, such as ``mechanism.calibrated(q, k, bound.w)`` returns.

        Raises:
            ValueError: They are not of this module's kind and sizes.
        """
        current, given = dict(_leaves(self.w)), dict(_leaves(weights))
        sizes, given_sizes = ({name: tuple(t.shape) for name, t in tree.items()} for tree in (current, given))
        if (type(weights) is not type(self.w) and current) or sizes != given_sizes:
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
        cu_seqlens: CuSeqlens | None = None,
        lengths: Lengths | None = None,
        enable_gqa: bool = False,
        group: Any = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Call the mechanism with these weights: ``(q, k, v)`` for an attention, ``(x)`` for a mixer.

        Args:
            inputs: Queries (..., H, L, E), keys (..., H, S, E) and values (..., H, S, Ev), or tokens (..., N, E).
            is_causal: As in the mechanism's call, and so are ``key_mask``, ``attn_mask`` and ``dropout``.
            key_mask: Boolean (..., S), True = may be seen.
            attn_mask: Boolean or additive, for mechanisms with ``traits.mask``.
            dropout: Probability with which an attention weight is dropped.
            cu_seqlens: The tokens are several sequences one after another, which do not see each other: where each
                begins and the last one ends, or a pair for queries and keys, as in ``fast_attention.attention``.
            lengths: Instead of it the number of tokens of each sequence, or a pair.
            enable_gqa: Let keys and values have fewer heads, as in ``fast_attention.attention``.
            group: The processes whose tokens together are the sequence, as in ``fast_attention.attention``.
            sinks: The scores (H,) that ``sinks=True`` would learn here, where another module holds them.

        Raises:
            ValueError: Sizes disagree with the shape this module was built for, or ``cu_seqlens`` do not rise from 0 to
                the number of tokens.
            Unsupported: The mechanism's traits deny what was asked.
        """
        self._check(inputs, enable_gqa)
        mechanism, w = self._with(sinks)
        return parallel.run(
            mechanism, inputs, w, group=self.group_of(group), is_causal=is_causal, key_mask=key_mask,
            attn_mask=attn_mask, dropout=dropout, cu_seqlens=cu_seqlens, lengths=lengths, enable_gqa=enable_gqa,
        )  # fmt: skip

    def _with(self, sinks: Tensor | None) -> tuple[Any, Any]:
        """The mechanism and its weights, of which another module may hold the sinks."""
        if sinks is None:
            return self.mechanism, self.w
        if not isinstance(self.mechanism, TakesSinks) or not self.mechanism.takes_sinks:
            raise Unsupported(f"{self.mechanism!r} takes no sinks of another module: {SINKS_ARE_TAKEN}")
        if not isinstance(sinks, Tensor) or sinks.shape != (self.shape.heads,):
            what = f"shape {tuple(sinks.shape)}" if isinstance(sinks, Tensor) else type(sinks).__name__
            raise ValueError(
                f"sinks must be a tensor of shape ({self.shape.heads},), a score for each head; got {what}"
            )
        return self.mechanism.with_sinks(sinks, self.w)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any = None, *, key_mask: Tensor | None = None, group: Any = None,
        sinks: Tensor | None = None, enable_gqa: bool = False,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """``mechanism.decode`` with these weights; over the processes of a ``group``, ``parallel.decode``."""
        if not isinstance(self.mechanism, Attention):
            raise self.mechanism.refuse("decoding", "memory")
        self._check((q, k, v), enable_gqa)
        mechanism, w = self._with(sinks)
        if (group := self.group_of(group)) is not None:
            if enable_gqa:
                k, v = heads.repeated(self.shape.heads, k=k, v=v)
            return parallel.decode(mechanism, q, k, v, w, state, group=group, key_mask=key_mask)
        return mechanism.decode(q, k, v, w, state, key_mask=key_mask, enable_gqa=enable_gqa)

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

    def _check(self, inputs: tuple[Tensor, ...], enable_gqa: bool = False) -> None:
        names = "q, k, v" if isinstance(self.mechanism, Attention) else "x"
        if len(inputs) != len(names.split()):
            raise TypeError(f"{self.mechanism!r} takes {names}; got {len(inputs)} tensors")
        first, shape = inputs[0], self.shape
        if len(inputs) == 3:
            self._check_heads(inputs[:1] if enable_gqa else inputs)
        elif isinstance(first, Tensor) and first.ndim > 1 and first.shape[-1] != shape.width:
            raise ValueError(f"x has width {first.shape[-1]} and this module was built for {shape.width} ({shape})")

    def _check_heads(self, inputs: tuple[Tensor, ...]) -> None:
        """Raise unless q, k and v have the weights' heads, and q and k, where they are read, the weights' width."""
        heads, width, names = self.shape.heads, self.shape.head_dim, self.mechanism.traits.inputs
        for name, x in zip("qkv", inputs, strict=False):
            if not isinstance(x, Tensor) or len(shape := x.shape) < 3:
                continue  # the mechanism's validation says what is wrong
            if shape[-3] != heads or (name != "v" and name in names and shape[-1] != width):
                transposed = shape[-2] == heads and shape[-3] != heads
                raise ValueError(
                    f"{name} has (heads, width) {(shape[-3], shape[-1])} and this module was built for {self.shape}"
                    + (f": its shape is {tuple(shape)}, did you mean {name}.transpose(1, 2)?" if transposed else "")
                )


def _leaves(weights: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree of weights, with the names that they have in a module."""
    if isinstance(weights, Tensor):
        yield prefix, weights
    elif weights is not None:
        for name, subtree in zip(getattr(weights, "_fields", range(len(weights))), weights, strict=True):
            yield from _leaves(subtree, f"{prefix}_{name}" if prefix else str(name))
