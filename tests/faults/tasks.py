"""Faults seeded into ``tasks/``."""

from tests.faults.fault import Fault

FAULTS = [
    Fault("the fairest guess reads what stands there too little", "tasks/proteins.py", "kept, other = 0.5, 0.5 / UNKNOWN", "kept, other = 0.4, 0.6 / UNKNOWN", "tests/tasks/test_tasks.py -k fairest"),
    Fault("a validation protein may share 15 residues", "tasks/proteins.py", "known[counted].unique()", "known[:1]",
          "tests/tasks/test_tasks.py -k shared_stretches"),
    Fault("the median of ListOps takes the upper middle", "tasks/listops.py",
          "(ranked[half - 1] + ranked[half]) // 2", "ranked[half]", "tests/tasks/test_tasks.py -k listops_values"),
    Fault("MQAR's gaps are all alike", "tasks/recall.py", "** (self.power - 1)", "** 0", "tests/tasks/test_tasks.py -k mqar"),
    Fault("Pathfinder's curves may touch", "tasks/pathfinder.py", "bits |= bits << step | bits >> step", "pass",
          "tests/tasks/test_tasks.py -k tracing"),
    Fault("the needle's depth is turned round", "tasks/needle.py", "cut = round(depth * room)",
          "cut = round((1 - depth) * room)", "tests/tasks/test_tasks.py -k needle"),
    Fault("a short past is not leant on", "tasks/bytes.py", "kinds[pasts] * chance", "kinds[pasts] / 256",
          "tests/tasks/test_tasks.py -k byte_counts"),
    Fault("batches mix long and short", "tasks/lengths.py", "drawn[keys.argsort(stable=True)]", "drawn",
          "tests/tasks/test_tasks.py -k protein_masks"),
    Fault("a class may miss from validation", "tasks/sequences.py", "max(1, round(task.share * len(texts)))",
          "round(task.share * len(texts) / 3)", "tests/tasks/test_tasks.py -k labelled"),
    Fault("sequences are cut before they are compared", "tasks/sequences.py",
          'lines[text.encode("utf-8", "surrogatepass"), label', "lines[text.encode()[: task.context], label",
          "tests/tasks/test_own_data.py -k compared_before"),
    Fault("a value too many in a table is dropped", "tasks/tables.py", "if any(row[len(names) :]):", "if False:",
          "tests/tasks/test_tasks.py -k sequence_errors"),
    Fault("a folder has no limit", "tasks/bytes.py", "        if room < 0:", "        if False:",
          "tests/lab/test_failures.py -k folder_is_limited"),
    Fault("a word's label stands at its first byte", "tasks/tags.py", "word.end() - 1 for word", "word.start() for word",
          "tests/tasks/test_own_data.py -k of_words"),
]  # fmt: skip
