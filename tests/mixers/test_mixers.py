"""FNet, gMLP and MLP-Mixer: the identities of mathematics section 13, items 18 and 19."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import GMLP, Bound, FNet, MLPMixer, Shape, Unsupported
from fast_attention.functional import fourier_mix, gated_mlp, token_mlp
from fast_attention.mechanisms.mixers.fast import affine, lower
from fast_attention.mechanisms.mixers.gmlp import spatial_weights
from fast_attention.mechanisms.mixers.mlp_mixer import TokenMLP
from tests.cases import MIXERS, bind, some_keys

LEARNED: list[Any] = [
    GMLP(),
    GMLP(expansion=2, attention_dim=8),
    GMLP(toeplitz=True),
    MLPMixer(),
    MLPMixer(token_hidden=None),
]


def tokens(length: int, width: int = 16, device: Any = "cpu", dtype: Any = torch.float64) -> Tensor:
    return torch.randn(2, length, width, dtype=dtype).to(device)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def fourier_matrix(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    place = torch.arange(size, dtype=torch.float64, device=device)
    angle = -2 * math.pi * place * place[:, None] / size
    return angle.cos(), angle.sin()


@pytest.mark.parametrize(("length", "width"), [(1, 16), (2, 6), (13, 16), (16, 7), (64, 1), (97, 31)])
def test_fnet_is_two_matrix_products(length: int, width: int, device: torch.device) -> None:
    """y = Cs X Ch - Ss X Sh, and torch's fft2, for odd and even sizes alike."""
    x = tokens(length, width, device)
    (cos_s, sin_s), (cos_h, sin_h) = fourier_matrix(length, device), fourier_matrix(width, device)
    y = fourier_mix(x)
    close(y, cos_s @ x @ cos_h - sin_s @ x @ sin_h, 1e-10)
    close(y, torch.fft.fft2(x).real, 1e-10)
    close(fourier_mix(x, norm="ortho"), y / math.sqrt(length * width), 1e-10)


@pytest.mark.parametrize("mechanism", MIXERS, ids=repr)
def test_a_new_thread_computes_as_the_first_one(mechanism: Any) -> None:
    """To the last bit, though torch tells a new thread late with how many threads of its own to compute."""
    before, bound, x = torch.get_num_threads(), bind(mechanism, dtype=torch.float32), tokens(32, dtype=torch.float32)
    try:
        for count in (1, 2):  # of which one is not OpenMP's own
            torch.set_num_threads(count)
            here = bound(x)
            with ThreadPoolExecutor(1) as pool:
                assert torch.equal(pool.submit(bound, x).result(), here)
            with ThreadPoolExecutor(1) as pool:
                assert torch.equal(pool.submit(fourier_mix, x).result(), fourier_mix(x))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mechanism", MIXERS, ids=repr)
