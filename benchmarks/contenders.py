"""The ways to draft and verify k tokens at a node that are compared: each is an acceptance, and most are a rule."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

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

SAMPLED = 32  # draws per pair, of what has no closed form
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
class Contender:
    """A way to draft and verify k tokens at a node.

    acceptance: of (p, q, k, seed), over n pairs; None where it does not exist for k.
    node: of (q, k), the rule and the law for one node; None where there is no single rule, or none for k.
    """

    name: str
    law_name: str
    acceptance: Callable[[Float[Tensor, "n v"], Float[Tensor, "n v"], int, int], Acceptance | None]
    node: Callable[[Float[Tensor, " v"], int], tuple[Verifier, Law] | None] = lambda q, k: None


def of_rule(rule: Verifier, family: LawFamily) -> Contender:
    """A rule with k draws of a law that it is lossless for."""

    def node(q: Tensor, k: int) -> tuple[Verifier, Law] | None:
        law = family(k)
        return (rule, law) if rule.accepts(law) else None

    def accepted(p: Tensor, q: Tensor, k: int, seed: int) -> Acceptance | None:
        law = family(k)
        if not rule.accepts(law):
            return None
        if isinstance(rule, HasAcceptance):
            with suppress(ForetokenError):  # too long a sum: sampled instead
                return Acceptance(acceptance(rule, law, p, q))
        mass = sampled(rule, law, p, q, SAMPLED, seed)
        return Acceptance(mass.sum(2).mean(1), standard_error(mass))

    return Contender(rule.name, family.name, accepted, node)


def optimum(family: LawFamily) -> Contender:
    """alpha*, the best that any rule can do with k draws of a law."""

    def accepted(p: Tensor, q: Tensor, k: int, seed: int) -> Acceptance:
        return Acceptance(alpha_star(family(k), p, q))

    return Contender(f"optimum, {family.name}", "bound", accepted)


def _budgeted(p: Tensor, q: Tensor, k: int) -> Tensor:
    return torch.stack([alpha_star(law, p[i], q[i]) for i, law in enumerate(budgeted_laws(q, k))])


def _budgeted_node(q: Tensor, k: int) -> tuple[Verifier, Law]:
    return VERIFIERS["transport"], budgeted_laws(q[None], k)[0]


def _takes_hub(q: Tensor, k: int) -> Tensor:
    """Where the k - 1 likeliest tokens hold most of q. A choice made from q, before any draw, is lossless."""
    return q.topk(min(k - 1, q.shape[1]), dim=1).values.sum(1) > HUB_SHARE


def _hub(p: Tensor, q: Tensor, k: int) -> Tensor:
    return acceptance("hub", Hub(k), p, q)


MIXED = (
    # The optimal rule with a random number of i.i.d. draws, k distinct tokens expected (core/budgeted.py).
    Contender("budgeted", "iid, random N", lambda p, q, k, _: Acceptance(_budgeted(p, q, k)), _budgeted_node),
    Contender(
        "better-of",
        "chosen from q",
        lambda p, q, k, _: Acceptance(torch.where(_takes_hub(q, k), _hub(p, q, k), _budgeted(p, q, k))),
        lambda q, k: (VERIFIERS["hub"], Hub(k)) if bool(_takes_hub(q[None], k)) else _budgeted_node(q, k),
    ),
    # The better one for the true p: a bound, since no drafter knows p.
    Contender(
        "better-of, p known",
        "bound",
        lambda p, q, k, _: Acceptance(torch.maximum(_budgeted(p, q, k), _hub(p, q, k))),
    ),
    optimum(IID),
    optimum(WithoutReplacement),
)


def any_size() -> list[Contender]:
    """What runs on a full vocabulary."""
    return [*(of_rule(VERIFIERS[name], VERIFIERS[name].laws[0]) for name in ANY_SIZE), *MIXED]


def all_rules() -> list[Contender]:
    """Every rule for draws from a q, with the law it is made for; the linear program without replacement as well."""
    rules = [rule for rule in VERIFIERS.values() if not isinstance(rule, StringRejection)]
    plain = [of_rule(rule, rule.laws[0]) for rule in rules]
    return [*plain, of_rule(VERIFIERS["ot-lp"], WithoutReplacement), *MIXED]
