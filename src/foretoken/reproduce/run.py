"""What every artefact is given: where figures go, how many to measure, and the real pair of models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from foretoken.compare.rows import ScoredText
from foretoken.compare.table import Report


@dataclass(frozen=True)
class Run:
    """limit_s: seconds for one cell of a table of times. scored: both models over a text, loaded when first called.
    vocabularies: folders of tokenizers by the name to show."""

    report: Report
    seed: int
    quick: bool
    limit_s: float
    scored: Callable[[], ScoredText]
    progress: Callable[[str], None]
    vocabularies: Mapping[str, str] = field(default_factory=dict)

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full


Artefact = Callable[[Run], None]
