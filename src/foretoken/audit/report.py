"""What an audit found: for a reader on one page, for a program as a dict."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, FAILED, WEAK, APPROXIMATE, NONE = "ok", "FAILED", "weak", "approx", "none"


@dataclass(frozen=True)
class Check:
    """outcome: OK; FAILED (the audit fails); WEAK (it could not have seen a wrong rule here; the audit goes on);
    APPROXIMATE (not lossless by design, within the tolerance it declares; the engine refuses it); NONE (nothing was
    checked: what is promised does not apply here)."""

    name: str
    outcome: str
    detail: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


def verdict(good: bool) -> str:
    return OK if good else FAILED


@dataclass(frozen=True)
class Section:
    title: str
    method: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class AuditReport:
    """subject: what was audited, e.g. {"target": ..., "verifier": ...}; empty where only the exact part ran."""

    subject: Mapping[str, Any]
    sections: tuple[Section, ...]

    @property
    def passed(self) -> bool:
        return all(check.outcome != FAILED for section in self.sections for check in section.checks)

    def text(self) -> str:
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
        return {"passed": self.passed, "subject": dict(self.subject), "sections": [asdict(s) for s in self.sections]}
