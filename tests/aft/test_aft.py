"""AFT: the identities of its formula (mathematics 10.2, 13.17), keys of any size, streaming, and its limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fast_attention import Bound, Shape, catalogue
from fast_attention.counting import exponent, peak_bytes
from fast_attention.engine.decay import decayed_sums
from fast_attention.engine.scan import prefix_sums, running_max
from fast_attention.functional import aft_full, aft_local, aft_simple
from fast_attention.mechanisms.aft.aft_conv import conv_band
from tests.cases import bind, qkv, some_keys

EVERY = ["AFTSimple()", "AFTFull()", "AFTFull(rank=3)", "AFTLocal(window=5)", "AFTLocal(window=6, strict=True)"]
EVERY += ["AFTConv(kernel_size=7)"]
STREAMING = ["AFTSimple()", "AFTLocal(window=1)", "AFTLocal(window=5)", "AFTLocal(window=6, strict=True)", "AFTConv()"]


def dense(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, *, is_causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """Every channel's softmax over positions, all n x n x d weights; w (..., n, n), -inf where nothing is seen."""
    n = k.shape[-2]
    hidden = w == float("-inf")
    if is_causal:
        hidden = hidden | torch.ones(n, n, dtype=torch.bool, device=k.device).triu(1)
    if key_mask is not None:
        hidden = hidden | ~key_mask[:, None, None, :]
    nothing = hidden.all(-1, keepdim=True)
    scores = (k.unsqueeze(-3) + w.masked_fill(hidden, 0.0).unsqueeze(-1)).double()
    scores = scores.masked_fill((hidden & ~nothing)[..., None], float("-inf"))
    pooled = (scores.softmax(-2) * v.double().unsqueeze(-3)).sum(-2)
    return q.double().sigmoid() * pooled.masked_fill(nothing, 0.0)


def biases(bound: Bound, n: int) -> Tensor:
    """The n x n matrix of biases (heads or 1, n, n), -inf where nothing is seen."""
    m, w = bound.mechanism, bound.w
    name, distance = type(m).__name__, torch.arange(n)[None, :] - torch.arange(n)[:, None]
    if name == "AFTFull":
        return (w.bias if m.rank is None else w.rows @ w.columns.T)[None, :n, :n]
    zeros = torch.zeros(1, n, n, dtype=torch.float64)
    if name == "AFTSimple":
        return zeros
    band = w.band[None, :n] if name == "AFTLocal" else conv_band(*w)
    reach = band.shape[-1] // 2
    inside = distance.abs() <= reach
    place = (distance + reach).clamp(0, 2 * reach).expand(band.shape[0], n, n)
    w = band.expand(-1, n, -1).gather(-1, place)
    return torch.where(inside, w, torch.full_like(w, float("-inf") if getattr(m, "strict", False) else 0.0))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_every_form_is_a_softmax_per_channel_at_odd_lengths(name: str, is_causal: bool) -> None:
    """13.17: sigmoid(q) * softmax_j(k + w) v, beyond the blocks (triangles 32, scans 16, 256)."""
    for n in (31, 33, 97, 271):
        bound = bind(name, head_dim=3, max_len=300)
        q, k, v = qkv(n, width=3, batch=1)
        k = 3 * k
        torch.testing.assert_close(
            bound(q, k, v, is_causal=is_causal), dense(q, k, v, biases(bound, n), is_causal=is_causal),
            rtol=1e-11, atol=1e-11,
        )  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
