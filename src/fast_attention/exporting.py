"""Exports modules as programs of torch.export and as ONNX files, with dynamic lengths.

A program is traced at one example and valid for every size that is left open. While it is traced, every mechanism
takes its plain form, in operations that ONNX has too.
"""

from __future__ import annotations

import os
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fast_attention import files
from fast_attention.mechanism import Unsupported
from fast_attention.nn.bound import Bound
from fast_attention.refusals import is_module

Inputs = Mapping[str, Tensor]
Open = Mapping[str, Mapping[int, Any]]  # input -> axis -> torch.export.Dim


def program(module: nn.Module, inputs: Inputs, open_sizes: Open) -> ExportedProgram:
    """``torch.export`` of a module in evaluation mode.

    Args:
        module: Anything; each mechanism in it is asked whether it can be exported.
        inputs: An example of the keyword arguments of ``forward``, with a size of 2 or more along every open axis:
            torch takes a size of 0 or 1 for a constant.
        open_sizes: Per input the axes whose size is left open, as ``torch.export.Dim``:
            ``{"x": {1: Dim("length", min=2, max=512)}}``.

    Raises:
        Unsupported: A mechanism's traits deny it, or torch cannot trace the module.
        ValueError: ``open_sizes`` names something that is no input or no axis of one, or the example does not fit it or
            the module.
        TypeError: ``module`` is no module, or an open input no tensor.
    """
    is_module("module", module)
    _fit(inputs, open_sizes)
    for part in module.modules():
        if isinstance(part, Bound) and not part.mechanism.traits.export:
            raise part.mechanism.refuse("export with an open length", "export")
    sizes = {name: open_sizes.get(name) for name in inputs}
    try:
        with torch.no_grad():
            return torch.export.export(module, (), dict(inputs), dynamic_shapes=sizes)
    except Unsupported:
        raise
    except Exception as error:
        _take(module, inputs)
        what = f"{type(module).__name__} with these sizes open"
        raise Unsupported(f"torch.export cannot trace {what}: {_constraints(error) or _root(error)}") from error


def _fit(inputs: Inputs, open_sizes: Open) -> None:
    """Raise unless the inputs are an example of the open sizes."""
    if unknown := open_sizes.keys() - inputs.keys():
        raise ValueError(f"open_sizes names {', '.join(sorted(unknown))}, and the inputs are {', '.join(inputs)}")
    sizes: dict[str, tuple[str, int]] = {}
    for name, axes in open_sizes.items():
        x: Any = inputs[name]
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
        for axis, dim in axes.items():
            if not -x.ndim <= axis < x.ndim:
                raise ValueError(f"open_sizes names axis {axis} of {name}, whose shape is {tuple(x.shape)}")
            if dim is None or isinstance(dim, int) or dim == Dim.STATIC:
                continue
            size, low, high = x.shape[axis], getattr(dim, "min", None), getattr(dim, "max", None)
            called = getattr(dim, "__name__", "")  # none of those that torch may find for itself, as Dim.AUTO
            along = f"{name} has size {size} along {called or f'axis {axis}'!r}"
            if size < 2:
                raise ValueError(f"{along}, which is open: give an example of 2 or more")
            if (low is not None and size < low) or (high is not None and size > high):
                raise ValueError(f"{along}, which is open from {low} to {high}: give an example between them")
            first, expected = sizes.setdefault(called, (name, size)) if called else (name, size)
            if size != expected:
                raise ValueError(f"{along} and {first} has {expected}: give sizes that differ a Dim each")


def _take(module: nn.Module, inputs: Inputs) -> None:
    """Raise a ``ValueError`` if the module does not take its example at all, whatever stays open."""
    try:
        with torch.no_grad():
            module(**inputs)
    except Exception as error:
        raise ValueError(f"{type(module).__name__} does not take its example: {_root(error)}") from error


