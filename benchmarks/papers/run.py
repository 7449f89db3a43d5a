"""What every artefact is given: where figures go, how many to measure, and the real pair of models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foretoken.engine import Engine
from foretoken.heads.lm import HeadLM
from foretoken.measure.report import Report
from foretoken.measure.teacher_forcing import ScoredText


@dataclass(frozen=True)
class Run:
    """What an artefact may use.

    limit_s: seconds for one cell of a table of times. scored: both models over a text, loaded when first called.
    vocabularies: folders of tokenizers by the name to show. named: whether models were named. pair: an engine and the
    held-out prompts' ids. head: a draft head of its target, None where there is none.
    """

    report: Report
    seed: int
    quick: bool
    limit_s: float
    scored: Callable[[], ScoredText]
    progress: Callable[[str], None]
    vocabularies: Mapping[str, str]
    named: bool
    pair: Callable[[], tuple[Engine, list[list[int]]]]
    head: Callable[[], HeadLM | None]

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full


Artefact = Callable[[Run], None]
