"""The record of an advice: the comparison that it rests on, the ranking, and the answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fast_attention.lab.advice.ranking import Question, Row, advice, furthest, ranked
from fast_attention.lab.comparison import Comparison


@dataclass
class Advised(Comparison):
    """All of one advice."""

    kind, noun, data, page = "advise", "advice", "advice.json", "advice.html"

    advice: dict[str, Any] = field(default_factory=dict)  # what to "use", in "words", "measured_up_to" so many tokens
    ranking: list[Row] = field(default_factory=list)  # the best first

    def __post_init__(self) -> None:
        self.ranking = [replace(row, cannot=tuple(row.cannot)) for row in self.ranking]  # JSON knows lists only

    @property
    def question(self) -> Question:
        """What was asked."""
        return Question(self.meta["length"], self.meta["budget"], self.meta["pass"])

    def answer(self, mechanisms: list[Any]) -> None:
        """Rank the mechanisms by what was measured, and put that into words; exact attention may be what to use."""
        self.ranking = ranked(self, mechanisms, self.question)
        words, end = advice(self, self.ranking, self.question), furthest(self, self.question)
        self.advice = {"use": self.ranking[0].mechanism, "words": words, "measured_up_to": end}
