"""Manhattan attention (Jiang and Zuo, "Fast Attention", Eqs. 11-12): values weighed by differences of log keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.feature_maps.positive import Positive, PositiveSoftplus
from fast_attention.mechanism import Traits
from fast_attention.mechanisms.log_manhattan import gpu, manhattan_gpu
from fast_attention.mechanisms.log_manhattan.manhattan_forms import ManhattanForms, Normalize, Reference, States
from fast_attention.mechanisms.log_manhattan.sorting import Distance
from fast_attention.value import at_least, one_of


def manhattan_attention(
    q: Float[Tensor, "*batch length queries"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    distance: Distance = "signed",
    normalize: Normalize = "mean",
    reference: Reference = "self",
    feature_map: Positive = PositiveSoftplus(),  # noqa: B008
    query_dim: Literal[0, 1] | None = 0,
    key_dim: Literal[1] | None = None,
    temperature: float = 1.0,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``h(k_i) v_i + sum_j (log h(k_j) - log h(k_i)) v_j``, channel by channel ("Fast Attention", Eq. 12).

    The sum runs over the keys that token i may see; without its own it has no first term. Settings: see ``Manhattan``.
    """
    m = Manhattan(distance, normalize, reference, feature_map, query_dim, key_dim, temperature)
    return m.attend(q, k, v, (), is_causal=is_causal, key_mask=key_mask)


@dataclass(frozen=True, repr=False)
class Manhattan(ManhattanForms):
    """Attention by differences of log keys, no product of query and key: ``k_i v_i + sum_j (log k_j - log k_i) v_j``.

    Channel by channel, k standing for h(k) > 0; what Eq. 12 leaves open are settings. Signed weights sum to zero around
    the mean key: the relative term depends on the token by ``log k_i`` times the mean value only, for centred values
    not at all. Keys are as wide as values, or 1 wide. A masked token's own row is that of a key of zeros.

    Args:
        distance: ``"signed"``: ``log k_j - log k_i`` as printed, linear time; ``"l1"``: its absolute value, O(n log n)
            by sorting, causal O(n log^2 n); ``"laplacian"``: ``exp(-|log k_j - log k_i| / temperature)`` at the same
            cost, with its own weight 1 in place of ``k_i v_i``.
        normalize: ``"mean"``: the relative term over the number of visible keys; ``"none"``: as printed; ``"l1"``: the
            output over the sum of all absolute weights (for ``"laplacian"`` a weighted mean), which costs a sort.
        reference: ``"self"``: differences to the token's own key; ``"first"``: to the first visible key, whose
            ``k_1 v_1`` is the first term: all outputs are the same unless causal. Needs ``"signed"``, not ``"l1"``.
        feature_map: h > 0: ``PositiveSoftplus()``, ``PositiveExp()``, ``PositiveElu()`` or ``PositiveRelu()``.
        query_dim: 0: no query, as printed. Ours: 1: a gate per token and head on the output, the sigmoid of the mean
            over the query's channels; None: a gate per channel, ``sigmoid(q_i)`` (queries as wide as values, or 1).
        key_dim: None: keys as they come; 1: one key per token and head, the mean over the key's channels before h.
        temperature: Of ``"laplacian"``, in units of log k; at least 1e-6.

    Raises:
        ValueError: Settings that do not go together, as said above.
    """

    distance: Distance = "signed"
    normalize: Normalize = "mean"
    reference: Reference = "self"
    feature_map: Positive = PositiveSoftplus()  # noqa: RUF009
    query_dim: Literal[0, 1] | None = 0
    key_dim: Literal[1] | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for setting, choices in (("distance", Distance), ("normalize", Normalize), ("reference", Reference)):
            one_of(self, setting, getattr(self, setting), choices)
        one_of(self, "query_dim", self.query_dim, (0, 1, None))
        one_of(self, "key_dim", self.key_dim, (1, None))
        if not isinstance(self.feature_map, Positive):
            raise ValueError(f"{self!r}: feature_map must be a positive map such as PositiveSoftplus()")
        if self.reference == "first" and not self._linear:
            raise ValueError(f'{self!r}: reference="first" needs distance="signed" and normalize="mean" or "none"')
        if self.temperature != 1.0 and self.distance != "laplacian":
            raise ValueError(f'{self!r}: a temperature needs distance="laplacian"')
        at_least(self, "temperature", self.temperature, 1e-6)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Sums for signed differences; sorts, and all keys as state, for absolute ones."""
        difference = "log k_j - log k_i"
        terms = {"signed": f"({difference})", "l1": f"|{difference}|", "laplacian": f"exp(-|{difference}| / t)"}
        return Traits(
            paper='Jiang and Zuo, "Fast Attention", Eqs. 11-12',
            formula=f"{'' if self.distance == 'laplacian' else 'k_i v_i + '}sum_j {terms[self.distance]} v_j",
            cost="n d" if self._linear else "n log n d (causal: n log^2 n d)",
            order=1.0,
            reads="kv" if self.query_dim == 0 else "qkv",
            causal=True,
            padding=True,
            memory="constant" if self._linear else "growing",
            matrix=self.key_dim == 1 and self.query_dim is not None,
            export=self._linear,  # causal halving takes as many rounds as the length has bits
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """Diagonal term plus sum of differences, normalised and gated."""
        if why := self._obstacle(k, v, key_mask):
            dispatch.unserved(k, why)
            return self._attend(q, k, v, w, is_causal=is_causal, key_mask=key_mask)
        l, diagonal, x = self._wide_terms(k, v, key_mask)
        out = manhattan_gpu.attend(l, diagonal, x, key_mask, is_causal=is_causal, **self._settings)
        return self._gated(q.float(), out).to(v.dtype)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: Any, *, key_mask: Tensor | None
    ) -> tuple[Tensor, States]:
        """Outputs of new tokens, and the sums over all keys up to the last, or the keys themselves."""
        if why := self._obstacle(k, v, key_mask):
            dispatch.unserved(k, why)
            return self._advance(q, k, v, w, state, key_mask=key_mask)
        l, diagonal, x = self._wide_terms(k, v, key_mask)
        out, after = manhattan_gpu.advance(l, diagonal, x, key_mask, state, **self._settings)
        return self._gated(q.float(), out).to(v.dtype), after

    @property
    def _settings(self) -> dict[str, bool]:
        return {"mean": self.normalize == "mean", "to_first": self.reference == "first"}

    def _obstacle(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> str:
        """Why no kernel computes this call; empty where one does."""
        if not self._linear:
            return "no kernel has sums of absolute differences"
        divisor = manhattan_gpu.divisor(mean=self.normalize == "mean")
        return gpu.obstacle(k, v, key_mask=key_mask, divisor=divisor)

    def _wide_terms(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """log h(k), diagonal terms and values in float32: the gradients of both uses of a value are added in it."""
        wide = v.float()
        l, _, _, diagonal, _ = self._terms(k.float(), wide, key_mask)
        return l, diagonal, wide
