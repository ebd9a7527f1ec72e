"""Validates arguments before anything is computed, with errors in the caller's words."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.heads import divide, repeated
from fast_attention.engine.precision import match_precision

Function = TypeVar("Function", bound=Callable[..., Tensor])
PADDED = "padded, with key_mask=, or its texts one behind the other, with lengths="
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def tensors(**inputs: object) -> None:
    """Raise unless all are floating-point tensors of one device and, outside of autocast, of one dtype."""
    first_of: dict[str, Tensor] = {}
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__} (torch.as_tensor makes one)")
        if x.is_nested or x.layout != torch.strided:
            kind, instead = ("sparse", ".to_dense()") if not x.is_nested else ("nested", PADDED)
            raise ValueError(f"{name} is a {kind} tensor: give a dense one, {instead}")
        if x.dtype not in FLOATS:
            raise ValueError(f"{name} is {x.dtype}: give float32, float64, bfloat16 or float16, such as {name}.float()")
        for first_name, first in first_of.items():
            if x.device != first.device:
                raise ValueError(f"{first_name} is on {first.device} and {name} on {x.device}: give all on one device")
            if x.dtype != first.dtype and (x.is_meta or not torch.is_autocast_enabled(first.device.type)):
                raise ValueError(
                    f"{first_name} is {first.dtype} and {name} is {x.dtype}: give all three the same dtype"
                )
        first_of = first_of or {name: x}


def threads() -> None:
    """Apply ``torch.set_num_threads`` in the caller's thread, also if it has not computed anything yet.

    torch applies it to a new thread at its first parallel loop; until then matrix products and FFTs of MKL use OpenMP's
    number of threads, which gives other last bits.
    """
    if not torch.compiler.is_compiling():
        torch.get_num_threads()  # this call applies it


def heads(q: Tensor, k: Tensor, v: Tensor, *, same_width: bool, grouped: bool = False) -> None:
    """Raise a ``ValueError`` unless q, k and v fit; with ``same_width``, q and k must have the same width.

    ``grouped``: keys and values may have other numbers of heads.
    """
    last = -3 if grouped else -2
    leading = q.shape[:last]
    for name, shape in (("q", q.shape), ("k", k.shape), ("v", v.shape)):
        if len(shape) < 3:
            raise ValueError(f"{name} must be (..., heads, tokens, width); got shape {tuple(shape)}")
        if shape[:last] != leading:
            raise ValueError(
                f"q has leading sizes {tuple(leading)} and {name} has {tuple(shape[:last])}: they must be "
                "equal (grouped keys and values: attention(..., enable_gqa=True), or repeat_interleave first)"
            )
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k has {k.shape[-2]} tokens and v has {v.shape[-2]}: every key needs its value")
    if same_width and q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has width {q.shape[-1]} and k has width {k.shape[-1]}: they must be equal")
    if same_width and q.shape[-1] == 0:
        raise ValueError(f"q has width 0 (shape {tuple(q.shape)}): a dot product needs at least 1")


def grouped(q: Tensor, k: Tensor, v: Tensor, *, shares: bool) -> tuple[Tensor, Tensor]:
    """Keys and values (..., G, S, E) for H heads of queries, repeated unless the mechanism ``shares`` them.

    Raises:
        ValueError: G does not divide H, or other sizes do not fit.
    """
    tensors(q=q, k=k, v=v)
    heads(q, k, v, same_width=False, grouped=True)
    divide(q.shape[-3], k=k, v=v)
    if not (shares and k.shape[-3] == v.shape[-3]):
        k, v = repeated(q.shape[-3], k=k, v=v)
    return k, v


def tokens(x: Tensor, width: int | None = None) -> None:
    """Raise unless x is a floating-point tensor (..., tokens, width), of the ``width`` of a layer if given."""
    tensors(x=x)
    if x.ndim < 2:
        raise ValueError(f"x must be (..., tokens, width); got shape {tuple(x.shape)}")
    if width is not None and x.shape[-1] != width:
        raise ValueError(f"x has width {x.shape[-1]} and this layer was built for {width}")


def flag(name: str, value: object) -> None:
    """Raise a ``TypeError`` unless ``value`` is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name} must be True or False; got {value!r}")


