"""Manhattan attention (Jiang and Zuo, "Fast Attention", Eqs. 11-12): values weighed by differences of log keys.

With h(k) > 0 and ``l = log h(k)``, channel by channel or 1 wide; also the sums over pairs of tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import advancing, masks
from fast_attention.engine.chunks import first_visible
from fast_attention.engine.precision import in_float32
from fast_attention.engine.scan import prefix_sums
from fast_attention.feature_maps.positive import Positive, PositiveSoftplus
from fast_attention.mechanism import Attention, Traits
from fast_attention.mechanisms.aft import reference as pool
from fast_attention.mechanisms.log_manhattan import reference, sorting
from fast_attention.mechanisms.log_manhattan.reference import Differences
from fast_attention.mechanisms.log_manhattan.sorting import Distance, PastKeys, appended, pair_sums
from fast_attention.mechanisms.log_manhattan.sums import Maps, score_attention
from fast_attention.traits import SUMS
from fast_attention.value import at_least

Normalize = Literal["mean", "none", "l1"]
Reference = Literal["self", "first"]
States = Differences | PastKeys


def manhattan_attention(
    q: Float[Tensor, "*batch length queries"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    distance: Distance = "signed",
    normalize: Normalize = "mean",
    reference: Reference = "self",
    feature_map: Positive = PositiveSoftplus(),  # noqa: B008
    query_dim: Literal[0, 1, None] = 0,
    key_dim: Literal[1, None] = None,
    temperature: float = 1.0,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``h(k_i) v_i + sum_j (log h(k_j) - log h(k_i)) v_j``, channel by channel ("Fast Attention", Eq. 12).

    The sum runs over the keys that token i may see; without its own it has no first term.

    Args:
        q: Queries (..., L, E); not read where ``query_dim`` is 0.
        k: Keys (..., L, E), of as many tokens.
        v: Values (..., L, Ev).
        distance: Signed differences as printed, or a distance; this and the other settings are those of ``Manhattan``.
        normalize: What divides the sum.
        reference: Which key is key 1 of the formula.
        feature_map: h, a positive map of keys.
        query_dim: 0: no query, as printed. Otherwise a gate on the output.
        key_dim: None: keys as they come. 1: their mean over the channels.
        temperature: Divides distances in ``distance="laplacian"``.
        is_causal: Each token sees itself and earlier ones.
        key_mask: (..., L), True where a key is visible.
    """
    m = Manhattan(distance, normalize, reference, feature_map, query_dim, key_dim, temperature)
    return m.attend(q, k, v, (), is_causal=is_causal, key_mask=key_mask)


