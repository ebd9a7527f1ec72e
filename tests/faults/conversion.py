"""Faults seeded into ``conversion/``."""

from tests.faults.fault import Fault

FAULTS = [
    Fault("a resumed conversion forgets its optimiser", "conversion/converting.py",
          "optimiser.load_state_dict(self.optimiser)", "pass", "tests/conversion/test_conversion.py -k killed"),
    Fault("a converted run's settings name what ran before", "conversion/nn_models.py", "\n        _update_config(model)\n        return",
          "\n        return", "tests/conversion/test_convert_own.py -k stay_and_say"),
    Fault("a layer that was put back stays", "conversion/choosing.py", "            model.set_submodule(name, module)",
          "            pass", "tests/conversion/test_conversion.py -k put_back"),
]  # fmt: skip