def key_mask(mask: object, batch: tuple[int, ...], like: Tensor) -> None:
    """Raise unless ``mask`` is boolean, on the device of ``like`` (..., S, E) and broadcasts to (*batch, S)."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_mask must be a torch.Tensor of booleans; got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise ValueError(f"key_mask must be boolean (True = may be seen); got {mask.dtype}")
    shape, keys = tuple(mask.shape), like.shape[-2]
    fits = 0 < len(shape) <= len(batch) + 1 and shape[-1] == keys  # no tuples: a traced size is in none
    fits = fits and all(a == 1 or a == b for a, b in zip(reversed(shape[:-1]), reversed(batch), strict=False))
    if not fits:
        raise ValueError(f"key_mask has shape {shape}; it must be {(*batch, keys)}: one flag per key, no head axis")
    if mask.device != like.device:
        raise ValueError(f"key_mask is on {mask.device} and the keys on {like.device}: give both on the same device")


def probability(dropout: object) -> None:
    """Raise a ``ValueError`` unless ``dropout`` is a number from 0 to 1."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout is a probability, from 0 to 1; got {dropout!r}")


def scores(attn_mask: object, dropout: object, q: Tensor, k: Tensor) -> None:
    """Raise unless the mask is None or broadcasts to (..., H, L, S) and ``dropout`` is a probability."""
    probability(dropout)
    if attn_mask is None:
        return
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor; got {type(attn_mask).__name__}")
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOATS:
        raise ValueError(
            f"attn_mask must be boolean (True = may be seen) or floating point (added); got {attn_mask.dtype}"
        )
    shape, full = tuple(attn_mask.shape), (*q.shape[:-1], k.shape[-2])
    pairs = zip(reversed(shape), reversed(full), strict=False)
    if len(shape) > len(full) or not all(a == 1 or a == b for a, b in pairs):
        raise ValueError(f"attn_mask has shape {shape}; it must broadcast to (..., heads, queries, keys) {full}")
    if attn_mask.device != q.device:
        raise ValueError(f"attn_mask is on {attn_mask.device} and q on {q.device}: give both on the same device")


def empty(*inputs: Tensor) -> bool:
    """Whether one of the inputs has no elements, or is on the meta device."""
    for x in inputs:  # noqa: SIM110 (a generator costs a frame a tensor)
        if x.numel() == 0 or x.is_meta:
            return True
    return False


