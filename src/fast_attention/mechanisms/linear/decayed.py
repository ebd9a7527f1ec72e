"""Linear attention that forgets (RetNet, Sun et al. 2023; GLA, Yang et al. 2023): sums that decay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.engine import masks, numerics, operation
from fast_attention.engine.heads import by_head
from fast_attention.engine.precision import in_float32, widen
from fast_attention.engine.tracing import symbolic, traced
from fast_attention.feature_maps.feature_map import Elementwise, Features
from fast_attention.feature_maps.features import EluPlusOne, FeatureMap, Identity, as_feature_map
from fast_attention.mechanism import Attention, Shape, Traits, Unsupported
from fast_attention.mechanisms.linear import gpu, kernelised, linear_state, reference, sums
from fast_attention.mechanisms.linear.core_map import CoreMap
from fast_attention.mechanisms.linear.linear_state import Sums
from fast_attention.value import at_least


class DecayedState(NamedTuple):
    """Sums over all tokens so far, ``exp(log_scale)`` times ``kv`` and ``k``, and the decay over all of them."""

    kv: Float[Tensor, "*batch C values"]
    k: Float[Tensor, "*batch C"]
    log_scale: Float[Tensor, "*batch 1"]
    log_decay: Float[Tensor, "*batch decays"]


class Gates(NamedTuple):
    """A token decays by ``sigmoid(logit + rows . k)``, for each channel where ``rows`` are so many for a head."""

    logit: Float[Tensor, "heads *channels"]
    rows: Float[Tensor, "heads *channels width"] | None


class Decay(NamedTuple):
    """The logarithms by which every token decays what was before it: in float32 or better whatever the keys are."""

    logs: Float[Tensor, "*batch length channels"]  # one channel stands for all


@in_float32
def decay(k: Tensor, w: Gates, key_mask: Tensor | None) -> Decay:
    """By how much every token decays what was before it; by nothing where it is masked."""
    logit = w.logit.reshape(len(w.logit), 1, -1).to(k.dtype)
    if w.rows is not None:
        logit = logit + by_head(k, w.rows.reshape(len(w.rows), -1, k.shape[-1]).mT.to(k.dtype))
    return Decay(masks.drop(F.logsigmoid(logit).expand(*k.shape[:-1], -1), key_mask))


def decayed_linear_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    log_decay: Float[Tensor, "*#batch length"] | Float[Tensor, "*#batch length width"],
    *,
    feature_map: FeatureMap = EluPlusOne(),  # noqa: B008
    normalize: bool = True,
    eps: float = 1e-6,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``sum_j D_ij phi(q_i) . phi(k_j) v_j``, with ``normalize`` over ``sum_j D_ij phi(q_i) . phi(k_j) + eps``.

    ``D_ij = exp(log_decay_{j+1} + ... + log_decay_i)`` for j <= i (RetNet, arXiv 2307.08621, Eq. 5; one number for each
    token as in arXiv 2312.06635); where it is not causal, the decay counts the same in both directions. With as many
    axes as keys have, ``log_decay`` has a number for each channel of an elementwise feature map, as GLA has (there, Eq.
    3): weights are ``sum_c D_ijc phi(q_i)_c phi(k_j)_c``. A masked token is as if it were not there: it is not summed
    and nothing decays at it.

    Raises:
        ValueError: ``log_decay`` does not spread over the keys, or one of its numbers is above 0.
    """
    by_channel = log_decay.dim() == k.dim() and isinstance(feature_map, Elementwise)
    wanted = k.shape if by_channel else k.shape[:-1]
    sizes = zip(reversed(log_decay.shape), reversed(wanted), strict=False)
    if log_decay.dim() > len(wanted) or any(size not in (1, keys) for size, keys in sizes):
        raise ValueError(f"log_decay has shape {tuple(log_decay.shape)}; keys {tuple(k.shape)} take one number each")
    if not traced() and bool((log_decay > 0.0).any()):
        raise ValueError("log_decay holds numbers above 0: sums decay by exp(log_decay), which is at most 1")
    log_decay = widen(log_decay).expand(wanted)
    log_decay = masks.drop(log_decay if by_channel else log_decay[..., None], key_mask)
    return _attend(q, k, v, log_decay, key_mask, phi=feature_map, normalize=normalize, eps=eps, is_causal=is_causal)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, is_causal: bool,
    **settings: Any,
) -> Tensor:  # fmt: skip
    core_map = CoreMap.of(phi)
    if not is_causal or core_map is None:
        return _of_features(q, k, v, log_decay, key_mask, phi=phi, is_causal=is_causal, **settings)
    return sums.of_map(core_map, q, k, v, key_mask, log_decay, is_causal=True, **settings)


