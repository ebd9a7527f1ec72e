"""Caches with room: what a step appends stands behind what was there, and no other cache changes by it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fast_attention import decoding
from fast_attention.engine import kv_cache
from fast_attention.engine.kv_cache import KVCache, append, concat_tokens, last


@pytest.fixture(autouse=True)
def room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small caches get room."""
    monkeypatch.setattr(kv_cache, "_SMALL", 0)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each move to memory with room copies."""
    counts: list[int] = []
    with_room = kv_cache._with_room

    def counted(earlier: Tensor, length: int) -> Tensor:
        counts.append(earlier.shape[-2])
        return with_room(earlier, length)

    monkeypatch.setattr(kv_cache, "_with_room", counted)
    return counts


def tokens(number: int, width: int = 4) -> Tensor:
    """Keys or values (3, 3, number, width)."""
    return torch.randn(3, 3, number, width)


def steps(number: int, size: int = 1) -> list[tuple[KVCache, Tensor, Tensor]]:
    """Caches of a prompt and ``number`` steps, each with the keys and values that it must hold."""
    k, v = tokens(10), tokens(10, 2)
    caches = [(append(None, k, v, None), k, v)]
    for _ in range(number):
        more = tokens(size), tokens(size, 2)
        k, v = torch.cat([k, more[0]], -2), torch.cat([v, more[1]], -2)
        caches.append((append(caches[-1][0], *more, None), k, v))
    return caches


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("size", [1, 3])
def test_holds_what_was_appended(mode: type, size: int) -> None:
    with mode():
        caches = steps(40, size)
        for cache, k, v in caches:  # all of them, after the last step
            torch.testing.assert_close((cache.k, cache.v), (k, v), rtol=0, atol=0)
            assert cache.visible.shape == (3, 1, k.shape[-2])
            assert bool(cache.visible.all())
        memory = {cache.k.untyped_storage().data_ptr() for cache, _, _ in caches}
    assert len(memory) < (12 if size == 1 else 20), "room was not used"


@torch.no_grad()
def test_copies_few_tokens_a_step(moved: list[int]) -> None:
    cache = tokens(1_000)
    for _ in range(1_000):
        cache = concat_tokens(cache, tokens(1))
    assert 0 < sum(moved) < 8 * 1_000, "as many tokens were copied as by a copy at every step"
    assert cache.untyped_storage().nbytes() <= 1.26 * cache.nbytes


@torch.no_grad()
def test_windows_slide_in_their_memory(moved: list[int]) -> None:
    """A window copies few tokens a step and holds no more than twice its memory; earlier ones stay as they were."""
    all_k, all_v = tokens(700), tokens(700, 2)
    windows = [last(append(None, all_k[..., :100, :], all_v[..., :100, :], None), 40)]
    for n in range(100, 700):
        near = append(windows[-1], all_k[..., n : n + 1, :], all_v[..., n : n + 1, :], None)
        windows.append(last(near, 40))
    for end, window in enumerate(windows, 100):
        assert torch.equal(window.k, all_k[..., end - 40 : end, :])
        assert torch.equal(window.v, all_v[..., end - 40 : end, :])
        assert window.k.untyped_storage().nbytes() <= 2 * window.k.nbytes
    assert 0 < sum(moved) < 2 * 5 * 600, "more than five tokens a step"


@torch.no_grad()
def test_two_steps_from_one_cache_do_not_meet() -> None:
    cache, k, v = steps(1)[-1]
    news = [(tokens(1), tokens(1, 2)) for _ in range(3)]
    for (one, two), after in zip(news, [append(cache, *new, None) for new in news], strict=True):
        torch.testing.assert_close(after.k, torch.cat([k, one], -2), rtol=0, atol=0)
        torch.testing.assert_close(after.v, torch.cat([v, two], -2), rtol=0, atol=0)


@torch.no_grad()
def test_threads_that_decode_from_one_cache_do_not_meet() -> None:
    cache, k, _ = steps(1)[-1]
    news = [tokens(1) for _ in range(64)]
    with ThreadPoolExecutor(8) as pool:
        for new, after in zip(news, pool.map(lambda new: concat_tokens(cache.k, new), news), strict=True):
            assert torch.equal(after, torch.cat([k, new], -2))


@torch.no_grad()
def test_parts_of_a_cache_leave_the_whole_as_it_is() -> None:
    parts = {
        "fewer tokens": lambda x: x[..., :5, :],
        "later tokens": lambda x: x[..., 2:, :],
        "one sequence": lambda x: x[:1],
        "another sequence": lambda x: x[1:],
        "some heads": lambda x: x[:, 1:],
        "narrower": lambda x: x[..., :2],
        "other columns": lambda x: x[..., 1:],
        "turned": lambda x: x.transpose(0, 1),
        "alone": lambda x: x.clone(),
        "copied": deepcopy,
    }
    for name, part in parts.items():
        cache, k, _ = steps(1)[-1]
        new = torch.randn_like(part(k)[..., :1, :])
        assert torch.equal(concat_tokens(part(cache.k), new), torch.cat([part(k), new], -2)), name
        new = tokens(1)
        assert torch.equal(concat_tokens(cache.k, new), torch.cat([k, new], -2)), name


def test_caches_of_inference_mode_go_on_outside() -> None:
    with torch.inference_mode():
        cache, k, _ = steps(1)[-1]
    new = tokens(1)
    with torch.no_grad():
        assert torch.equal(concat_tokens(cache.k, new), torch.cat([k, new], -2))
    assert torch.equal(concat_tokens(cache.k, new), torch.cat([k, new], -2))


def test_gradients_get_memory_of_their_own() -> None:
    with torch.no_grad():
        cache, k, _ = steps(1)[-1]
    new = tokens(1).requires_grad_()
    after = concat_tokens(cache.k, new)
    squares = after.square().sum()
    with torch.no_grad():
        concat_tokens(cache.k, tokens(1))
    squares.backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, 2 * new.detach())
    assert torch.equal(after[..., :-1, :], k)


@torch.no_grad()
def test_unlike_tokens_are_joined_as_torch_joins_them() -> None:
    cache, k, _ = steps(1)[-1]
    assert concat_tokens(cache.k, tokens(1).double()).dtype == torch.float64
    with pytest.raises(RuntimeError):
        concat_tokens(cache.k, tokens(1)[:1])
    assert torch.equal(cache.k, k)


@torch.no_grad()
def test_saves_what_it_shows(tmp_path: Path) -> None:
    cache = concat_tokens(tokens(4_000, 8), tokens(1, 8))
    assert cache.untyped_storage().nbytes() > 1.2 * cache.nbytes
    decoding.save((cache,), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 1.05 * cache.nbytes
    assert torch.equal(decoding.load(tmp_path / "state.pt")[0], cache)
