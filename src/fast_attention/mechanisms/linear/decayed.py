"""Linear attention that forgets (RetNet, Sun et al. 2023; GLA, Yang et al. 2023): sums that decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.engine.heads import by_head
from fast_attention.engine.operation import Fast, Operation, Unserved
from fast_attention.engine.precision import in_float32, widen
from fast_attention.engine.tracing import traced
from fast_attention.feature_maps.feature_map import Elementwise
from fast_attention.feature_maps.features import EluPlusOne, FeatureMap, Identity, as_feature_map
from fast_attention.mechanism import Attention, Shape, Traits, Unsupported
from fast_attention.mechanisms.linear import compiled, decayed_gpu, decayed_sums
from fast_attention.mechanisms.linear.decayed_sums import DecayedState
from fast_attention.traits import KERNELS
from fast_attention.value import at_least, one_of


class Gates(NamedTuple):
    """A token decays by ``sigmoid(logit + rows . k)``, for each channel where ``rows`` are so many for a head."""

    logit: Float[Tensor, "heads *channels"]
    rows: Float[Tensor, "heads *channels width"] | None


class Decay(NamedTuple):
    """The logarithms by which every token decays what was before it: in float32 or better whatever the keys are."""

    logs: Float[Tensor, "*batch length *channels"]


@in_float32
def decay(k: Tensor, w: Gates, key_mask: Tensor | None) -> Decay:
    """By how much every token decays what was before it; by nothing where it is masked."""
    if w.logit.ndim > 1:
        assert w.rows is not None
        logit = w.logit[:, None].to(k.dtype) + by_head(k, w.rows.mT.to(k.dtype))
        return Decay(unmasked(F.logsigmoid(logit), key_mask, by_channel=True))
    logit = w.logit[..., None].to(k.dtype)
    if w.rows is not None:
        logit = logit + by_head(k, w.rows.to(k.dtype)[..., None])[..., 0]
    return Decay(unmasked(F.logsigmoid(logit).expand(k.shape[:-1]), key_mask))


def unmasked(log_decay: Tensor, key_mask: Tensor | None, *, by_channel: bool = False) -> Tensor:
    """``log_decay`` (..., L), or (..., L, C) ``by_channel``; nothing at masked tokens."""
    if key_mask is None:
        return log_decay
    return log_decay.masked_fill(~(key_mask[..., None] if by_channel else key_mask), 0.0)


def columns(log_decay: Tensor, k: Tensor) -> Tensor:
    """``log_decay`` (..., L) as (..., L, 1); with a number for each channel of the keys, as it is."""
    return log_decay if log_decay.ndim == k.ndim else log_decay[..., None]


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
    log_decay = unmasked(widen(log_decay).expand(wanted), key_mask, by_channel=by_channel)
    return _attend(q, k, v, log_decay, key_mask, phi=feature_map, normalize=normalize, eps=eps, is_causal=is_causal)


def further_decayed(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, *state: Any, advances: bool,
    **settings: Any,
) -> Any:  # fmt: skip
    """Causal outputs of tokens, and with ``advances`` the four tensors of the state after them."""
    if not advances:
        return decayed_sums.attend(q, k, v, columns(log_decay, k), key_mask, is_causal=True, **settings)
    before = DecayedState(*state) if state else None
    out, after = decayed_sums.streamed(q, k, v, columns(log_decay, k), key_mask, before, **settings)
    return out, *after


def both_ways(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, **settings: Any
) -> Tensor:  # fmt: skip
    """Outputs (..., L, Ev) over keys that decay on both sides of a query, in plain operations."""
    return decayed_sums.attend(q, k, v, columns(log_decay, k), key_mask, is_causal=False, **settings)


def _against(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, *state: Tensor, phi: FeatureMap,
    advances: bool = False, **settings: Any,
) -> str:  # fmt: skip
    """Why the core does not serve; empty where it does."""
    if type(phi) not in compiled.NUMBERS:
        return "features of another map"
    if state and bool(state[2].any()):
        return "large keys that need rescaling"
    return (compiled.advances if advances else compiled.serves)(q, k, v, key_mask, log_decay, *state)


def _given(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a call as the compiled core takes them."""
    q, k, v, log_decay, key_mask, *state = tensors
    return q, k, v, key_mask, None, None, None, *(state[:2] or (None, None)), None, columns(log_decay, k).float()


def _code(settings: dict[str, Any]) -> dict[str, Any]:
    """The core's settings."""
    return {**compiled.code(settings.pop("phi")), **settings, "eps": float(settings["eps"]), "is_causal": True}