def save(module: nn.Module, inputs: Inputs, path: str | os.PathLike[str], open_sizes: Open) -> None:
    """Write ``program`` as a file for ``torch.export.load`` (.pt2), whole or not at all."""
    exported = program(module, inputs, open_sizes)
    with files.atomic(path) as partial, open(partial, "wb") as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No complete tensor found")  # a weight that is part of a larger one
        torch.export.save(exported, file)


def onnx(
    module: nn.Module,
    inputs: Inputs,
    path: str | os.PathLike[str],
    open_sizes: Open,
    *,
    opset: int | None = None,
    external_data: bool | None = None,
) -> None:
    """Write a module as an ONNX file, whole or not at all. Needs the extra ``onnx``.

    Args:
        module, inputs, open_sizes: As for ``program``; the file's inputs have the same names, its outputs are called
            ``output``, or ``output_0``, ``output_1`` and so on.
        path: Where to.
        opset: The version of ONNX's operators; torch's own choice unless given.
        external_data: Whether the weights go into a second file beside it; None: where one file would be too large.

    Raises:
        Unsupported: A mechanism's traits deny it, torch cannot trace the module, or ONNX lacks an operator.
    """
    traced = program(module, inputs, open_sizes)
    returned = len(traced.graph_signature.user_outputs)
    names = ["output"] if returned == 1 else [f"output_{i}" for i in range(returned)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's and onnx's own internals
            onnx_program = torch.onnx.export(
                traced, dynamo=True, opset_version=opset, output_names=names, verbose=False, optimize=True
            )
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise Unsupported(f"{type(module).__name__} cannot be written as ONNX: {_root(error)}") from error
    assert onnx_program is not None
    with files.atomic_group(path) as target:
        onnx_program.save(target, external_data=external_data)


def load(path: str | os.PathLike[str]) -> Callable[[Inputs], tuple[Tensor, ...]]:
    """Load a file of ``save`` or ``onnx`` as a function of the inputs by name; ``.onnx`` files run in ONNX Runtime.

    Raises:
        FileNotFoundError: There is no such file.
    """
    path = Path(path)
    files.settle(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; save or onnx writes one")
    if path.suffix != ".onnx":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # which torch 2.11 only reads
            exported = torch.export.load(path).module()

        def run_program(inputs: Inputs) -> tuple[Tensor, ...]:
            with torch.no_grad():
                out = exported(**inputs)
            return (out,) if isinstance(out, Tensor) else tuple(out)

        return run_program

    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run_session(inputs: Inputs) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(out) for out in session.run(None, {n: x.numpy() for n, x in inputs.items()}))

    return run_session


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two outputs as a fraction of the largest number of the first.

    Infinite if they differ in shape or in what is not finite.
    """
    ours, theirs, finite = ours.detach(), theirs.detach(), ours.isfinite()
    if ours.shape != theirs.shape or not bool((finite == theirs.isfinite()).all()):
        return float("inf")
    scale, largest = (float(x[finite].abs().max()) if bool(finite.any()) else 0.0 for x in (ours, ours - theirs))
    return largest / scale if scale else largest


def _root(error: BaseException) -> str:
    """The root cause of an error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = re.split("The error above occurred|For more information about", str(error))[0]  # torch's advice about itself
    return f"{type(error).__name__}: {textwrap.shorten(said, 300, placeholder=' ...')}"


def _constraints(error: BaseException) -> str:
    """Name the sizes that torch could not keep open, and what it suggests; empty for any other error."""
    broken = re.findall(r"^  - (.*?)\.?(?: If you.*)?$", str(error), re.MULTILINE)
    fixes = re.search(r"Suggested fixes:\n((?: +.*(?:\n|$))+)", str(error))
    would_work = f". What would work: {', '.join(line.strip() for line in fixes[1].splitlines())}" if fixes else ""
    return "; ".join(dict.fromkeys(broken)) + would_work if broken else ""


__all__ = [
    "difference", "load", "onnx", "program", "save",
]  # fmt: skip
