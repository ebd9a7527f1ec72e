"""Faults seeded into ``tasks/``."""

from tests.faults.fault import Fault

FAULTS = [
    Fault("the best baseline uses the visible residue too little", "tasks/proteins.py", "unchanged, other = 0.5, 0.5 / UNKNOWN", "unchanged, other = 0.4, 0.6 / UNKNOWN", "tests/tasks/test_tasks.py -k fairest"),
    Fault("a validation protein may share 15 residues", "tasks/proteins.py", "train_codes[train_known].unique()", "train_codes[:1]",
          "tests/tasks/test_tasks.py -k shared_stretches"),
    Fault("the median of ListOps takes the upper middle", "tasks/listops.py",
          "(ranked[half - 1] + ranked[half]) // 2", "ranked[half]", "tests/tasks/test_tasks.py -k listops_values"),
    Fault("MQAR's gaps are all alike", "tasks/recall.py", "** (self.power - 1)", "** 0", "tests/tasks/test_tasks.py -k mqar"),
    Fault("Pathfinder's curves may touch", "tasks/pathfinder.py", "bits |= bits << step | bits >> step", "pass",
          "tests/tasks/test_tasks.py -k tracing"),
    Fault("the needle's depth is reversed", "tasks/needle.py", "cut = round(depth * hay_length)",
          "cut = round((1 - depth) * hay_length)", "tests/tasks/test_tasks.py -k needle"),
    Fault("shorter contexts are not interpolated", "tasks/bytes.py", "followers[contexts] * probability", "followers[contexts] / 256",
          "tests/tasks/test_tasks.py -k byte_counts"),
    Fault("batches mix long and short", "tasks/lengths.py", "indices[keys.argsort(stable=True)]", "indices",
          "tests/tasks/test_tasks.py -k protein_masks"),
    Fault("a class may miss from validation", "tasks/sequences.py", "max(1, round(task.share * len(texts)))",
          "round(task.share * len(texts) / 3)", "tests/tasks/test_tasks.py -k labelled"),
    Fault("sequences are cut before they are compared", "tasks/sequences.py",
          'lines[text.encode("utf-8", "surrogatepass"), label', "lines[text.encode()[: task.context], label",
          "tests/tasks/test_own_data.py -k compared_before"),
    Fault("a value too many in a table is dropped", "tasks/tables.py", "if any(row[len(names) :]):", "if False:",
          "tests/tasks/test_tasks.py -k sequence_errors"),
    Fault("a folder has no limit", "tasks/bytes.py", "        if remaining < 0:", "        if False:",
          "tests/lab/test_failures.py -k folder_is_limited"),
    Fault("a word's label stands at its first byte", "tasks/tags.py", "word.end() - 1 for word", "word.start() for word",
          "tests/tasks/test_own_data.py -k of_words"),
]  # fmt: skip
