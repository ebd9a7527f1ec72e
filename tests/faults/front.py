"""Faults seeded into the public front."""

from tests.faults.fault import LAW, Fault

FAULTS = [
    Fault("masked keys and values take part", "checks.py", "    if key_mask is None:\n        return k, v, None",
          "    if key_mask is not None:\n        return k, v, key_mask[..., None, :]", LAW + "'anything and Softmax'"),
    Fault("weights for other heads are taken", "checks.py", "heads != q.shape[-3]:", "heads != heads:",
          LAW + "'serve_all_heads and BigBird'"),
    Fault("a state of another batch is taken", "decoding.py", "if state[:5] != expected[:5]", "if state[0] != expected[0]",
          "tests/nn/test_decoding.py -k another"),
    Fault("validation lets non-causal mechanisms through", "mechanism.py", "if is_causal and not traits.causal:",
          "if False:", LAW + "'refusals and Linformer'"),
    Fault("a refusal names no mechanism", "mechanism.py", 'f"{self!r} does not support', 'f"it does not support',
          LAW + "'refusals and Linformer'"),
    Fault("a new thread computes otherwise", "mechanism.py", "        checks.threads()  # mixers begin with", "        # mixers",
          "tests/mixers/test_mixers.py -k new_thread"),
    Fault("two processes train in one folder", "files.py", "fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass",
          "tests/training/test_resuming.py -k two_processes"),
    Fault("a second backward pass gives the first one's rows", "attention_maps.py", "chunk = positions[start : start + width]",
          "chunk = positions[: min(width, len(positions) - start)]", "tests/test_attention_maps.py -k 'rows_are and Softmax'"),
    Fault("damaged weights are loaded", "files.py", "if (actual := sha256(path)) != digest:", "if (actual := sha256(path)) is None:",
          "tests/nn/test_models.py -k told_by_its_hash"),
]  # fmt: skip
