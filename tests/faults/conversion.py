"""Faults seeded into ``conversion/``."""

from tests.faults.fault import Fault

FAULTS = [
    Fault("a resumed conversion forgets its optimiser", "conversion/converting.py",
          "optimiser.load_state_dict(self.optimiser)", "pass", "tests/conversion/test_conversion.py -k killed"),
    Fault("a converted run's settings name what ran before", "conversion/nn_models.py", "\n        _update_config(model)\n        return",
          "\n        return", "tests/conversion/test_convert_own.py -k stay_and_say"),
    Fault("a group's figures are those of all", "conversion/goals.py", "{name: self.figures(each) for name, each in",
          "{name: self.figures(_joined(scores.values())) for name, each in",
          "tests/conversion/test_groups.py"),
    Fault("a layer that was put back stays", "conversion/choosing.py", "            model.set_submodule(name, module)",
          "            pass", "tests/conversion/test_conversion.py -k put_back"),
    Fault("projections are trained though short inputs must stay", "conversion/trained.py",
          "[] if own else projections", "projections",
          "tests/conversion/test_convert_exact_up_to.py -k stay_and"),
    Fault("the fine-tune trains all though short inputs must stay", "conversion/trained.py",
          "[] if own else [p for p", "[p for p",
          "tests/conversion/test_convert_exact_up_to.py -k stay_and"),
    Fault("what was learnt is drawn again behind exact attention", "integrations/crossover.py",
          "new.adopt(Weights((), bound.w))", "pass", "tests/conversion/test_convert_exact_up_to.py -k stay_and"),
]  # fmt: skip
