"""Layers whose answers are known. Other processes can import them from here."""

from __future__ import annotations

import os
from dataclasses import dataclass

from crosscurrent.suite.layer import Outcome
from crosscurrent.suite.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Question:
    """A layer whose answer is known."""

    name: str = "question"
    claim: str = "The answer is known."
    needs_cuda: bool = False
    needs_quiet: bool = False
    takes_graphs: bool = False
    answer: Outcome | Exception = Outcome.held("known")  # noqa: RUF009

    def check(self, scenario: Scenario) -> Outcome:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def takes(self, scenario: Scenario) -> bool:
        return self.takes_graphs or not scenario.graphs


@dataclass(frozen=True, kw_only=True)
class Asked(Question):
    """Its answer is the process that was asked."""

    def check(self, scenario: Scenario) -> Outcome:
        return Outcome.held(str(os.getpid()))