@in_float32
def _of_features(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, normalize: bool,
    eps: float, is_causal: bool,
) -> Tensor:  # fmt: skip
    """Outputs by features that are made here; not causal, over keys on both sides of a query."""
    q, k = phi(q), phi(masks.drop(k, key_mask))
    if is_causal:
        return sums.of_map(sums.PLAIN, q, k, v, key_mask, log_decay, normalize=normalize, eps=eps, is_causal=True)
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1) if normalize else v
    out, scale = None, v.new_ones(1)
    if not operation.unsupported_reason(q, k, v):
        out = _both_sides(q, k, values, log_decay, key_mask)
    if out is None or not bool(out.detach().sum().isfinite()):  # in units of large features
        factor = (-reference.log_scale(Features(masks.drop(k, key_mask)))).exp()[..., None]
        row = numerics.factor(q, 1.0, rows=True)
        out, scale = _both_sides(q * row, k * factor, values, log_decay, key_mask), row * factor
    if not normalize:
        return out / scale
    return linear_state.normalise(Sums(out[..., :-1], out[..., -1] + eps * scale[..., 0]))


def _advance(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, state: DecayedState | None,
    core_map: CoreMap = sums.PLAIN, *, normalize: bool, eps: float,
) -> tuple[Tensor, DecayedState]:  # fmt: skip
    out, after = sums.advance_map(core_map, q, k, v, key_mask, state, log_decay, normalize=normalize, eps=eps)
    over_all = log_decay[..., 0, :]
    if symbolic() or q.shape[-2] > 1:
        over_all = log_decay.sum(-2, dtype=torch.float64)
    over_all = over_all if state is None else over_all + state.log_decay
    return out, DecayedState(*after, over_all.to(after.k.dtype))


@in_float32
def _advance_features(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, state: DecayedState | None, *,
    phi: FeatureMap, **settings: Any,
) -> tuple[Tensor, DecayedState]:  # fmt: skip
    return _advance(phi(q), phi(masks.drop(k, key_mask)), v, log_decay, key_mask, state, **settings)


def _both_sides(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None) -> Tensor:
    """Sums over keys up to each query, and from the end over those behind it: to the next, and by its decay.

    Channels that decay by themselves fade in the queries.
    """
    of_sums = partial(sums.of_map, sums.PLAIN, is_causal=True, normalize=False)
    left = of_sums(q, k, v, key_mask, log_decay)
    to_next, by_channel = _next(log_decay), log_decay.shape[-1] > 1
    factor = to_next.exp()
    mask = None if key_mask is None else _next(key_mask[..., None]).flip(-2)[..., 0]
    q, k, v = (x.flip(-2) for x in (q * factor if by_channel else q, _next(k), _next(v)))
    right = of_sums(q, k, v, mask, _next(to_next).flip(-2)).flip(-2)
    return left + (right if by_channel else right * factor)


def _next(x: Tensor) -> Tensor:
    """Token behind every token; zeros behind the last."""
    return F.pad(x, (0, 0, 0, 1))[..., 1:, :]


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, lengths: tuple[int, ...], key_mask: Tensor | None, *,
    phi: FeatureMap, normalize: bool, is_causal: bool, **settings: Any,
) -> Tensor | None:  # fmt: skip
    """Outputs of sequences one behind another, by kernels: nothing passes to where one begins, nor back from there.

    None where kernels do not serve.
    """
    logs, core_map = gpu.begun(log_decay, lengths), CoreMap.of(phi) or sums.PLAIN
    others = [None] * 6
    if gpu.serves(q, k, v, key_mask, *others, logs, **core_map.settings, normalize=normalize and is_causal):
        return None
    return _attend(q, k, v, logs, key_mask, phi=phi, normalize=normalize, is_causal=is_causal, **settings)


TRAITS = replace(
    kernelised.TRAITS,
    paper="Sun et al. 2023, arXiv 2307.08621",
    formula="S_t = g_t S_{t-1} + phi(k_t) v_t^T, z alike; phi(q) S_t / (phi(q) . z_t + eps)",
    cross=False,
)