def zeros(shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
    """Zeros in the dtype of the first input, through which every input gets a gradient of zeros."""
    zero = sum((x.flatten()[:0].sum() for x in inputs[1:]), inputs[0].flatten()[:0].sum())
    return inputs[0].new_zeros(shape) + zero.to(inputs[0].dtype)


def without_masked(k: Tensor, v: Tensor, key_mask: Tensor | None, names: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with zeros where ``key_mask`` (..., S) is False, and the mask as (..., 1, S).

    Masked keys and values are then finite in every formula, and their gradients are zero. Keys that are not read stay.
    """
    if key_mask is None:
        return k, v, None
    mask = key_mask[..., None, :]
    return masks.drop(k, mask) if "k" in names else k, masks.drop(v, mask), mask


def weights(mechanism: Any, w: Any, x: Tensor) -> Any:
    """Return ``w``, as wide as the tokens ``x`` ask; raise a ``ValueError`` if it is missing or for other heads."""
    if not mechanism.needs_weights:
        return w
    if not isinstance(w, tuple | Tensor):
        raise ValueError(f"w is a {type(w).__name__}: give what {mechanism!r}.weights(Shape(...)) returned, or bound.w")
    if isinstance(w, tuple) and not w:
        raise ValueError(
            f"{mechanism!r} needs its weights: pass w=mechanism.weights(Shape(heads=..., head_dim=..., max_len=...)) "
            "or call it through fast_attention.Bound"
        )
    heads = mechanism.heads_of(w)
    if heads is not None and heads != x.shape[-3]:
        raise ValueError(
            f"{mechanism!r}: its weights are for {heads} heads and q has {x.shape[-3]} (shape {tuple(x.shape)}): give "
            f"weights(Shape(heads={x.shape[-3]}, ...))"
        )
    return match_precision(w, x)


def rows(inputs: dict[str, Tensor], *, same_width: bool) -> None:
    """Raise a ``ValueError`` unless these are (..., tokens, width) and every key has its value.

    With ``same_width``, q and k must have the same width.
    """
    for name, x in inputs.items():
        if x.ndim < 2:
            raise ValueError(f"{name} must be (..., tokens, width); got shape {tuple(x.shape)}")
    if {"k", "v"} <= inputs.keys() and (keys := inputs["k"].shape[-2]) != (values := inputs["v"].shape[-2]):
        raise ValueError(f"k has {keys} tokens and v has {values}: every key needs its value")
    if same_width and (width := inputs["q"].shape[-1]) != (other := inputs["k"].shape[-1]):
        raise ValueError(f"q has width {width} and k has width {other}: they must be equal")


def checked(
    function: Function, kind: Callable[..., Any] | None = None, *,
    masked: Callable[[Callable[..., Tensor], dict[str, Any]], Tensor] | None = None,
) -> Function:  # fmt: skip
    """Wrap a pure function of q, k, v or of x in the validation of a mechanism's call, and of the ``kind``'s settings.

    Its ``key_mask`` is (..., S); masked keys and values are replaced by zeros, and empty inputs give zeros. Where there
    is a mask, ``masked(function, arguments)`` calls the function, if given.
    """
    parameters = inspect.signature(function).parameters
    names, flags = tuple(parameters), [name for name, each in parameters.items() if isinstance(each.default, bool)]
    last = [str(parameters[name].annotation).split()[-1] for name in ("q", "k") if name in names]  # axis
    same_width = len(last) == 2 and last[0] == last[1]
    of_kind = () if kind is None else inspect.signature(kind).parameters.keys() - {"bias", "sinks"}  # tensors here

    @functools.wraps(function)
    def validated(*args: Any, **options: Any) -> Tensor:
        arguments = dict(zip(names, args, strict=False)) | options
        inputs = {name: arguments[name] for name in ("q", "k", "v", "x") if name in arguments}
        if len(inputs) == len({"q", "k", "v", "x"} & set(names)):  # else the function says what is missing
            tensors(**inputs)
            rows(inputs, same_width=same_width)
            threads()
            for name in flags:
                flag(name, arguments.get(name, False))
            given = {name: arguments[name] for name in arguments if name in of_kind}
            if kind is not None and given and not torch.compiler.is_compiling():
                mechanism = kind(**given)
                arguments |= {name: getattr(mechanism, name) for name in given}
            if "q" in inputs and "dropout" in names:
                scores(arguments.get("attn_mask"), arguments.get("dropout", 0.0), inputs["q"], inputs["k"])
            values = inputs["v" if "v" in inputs else "x"]
            if empty(*inputs.values()) and "scores" not in names:
                return zeros((*inputs.get("q", values).shape[:-1], values.shape[-1]), *inputs.values())
            arguments, mask = arguments | inputs, arguments.get("key_mask")
            if mask is not None:
                key_mask(mask, tuple(values.shape[: -3 if "v" in inputs else -2]), values)
                mask = mask[..., None, :] if "v" in inputs and values.ndim > 2 else mask
                visible = {name: masks.drop(x, mask) for name, x in inputs.items() if name != "q"}
                arguments = arguments | visible | {"key_mask": mask}
                if masked is not None:
                    return masked(function, arguments)
        return function(**arguments)

    return validated  # type: ignore[return-value]
