"""Faults seeded into ``mechanisms/hybrid/``."""

from tests.faults.fault import ORACLE, Fault

TESTS = "tests/hybrid/test_hybrid.py"
FAULTS = [
    Fault("a sink token counts twice", "mechanisms/hybrid/positions.py", "position), visible & ~chosen",
          "position), visible", ORACLE + "Hybrid"),
    Fault("keys behind the span are not summed", "mechanisms/hybrid/far_sums.py",
          "terms = list(zip(blocks[end:]", "terms = list((0 * y, z) for y, z in zip(blocks[end:]",
          f"{TESTS} -k many_blocks"),
    Fault("a step forgets the far keys", "mechanisms/hybrid/reference.py",
          "out, weights = _softmax(logits, v, queries, outside)",
          "out, weights = _softmax(logits, v, queries, FarSums(0 * outside.sums, outside.log_scale))",
          f"{TESTS} -k small"),
    Fault("a rounded kernel's logarithm is no number", "mechanisms/hybrid/reference.py",
          'product.masked_fill(negligible, least).log().masked_fill_(negligible, float("-inf"))', "product.log()",
          f"{TESTS} -k below_zero"),
    Fault("a weight is divided by a small sum", "mechanisms/hybrid/reference.py", "weight[..., None] * mean, weights",
          "(weight / denominator.masked_fill(negligible, 1.0))[..., None] * sums[..., :-1], weights",
          f"{TESTS} -k small_sums"),
    Fault("the carried sum keeps its old log scale", "mechanisms/hybrid/far_sums.py",
          "carry.mul_(self.rescales[step - 1])", "pass", f"{TESTS} -k many_blocks"),
    Fault("the sum of gradients forgets to turn round", "mechanisms/hybrid/far_sums.py",
          "each.transposed().run", "CarriedSum(*each[1::-1], each.rescales).run", f"{TESTS} -k many_blocks"),
    Fault("what leaves the window is forgotten", "mechanisms/hybrid/hybrid.py",
          "far = linear_state.combine(far", "_ = linear_state.combine(far",
          f"{TESTS} -k small"),
    Fault("a chunk reads the first chunk's sums", "mechanisms/hybrid/fast.py",
          "sums[..., chunk.blocks, :, :]]\n\n\ndef _block_sums", "sums[..., : chunk.number, :, :]]\n\n\ndef _block_sums",
          f"{TESTS} -k chunks"),
    Fault("a parameter in a map's scale loses its gradient", "mechanisms/hybrid/fast.py",
          "any(x.requires_grad for phi in pair for x in phi(one) if x is not None)",
          "any(phi(one).values.requires_grad for phi in pair)", f"{TESTS} -k scales_gets"),
    Fault("the gradient of summed keys is lost", "mechanisms/hybrid/fast.py",
          "plan.key_chunks(x.q, x.k):\n        held", "():\n        held", f"{TESTS} -k chunks"),
]  # fmt: skip