@dataclass(frozen=True, repr=False)
class DecayedLinearAttention(Attention[Gates, DecayedState]):
    """Linear attention whose sums decay from token to token, so that late keys weigh more and the state never fills up.

    Retention (RetNet) is ``DecayedLinearAttention(Identity(), normalize=False)`` with rotary queries and keys, without
    RetNet's group normalisation and its factor ``1 / sqrt(width)``.

    Args:
        feature_map: The map phi of queries and keys, as in ``LinearAttention``, but taken as it is: ``Exp()`` overflows
            above 88. With ``Identity()`` queries and keys may be rotary.
        gate: ``"fixed"``: head h decays by ``1 - 2^(-5 - h)`` a token, as RetNet has it; ``"learned"``: one number for
            each head, trained, which starts there; ``"token"``: ``sigmoid(logit + rows . k)`` for each token, trained,
            which starts as ``"fixed"``; ``"channel"``: such a number for each token and channel of the key, as GLA has
            them, with a full matrix for each head instead of GLA's of low rank and without its 16th root. It takes an
            elementwise feature map.
        normalize: Whether the weights of a query sum to one. Where they do not, outputs grow with the sums.
        eps: Added to the denominators, at least 0.
    """

    feature_map: FeatureMap = EluPlusOne()  # noqa: RUF009
    gate: Literal["fixed", "learned", "token", "channel"] = "fixed"
    normalize: bool = True
    eps: float = 1e-6

    _traits = TRAITS  # of each value, set when it is made

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_map", as_feature_map(self, "feature_map", self.feature_map))
        if self.gate == "channel" and not isinstance(self.feature_map, Elementwise):
            raise ValueError(
                f"{self!r}: channels decay by themselves under an elementwise map only, such as Identity()"
            )
        at_least(self, "eps", self.eps, 0.0)
        rotary = isinstance(self.feature_map, Identity) and self.gate != "channel"
        object.__setattr__(self, "_traits", replace(TRAITS, rotary=rotary, learned=self.gate != "fixed"))

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits of linear attention, for queries that stand beside their keys."""
        return self._traits

    def weights(self, shape: Shape) -> Gates:
        """RetNet's decays, by their logits."""
        logit = torch.log(2.0 ** (5 + torch.arange(shape.heads)) - 1)
        if self.gate == "fixed":
            return Gates(logit, None)
        if self.gate == "channel":
            logit = logit[:, None].repeat(1, shape.head_dim)
        rows = None if self.gate == "learned" else nn.Parameter(torch.zeros(*logit.shape, shape.head_dim))
        return Gates(nn.Parameter(logit), rows)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Gates, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """``decayed_linear_attention`` with these settings and the weights' decays."""
        log_decay = decay(k, w, key_mask).logs
        return _attend(q, k, v, log_decay, key_mask, is_causal=is_causal, **self._settings)

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, w: Gates, lengths: tuple[int, ...], *, is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """By kernels, unless channels decay by themselves."""
        log_decay = decay(k, w, key_mask).logs
        return attend_packed(q, k, v, log_decay, lengths, key_mask, is_causal=is_causal, **self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        return {"phi": self.feature_map, "normalize": self.normalize, "eps": self.eps}

    def parts_by_states(self, is_causal: bool) -> bool:
        """Only if causal: else keys decay on both sides."""
        return is_causal

    def read_summary(
        self, q: Tensor, k: Tensor, v: Tensor, w: Gates, state: DecayedState, *, key_mask: Tensor | None
    ) -> Tensor:
        """Refused: decays count from both sides.

        Raises:
            Unsupported: Always.
        """
        raise Unsupported(
            f"{self!r} does not support reading from one state: keys decay on both sides of a query. What would work: "
            "decode"
        )

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Gates, state: DecayedState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, DecayedState]:
        """Outputs of the new tokens, and the sums up to their end."""
        logs, core_map = decay(k, w, key_mask).logs, CoreMap.of(self.feature_map)
        if core_map is None:
            return _advance_features(q, k, v, logs, key_mask, state, **self._settings)
        return _advance(q, k, v, logs, key_mask, state, core_map, normalize=self.normalize, eps=self.eps)

    @in_float32
    def summarise_keys(self, k: Tensor, v: Tensor, w: Gates, *, key_mask: Tensor | None = None) -> DecayedState:
        """The sums over some tokens, and how much these decay what was before them."""
        keys = reference.masked_keys(lambda x: Features(self.feature_map(x)), k, key_mask)
        log_scale, reached = reference.log_scale(keys), decay(k, w, key_mask).logs.double().cumsum(-2)
        rescale = (reached[..., -1:, :] - reached).exp().to(v.dtype)
        scaled = keys.values * (-log_scale).exp()[..., None] * rescale
        return DecayedState(scaled.mT @ v, scaled.sum(-2), log_scale, reached[..., -1, :].to(v.dtype))

    def merge_states(self, earlier: DecayedState, later: DecayedState) -> DecayedState:
        """The sums over neighbouring tokens."""
        log_scale = torch.maximum(earlier.log_scale, later.log_scale)
        a, b = (earlier.log_scale - log_scale + later.log_decay).exp(), (later.log_scale - log_scale).exp()
        kv = a[..., None] * earlier.kv + b[..., None] * later.kv
        return DecayedState(kv, a * earlier.k + b * later.k, log_scale, earlier.log_decay + later.log_decay)
