"""Faults seeded into ``conversion/``."""

from tests.faults.fault import Fault

FAULTS = [
    Fault("a resumed conversion forgets its optimiser", "conversion/converting.py",
          "optimiser.load_state_dict(self.optimiser)", "pass", "tests/conversion/test_conversion.py -k killed"),
    Fault("a converted run's settings name what ran before", "conversion/nn_models.py", "\n        _update_config(model)\n        return",
          "\n        return", "tests/conversion/test_convert_own.py -k stay_and_say"),
    Fault("a layer that was put back stays", "conversion/choosing.py", "            model.set_submodule(name, module)",
          "            pass", "tests/conversion/test_conversion.py -k put_back"),
    Fault("projections are trained though short inputs must stay", "conversion/converting.py",
          "rates if self.exact_up_to is None else rates[:1]", "rates",
          "tests/conversion/test_convert_exact_up_to.py -k stay_and"),
    Fault("the fine-tune trains all though short inputs must stay", "conversion/converting.py",
          "trainable if self.exact_up_to is None else []", "trainable",
          "tests/conversion/test_convert_exact_up_to.py -k stay_and"),
    Fault("what was learnt is drawn again behind exact attention", "integrations/crossover.py",
          "new.adopt(Weights((), bound.w))", "pass", "tests/conversion/test_convert_exact_up_to.py -k stay_and"),
]  # fmt: skip