@dataclass(frozen=True, repr=False)
class Manhattan(Attention[tuple[()], States]):
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
    query_dim: Literal[0, 1, None] = 0
    key_dim: Literal[1, None] = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
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
            complexity_exponent=1.0,
            gpu=SUMS,
            inputs="kv" if self.query_dim == 0 else "qkv",
            causal=True,
            padding=True,
            memory="constant" if self._linear else "growing",
            matrix=self.key_dim == 1 and self.query_dim is not None,
            export=self._linear,  # causal halving takes as many rounds as the length has bits
        )

    @property
    def _linear(self) -> bool:
        return self.distance == "signed" and self.normalize != "l1"

    @in_float32
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """Diagonal term plus sum of differences, normalised and gated."""
        if self._linear and self.reference == "self":
            keys = self._keys(k, v)
            anchor = self.feature_map.log(first_visible(keys.detach(), key_mask)).detach()

            def mapped(k: Tensor) -> tuple[Tensor, Tensor]:
                h, l = self.feature_map.value_and_log(k)
                return l - anchor, h  # only differences count, and large l would cancel

            divisor = "count" if self.normalize == "mean" else "none"
            out = score_attention(keys, keys, v, key_mask, Maps(None, mapped), divisor=divisor, is_causal=is_causal)
            return self._gated(q, out)
        if is_causal:
            return self.advance(q, k, v, w, None, key_mask=key_mask)[0]
        l, x, ones, diagonal, weight = self._terms(k, v, key_mask)
        if self._linear:
            return self._of_sums(q, l, diagonal, reference.summarised(l, x, diagonal, key_mask))
        l1 = self.normalize == "l1"
        total, size = pair_sums(l, x, ones, None, distance=self.distance, sizes=l1, is_causal=False)
        return self._out(q, diagonal, total, weight + size if l1 else ones[..., :1].sum(-2, keepdim=True))

    @advancing.in_chunks
    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: Any, *, key_mask: Tensor | None
    ) -> tuple[Tensor, States]:
        """Outputs of new tokens, and the sums over all keys up to the last, or the keys themselves."""
        l, x, ones, diagonal, weight = self._terms(k, v, key_mask)
        if self._linear:
            sums = reference.running(l, x, diagonal, key_mask, state)
            return self._of_sums(q, l, diagonal, sums), reference.last(sums)
        l1, keys = self.normalize == "l1", appended(state, l, x, ones)
        total, size = pair_sums(l, x, ones, state, distance=self.distance, sizes=l1, is_causal=True)
        divisor = weight + size if l1 else prefix_sums(keys.ones[..., :1])[..., -l.shape[-2] :, :]
        return self._out(q, diagonal, total, divisor), keys

    @advancing.summed_in_chunks
    @in_float32
    def summarise_keys(self, k: Tensor, v: Tensor, w: tuple[()], *, key_mask: Tensor | None = None) -> States:
        """The sums over the keys of a chunk."""
        l, x, _, diagonal, _ = self._terms(k, v, key_mask)
        return reference.summarised(l, x, diagonal, key_mask)

    @in_float32
    def read_summary(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: Any, *, key_mask: Tensor | None
    ) -> Tensor:
        """Outputs of tokens from the sums over all keys; their own term is that of their key and value."""
        l, *_, diagonal, _ = self._terms(k, v, key_mask)
        return self._of_sums(q, l, diagonal, state)

    def merge_states(self, earlier: Any, later: Any) -> States:
        """The sums over two neighbouring chunks."""
        return reference.combined(earlier, later)

    def _terms(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """log h(k), values and ones (zeros where masked), diagonal terms ``k_i v_i`` and their absolute weights."""
        h, l = self.feature_map.value_and_log(self._keys(k, v))
        l = l if self.temperature == 1.0 else l / self.temperature
        x, h = masks.drop(v, key_mask), torch.zeros_like(h) if self.distance == "laplacian" else masks.drop(h, key_mask)
        return l, x, pool.visible_ones(l, key_mask), h * x, h

    def _of_sums(self, q: Tensor, l: Tensor, diagonal: Tensor, sums: Differences) -> Tensor:
        if self.reference == "self":
            return self._out(q, diagonal, reference.relative(l, sums), sums.number)
        first = sums.first.masked_fill(sums.number == 0, 0.0)
        return self._out(q, first.expand_as(diagonal), sums.weighted, sums.number)

    def _out(self, q: Tensor, diagonal: Tensor, total: Tensor, divisor: Tensor) -> Tensor:
        if self.normalize == "l1":
            return self._gated(q, pool.quotient(diagonal + total, divisor))
        return self._gated(q, diagonal + (total if self.normalize == "none" else total / divisor.clamp(min=1.0)))

    def _keys(self, k: Tensor, v: Tensor) -> Tensor:
        k = k.mean(-1, keepdim=True) if self.key_dim == 1 else k
        pool.same_width(self, k, v, or_one=True)
        return k

    def _gated(self, q: Tensor, out: Tensor) -> Tensor:
        if self.query_dim == 0:
            return out
        gate = q if self.query_dim is None else q.mean(-1, keepdim=True)
        pool.same_width(self, gate, out, name="queries", or_one=True)
        return gate.sigmoid() * out


Mask = Bool[Tensor, "*#batch2 length"]


@in_float32
def signed_manhattan(
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    feature_map: Positive = PositiveSoftplus(),  # noqa: B008
    is_causal: bool = False,
    key_mask: Mask | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``sum_j (log h(k_j) - log h(k_i)) v_j``, the relative term of Eq. 12; width is ``values`` or 1; time O(n d)."""
    return reference.signed(feature_map.log(k), masks.drop(v, key_mask), key_mask, is_causal=is_causal)


@in_float32
def absolute_manhattan(
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    feature_map: Positive = PositiveSoftplus(),  # noqa: B008
    is_causal: bool = False,
    key_mask: Mask | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``sum_j |log h(k_j) - log h(k_i)| v_j``; width is ``values`` or 1; time O(n log n d), causal O(n log^2 n d)."""
    return sorting.over(feature_map.log(k), masks.drop(v, key_mask), sorting.absolute, is_causal=is_causal)


@in_float32
def laplacian_manhattan(
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    feature_map: Positive = PositiveSoftplus(),  # noqa: B008
    temperature: float = 1.0,
    is_causal: bool = False,
    key_mask: Mask | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``sum_j exp(-|log h(k_j) - log h(k_i)| / temperature) v_j``; sizes and time as ``absolute_manhattan``."""
    l = feature_map.log(k) / temperature
    return sorting.over(l, masks.drop(v, key_mask), sorting.laplacian, is_causal=is_causal)


@in_float32
def vector_manhattan(
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    feature_map: Positive = PositiveSoftplus(),  # noqa: B008
    is_causal: bool = False,
    key_mask: Mask | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``sum_j ||log h(k_j) - log h(k_i)||_1 v_j``: one weight for all values, the L1 distance of whole keys.

    Time O(width n (log n + values)), one sort for each channel of the keys; causal a factor log n more.
    """
    return sorting.vector_absolute(feature_map.log(k), masks.drop(v, key_mask), is_causal=is_causal)