def forward(*tensors: Any, keep: bool, advances: bool, **settings: Any) -> Any:
    """The core's outputs, and with ``advances`` the state after them."""
    given = _given(tensors)
    outputs, kept = compiled.forward(*given, keep=keep, advances=advances, **_code(settings))
    if not advances:
        return outputs, kept
    steps = given[-1].expand(*given[0].shape[:-2], -1, -1)
    steps = torch.cat([tensors[8][..., None, :], steps], -2) if len(tensors) > 5 else steps
    return (*outputs, steps.sum(-2, dtype=torch.float64).to(outputs[1].dtype)), kept


def backward(
    inputs: Any, outputs: Any, kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *, advances: bool,
    **settings: Any,
) -> Any:  # fmt: skip
    """Gradients of tokens, decays and states."""
    found = compiled.backward(_given(inputs), outputs, kept, gradients, advances=advances, **_code(settings))
    log_decay, d_decay = inputs[3], found[10]
    assert d_decay is not None
    if advances:
        d_decay = d_decay + gradients[4][..., None, :].sum_to_size(*d_decay.shape[:-2], 1, d_decay.shape[-1])
    d_state = (*found[7:9], None, gradients[4]) if len(inputs) > 5 else ()
    return *found[:3], d_decay.view(log_decay.shape).to(log_decay.dtype), None, *d_state


def _by_core(*tensors: Any, **settings: Any) -> Tensor:
    """``decayed_gpu.both_sides`` by the core.

    Raises:
        Unserved: Not all outputs are finite.
    """
    out = decayed_gpu.both_sides(*tensors, advance=partial(_further, advances=False), **settings)
    if not bool(out.detach().sum().isfinite()):
        raise Unserved("outputs that are not finite in one scale")
    return out


_further = Operation(
    further_decayed,
    cpu=Fast(
        forward, backward, serves=_against, even=3, halves=True, path=compiled.PATH, why="sums that decay",
        sizes=compiled.sizes,
    ),
    cuda=Fast(decayed_gpu.further, None, serves=decayed_gpu.advances, halves=True),
    compute=torch.float32,
    path="blocks side by side",
    sizes=lambda *tensors, **settings: {"block": decayed_sums.BLOCK},
)  # fmt: skip
_both_ways = Operation(
    both_ways,
    cpu=Fast(_by_core, None, serves=_against, even=3),
    cuda=Fast(
        partial(decayed_gpu.attend, is_causal=False), None, serves=partial(decayed_gpu.serves, is_causal=False),
        halves=True,
    ),
    compute=torch.float32,
    path="blocks side by side",
    sizes=lambda *tensors, **settings: {"block": decayed_sums.BLOCK},
)  # fmt: skip


def _attend(*tensors: Any, is_causal: bool, **settings: Any) -> Tensor:
    return _further(*tensors, advances=False, **settings) if is_causal else _both_ways(*tensors, **settings)


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_map", as_feature_map(self, "feature_map", self.feature_map))
        one_of(self, "gate", self.gate, ("fixed", "learned", "token", "channel"))
        if self.gate == "channel" and not isinstance(self.feature_map, Elementwise):
            raise ValueError(
                f"{self!r}: channels decay by themselves under an elementwise map only, such as Identity()"
            )
        at_least(self, "eps", self.eps, 0.0)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits of linear attention, for queries that stand beside their keys."""
        return Traits(
            paper="Sun et al. 2023, arXiv 2307.08621",
            formula="S_t = g_t S_{t-1} + phi(k_t) v_t^T, z alike; phi(q) S_t / (phi(q) . z_t + eps)",
            cost="n m d",
            complexity_exponent=1.0,
            gpu=KERNELS,
            causal=True,
            padding=True,
            rotary=isinstance(self.feature_map, Identity) and self.gate != "channel",
            memory="constant",
            learned=self.gate != "fixed",
        )

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
        """By kernels: nothing passes to where a sequence begins, nor back from there."""
        logs = decayed_gpu.begun(decay(k, w, key_mask).logs, lengths)
        if self.gate == "channel" or decayed_gpu.serves(q, k, v, logs, key_mask, is_causal=is_causal, **self._settings):
            return None
        return decayed_gpu.attend(q, k, v, logs, key_mask, is_causal=is_causal, **self._settings)

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
        log_decay = decay(k, w, key_mask).logs
        out, *after = _further(q, k, v, log_decay, key_mask, *(state or ()), advances=True, **self._settings)
        return out, DecayedState(*after)

    @in_float32
    def summarise_keys(self, k: Tensor, v: Tensor, w: Gates, *, key_mask: Tensor | None = None) -> DecayedState:
        """The sums over some tokens, and how much these decay what was before them."""
        log_decay = columns(decay(k, w, key_mask).logs, k)
        return decayed_sums.summarise(k, v, log_decay, key_mask, phi=self.feature_map)

    def merge_states(self, earlier: DecayedState, later: DecayedState) -> DecayedState:
        """The sums over neighbouring tokens."""
        return decayed_sums.combine(earlier, later)
