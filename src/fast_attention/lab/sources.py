"""Opens the source of real tensors that a user named."""

from __future__ import annotations

import re

from fast_attention.lab import capture, corpus, loading
from fast_attention.lab.inputs import InputError

_SHAPES = re.compile(r"([0-9]+)x([0-9]+)")


def source(model: str | None, text: str | None, seed: int, longest: int = 0) -> capture.Source:
    """The source called ``model``: what ``loading.find`` knows, ``gaussian``, or ``HEADSxWIDTH`` (such tensors).

    A Hugging Face model's positions are extended to ``longest`` tokens where it has fewer.

    Raises:
        InputError: It cannot be read, or does not read what was given.
    """
    sizes = _SHAPES.fullmatch(model or "")
    if sizes or model == capture.GAUSSIAN:
        if text:
            raise InputError(f"--model {model} reads nothing: leave out --text")
        if sizes is None:
            return capture.Gaussian(seed=seed)
        if not all(0 < len(size.lstrip("0")) < 10 for size in sizes.groups()):
            raise InputError(f"{model}: write HEADSxWIDTH, both at least 1 and below 10^9, such as 8x64")
        heads, width = map(int, sizes.groups())
        return capture.Gaussian(heads, width, seed)
    try:
        name = model or loading.default_model()
        loading.find(name)
    except InputError as error:
        raise InputError(
            f"{error}. For a model of another kind give its heads and their width, such as 8x64"
        ) from error
    return capture.HuggingFace(name, corpus.read(text), longest)
