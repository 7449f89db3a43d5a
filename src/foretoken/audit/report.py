"""The result of an audit, as text of one page and as plain values."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, FAILED, WEAK, APPROXIMATE, NONE = "ok", "FAILED", "weak", "approx", "none"


@dataclass(frozen=True)
class Check:
    """One check and its outcome.

    name: what was checked.
    outcome: OK; FAILED (the audit fails); WEAK (the check could not have seen a wrong rule here; the audit does not
        fail); APPROXIMATE (not lossless by design, within the tolerance that the rule declares; the engine refuses it);
        NONE (nothing was checked, since the check does not apply here).
    detail: the outcome in words.
    numbers: its figures, by name.
    """

    name: str
    outcome: str
    detail: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


def verdict(good: bool) -> str:
    """Return the outcome of a check that passes if `good`: OK or FAILED."""
    return OK if good else FAILED


def largest(deviations: Iterable[float]) -> float:
    """Return the largest of some deviations, infinity where one is NaN, over which `max` would pass."""
    return max(math.inf if math.isnan(deviation) else deviation for deviation in deviations)


@dataclass(frozen=True)
class Section:
    """Checks of one kind.

    title: what they check.
    method: how, in one or more lines.
    checks: the checks.
    """

    title: str
    method: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    subject: what was audited, e.g. {"target": ..., "verifier": ...}; empty where only the exact part ran.
    sections: the checks, by kind.
    """

    subject: Mapping[str, Any]
    sections: tuple[Section, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.outcome != FAILED for section in self.sections for check in section.checks)

    def text(self) -> str:
        """Return the report as lines for a terminal."""
        lines = ["Audit: is the output distribution the target's own?"]
        lines += [f"  {key}: {value}" for key, value in self.subject.items()]
        for section in self.sections:
            lines += ["", section.title, *(f"  {line}" for line in section.method.splitlines())]
            width = max(len(check.name) for check in section.checks)
            lines += [f"  {c.outcome:6}  {c.name:{width}}  {c.detail}" for c in section.checks]
        checks = [check for section in self.sections for check in section.checks if check.outcome != NONE]
        failed = sum(check.outcome == FAILED for check in checks)
        weak = sum(check.outcome == WEAK for check in checks)
        end = f"FAILED: {failed} of {len(checks)} checks." if failed else f"PASSED: {len(checks)} checks."
        if weak:
            end += f" {weak} could not tell: see the lines marked weak."
        return "\n".join([*lines, "", end])

    def json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"passed": self.passed, "subject": dict(self.subject), "sections": [asdict(s) for s in self.sections]}