def test_special_cases_of_one_another(is_causal: bool, device: torch.device) -> None:
    """13.17: zero bias = simple; window over everything = full; full kernel = Toeplitz bias; factors; d heads."""
    n = 19
    q, k, v = qkv(n, device=device)
    w = torch.randn(n, n, dtype=torch.float64, device=device)
    simple = aft_simple(q, k, v, is_causal=is_causal)
    tight = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(aft_full(q, k, v, 0 * w, is_causal=is_causal), simple, **tight)
    for window in (1, 4):
        zeros = w.new_zeros(1, n, 2 * window - 1)
        torch.testing.assert_close(aft_local(q, k, v, zeros, is_causal=is_causal), simple, **tight)
    full = aft_full(q, k, v, w, is_causal=is_causal)
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    band = torch.zeros(1, n, 2 * n - 1, dtype=torch.float64, device=device)
    band[0, torch.arange(n)[:, None], distance + n - 1] = w
    for strict in (False, True):
        torch.testing.assert_close(aft_local(q, k, v, band, strict=strict, is_causal=is_causal), full, **tight)
    kernel = torch.randn(1, 2 * n - 1, dtype=torch.float64, device=device)
    toeplitz = aft_full(q, k, v, kernel[0, distance + n - 1], is_causal=is_causal)
    torch.testing.assert_close(aft_local(q, k, v, kernel[:, None], is_causal=is_causal), toeplitz, **tight)
    heads = [x.transpose(-1, -2).flatten(1, 2)[..., None] for x in (q, k, v)]
    single = aft_full(*heads, w, is_causal=is_causal)[..., 0].unflatten(1, (2, 8)).transpose(-1, -2)
    torch.testing.assert_close(single, full, **tight)


def test_local_is_the_banded_correction_of_the_global_sums() -> None:
    """10.2: (exp(w) - 1) in the band plus the sums over all keys."""
    bound = bind("AFTLocal(window=4)")
    q, k, v = qkv(23)
    correction = biases(bound, 23).exp() - 1
    e = k.exp()
    numerator, denominator = ((x.sum(-2, keepdim=True) + correction @ x) for x in (e * v, e))
    torch.testing.assert_close(bound(q, k, v), q.sigmoid() * numerator / denominator, rtol=1e-12, atol=1e-12)


def test_causal_simple_is_two_cumulative_sums_and_a_running_maximum() -> None:
    """10.2: the paper's prefix sums, and the recurrence in units of a running maximum."""
    q, k, v = qkv(67)
    sums = q.sigmoid() * (k.exp() * v).cumsum(-2) / k.exp().cumsum(-2)
    out = aft_simple(q, k, v, is_causal=True)
    torch.testing.assert_close(out, sums, rtol=1e-12, atol=1e-12)
    top, a, b, rows = torch.full_like(k[..., 0, :], -torch.inf), 0.0, 0.0, []
    for t in range(67):
        new = torch.maximum(top, k[..., t, :])
        a, b = (x * (top - new).exp() + (k[..., t, :] - new).exp() * y for x, y in ((a, v[..., t, :]), (b, 1.0)))
        top = new
        rows.append(a / b)
    torch.testing.assert_close(out, q.sigmoid() * torch.stack(rows, -2), rtol=1e-12, atol=1e-12)