def test_a_new_thread_asks_for_its_number_of_threads(mechanism: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause of the test above, on every machine: whether bits differ without it depends on the processor."""
    bound, x, asked, ask = bind(mechanism), tokens(8), [], torch.get_num_threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked.append(threading.get_ident()) or ask())
    with ThreadPoolExecutor(1) as pool:
        for function in (bound, fourier_mix):
            asked.clear()
            pool.submit(function, x).result()
            assert asked == [pool.submit(threading.get_ident).result()]


def test_fnet_twice_is_a_mean_with_the_mirror_image(device: torch.device) -> None:
    """Re F(Re F x) = (N D / 2)(x[n, h] + x[-n, -h])."""
    x = tokens(13, 10, device)
    mirror = x.flip(-2, -1).roll((1, 1), (-2, -1))
    close(fourier_mix(fourier_mix(x)), 13 * 10 / 2 * (x + mirror), 1e-10)
    close(fourier_mix(fourier_mix(x, norm="ortho"), norm="ortho"), (x + mirror) / 2, 1e-10)


def test_fnet_never_gains_more_than_its_sizes(device: torch.device) -> None:
    """||y||^2 <= N D ||x||^2, and no gain at all when orthonormal; the bound is met by a constant."""
    x = tokens(24, 16, device)
    assert fourier_mix(x).square().sum() <= 24 * 16 * x.square().sum()
    assert fourier_mix(x, norm="ortho").square().sum() <= x.square().sum()
    constant = torch.ones_like(x)
    close(fourier_mix(constant, norm="ortho").square().sum(), constant.square().sum(), 1e-10)


def test_fnet_takes_the_real_part_last(device: torch.device) -> None:
    """Either transform may come first; taking the real part between them is another map."""
    x = tokens(12, 10, device)
    close(torch.fft.fft(torch.fft.fft(x, dim=-2), dim=-1).real, fourier_mix(x), 1e-10)
    between = torch.fft.fft(torch.fft.fft(x, dim=-1).real, dim=-2).real
    assert (between - fourier_mix(x)).abs().max() > 1


@pytest.mark.parametrize(("length", "width"), [(1031, 33), (512, 64), (257, 130), (4096, 8)])
@pytest.mark.parametrize("norm", ["backward", "ortho"])
def test_fnet_of_a_long_sequence_is_torchs_fft2_forth_and_back(length: int, width: int, norm: Any) -> None:
    """Also transposed, and its gradient, once and twice."""
    for x in (tokens(length, width), tokens(width, length).mT):
        x.requires_grad_()
        y, slope = fourier_mix(x, norm=norm), torch.randn(x.shape, dtype=x.dtype, requires_grad=True)
        expected = torch.fft.fft2(x, norm=norm).real
        close(y, expected, 1e-10)
        (ours,), (theirs,) = (torch.autograd.grad(z, x, slope, create_graph=True) for z in (y, expected))
        close(ours, theirs, 1e-10)
        (once,) = torch.autograd.grad(fourier_mix(x, norm=norm), x, slope)
        close(once, theirs, 1e-10)
        (again,) = torch.autograd.grad(ours, slope, x)
        close(again, expected, 1e-10)
    low = tokens(length, width, dtype=torch.float32)
    error = (fourier_mix(low, norm=norm).double() - fourier_mix(low.double(), norm=norm)).abs().max()
    assert error < 1e-5 * fourier_mix(low, norm=norm).abs().max()


def test_fnet_refuses_what_a_transform_cannot_do() -> None:
    x = tokens(9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    with pytest.raises(Unsupported, match=r"FNet\(\) does not support is_causal=True"):
        FNet()(x, is_causal=True)
    with pytest.raises(Unsupported, match=r"FNet\(\) does not support a key_mask"):
        FNet()(x, key_mask=mask)
    with pytest.raises(ValueError, match="norm must be one of 'backward', 'ortho'"):
        FNet(norm="forward")  # type: ignore[arg-type]
    padded = torch.cat([x, torch.zeros_like(x[:, :3])], 1)
    assert (fourier_mix(padded)[:, :9] - fourier_mix(x)).abs().max() > 1, "why: zeros are not nothing"


def plain(x: Tensor, w: Any) -> Tensor:
    """The feed-forward layer that a gMLP with an open gate is."""
    return F.gelu(x @ w.U + w.U_bias).chunk(2, -1)[0] @ w.V + w.V_bias


def test_gmlp_with_an_open_gate_is_a_feed_forward_layer(device: torch.device) -> None:
    """W = 0, b = 1 gives s(Z) = Z1; as built, W is so near zero that it starts there."""
    x = tokens(13, device=device)
    bound = bind(GMLP(), device=device)
    open_gate = bound.w._replace(W=torch.zeros_like(bound.w.W), b=torch.ones_like(bound.w.b))
    close(gated_mlp(x, open_gate), plain(x, bound.w))
    for toeplitz in (False, True):
        fresh = Bound(GMLP(toeplitz=toeplitz), Shape(2, 8, 32)).to(device, torch.float64)
        assert (fresh(x) - plain(x, fresh.w)).abs().max() < 1e-2 * plain(x, fresh.w).abs().max()


@pytest.mark.parametrize("is_causal", [False, True])
def test_gmlp_toeplitz_is_the_full_matrix_with_constant_diagonals(is_causal: bool, device: torch.device) -> None:
    x, bound = tokens(13, device=device), bind(GMLP(toeplitz=True), device=device)
    full = spatial_weights(bound.w.W, 32)
    for offset in range(-31, 32):
        assert torch.unique(full.diagonal(offset)).tolist() == [float(bound.w.W[offset + 31].detach())]
    close(gated_mlp(x, bound.w._replace(W=full), is_causal=is_causal), bound(x, is_causal=is_causal))


def test_gmlp_causal_is_the_lower_triangle(device: torch.device) -> None:
    x, bound = tokens(13, device=device), bind(GMLP(), device=device)
    close(bound(x, is_causal=True), gated_mlp(x, bound.w._replace(W=bound.w.W.tril())))
    assert (bound(x) - bound(x, is_causal=True)).abs().max() > 1e-2


def test_amlp_adds_attention_to_the_gate(device: torch.device) -> None:
    """With no output it is the gMLP; with W = 0 and b = 0 the attention alone is the gate."""
    x, bound = tokens(13, device=device), bind(GMLP(attention_dim=8), device=device)
    w = bound.w
    silent = w._replace(tiny=w.tiny._replace(O=torch.zeros_like(w.tiny.O)))
    close(gated_mlp(x, silent), gated_mlp(x, w._replace(tiny=None)))
    q, k, v = (x @ w.tiny.QKV).chunk(3, -1)
    gate = F.scaled_dot_product_attention(q, k, v, is_causal=True) @ w.tiny.O
    alone = w._replace(W=torch.zeros_like(w.W), b=torch.zeros_like(w.b))
    expected = F.gelu(x @ w.U + w.U_bias).chunk(2, -1)[0] * gate @ w.V + w.V_bias
    close(gated_mlp(x, alone, is_causal=True), expected)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,)])
def test_a_product_over_tokens_is_the_definition(batch: tuple[int, ...], strided: bool, device: torch.device) -> None:
    """Forward and every gradient, sequence by sequence, also where not all are wanted and where they are two."""
    W, b = tokens(5, 7, device)[0], tokens(5, 1, device)[0, :, 0]
    x = torch.randn(*batch, 6, 7, dtype=W.dtype, device=device).mT if strided else None
    x = torch.randn(*batch, 7, 6, dtype=W.dtype, device=device) if x is None else x
    W, x, b = (z.detach().requires_grad_() for z in (W, x, b))
    out, expected = affine(W, x, b), W @ x + b[:, None]
    slope = torch.randn_like(expected)
    close(out, expected, 1e-12)
    for inputs in ((W, x, b), (W,), (x,), (b,)):
        ours, theirs = (torch.autograd.grad(y, inputs, slope, retain_graph=True) for y in (out, expected))
        for mine, other in zip(ours, theirs, strict=True):
            close(mine, other, 1e-12)
    close(torch.autograd.grad(affine(W.detach(), x, b), x, slope)[0], W.detach().mT @ slope, 1e-12)
    if x.numel():
        assert torch.autograd.gradgradcheck(affine, (W, x, b))
    several = torch.randn(3, 70, 4, dtype=W.dtype, device=device, requires_grad=True)  # too long to be one call
    wide = torch.randn(5, 70, dtype=W.dtype, device=device, requires_grad=True)
    out, expected = affine(wide, several, b), wide @ several + b[:, None]
    close(out, expected, 1e-12)
    ours, theirs = (torch.autograd.grad(y.square().sum(), (wide, several, b)) for y in (out, expected))
    for mine, other in zip(ours, theirs, strict=True):
        close(mine, other, 1e-10)


@pytest.mark.parametrize("length", [63, 512, 513, 767, 769, 1030])
@pytest.mark.parametrize("strided", [False, True])
def test_a_triangle_in_blocks_is_the_triangle(length: int, strided: bool, device: torch.device) -> None:
    """Forward and both gradients, whatever stands above the diagonal; also where only one gradient is wanted."""
    W = (
        torch.randn(length, length, dtype=torch.float64, device=device).triu(1).mul_(1e3)
        + tokens(length, length)[0].tril()
    )
    x = tokens(10, length, device).mT if strided else tokens(length, 10, device)
    slope = torch.randn(x.shape, dtype=x.dtype, device=device)
    W, x = W.requires_grad_(), x.requires_grad_()
    out, expected = lower(W, x), W.tril() @ x
    close(out, expected, 1e-10)
    for inputs in ((W, x), (W,), (x,)):
        ours, theirs = (torch.autograd.grad(y, inputs, slope, retain_graph=True) for y in (out, expected))
        for a, b in zip(ours, theirs, strict=True):
            close(a, b, 1e-10)
    alone = torch.autograd.grad(lower(W.detach(), x), x, slope)[0]
    close(alone, W.detach().tril().mT @ slope, 1e-10)
    close(lower(W, x[0]), expected[0], 1e-10)
    with torch.no_grad():
        close(lower(W.float(), 100 * x.float()), 100 * expected.float(), 1e-3)


@pytest.mark.parametrize("mechanism", [GMLP(expansion=2), GMLP(toeplitz=True), MLPMixer(token_hidden=None)], ids=repr)
def test_long_causal_mixing_is_cut_from_longer(mechanism: Any) -> None:
    """Lengths that end inside, at and behind a block of rows; no later token moves an earlier output."""
    bound, x = bind(mechanism, max_len=800), tokens(800)
    whole = bound(x, is_causal=True)
    for length in (513, 767, 768, 769):
        close(bound(x[:, :length], is_causal=True), whole[:, :length], 1e-10)
    moved = bound(torch.cat([x[:, :700], 60 * x[:, 700:]], 1), is_causal=True)
    assert torch.equal(moved[:, :700], whole[:, :700])


def test_mixer_in_its_linear_range_is_a_matrix(device: torch.device) -> None:
    """Far up, gelu is the identity: W2 W1 = A mixes by A, causally with triangles."""
    x, far = tokens(7, device=device), 1e3
    W1, W2 = torch.randn(2, 7, 7, dtype=x.dtype, device=device)
    b1 = torch.full((7,), far, dtype=x.dtype, device=device)
    close(token_mlp(x, TokenMLP(W1, b1, W2, -W2 @ b1)), W2 @ W1 @ x, 1e-9)
    W1, W2 = W1.tril(), W2.tril()
    w = TokenMLP(W1, b1, W2, -W2 @ b1)
    close(token_mlp(x, w, is_causal=True), (W2 @ W1).tril() @ x, 1e-9)
    close(token_mlp(x, w), (W2 @ W1).tril() @ x, 1e-9)


def test_mixer_shares_its_weights_over_channels(device: torch.device) -> None:
    x, bound = tokens(13, device=device), bind(MLPMixer(token_hidden=5), device=device)
    order = torch.randperm(16)
    close(bound(x[..., order]), bound(x)[..., order])


def test_mixer_is_causal_only_with_a_unit_for_every_token(device: torch.device) -> None:
    x = tokens(13, device=device)
    assert not MLPMixer(token_hidden=64).traits.causal
    with pytest.raises(Unsupported, match=r"traits\.causal"):
        bind(MLPMixer(token_hidden=64), device=device)(x, is_causal=True)
    bound = bind(MLPMixer(token_hidden=None), device=device)
    reach = torch.autograd.functional.jacobian(lambda y: bound(y, is_causal=True).sum((0, 2)), x).abs().sum((1, 3))
    assert bool(((reach > 0) == torch.ones(13, 13, device=device).tril().bool()).all())


@pytest.mark.parametrize("mechanism", LEARNED, ids=repr)
def test_padding_is_a_shorter_sequence(mechanism: Any, device: torch.device) -> None:
    """For every visible token, whatever the masked ones hold; also with holes, and causally."""
    bound, x = bind(mechanism, device=device), tokens(19, device=device)
    for is_causal in mechanism.traits.modes:
        mask = (torch.arange(19, device=device) < 11).expand(2, -1)
        loud = x.masked_fill(~mask[..., None], 1e30)
        close(bound(loud, key_mask=mask, is_causal=is_causal)[:, :11], bound(x[:, :11], is_causal=is_causal), 1e-10)
        holes = some_keys(2, 19, device)
        loud = x.masked_fill(~holes[..., None], -1e30).requires_grad_()
        out = bound(loud, key_mask=holes, is_causal=is_causal)
        close(out[holes], bound(x, key_mask=holes, is_causal=is_causal)[holes], 1e-10)
        (grad,) = torch.autograd.grad(out.square().sum(), loud)
        assert bool((grad[~holes] == 0).all())


@pytest.mark.parametrize("mechanism", LEARNED, ids=repr)
def test_shorter_sequences_use_the_corner_of_the_weights(mechanism: Any, device: torch.device) -> None:
    long, x = bind(mechanism, max_len=24, device=device), tokens(24, device=device)
    if mechanism.traits.causal:
        close(long(x, is_causal=True)[:, :13], long(x[:, :13], is_causal=True))
    with pytest.raises(ValueError, match="max_len=24 tokens and got 25"):
        long(tokens(25, device=device))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="expansion must be at least 1"):
        GMLP(expansion=0)
    with pytest.raises(ValueError, match="attention_dim must be at least 0"):
        GMLP(attention_dim=-1)
    with pytest.raises(ValueError, match="token_hidden must be at least 1"):
        MLPMixer(token_hidden=0)
    with pytest.raises(Unsupported, match="does not support decoding"):
        bind(GMLP()).decode(*(torch.randn(1, 1, 2, 16),) * 3)
