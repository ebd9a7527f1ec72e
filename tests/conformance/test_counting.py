"""Operations and memory are counted right where the answer is known."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fast_attention.counting import count_operations, exponent, peak_bytes


def test_matrix_products_count_two_per_multiply_add() -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 32)
    assert count_operations(lambda: a @ b) == 2 * 8 * 16 * 32
    assert count_operations(lambda: a @ b[:, 0]) == 2 * 8 * 16
    assert count_operations(lambda: a[0] @ a[1]) == 2 * 16
    assert count_operations(lambda: (a + a).exp()) == 2 * 8 * 16
    assert count_operations(lambda: a.mT.reshape(-1)[0]) == 8 * 16, "only the copy counts, views are free"


def test_fused_attention_is_counted_forward_and_backward() -> None:
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    products = 2 * 2 * 64 * 64 * 16
    assert count_operations(lambda: F.scaled_dot_product_attention(q, q, q)) == 2 * products
    assert count_operations(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward()) >= 7 * products


def test_peak_sees_temporaries_and_forgets_what_is_freed(device: torch.device) -> None:
    x = torch.ones(1 << 20, device=device)

    def chain() -> torch.Tensor:
        y = x + 1
        for _ in range(10):
            y = y + 1
        return y

    assert 2 * x.nbytes <= peak_bytes(chain, device) <= 3 * x.nbytes
    kept = peak_bytes(lambda: [x + i for i in range(5)], device)
    assert 5 * x.nbytes <= kept <= 6 * x.nbytes
    assert peak_bytes(lambda: x.view(2, -1)[0], device) <= 512


def test_exponent() -> None:
    assert exponent(10, 160, 4) == 2.0
    assert exponent(0, 0, 4) == 0.0
