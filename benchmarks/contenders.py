"""The ways to draft and verify k tokens at a node that are compared: each is an acceptance, and most are a rule."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from benchmarks.budgeted import budgeted_laws
from benchmarks.exactly import standard_error
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.verifier import HasAcceptance, LawFamily, Verifier
from foretoken.measure.child_acceptance import sampled
from foretoken.trees.budget import HUB_SHARE
from foretoken.verify import VERIFIERS
from foretoken.verify.acceptance import acceptance, alpha_star
from foretoken.verify.strings import StringRejection

ANY_SIZE = (
    "exact-match",
    "standard",
    "rrs",
    "rrsw",
    "kseq",
    "spechub",
    "hub",
    "pairwise",
    "transport-grouped",
    "transport",
)


@dataclass(frozen=True, eq=False)
class Acceptance:
    """of_rows[i]: P(a draft is accepted) at pair i. error: standard error of its mean, where draws were sampled."""

    of_rows: Float[Tensor, " n"]
    error: float | None = None

    @property
    def mean(self) -> float:
        return float(self.of_rows.mean())


@dataclass(frozen=True)
class Effort:
    """Of what has no closed form: draws per pair, and their seed."""

    num_draws: int = 32
    seed: int = 0


@runtime_checkable
class Contender(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def law_name(self) -> str: ...

    def node(self, q: Float[Tensor, " v"], k: int) -> tuple[Verifier, Law] | None:
        """The rule and the law for one node; None where there is no single rule, or none for k."""
        ...

    def acceptance(self, p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], k: int, effort: Effort) -> Acceptance | None:
        """None where it does not exist for k."""
        ...


@dataclass(frozen=True)
class Plain:
    """A rule with k draws of a law that it is lossless for."""

    rule: Verifier
    family: LawFamily

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def law_name(self) -> str:
        return self.family.name

    def node(self, q: Float[Tensor, " v"], k: int) -> tuple[Verifier, Law] | None:
        law = self.family(k)
        return (self.rule, law) if self.rule.accepts(law) else None

    def acceptance(self, p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], k: int, effort: Effort) -> Acceptance | None:
        law = self.family(k)
        if not self.rule.accepts(law):
            return None
        if isinstance(self.rule, HasAcceptance):
            with suppress(ForetokenError):  # too long a sum: sampled instead
                return Acceptance(acceptance(self.rule, law, p, q))
        mass = sampled(self.rule, law, p, q, effort.num_draws, effort.seed)
        return Acceptance(mass.sum(2).mean(1), standard_error(mass))


@dataclass(frozen=True)
class Budgeted:
    """The optimal rule with a random number of i.i.d. draws, k distinct tokens expected (core/budgeted.py)."""

    name: str = "budgeted"
    law_name: str = "iid, random N"

    def node(self, q: Float[Tensor, " v"], k: int) -> tuple[Verifier, Law] | None:
        return VERIFIERS["transport"], budgeted_laws(q[None], k)[0]

    def acceptance(self, p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], k: int, effort: Effort) -> Acceptance | None:
        laws = budgeted_laws(q, k)
        return Acceptance(torch.stack([alpha_star(law, p[i], q[i]) for i, law in enumerate(laws)]))


@dataclass(frozen=True)
class Better:
    """Budgeted or hub drafting, chosen at each node from q alone: hub where the k - 1 likeliest tokens hold most of q.

    A choice made from q, before any draw, leaves both rules lossless.
    """

    name: str = "better-of"
    law_name: str = "chosen from q"

    def node(self, q: Float[Tensor, " v"], k: int) -> tuple[Verifier, Law] | None:
        return (VERIFIERS["hub"], Hub(k)) if bool(self.takes_hub(q[None], k)) else Budgeted().node(q, k)

    def takes_hub(self, q: Float[Tensor, "n v"], k: int) -> Tensor:
        return q.topk(min(k - 1, q.shape[1]), dim=1).values.sum(1) > HUB_SHARE

    def acceptance(self, p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], k: int, effort: Effort) -> Acceptance | None:
        budgeted, hub = _both(p, q, k, effort)
        return Acceptance(torch.where(self.takes_hub(q, k), hub, budgeted))


@dataclass(frozen=True)
class BetterInHindsight:
    """The better of budgeted and hub drafting for the true p: a bound, since no drafter knows p."""

    name: str = "better-of, p known"
    law_name: str = "bound"

    def node(self, q: Float[Tensor, " v"], k: int) -> tuple[Verifier, Law] | None:
        return None

    def acceptance(self, p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], k: int, effort: Effort) -> Acceptance | None:
        return Acceptance(torch.maximum(*_both(p, q, k, effort)))


@dataclass(frozen=True)
class Optimum:
    """alpha*, the best that any rule can do with k draws of a law."""

    family: LawFamily

    @property
    def name(self) -> str:
        return f"optimum, {self.family.name}"

    @property
    def law_name(self) -> str:
        return "bound"

    def node(self, q: Float[Tensor, " v"], k: int) -> tuple[Verifier, Law] | None:
        return None

    def acceptance(self, p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], k: int, effort: Effort) -> Acceptance | None:
        return Acceptance(alpha_star(self.family(k), p, q))


def _both(p: Tensor, q: Tensor, k: int, effort: Effort) -> tuple[Tensor, Tensor]:
    budgeted = Budgeted().acceptance(p, q, k, effort)
    assert budgeted is not None
    return budgeted.of_rows, acceptance("hub", Hub(k), p, q)


def any_size() -> list[Contender]:
    """What runs on a full vocabulary, the optima last."""
    plain: list[Contender] = [Plain(VERIFIERS[name], VERIFIERS[name].laws[0]) for name in ANY_SIZE]
    return [*plain, Budgeted(), Better(), BetterInHindsight(), Optimum(IID), Optimum(WithoutReplacement)]


def all_rules() -> list[Contender]:
    """Every rule for draws from a q, with the law it is made for; the linear program without replacement as well."""
    rules = [rule for rule in VERIFIERS.values() if not isinstance(rule, StringRejection)]
    plain: list[Contender] = [Plain(rule, rule.laws[0]) for rule in rules]
    return [*plain, Plain(VERIFIERS["ot-lp"], WithoutReplacement)]
