"""Every mechanism agrees with its oracle: outputs and gradients to 1e-10 in float64.

One head of one sequence in ``make test``; two heads of two sequences in ``make test-all``, where every shape in a
signature is checked at run time too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Attention, catalogue
from tests.cases import CASES, bind, qkv, some_keys
from tests.oracles import ORACLES, VARIANTS

# Every mechanism as its traits grant it; test_contract has the refusals of what they deny.
GRANTED = [
    pytest.param(mechanism, is_causal, masked, id=f"{mechanism!r}{', causal' * is_causal}{', masked' * masked}")
    for mechanism in CASES
    for is_causal in mechanism.traits.modes
    for masked in (False, True)[: 1 + mechanism.traits.padding]
]


@pytest.mark.parametrize("name", catalogue.names())
def test_every_mechanism_has_an_oracle(name: str) -> None:
    assert name in ORACLES, f"{name} has no oracle: add one to tests/oracles/ (see its docstring)"


def test_every_oracle_and_variant_belongs_to_a_mechanism() -> None:
    names = catalogue.names()
    assert set(ORACLES) <= set(names)
    assert {text.split("(")[0] for text in VARIANTS} <= set(names)


@pytest.mark.parametrize(("mechanism", "is_causal", "masked"), GRANTED)
def test_one_head(mechanism: Any, is_causal: bool, masked: bool, device: torch.device) -> None:
    """The last head of the last of two sequences; no gradient reaches the others."""
    sizes = [(1, 1), (13, 13)] + [(5, 9), (9, 5)] * mechanism.traits.cross
    agree(mechanism, is_causal, masked, device, [1], sizes)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", CASES, ids=repr)
def test_heads_and_sequences(mechanism: Any, device: torch.device) -> None:
    sizes = [(5, 9)] * mechanism.traits.cross + [(2, 2), (7, 7)]
    for is_causal in mechanism.traits.modes:
        for masked in (False, True)[: 1 + mechanism.traits.padding]:
            agree(mechanism, is_causal, masked, device, [0, 1], sizes)


def agree(
    mechanism: Any, is_causal: bool, masked: bool, device: torch.device, which: list[int], sizes: list[tuple[int, int]]
) -> None:
    """Compare outputs and all gradients with the oracle's, for ``which`` of two heads and of two sequences."""
    bound, heads = bind(mechanism, device=device), isinstance(mechanism, Attention)
    for length, keys in sizes:
        x = qkv(length, keys, device=device) if heads else (torch.randn(2, length, 16, dtype=torch.float64).to(device),)
        inputs = tuple(each.requires_grad_() for each in x)
        key_mask = some_keys(2, keys, device) if masked else None
        ours = bound(*inputs, is_causal=is_causal, key_mask=key_mask)[which]
        theirs = [
            expected(
                mechanism, [x[i] for x in inputs], bound.w, which, is_causal, None if key_mask is None else key_mask[i]
            )
            for i in which
        ]
        ours = ours[:, which] if heads else ours
        same(
            f"{mechanism!r} at {length} x {keys}, {is_causal=}, {masked=}",
            ours,
            torch.stack(theirs),
            (*inputs, *bound.parameters()),
        )


def expected(
    mechanism: Any, x: list[Tensor], w: Any, which: list[int], is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """One sequence by the oracle: some heads one by one, or the tokens that a mixer mixes."""
    oracle: Any = ORACLES[type(mechanism).__name__]
    settings = {"is_causal": is_causal, "key_mask": key_mask}
    if len(x) == 1:
        return oracle(mechanism, *x, w, **settings)
    return torch.stack([oracle(mechanism, *(each[h] for each in x), w, head=h, **settings) for h in which])


def same(name: str, ours: Tensor, theirs: Tensor, leaves: tuple[Tensor, ...]) -> None:
    grad_out = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name} output: {m}")
    kwargs: Any = {"allow_unused": True, "retain_graph": True, "materialize_grads": True}
    mine, oracle = (torch.autograd.grad((out * grad_out).sum(), leaves, **kwargs) for out in (ours, theirs))
    for i, (a, b) in enumerate(zip(mine, oracle, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, i=i: f"{name} gradient {i}: {m}")
