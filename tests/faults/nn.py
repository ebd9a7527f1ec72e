"""Faults seeded into ``nn/``."""

from tests.faults.fault import LAW, Fault

FAULTS = [
    Fault("redraw leaves the old draws", "nn/bound.py", "self.get_buffer(name).copy_(fresh)", "pass",
          LAW + "'weights_are and FavorPlus'"),
    Fault("key padding is not inverted", "nn/torch_masks.py", "return Masks(is_causal, ~padding_mask, attn_mask)",
          "return Masks(is_causal, padding_mask, attn_mask)", "tests/nn/test_multihead.py"),
    Fault("a reversible pass is replayed with the module's own weights", "nn/reversible.py", "weights | aliases", "aliases",
          "tests/nn/test_replayed_weights.py -k functional_call"),
    Fault("a chunk is replayed with the module's own weights", "nn/feedforward.py",
          "_reparametrize_module(self, dict(weights))", "nullcontext()", "tests/nn/test_replayed_weights.py -k functional_call"),
    Fault("a replayed layer may change its buffers", "nn/reversible.py", "if name := next(", "if name := None and next(",
          "tests/nn/test_replayed_weights.py -k 'changed or changes or buffers'"),
    Fault("dropout is drawn anew in the backward pass", "nn/reversible.py", "torch.set_rng_state(self.cpu)", "pass",
          "tests/nn/test_reversible.py"),
    Fault("positions of new tokens start at 0", "nn/token_mixer.py", "start.to(x.device)[..., None] + offsets",
          "offsets", "tests/nn/test_grouped_rotary.py -k keeps_the_positions"),
    Fault("YaRN divides the fast pairs", "nn/positions.py", "rates * (1 - slow) + rates / self.factor * slow",
          "rates * slow + rates / self.factor * (1 - slow)", "tests/nn/test_grouped_rotary.py -k llama_rotates"),
    Fault("rotary positions run on in a packed row", "nn/positions.py", "sequences.keys, strict=True)\n    empty", "sequences.keys, strict=True)\n    return None, None\n    empty",
          "tests/test_packed.py -k 'test_multihead'"),
]  # fmt: skip
