"""Faults seeded into ``conversion/`` and into what the command ``convert`` reads."""

from tests.faults.fault import Fault

_API, _COMMAND = "tests/conversion/test_conversion.py -k ", "tests/conversion/test_convert_command.py -k "
FAULTS = [
    Fault("the best stage is forgotten where a conversion resumes", "conversion/outcome.py",
          '"best": best}, buffer)', '"best": finished}, buffer)', _API + "killed"),
    Fault("a checkpoint is of any model of a class and size", "conversion/outcome.py", "return digest.hexdigest()[:16]",
          "return ''", _API + "killed"),
    Fault("Ctrl-C leaves a stage half trained", "conversion/converting.py",
          "        self.model.load_state_dict(state)\n        self._bind(", "        self._bind(", _API + "ctrl_c"),
    Fault("a training that made it worse is kept", "conversion/converting.py",
          "self._leave(self.result.best, self.best", "self._leave(self.result.best, self.finished", _API + "made_it_worse"),
    Fault("a text that is trained on chooses the stage", "conversion/outcome.py", "if not name.startswith(TRAINED)", "if name",
          _API + "do_not_judge"),
    Fault("a group's figures are those of all", "conversion/goals.py", "{name: goal.figures(each) for name, each in",
          "{name: goal.figures(_joined(scores.values())) for name, each in", _API + "own_batches"),
    Fault("a chunk lacks its last mark", "conversion/goals.py", "content, row[end:]])", "content])", _API + "texts_of_their_own"),
    Fault("a prompt that labels leave out is learnt", "conversion/goals.py", "valid = targets != IGNORED",
          "valid = targets == targets", _API + "predicts_labels"),
    Fault("the fine-tune trains all though short inputs must stay", "conversion/converting.py",
          'self.settings.train == "model"', "True", _API + "mechanism_only"),
    Fault("what was learnt is drawn again behind exact attention", "integrations/crossover.py",
          "new.adopt(Weights(new.w.short if isinstance(new, relative.Tied) else short, bound.w))", "pass",
          _API + "stay_and"),
    Fault("exact attention of a converted model has no positions", "integrations/crossover.py",
          "replace(mechanism, short=exact.mechanism), exact.w", "mechanism, ()", _API + "positions"),
    Fault("a failed conversion leaves what it trained", "conversion/converting.py",
          "self.model.load_state_dict({name: state[name] for name in self.model.state_dict()})", "pass", _API + "failure"),
    Fault("the held-out chunks are of the trained text", "lab/texts.py", "self._held_out_groups(held_out.name, document)",
          "self._held_out_groups(held_out.name, read[0])", _COMMAND + "another_text_judges"),
]  # fmt: skip
