"""Captures real queries, keys and values from a model of this library: written by ``train``, or shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.integrations import swap
from fast_attention.lab import corpus, loading
from fast_attention.lab.calls import reading
from fast_attention.lab.capture import Layer, bound_layers
from fast_attention.lab.corpus import Corpus
from fast_attention.lab.inputs import InputError
from fast_attention.mechanism import Attention, Unsupported
from fast_attention.nn.bound import Bound
from fast_attention.nn.models import Model
from fast_attention.nn.token_mixer import TokenMixer
from fast_attention.tasks.proteins import encoded


class LibrarySource:
    """A model of this library reading proteins or text, residue by residue or byte by byte."""

    extension = ""

    def __init__(self, folder: Path, name: str, text: str | None = None, fasta: str | None = None) -> None:
        self.model = loading.load(folder)
        self.name, config = name, self.model.config
        if config.reads not in ("bytes", "residues"):
            raise InputError(f"{name}: it reads numbers of its task's own, neither text nor proteins")
        self.corpus = _corpus(name, config.reads, text, fasta)
        self.context = config.longest
        self.heads, self.head_dim, self.is_causal = config.heads, config.width // config.heads, config.causal
        kind = "decoder" if config.causal else "encoder"
        self.title = (
            f"{name} ({kind} of this library, {config.layers} layers, {config.heads} heads of width {self.head_dim}) "
            f"reading {self.corpus.name}"
        )

    @torch.no_grad()
    def layers(self, length: int) -> tuple[list[Layer], str]:
        """Run the model once and keep what every layer that has queries and keys attends with.

        Raises:
            InputError: No layer has both.
        """
        tokens, read = self.tokens(length)
        calls = reading(self.model, tokens)
        asking = [call for call in calls if {*"qk"} <= {*call.bound.mechanism.traits.reads}]
        layers = bound_layers(asking)
        if not layers:
            raise InputError(f"{self.name}: none of its mechanisms has queries and keys")
        return layers, read

    def tokens(self, length: int) -> tuple[Tensor, str]:
        """Up to ``length`` token numbers (1, n) of the corpus, and what they are."""
        name, passage = self.corpus.passage(length)
        numbers = encoded(passage) if self.model.config.reads == "residues" else torch.tensor(list(passage.encode()))
        tokens = numbers[:length].long()[None]
        return tokens, f"the first {tokens.shape[1]} {self.model.config.reads} of {name}"


def _corpus(name: str, reads: str, text: str | None, fasta: str | None) -> Corpus:
    if reads == "residues" and text:
        raise InputError(f"{name} reads proteins: give --fasta, not --text")
    if reads == "bytes" and fasta:
        raise InputError(f"{name} reads text: give --text, not --fasta")
    return corpus.read(text, fasta or (corpus.SAMPLE if reads == "residues" else None))


def replace(model: nn.Module, mechanism: Any) -> str:
    """Swap a mechanism into a model of transformers, or into the layers of one of ours that read what it reads.

    Returns:
        What was replaced, in words.

    Raises:
        Unsupported: There is no such layer.
    """
    if not isinstance(model, Model):
        return str(swap(model, mechanism))
    reads = {*mechanism.traits.reads} if isinstance(mechanism, Attention) else {"x"}
    mixers = [part for part in model.modules() if isinstance(part, TokenMixer)]
    able = [mixer for mixer in mixers if reads <= {*mixer.mechanism.traits.reads} - {"x"}]
    if not able:
        raise Unsupported(f"{mechanism!r} can stand in for no layer of this model: it reads other projections")
    for mixer in able:
        like = mixer.in_proj.weight
        mixer.attention = Bound(mechanism, mixer.attention.shape).to(like.device, like.dtype)
    return f"{len(able)} of {len(mixers)} layers replaced by {mechanism!r}"
