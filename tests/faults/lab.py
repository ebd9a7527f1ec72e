"""Faults seeded into ``lab/``."""

from tests.faults.fault import Fault

FAULTS = [
    Fault("an error stands beside a speed of another length", "lab/comparison.py",
          "timed = {length for length in known if length in self.ratios(EXACT)}", "timed = known",
          "tests/lab/test_compare.py -k cannot_be_extended"),
    Fault("hidden pairs count as left out", "lab/accuracy.py", "pairs = int((self.length - sampled).sum()) if self.setting.is_causal else",
          "pairs =", "tests/lab/test_compare.py -k pairs_that_are_read"),
    Fault("short texts are read with extended positions", "lab/capture.py", "model = self.extended if beyond else self.model",
          "model = self.extended", "tests/lab/test_compare.py -k 'more_of_them and llama'"),
    Fault("a full disk is called the user's mistake", "lab/refusals.py", "1 if error.errno in BROKEN else 2", "2",
          "tests/lab/test_failures.py -k every_failure"),
    Fault("a map leaves out the last key of a block", "lab/maps/heads.py", "sums[..., edges[1:]] -", "sums[..., edges[1:] - 1] -",
          "tests/lab/test_maps_command.py -k cover_every_key"),
    Fault("weights that a folder lacks are drawn at random", "lab/loading.py", "    _complete(model, info)\n", "",
          "tests/lab/test_loading.py -k 'damaged and missing'"),
    Fault("a tokenizer that transformers made up reads", "lab/loading.py", "if len(words) < 2:", "if False:",
          "tests/lab/test_loading.py -k 'tokenizer and maps'"),
    Fault("a record's checksum is taken and not looked at", "lab/records.py", "saved != (actual := checksum(held))",
          "saved is (actual := None)", "tests/lab/test_records.py -k 'digit or optional'"),
    Fault("noise counts as a win", "lab/verdicts.py", " or even(cell, which):", ":", "tests/lab/test_compare.py -k noise"),
    Fault("a file that disagrees with its model is kept", "lab/export.py",
          "if max(trial.difference for trial in trials) > tolerance:", "if False:",
          "tests/integrations/test_export.py -k 'disagrees'"),
    Fault("a draw in time is worth giving up exactness", "lab/advice/ranking.py", "if ratio >= FASTER:", "if ratio >= 1.0:",
          "tests/lab/test_advise.py -k limits"),
    Fault("what is too inexact is advised", "lab/advice/ranking.py", "if not summary[0] <= question.budget:", "if False:",
          "tests/lab/test_advise.py -k 'limits or ranking'"),
    Fault("help imports what the command needs", "lab/options.py", "return not _READING.get()", "return True",
          "tests/lab/test_cli.py -k needs_no_torch"),
]  # fmt: skip
