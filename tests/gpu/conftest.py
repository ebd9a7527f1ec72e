"""Kernels on a GPU where there is one; else Triton's interpreter runs them on the CPU's tensors: slow, exact.

Triton decides when it is imported whether it interprets, so these tests have a run of their own: ``make kernels``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operations take tensors of the CPU for a GPU's."""
    from fast_attention.engine import operation

    if INTERPRETED:
        monkeypatch.setattr(operation, "on_gpu", lambda x: x.device.type == "cpu")


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """Where tensors are made."""
    torch.manual_seed(0)
    with torch.device("cpu" if INTERPRETED else "cuda") as made:
        yield made


@contextmanager
def tf32_cut_off() -> Iterator[None]:
    """Let the interpreter's products in TF32 read what tensor cores read of their operands: sign, exponent, ten bits.

    It multiplies all digits otherwise, and what a GPU gets wrong by leaving some out is right there.
    """
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    whole = interpreter.InterpreterBuilder.create_dot

    def read(x: Any) -> Any:
        return interpreter.TensorHandle((x.data.view(np.uint32) & 0xFFFFE000).view(np.float32), x.dtype)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
        if precision == interpreter._ir.INPUT_PRECISION.TF32 and a.data.dtype == np.float32:
            a, b = read(a), read(b)
        return whole(self, a, b, d, precision, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.fixture(autouse=True, scope="session")
def tensor_cores() -> Iterator[None]:
    with tf32_cut_off():
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Spare the interpreter three things it does anew each time; they were two thirds of these tests' time.

    It puts its functions into Triton's language with every function it calls, to be sure of the modules which that
    function sees; here all there are are patched once a launch. It makes its table of numpy's types with every array.
    It computes sums and products of 32-bit integers twice, to see them overflow, which no size of these tests does.
    """
    if not INTERPRETED:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    inside: list[Any] = []
    types: dict[str, Any] = {}
    patch_language, numpy_type, builder = (
        interpreter._patch_lang,
        interpreter._get_np_dtype,
        interpreter.interpreter_builder,
    )

    def patched(function: Any) -> Any:
        if inside:
            return None
        inside.append(function)
        scope = patch_language(SimpleNamespace(__globals__={"tl": language, "core": language.core}))

        def restored() -> None:
            inside.clear()
            scope.restore()

        return SimpleNamespace(restore=restored)

    def looked_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in types:
            types[name] = numpy_type(dtype)
        return types[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patched)
        patch.setattr(interpreter, "_get_np_dtype", looked_up)
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield
