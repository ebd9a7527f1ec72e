"""Every mechanism agrees with its oracle: outputs and gradients to 1e-10 in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import catalogue
from tests.cases import ATTENTIONS, MIXERS, bind, qkv, some_keys
from tests.oracles import ORACLES, VARIANTS

LENGTHS = (1, 2, 7, 13)


def agree(name: str, ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...]) -> None:
    probe = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name} output: {m}")
    kwargs: Any = {"allow_unused": True, "retain_graph": True, "materialize_grads": True}
    mine = torch.autograd.grad((ours * probe).sum(), inputs, **kwargs)
    oracle = torch.autograd.grad((theirs * probe).sum(), inputs, **kwargs)
    for i, (a, b) in enumerate(zip(mine, oracle, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, i=i: f"{name} gradient {i}: {m}")


@pytest.mark.parametrize("name", catalogue.names())
def test_every_mechanism_has_an_oracle(name: str) -> None:
    assert name in ORACLES, f"{name} has no oracle: add one to tests/oracles/ (see its docstring)"


def test_every_oracle_and_variant_belongs_to_a_mechanism() -> None:
    names = catalogue.names()
    assert set(ORACLES) <= set(names)
    assert {text.split("(")[0] for text in VARIANTS} <= set(names)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mechanism", ATTENTIONS, ids=repr)
def test_attention(mechanism: Any, is_causal: bool, masked: bool, device: torch.device) -> None:
    traits = mechanism.traits
    if is_causal not in traits.modes or (masked and not traits.padding):
        pytest.skip("denied by traits: the refusal is tested in test_contract")
    sizes = [(n, n) for n in LENGTHS] + ([(5, 9), (9, 5)] if traits.cross else [])
    bound = bind(mechanism, device=device)
    oracle = ORACLES[type(mechanism).__name__]
    for length, keys in sizes:
        q, k, v = (x.requires_grad_() for x in qkv(length, keys, device=device))
        key_mask = some_keys(2, keys, device) if masked else None
        ours = bound(q, k, v, is_causal=is_causal, key_mask=key_mask)
        theirs = torch.stack([
            torch.stack([
                oracle(
                    mechanism, q[b, h], k[b, h], v[b, h], bound.w, head=h, is_causal=is_causal,
                    key_mask=None if key_mask is None else key_mask[b],
                )
                for h in range(2)
            ])
            for b in range(2)
        ])  # fmt: skip
        agree(f"{mechanism!r} at {length} x {keys}", ours, theirs, (q, k, v, *bound.parameters()))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mechanism", MIXERS, ids=repr)
def test_mixer(mechanism: Any, is_causal: bool, masked: bool, device: torch.device) -> None:
    traits = mechanism.traits
    if is_causal not in traits.modes or (masked and not traits.padding):
        pytest.skip("denied by traits: the refusal is tested in test_contract")
    bound = bind(mechanism, device=device)
    for length in LENGTHS:
        x = torch.randn(2, length, 16, dtype=torch.float64).to(device).requires_grad_()
        key_mask = some_keys(2, length, device) if masked else None
        ours = bound(x, is_causal=is_causal, key_mask=key_mask)
        theirs = torch.stack([
            ORACLES[type(mechanism).__name__](
                mechanism, x[b], bound.w, is_causal=is_causal, key_mask=None if key_mask is None else key_mask[b]
            )
            for b in range(2)
        ])  # fmt: skip
        agree(f"{mechanism!r} at {length}", ours, theirs, (x, *bound.parameters()))
