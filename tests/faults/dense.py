"""Faults seeded into ``mechanisms/dense/``."""

from tests.faults.fault import ORACLE, Fault

FAULTS = [
    Fault("a biased block of queries stands one offset further", "mechanisms/dense/offset_flash.py",
          "self.numbers.storage_offset() + length - last", "self.numbers.storage_offset() + length - last + (last < length)",
          "tests/biases/test_biases.py -k flash"),
    Fault("keys under a mask weigh beside a bias", "mechanisms/dense/offset_flash.py", "torch.finfo(q.dtype).min / 4 / scale", "-1.0",
          "tests/biases/test_biases.py -k flash"),
    Fault("relu's tiles see one key ahead", "mechanisms/dense/rectified.py", "scores.tril_(rows.start + ahead - start)",
          "scores.tril_(rows.start + ahead - start + 1)", "tests/engine/test_chunks.py -k relu"),
    Fault("relu's norm has no gradient", "mechanisms/dense/rectified.py", "slopes.sub_(shift)", "pass",
          "tests/engine/test_chunks.py -k relu"),
    Fault("a key's bias gets the gradient of another column", "mechanisms/dense/biased_keys.py", "dk[..., :width], dv[..., :width], dk[..., width]",
          "dk[..., :width], dv[..., :width], dk[..., width - 1]", "tests/dense/test_synthesizer.py -k long_sequences"),
    Fault("a block of queries sees one key of the future", "mechanisms/dense/rows.py", "device=v.device).triu(1)", "device=v.device).triu(2)",
          "tests/dense/test_synthesizer.py -k blocks_of_queries"),
    Fault("blocks see masked keys between others", "mechanisms/dense/rows.py", "None if len(positions) == end - first else ~visible", "None",
          "tests/dense/test_synthesizer.py -k blocks_of_queries"),
    Fault("the mean slope of a row stays in its gradient", "mechanisms/dense/rows.py", "slope.sub_(mean[b, h, rows])", "pass",
          "tests/dense/test_synthesizer.py -k blocks_of_queries"),
    Fault("a table's gradient is written where nobody looked", "mechanisms/dense/rows.py",
          "into.R[b, h, rows, keys.stop :] = 0.0", "into.R[b, h, rows, keys.stop :] = 1.0",
          "tests/dense/test_synthesizer.py -k blocks_of_queries"),
    Fault("a mixture forgets a table's fraction", "mechanisms/dense/scores.py", "R, share = (part.R, share_of_part) if",
          "R, share = (part.R, None) if", ORACLE + "MixtureSynthesizer"),
    Fault("the fused kernel's gradient does not know of sinks", "mechanisms/dense/sinks.py", "torch.logaddexp(log_sums, ", "torch.maximum(log_sums, ",
          "tests/engine/test_sinks.py -k 'column_more and Softmax'"),
    Fault("sinks get the gradient of a larger share", "mechanisms/dense/sinks.py", "return *gradients[:3], sink_gradient(",
          "return *gradients[:3], 2 * sink_gradient(", "tests/engine/test_sinks.py -k 'column_more and Softmax'"),
]  # fmt: skip
