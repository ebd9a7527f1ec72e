"""Real queries, keys and values from a model of this library: a folder that ``train`` made, or the shipped one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fast_attention import catalogue, data
from fast_attention.lab import corpus
from fast_attention.lab.capture import Layer
from fast_attention.lab.corpus import Corpus
from fast_attention.lab.inputs import InputError
from fast_attention.mechanism import Attention
from fast_attention.nn import saving
from fast_attention.nn.token_mixer import TokenMixer
from fast_attention.tasks.proteins import encoded


def place(name: str | None) -> Path | None:
    """The folder of a model of this library that ``name`` means: a shipped one, a run's, a model's; else None."""
    if name is None:
        return None
    for folder in (Path(name) / "model", Path(name)):
        try:
            held = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(held, dict) and held.get("format") == saving.FORMAT:
            return folder
    return data.models().get(name)


class Own:
    """A model of this library reading proteins or text, residue by residue or byte by byte."""

    def __init__(self, folder: Path, name: str, text: str | None = None, fasta: str | None = None) -> None:
        try:
            self.model = saving.load(folder)
        except (OSError, ValueError) as error:
            raise InputError(f"--model {name}: {error}") from error
        self.name, config = name, self.model.config
        if config.reads not in ("bytes", "residues"):
            raise InputError(f"--model {name}: it reads numbers of its task's own, neither text nor proteins")
        self.corpus = _corpus(name, config.reads, text, fasta)
        bounded = any(catalogue.parse(each).traits.bounded for each in config.mechanisms)
        self.context = config.max_len if bounded or config.positions == "learned" else None
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
        found: list[Layer] = []

        def keep(module: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
            q, k, v = inputs[:3]
            found.append(Layer(f"layer {len(found)}", q, k, v, bool(options.get("is_causal", False))))

        mixers = [module for module in self.model.modules() if isinstance(module, TokenMixer)]
        asking = [m for m in mixers if isinstance(m.mechanism, Attention) and {*"qk"} <= {*m.mechanism.traits.reads}]
        hooks = [mixer.attention.register_forward_pre_hook(keep, with_kwargs=True) for mixer in asking]
        try:
            self.model(tokens)
        finally:
            for hook in hooks:
                hook.remove()
        if not found:
            raise InputError(f"--model {self.name}: none of its mechanisms has queries and keys")
        return found, read

    def tokens(self, length: int) -> tuple[Tensor, str]:
        """Up to ``length`` token numbers (1, n) of the corpus, and what they are."""
        name, passage = self.corpus.passage(length)
        numbers = encoded(passage) if self.model.config.reads == "residues" else torch.tensor(list(passage.encode()))
        tokens = numbers[:length].long()[None]
        return tokens, f"the first {tokens.shape[1]} {self.model.config.reads} of {name}"


def _corpus(name: str, reads: str, text: str | None, fasta: str | None) -> Corpus:
    if reads == "residues" and text:
        raise InputError(f"--model {name} reads proteins: give --fasta, not --text")
    if reads == "bytes" and fasta:
        raise InputError(f"--model {name} reads text: give --text, not --fasta")
    return corpus.read(text, fasta or (corpus.SAMPLE if reads == "residues" else None))
