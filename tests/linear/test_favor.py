"""FAVOR and FAVOR+: identities, unbiasedness, variances and the draws behind them (mathematics 4 and 13)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Bound, Favor, FavorPlus, FavorPlusPlus, Shape, Unsupported, catalogue
from fast_attention.feature_maps.feature_map import Features, Logs
from fast_attention.feature_maps.features import Custom, Exp, Relu
from fast_attention.feature_maps.random_features import damped, draw, generalised, positive, trigonometric
from fast_attention.functional import (
    favor_attention,
    favor_plus_attention,
    favor_plus_plus_attention,
    generalised_attention,
    optimal_damping,
    softmax_attention,
)
from fast_attention.mechanisms.linear import linear_state, reference
from tests.cases import bind, qkv, some_keys
from tests.oracles.favor import damping_by_search

D = 8


def plain(features: Features | Logs) -> Tensor:
    """phi, its scale multiplied back in."""
    if isinstance(features, Logs):
        return features.logs.exp()
    return features.values if features.log_scale is None else features.values * features.log_scale[..., None].exp()


def pair(x_norm: float, y_norm: float, cosine: float, width: int = D) -> tuple[Tensor, Tensor]:
    """Two vectors (1, width) of given norms and angle, in a random plane."""
    a, b = torch.linalg.qr(torch.randn(width, 2)).Q.T
    return x_norm * a[None], y_norm * (cosine * a + math.sqrt(1 - cosine**2) * b)[None]


def products(phi: Callable[[Tensor, Tensor], Features | Logs], x: Tensor, y: Tensor, W: Tensor) -> Tensor:
    """phi(x) . phi(y) for every draw of W (draws, m, d)."""
    return (plain(phi(x, W)) * plain(phi(y, W))).sum(-1)[:, 0].double()


def phased(x: Tensor, W: Tensor) -> Features:
    phase = 2 * math.pi * torch.rand(W.shape[:-1], generator=torch.Generator().manual_seed(5))
    return trigonometric(x, W, phase)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Features | Logs]] = {
    "sincos": trigonometric,
    "phase": phased,
    "positive": positive,
    "hyperbolic": lambda x, W: positive(x, torch.cat([W, -W], -2)),
    "damped": lambda x, W: positive(x, *damped(W, torch.linspace(0.0, 0.2, len(W)))),
}


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_unbiased(name: str, orthogonal: bool) -> None:
    """Statistic 21: E[phi(x) . phi(y)] = exp(x . y) within 4.5 standard errors."""
    x, y = pair(0.8, 0.9, -0.542)
    got = products(ESTIMATORS[name], x, y, draw(50_000, 8, D, orthogonal=orthogonal))
    target = (x @ y.T).exp().item()
    assert abs(got.mean().item() - target) < 4.5 * got.std().item() / math.sqrt(len(got))
    assert abs(target - 0.6769) < 1e-3


def test_mean_squared_errors() -> None:
    """Statistic 22: Lemma 2's values within 5 %; and section 4.2's for the random phase."""
    x, y = pair(0.8, 0.9, -0.542)
    m, W = 8, draw(200_000, 8, D, orthogonal=False)
    SM, z2 = (x @ y.T).exp().item(), (x + y).square().sum().item()
    gap = (x - y).square().sum().item()
    pos = math.exp(z2) * SM**2 * (1 - math.exp(-z2)) / m
    kappa = math.exp(-gap / 2)
    lengths = math.exp(x.square().sum().item() + y.square().sum().item())
    theory = {
        "sincos": math.exp(z2) * SM**-2 * (1 - math.exp(-gap)) ** 2 / (2 * m),
        "phase": lengths * (1 + kappa**4 / 2 - kappa**2) / m,
        "positive": pos,
        "hyperbolic": (1 - math.exp(-z2)) * pos / 2,
    }
    assert abs(theory["sincos"] - 0.21225) < 1e-3
    assert abs(theory["positive"] - 0.05461) < 1e-3
    for name, expected in theory.items():
        mse = (products(ESTIMATORS[name], x, y, W) - SM).square().mean().item()
        assert abs(mse / expected - 1) < 0.05, f"{name}: {mse} against {expected}"


def test_damping() -> None:
    """Section 4.8: the variance of the optimal positive features, and that the optimum is one."""
    x, y = pair(1.2, 1.2, -0.25)
    W, SM, z2 = draw(400_000, 1, D, orthogonal=False), (x @ y.T).exp().item(), (x + y).square().sum().item()
    best = optimal_damping(x[None] * D**0.25, y[None] * D**0.25).item()
    assert 0.05 < best < 0.2

    def variance(damping: float) -> float:
        A = -damping
        spread = (1 - 4 * A) ** D * (1 - 8 * A) ** (-D / 2) * math.exp(2 * (1 - 4 * A) / (1 - 8 * A) * z2)
        return spread * math.exp(-x.square().sum().item() - y.square().sum().item()) - SM**2

    assert variance(best) < min(variance(best - 0.01), variance(best + 0.01), 0.6 * variance(0.0))
    got = products(lambda t, P: positive(t, *damped(P, torch.full((len(P),), best))), x, y, W)
    assert abs(got.var().item() / variance(best) - 1) < 0.05
    assert optimal_damping(torch.zeros(1, 3, D), torch.zeros(1, 3, D)).item() == pytest.approx(0.0)


def test_damping_from_the_data_of_each_head() -> None:
    """Against a search for the least variance over all pairs of a head; what is masked does not count."""
    q, k, _ = qkv(7, 9, batch=1, heads=3)
    q, k = (t * torch.tensor([0.3, 1.0, 2.0])[:, None, None] for t in (q, k))
    ours = optimal_damping(q, k)
    assert ours.shape == (3,)
    assert ours[0] < ours[1] < ours[2]
    for head in range(3):
        assert ours[head].item() == pytest.approx(damping_by_search(q[0, head], k[0, head]), abs=1e-4)
    mask = torch.arange(9) < 4
    torch.testing.assert_close(optimal_damping(q, k, key_mask=mask[None]), optimal_damping(q, k[:, :, :4]))
    q, k, _ = qkv(9, batch=2, heads=2)  # a mask over as many queries as keys holds for both
    apart = [optimal_damping(q[i : i + 1, :, :n], k[i : i + 1, :, :n]) for i, n in ((0, 9), (1, 4))]
    garbage = torch.arange(9) >= torch.tensor([[9], [4]])
    q, k = (t.masked_fill(garbage[:, None, :, None], 1e30) for t in (q, k))
    both = optimal_damping(q, k, key_mask=~garbage)
    assert (torch.minimum(*apart) <= both).all()
    assert (both <= torch.maximum(*apart)).all()
    torch.testing.assert_close(optimal_damping(q[1:], k[1:], key_mask=~garbage[1:]), apart[1])
    for bad in ({"key_mask": torch.zeros(1, 9, dtype=torch.bool)}, {}):
        with pytest.raises(ValueError, match=r"no damping follows from queries \(1, 2, 9, 8\)"):
            optimal_damping(q[:1] * (1.0 if bad else math.nan), k[:1], **bad)


def test_calibrated_features() -> None:
    """Weights suit unit scale; calibrated ones their data: about 0.45 of the error of undamped features."""
    mechanism, heads, width = FavorPlusPlus(num_features=1024), 16, 16
    w = mechanism.weights(Shape(heads, width))
    unit = torch.nn.functional.normalize(torch.randn(heads, 4000, width), dim=-1) * math.sqrt(width)
    torch.testing.assert_close(optimal_damping(unit, unit.flip(1)).float(), w.damping, rtol=0.02, atol=0)
    q, k, v = (torch.randn(heads, 512, width) for _ in range(3))

    def error(x: Tensor, exact: Tensor) -> float:
        return (x - exact).square().mean((-2, -1)).median().item()

    for scale, limit in ((0.5, 0.7), (0.7, 0.6)):
        x, y = scale * q, scale * k
        fitted, exact = mechanism.calibrated(x, y, w), softmax_attention(x, y, v)
        assert fitted.projection is w.projection
        plain = favor_plus_attention(x, y, v, w.projection)
        torch.testing.assert_close(
            favor_plus_plus_attention(x, y, v, w.projection, torch.zeros(heads)), plain, rtol=1e-3, atol=1e-4
        )
        assert error(mechanism(x, y, v, fitted), exact) < limit * error(plain, exact)
    assert (mechanism.calibrated(1.3 * q, 1.3 * k, w).damping > 1.2 * w.damping).all()
    with pytest.raises(ValueError, match=r"leading sizes \(16,\) and k has \(1,\)"):
        mechanism.calibrated(q, k[:1], w)


def test_calibration_stays_in_the_module() -> None:
    """Put in place, saved, and kept when features are drawn again."""
    bound = Bound("FavorPlusPlus(num_features=12)", Shape(2, D))
    q, k, v = qkv(20, dtype=torch.float32, scale=2.0)
    mask = some_keys(2, 20)
    wanted = bound.mechanism.calibrated(q, k, bound.w, key_mask=mask)
    assert (wanted.damping > bound.w.damping).all()
    bound.adopt(wanted)
    before = bound.w.projection.clone()
    torch.testing.assert_close(bound(q, k, v), bound.mechanism(q, k, v, wanted), rtol=0, atol=0)
    bound.redraw()
    assert torch.equal(bound.w.damping, wanted.damping)
    assert not torch.equal(bound.w.projection, before)
    other = Bound("FavorPlusPlus(num_features=12)", Shape(2, D))
    other.load_state_dict(bound.state_dict())
    assert torch.equal(other(q, k, v), bound(q, k, v))
    with pytest.raises(ValueError, match=r"damping': \(2,\).*got .*'damping': \(3,\)"):
        bound.adopt(FavorPlusPlus(num_features=12).weights(Shape(3, D)))


def test_orthogonal_rows_lower_the_variance() -> None:
    """Statistic 23: measured 0.34 for trigonometric, 0.40 for hyperbolic, 0.85 for positive features."""
    x, y = pair(0.8, 0.9, -0.542)
    SM = (x @ y.T).exp().item()
    draws = {kind: draw(40_000, 8, D, orthogonal=kind) for kind in (False, True)}
    for name, limit in (("sincos", 0.45), ("hyperbolic", 0.5), ("positive", 0.95)):
        independent, orthogonal = (
            (products(ESTIMATORS[name], x, y, draws[kind]) - SM).square().mean().item() for kind in (False, True)
        )
        assert orthogonal / independent < limit


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("axis", ["diagonal", "first"])
def test_orthogonal_rows_are_uniform(axis: str, sign: int) -> None:
    """Statistic 23: without the sign fix these ratios are 0.77 and 1.22."""
    direction = torch.ones(D) if axis == "diagonal" else torch.eye(D)[0]
    z = sign * 1.2 * direction / direction.norm()
    W = draw(100_000, D, D)
    assert abs((W @ z).exp().mean().item() / math.exp(1.2**2 / 2) - 1) < 0.01


def test_draws() -> None:
    """Statistic 23: rows orthogonal in blocks, chi-distributed norms, one projection a head, truncated last block."""
    W = draw(3000, 19, D)
    assert W.shape == (3000, 19, D)
    for block in W.split(D, dim=1):
        unit = torch.nn.functional.normalize(block, dim=-1)
        torch.testing.assert_close(unit @ unit.mT, torch.eye(unit.shape[1]).expand(3000, -1, -1), rtol=0, atol=1e-5)
    squares = W.square().sum(-1)
    assert abs(squares.mean().item() - D) < 0.1
    assert abs(squares.var().item() - 2 * D) < 0.7
    assert (W[0] - W[1]).abs().max() > 0.1
    even = draw(5, 19, D, regularised=True)
    torch.testing.assert_close(even.norm(dim=-1), torch.full((5, 19), math.sqrt(D)))
    independent = draw(2, 3000, D, orthogonal=False)
    torch.testing.assert_close(independent.mT @ independent / 3000, torch.eye(D).expand(2, -1, -1), rtol=0, atol=0.15)


@pytest.mark.parametrize("width", [2, 8, 64])
def test_regularised_kernel_is_smaller(width: int) -> None:
    """Statistic 24: SMREG <= SM."""
    x, y = pair(1.0, 1.0, 0.3, width)
    W = draw(40_000 if width < 64 else 1000, width, width, regularised=True)
    got, SM = products(positive, x, y, W), (x @ y.T).exp().item()
    error = got.std().item() / math.sqrt(len(got))
    assert got.mean().item() < SM + 2 * error
    assert width > 8 or got.mean().item() < SM - 3 * error
    assert got.mean().item() > SM * (1 - 2 / width ** (1 / 3))


def test_relu_features_estimate_the_arc_cosine_kernel() -> None:
    """Section 4.7: E[relu(w.x) relu(w.y)] = |x| |y| (sin t + (pi - t) cos t) / (2 pi)."""
    x, y = pair(0.5, 0.7, 0.2)
    got = products(lambda t, P: generalised(t, P, Relu(), 0.0), x, y, draw(50_000, 16, D))
    t = math.acos(0.2)
    target = 0.5 * 0.7 * (math.sin(t) + (math.pi - t) * math.cos(t)) / (2 * math.pi)
    assert abs(got.mean().item() - target) < 4.5 * got.std().item() / math.sqrt(len(got))


def test_factors_of_the_softmax_kernel() -> None:
    """Identity 8: exp(q . k / sqrt d) = D_Q B D_K, and what sines and hyperbolic cosines make of it."""
    q, k = torch.randn(2, 6, D, dtype=torch.float64)
    x, y, W = q / D**0.25, k / D**0.25, draw(1, 5, D)[0].double()
    lengths = (x.square().sum(-1)[:, None] + y.square().sum(-1)) / 2
    gaussian = (-torch.cdist(q, k).square() / (2 * math.sqrt(D))).exp()
    torch.testing.assert_close(lengths.exp() * gaussian, (q @ k.T / math.sqrt(D)).exp(), rtol=1e-12, atol=1e-12)
    difference, total = x[:, None] - y[None], x[:, None] + y[None]
    ours = plain(trigonometric(x, W)) @ plain(trigonometric(y, W)).T
    torch.testing.assert_close(ours, lengths.exp() * (difference @ W.T).cos().mean(-1), rtol=1e-12, atol=1e-12)
    ours = plain(positive(x, torch.cat([W, -W], -2))) @ plain(positive(y, torch.cat([W, -W], -2))).T
    torch.testing.assert_close(ours, (-lengths).exp() * (total @ W.T).cosh().mean(-1), rtol=1e-12, atol=1e-12)


def test_a_common_scale_of_the_keys_cancels() -> None:
    """Identity 8: a constant on all key log-features leaves outputs unchanged, for there is no epsilon."""
    q, k, v = (t[0] for t in qkv(20))
    W = draw(2, 16, D).double()
    keys = positive(k / D**0.25, W)
    for constant in (-1e3, 5.0, 1e3):
        for is_causal in (False, True):
            moved = Logs(keys.logs + constant)
            a, b = (
                linear_state.normalise(reference.attend(positive(q, W), t, v, is_causal=is_causal, chunk=8))
                for t in (keys, moved)
            )
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("settings", [{}, {"hyperbolic": True}])
def test_many_features_give_softmax(settings: dict[str, Any]) -> None:
    """Finding 4 of section 0.2: at small norms only (section 4.6, d = 16, std 0.5: 1.2e-6 at m = 16384)."""
    q, k, v = (t * s for t, s in zip(qkv(256, batch=1, heads=1, width=16), (0.5, 0.5, 1.0), strict=True))
    W = draw(1, 16384, 16).double()
    for is_causal in (False, True):
        error = favor_plus_attention(q, k, v, W, is_causal=is_causal, **settings) - softmax_attention(
            q, k, v, is_causal=is_causal
        )
        assert error.square().mean() < 3e-5
        error = favor_plus_plus_attention(q, k, v, W, W.new_full((1,), 0.05), is_causal=is_causal) - softmax_attention(
            q, k, v, is_causal=is_causal
        )
        assert error.square().mean() < 3e-5
        error = favor_attention(q, k, v, W, is_causal=is_causal) - softmax_attention(q, k, v, is_causal=is_causal)
        assert error.square().mean() < 1e-5


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("mechanism", ["Favor", "FavorPlus", "hyperbolic"])
def test_error_falls_with_features(mechanism: str, orthogonal: bool) -> None:
    """Statistic 27: log-log slopes of the error, 16 to 256 features, within -0.7 and -1.4 at q, k ~ N(0, 0.25)."""
    draws, counts = 48, (16, 32, 64, 128, 256)
    q, k, v = (torch.randn(draws, 1024, 16) for _ in range(3))
    q, k = q / 2, k / 2
    exact, errors = softmax_attention(q, k, v), []
    for m in counts:
        W = draw(draws, m, 16, orthogonal=orthogonal)
        if mechanism == "Favor":
            out = favor_attention(q, k, v, W)
        else:
            out = favor_plus_attention(q, k, v, W, hyperbolic=mechanism == "hyperbolic")
        errors.append((out - exact).square().mean((-2, -1)).median())
    x, y = torch.tensor(counts).log(), torch.stack(errors).log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert -1.4 < slope < -0.7, f"errors {errors}"


def test_bias_of_the_ratio_falls_as_one_over_features() -> None:
    """Statistic 25: same sign at 64 and 256 features, and about a quarter of the size."""
    q, k = 0.6 * torch.randn(1, D), 0.6 * torch.randn(6, D)
    scores = q @ k.T / math.sqrt(D)
    v = ((scores - scores.mean()) / scores.std()).T
    exact, biases = softmax_attention(q[None], k[None], v[None]).item(), []
    for m in (64, 256):
        W = draw(20_000, m, D, orthogonal=False)
        out = favor_plus_attention(q.expand(20_000, -1, -1), k.expand(20_000, -1, -1), v.expand(20_000, -1, -1), W)
        biases.append(out.double().mean().item() - exact)
        assert biases[-1] < -3 * out.std().item() / math.sqrt(len(out))
    assert 0.15 < biases[1] / biases[0] < 0.45


def test_clamp() -> None:
    """Denominators of trigonometric features come out negative at unit scale; the clamp lifts them."""
    q, k, v = qkv(64, heads=2, width=16)
    w = Favor(num_features=16).weights(Shape(2, 16))
    plain, clamped = (
        favor_attention(q, k, v, w.projection.double(), clamp=clamp, is_causal=True) for clamp in (None, 0.5)
    )
    ones = torch.ones_like(v)
    mass, lifted = (
        favor_attention(q, k, ones, w.projection.double(), clamp=clamp, is_causal=True) for clamp in (None, 0.5)
    )
    torch.testing.assert_close(mass, ones)
    untouched = (lifted - 1).abs() < 1e-9
    assert 0.1 < untouched.double().mean() < 1
    torch.testing.assert_close(plain[untouched], clamped[untouched])
    assert (lifted < 1 - 1e-6).any(), "a lifted denominator exceeds the sum it replaces"
    assert clamped.abs().max() < plain.abs().max()


@pytest.mark.parametrize(
    "text", ["Favor(num_features=16, clamp=0.5)", "FavorPlus(num_features=16)", "FavorPlusPlus(num_features=16)"]
)
def test_gradients_through_a_stretch(text: str) -> None:
    """Of the later outputs by the later keys, as in one pass: the units that clamp reads may lie in the state."""
    bound = bind(text)
    q, k, v = (2 * t for t in qkv(30))
    later, probe = k[:, :, 20:].clone().requires_grad_(), torch.randn(2, 2, 10, D, dtype=torch.float64)
    whole = bound(q, torch.cat([k[:, :, :20], later], -2), v, is_causal=True)[:, :, 20:]
    _, state = bound.decode(q[:, :, :20], k[:, :, :20], v[:, :, :20])
    stretch, _ = bound.decode(q[:, :, 20:], later, v[:, :, 20:], state)
    theirs, ours = (torch.autograd.grad((out * probe).sum(), later)[0] for out in (whole, stretch))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_weights_are_drawn_per_head_saved_and_redrawn() -> None:
    for text in ("FavorPlus(num_features=20)", "Favor(num_features=20, features='phase')"):
        bound = Bound(text, Shape(3, D))
        state = bound.state_dict()
        assert state["projection"].shape == (3, 20, D)
        assert not list(bound.parameters())
        torch.manual_seed(1)
        other = Bound(text, Shape(3, D))
        assert not torch.equal(other.w.projection, bound.w.projection)
        assert not torch.equal(other.w.projection[0], other.w.projection[1])
        before = other.w.projection.clone()
        other.redraw()
        assert not torch.equal(other.w.projection, before)
        other.load_state_dict(state)
        q, k, v = qkv(9, heads=3, dtype=torch.float32)
        assert torch.equal(other(q, k, v), bound(q, k, v))
    assert Favor().weights(Shape(1, D)).phase is None
    phase = Favor(features="phase").weights(Shape(4, D)).phase
    assert phase is not None
    assert 0 <= phase.min() < 0.1 < 6.2 < phase.max() < 2 * math.pi


def test_regularised_setting() -> None:
    W = FavorPlus(num_features=20, regularised=True).weights(Shape(2, D)).projection
    torch.testing.assert_close(W.norm(dim=-1), torch.full((2, 20), math.sqrt(D)))
    independent = FavorPlus(num_features=D, orthogonal=False).weights(Shape(1, D)).projection[0]
    assert (independent @ independent.T).fill_diagonal_(0).abs().max() > 0.1


def test_any_function_as_kernel() -> None:
    mechanism = FavorPlus(num_features=16, kernel=torch.sigmoid)
    assert mechanism.kernel == Custom(torch.sigmoid)
    assert mechanism.traits.approximates is None
    assert FavorPlus().traits.approximates == "Softmax"
    q, k, v = qkv(9)
    W = draw(2, 16, D).double()
    phi_q, phi_k = (torch.sigmoid(t / D**0.25 @ W.mT) + 1e-3 for t in (q, k))
    A = phi_q @ phi_k.mT
    expected = A @ v / A.sum(-1, keepdim=True)
    torch.testing.assert_close(mechanism(q, k, v, type(mechanism.weights(Shape(2, D)))(W)), expected)
    torch.testing.assert_close(generalised_attention(q, k, v, W, kernel=Custom(torch.sigmoid)), expected)


@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 10.0])
def test_exponential_kernel_far_out(epsilon: float) -> None:
    """The epsilon joins the features whatever their scale: equal to float64 where that can say it plainly."""
    x = 60 * torch.randn(4, D)
    W = draw(1, 12, D)[0]
    exact = ((x.double() @ W.double().T).exp() + epsilon) / math.sqrt(12)
    found = generalised(x, W, Exp(), epsilon)
    assert isinstance(found, Logs)
    torch.testing.assert_close(found.logs.double(), exact.log(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("FavorPlus(num_features=0)", "at least 1"),
        ("FavorPlus(features='cosh')", "'positive', 'hyperbolic'"),
        ("FavorPlusPlus(num_features=0)", "at least 1"),
        ("FavorPlus(kernel_epsilon=-1.0)", "at least 0"),
        ("FavorPlus(features='hyperbolic', kernel=Relu())", "leave them with a kernel"),
        ("FavorPlus(kernel=3)", "feature map"),
        ("Favor(num_features=0)", "at least 1"),
        ("Favor(features='positive')", "'sincos', 'phase'"),
        ("Favor(clamp=-1.0)", "at least 0"),
    ],
)
def test_refused_settings(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        catalogue.parse(text)


def test_no_gradient_is_lost_in_a_clamped_state() -> None:
    """The clamp's unit is the longest key's, which a state holds as a number."""
    bound, (q, k, v) = Bound("Favor(num_features=16, clamp=0.5)", Shape(2, 4)), torch.randn(3, 1, 2, 5, 4)
    k.requires_grad_()
    _, state = bound.decode(q, k, v)
    with pytest.raises(Unsupported, match="detach"):
        bound.decode(q, k, v, state)
    with torch.no_grad():
        bound.decode(q, k, v, state)
