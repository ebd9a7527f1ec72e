"""Peers that mix whole tokens without queries: Fourier transforms, gated units, token MLPs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.competitors import Peer, Sizes
from benchmarks.functions import Wrapped

EXPANSION, HIDDEN = 6, 256  # as in our GMLP() and MLPMixer()


def fnet_pytorch(sizes: Sizes) -> nn.Module:
    with warnings.catch_warnings():  # a deprecated decorator runs when it is imported
        warnings.simplefilter("ignore")
        import fnet

    return fnet.FourierFFTLayer()


def labml_fnet(sizes: Sizes) -> nn.Module:
    from labml_nn.transformers.fnet import FNetMix

    def call(inner: nn.Module, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)  # sequence first
        return inner(x, x, x).transpose(0, 1)

    return Wrapped(FNetMix(), call)


def transformers_fnet(sizes: Sizes) -> nn.Module:
    from transformers import FNetConfig
    from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform

    made = FNetBasicFourierTransform(FNetConfig(hidden_size=sizes.width, max_position_embeddings=sizes.length))
    return Wrapped(made, lambda inner, x: inner(x)[0])


def g_mlp(*, is_causal: bool) -> Callable[[Sizes], nn.Module]:
    def build(sizes: Sizes) -> nn.Module:
        from g_mlp_pytorch import gMLPBlock

        return gMLPBlock(dim=sizes.width, dim_ff=EXPANSION * sizes.width, seq_len=sizes.length, causal=is_causal)

    return build


class LabmlGated(nn.Module):
    """labml-nn's gMLP block without the norm before it and the shortcut around it, which ours does not have."""

    def __init__(self, sizes: Sizes, is_causal: bool) -> None:
        super().__init__()
        from labml_nn.transformers.gmlp import GMLPBlock

        self.inner = GMLPBlock(sizes.width, EXPANSION * sizes.width, sizes.length)
        self.register_buffer("mask", torch.ones(sizes.length, sizes.length).tril()[..., None] if is_causal else None)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner.activation(self.inner.proj1(x.transpose(0, 1)))
        mask = None if self.mask is None else self.mask[: x.shape[1], : x.shape[1]]
        return self.inner.proj2(self.inner.sgu(z, mask)).transpose(0, 1)


def mixer(sizes: Sizes) -> nn.Module:
    from functools import partial

    from mlp_mixer_pytorch.mlp_mixer_pytorch import FeedForward

    return FeedForward(sizes.length, HIDDEN, dense=partial(nn.Conv1d, kernel_size=1))


def fourier_truth(made: Any, x: Tensor) -> Tensor:
    """``Re F_tokens(F_channels(x))`` (arXiv 2105.03824)."""
    return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


def mixer_truth(made: Any, x: Tensor) -> Tensor:
    """``W2 gelu(W1 x + b1) + b2`` along the tokens with the peer's own weights."""
    first, last = made[0], made[3]
    h = F.gelu(first.weight.double().squeeze(-1) @ x + first.bias.double()[:, None])
    return last.weight.double().squeeze(-1) @ h + last.bias.double()[:, None]


PEERS = [
    Peer("fnet-pytorch", "fnet-pytorch", "FNet()", fnet_pytorch, "mixer", truth=fourier_truth),
    Peer("labml-nn FNet", "labml-nn", "FNet()", labml_fnet, "mixer", truth=fourier_truth),
    Peer("transformers FNet", "transformers", "FNet()", transformers_fnet, "mixer", truth=fourier_truth),
    *(Peer(f"g-mlp-pytorch{', causal' * is_causal}", "g-mlp-pytorch", "GMLP()", g_mlp(is_causal=is_causal), "mixer",
           is_causal=is_causal, order=2.0)
      for is_causal in (False, True)),
    *(Peer(f"labml-nn gMLP{', causal' * is_causal}", "labml-nn", "GMLP()",
           lambda sizes, c=is_causal: LabmlGated(sizes, c), "mixer", is_causal=is_causal, order=2.0)
      for is_causal in (False, True)),
    Peer("mlp-mixer-pytorch", "mlp-mixer-pytorch", "MLPMixer()", mixer, "mixer", truth=mixer_truth),
]  # fmt: skip
