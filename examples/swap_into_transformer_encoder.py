"""Swap the attention of a torch encoder you already have, keep its weights, and see what changes."""

import copy

import torch
from torch import nn

from fast_attention import MultiheadAttention


def swapped(encoder: nn.TransformerEncoder, mechanism: str) -> nn.TransformerEncoder:
    """The same encoder with another attention in every layer, loaded from the old one's checkpoint."""
    encoder = copy.deepcopy(encoder)
    for layer in encoder.layers:
        old = layer.get_submodule("self_attn")
        assert isinstance(old, nn.MultiheadAttention)
        new = MultiheadAttention(old.embed_dim, old.num_heads, batch_first=True, mechanism=mechanism)
        missing, unexpected = new.load_state_dict(old.state_dict(), strict=False)
        assert not unexpected
        assert all(name.startswith("attention.") for name in missing)  # the mechanism's own: random features
        layer.self_attn = new
    return encoder.eval()


def main() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 300, 64)
    padding = torch.zeros(2, 300, dtype=torch.bool)
    padding[1, 200:] = True  # torch's sense: True = ignore

    with torch.no_grad():
        exact = encoder(x, src_key_padding_mask=padding)
        errors = {}
        for mechanism in (
            "Softmax()",
            "FavorPlus(num_features=16)",
            "FavorPlus(num_features=512)",
            "LinearAttention()",
        ):
            model = swapped(encoder, mechanism)
            out = model(x, src_key_padding_mask=padding)
            errors[mechanism] = float((out - exact)[~padding].norm() / exact[~padding].norm())
            print(f"{mechanism:30s} differs from torch's encoder by {errors[mechanism]:8.1e}")

            garbage = x.masked_fill(padding[..., None], 100.0)
            again = model(garbage, src_key_padding_mask=padding)
            assert torch.allclose(again[~padding], out[~padding], atol=1e-4), "padding must not be seen"

    assert errors["Softmax()"] < 1e-5
    assert errors["FavorPlus(num_features=512)"] < errors["FavorPlus(num_features=16)"]
    print("Softmax is torch's own; more random features come closer to it; no mechanism sees the padding.")


if __name__ == "__main__":
    main()