def test_mean_of_ones_is_one(device: torch.device) -> None:
    """Whatever the keys: the weights sum to 1 (fast-transformers' causal AFT-simple gives 1, 1.12, 1.69 ...)."""
    for name in EVERY:
        q, k, v = qkv(41, device=device, dtype=torch.float32)
        for is_causal in (False, True):
            out = bind(name, max_len=64, device=device, dtype=torch.float32)(
                q, 5 * k, torch.ones_like(v), is_causal=is_causal
            )
            torch.testing.assert_close(out, q.sigmoid(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_keys_may_jump_by_300_in_either_direction(name: str, is_causal: bool, device: torch.device) -> None:
    """10.2, peers: a huge key anywhere, inside a block or not, neither drowns the rows before it nor overflows."""
    n = 71
    low, exact = (bind(name, max_len=80, device=device, dtype=dtype) for dtype in (torch.float32, torch.float64))
    q, k, v = qkv(n, device=device, dtype=torch.float32)
    k = k + 300.0 * torch.randint(-1, 2, (2, 2, n, 8), device=device)
    key_mask = some_keys(2, n, device)
    for mask in (None, key_mask):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        out = low(*inputs, is_causal=is_causal, key_mask=mask)
        w = biases(exact.cpu(), n).detach().to(device)
        theirs = dense(*wide, w, is_causal=is_causal, key_mask=mask)
        torch.testing.assert_close(out.double(), theirs, rtol=2e-4, atol=1e-5)
        probe = torch.randn_like(theirs)
        ours = torch.autograd.grad((out * probe.float()).sum(), inputs)
        exactly = torch.autograd.grad((theirs * probe).sum(), wide)
        for a, b in zip(ours, exactly, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=2e-4)


def test_scans_at_every_depth(device: torch.device) -> None:
    """Blocks of 16 over blocks of 16 over ...: against the plain definitions, levels far apart."""
    for n in (1, 15, 16, 17, 255, 256, 257, 1000, 4113):
        x, level = torch.randn(2, 3, n, 2, dtype=torch.float64, device=device)
        level = (40 * level).cummax(-2).values
        exact = torch.zeros_like(x)
        row = torch.zeros_like(x[:, 0])
        for t in range(n):
            row = x[:, t] + (row * (level[:, t - 1] - level[:, t]).exp() if t else 0.0)
            exact[:, t] = row
        torch.testing.assert_close(decayed_sums(x, level), exact, rtol=1e-11, atol=1e-11)
        both = decayed_sums(torch.cat([x, 2 * x], -1), level)
        torch.testing.assert_close(both, torch.cat([exact, 2 * exact], -1), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(prefix_sums(x), x.cumsum(-2), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(running_max(x), x.cummax(-2).values, rtol=0, atol=0)
    x, level = torch.randn(1, 40, 2, dtype=torch.float64), torch.rand(1, 40, 2, dtype=torch.float64).cumsum(-2)
    assert torch.autograd.gradcheck(
        decayed_sums, (x.requires_grad_(), level.requires_grad_()), check_batched_grad=False
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", STREAMING)
def test_decode_in_any_split_is_one_pass(name: str, masked: bool, device: torch.device) -> None:
    """13.20; keys jump by 300, splits are shorter and longer than the window."""
    n = 40
    bound = bind(name, max_len=n, device=device)
    q, k, v = qkv(n, device=device)
    k = k + 300.0 * torch.randint(-1, 2, (2, 2, n, 8), device=device)
    mask = some_keys(2, n, device) if masked else None
    if mask is not None:
        mask[0, :9] = False
    whole = bound(q, k, v, is_causal=True, key_mask=mask)
    for sizes in ([1] * n, [n], [3, 1, 7, 20, 9], [17, 1, 1, 21], [39, 1]):
        state, parts, start = None, [], 0
        for size in sizes:
            now = slice(start, start + size)
            part, state = bound.decode(
                q[:, :, now], k[:, :, now], v[:, :, now], state, key_mask=None if mask is None else mask[:, now]
            )
            parts.append(part)
            start += size
        torch.testing.assert_close(torch.cat(parts, -2), whole, rtol=1e-10, atol=1e-10)


def test_biases_far_from_zero(device: torch.device) -> None:
    """Only differences within what a row sees count: biases of the future do not, nor a level common to all."""
    q, k, v = qkv(40, device=device, dtype=torch.float32)
    w = torch.randn(40, 40, device=device)
    future = torch.ones_like(w).triu(1)
    causal = aft_full(q, k, v, w, is_causal=True)
    torch.testing.assert_close(aft_full(q, k, v, w + 300 * future, is_causal=True), causal)
    torch.testing.assert_close(aft_full(q, k, v, w - 300, is_causal=True), causal)
    band = torch.randn(1, 40, 9, device=device)
    for is_causal in (False, True):
        strict = aft_local(q, k, v, band, strict=True, is_causal=is_causal)
        for level in (-300.0, 300.0):
            moved = aft_local(q, k, v, band + level, strict=True, is_causal=is_causal)
            torch.testing.assert_close(moved, strict, rtol=1e-4, atol=1e-5)
        inside = aft_local(q, k, v, band + 300, is_causal=is_causal)
        torch.testing.assert_close(inside, strict, rtol=1e-4, atol=1e-5)
        outside = aft_local(q, k, v, band - 300, is_causal=is_causal)
        distance = (torch.arange(40)[None, :] - torch.arange(40)[:, None]).abs().to(device)
        w = torch.full((40, 40), float("-inf"), device=device).masked_fill(distance > 4, 0.0)
        exact = dense(q, k, v, w, is_causal=is_causal).float()
        rows = slice(5, None)  # causally, the first rows see nothing but their window
        torch.testing.assert_close(outside[:, :, rows], exact[:, :, rows], rtol=1e-4, atol=1e-5)


def test_cross_attention_ends_where_the_keys_end(device: torch.device) -> None:
    """Causal queries are the last of the sequence: fewer of them see what the last rows of a whole call see."""
    for name in ("AFTSimple()", "AFTFull()"):
        bound = bind(name, device=device)
        q, k, v = qkv(9, device=device)
        whole = bound(q, k, v, is_causal=True)
        torch.testing.assert_close(bound(q[:, :, 4:], k, v, is_causal=True), whole[:, :, 4:])
        more = bound(torch.cat([q[:, :, :3], q], -2), k, v, is_causal=True)
        torch.testing.assert_close(more[:, :, 3:], whole)
        assert bool((more[:, :, :3] == 0).all())


def test_a_strict_window_of_one_is_the_gated_value() -> None:
    bound = bind("AFTLocal(window=1, strict=True)")
    q, k, v = qkv(11)
    for is_causal in (False, True):
        torch.testing.assert_close(bound(q, k, v, is_causal=is_causal), q.sigmoid() * v)


def test_conv_starts_as_simple_and_its_kernel_is_normalised() -> None:
    """10.2: gain 0 at the start; then mean ``shift`` and standard deviation ``gain``."""
    q, k, v = qkv(20)
    fresh = Bound("AFTConv()", Shape(2, 8)).double()
    torch.testing.assert_close(fresh(q, k, v), aft_simple(q, k, v), rtol=1e-12, atol=1e-12)
    w = bind("AFTConv()").w
    band = conv_band(*w)[:, 0]
    torch.testing.assert_close(band.mean(-1), w.shift)
    torch.testing.assert_close(band.std(-1, correction=0), w.gain.abs())
    flat = torch.ones(2, 11, dtype=torch.float64, requires_grad=True)
    level = conv_band(flat, w.gain, w.shift)
    torch.testing.assert_close(level, w.shift[:, None, None].expand(2, 1, 11))
    assert bool(torch.autograd.grad(level.sum(), flat)[0].isfinite().all())


def test_windows_take_linear_memory() -> None:
    """Never n x n, strict or not."""
    for name in ("AFTLocal(window=8)", "AFTLocal(window=8, strict=True)", "AFTConv(kernel_size=7)"):
        for is_causal in (False, True):
            held = []
            for n in (512, 2048):
                bound = Bound(name, Shape(1, 4, n))
                x = torch.randn(1, 1, n, 4)
                held.append(peak_bytes(lambda b=bound, x=x, c=is_causal: b(x, x, x, is_causal=c)))
            assert exponent(held[0], held[1], 4) < 1.05, (name, is_causal, held)


def test_settings_and_sizes_are_checked() -> None:
    for text, said in (
        ("AFTConv(kernel_size=4)", "kernel_size must be odd"),
        ("AFTConv(kernel_size=1)", "at least 3"),
        ("AFTLocal(window=0)", "at least 1"),
        ("AFTFull(rank=0)", "at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            catalogue.parse(text)
    q, k, v = qkv(6)
    for name in EVERY:
        with pytest.raises(ValueError, match="keys of width 8 and values of width 4"):
            bind(name)(q, k, v[..., :4])
    bound = bind("AFTLocal()", max_len=10)
    _, state = bound.decode(q, k, v)
    with pytest.raises(ValueError, match="max_len=10 tokens and got 12"):
        bound.decode(q, k, v, state)
