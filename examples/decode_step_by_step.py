"""Decode one token at a time with a state of constant size, and compare with one pass over all tokens."""

import torch
from torch import Tensor

from fast_attention import TokenMixer


def size(state: object) -> int:
    """Numbers held in a state: a tuple of tensors, perhaps nested."""
    if isinstance(state, Tensor):
        return state.numel()
    return sum(size(part) for part in state) if isinstance(state, tuple) else 0


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 600, 32)
    grown = {}
    for mechanism in ("Softmax()", "LinearAttention()", "FavorPlus(num_features=32)"):
        mixer = TokenMixer(32, 4, mechanism).eval()
        with torch.no_grad():
            whole = mixer(x, is_causal=True)  # one pass over all tokens

            out, state = mixer.decode(x[:, :100])  # the prompt at once ...
            outputs, early = [out], size(state)
            for t in range(100, 600):  # ... and then token by token
                out, state = mixer.decode(x[:, t : t + 1], state)
                outputs.append(out)

        error = float((torch.cat(outputs, 1) - whole).abs().max())
        grown[mechanism] = size(state) / early
        print(f"{mechanism:28s} decoded = one pass to {error:.0e}; state: {early} numbers, then {size(state)}")
        assert error < 1e-4

    assert grown["LinearAttention()"] == grown["FavorPlus(num_features=32)"] == 1.0
    assert grown["Softmax()"] > 5
    print("Softmax remembers every token; the linear mechanisms stay as large as they were.")


if __name__ == "__main__":
    main()
