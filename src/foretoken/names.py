"""Names -> trees, laws and rules, and the refusal of pairs that would not be lossless. The only registries are these
dicts and VERIFIERS."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from foretoken.core.errors import ForetokenError
from foretoken.core.interfaces import Drafter
from foretoken.core.laws import IID, Hub, Law, Opaque, WithoutReplacement
from foretoken.core.policy import TreePolicy
from foretoken.core.verifier import Approximate, LawFamily, Verifier
from foretoken.core.walk import PathVerifier
from foretoken.trees import static
from foretoken.trees.budget import BudgetTree
from foretoken.trees.confident import ConfidentTree
from foretoken.trees.dynamic import DynamicTree, OptTree, ProductTree
from foretoken.trees.sequoia import read_acceptance, sequoia
from foretoken.trees.static import StaticTree
from foretoken.verify import VERIFIERS
from foretoken.verify.checked import checked
from foretoken.verify.transport.plan import Solver

LAWS: dict[str, LawFamily] = {family.name: family for family in (IID, WithoutReplacement, Hub, Opaque)}


def _chain(spec: str) -> TreePolicy:
    depth, floor = _floor(spec, "chain:D")
    return _ended(static.chain(_positive(depth, "chain:D")), floor)


def _kary(spec: str) -> TreePolicy:
    k, cross, rest = spec.partition("x")
    if not cross:
        raise ForetokenError(f"Tree kary:{spec} is incomplete: write kary:KxD, e.g. kary:2x4.")
    depth, floor = _floor(rest, "kary:KxD")
    return _ended(static.kary(_positive(k, "kary:KxD"), _positive(depth, "kary:KxD")), floor)


def _budget(spec: str) -> TreePolicy:
    return BudgetTree(_positive(spec, "budget:N"))


def _dynamic(spec: str) -> TreePolicy:
    return DynamicTree(_positive(spec, "dynamic:N"))


def _sequoia(spec: str) -> TreePolicy:
    number, at, path = spec.partition("@")
    if not at:
        raise ForetokenError(f"Tree sequoia:{spec} is incomplete: write sequoia:N@FILE, FILE with measured acceptance.")
    return sequoia(read_acceptance(path), _positive(number, "sequoia:N@FILE"))


def _opt_tree(spec: str) -> TreePolicy:
    return OptTree(_positive(spec, "opt-tree:N"))


def _product(spec: str) -> TreePolicy:
    return ProductTree(_positive(spec, "product:N"))


TREES: dict[str, tuple[str, Callable[[str], TreePolicy]]] = {
    "chain": ("chain:D, a path of D drafts; chain:D@C, ended where the drafter is less sure of it than C", _chain),
    "kary": ("kary:KxD or kary:KxD@C, K children at every node down to depth D", _kary),
    "budget": ("budget:N, sampled children where they pay most, N nodes expected over a text", _budget),
    "dynamic": ("dynamic:N, the N likeliest nodes of a tree grown by the likeliest (EAGLE-2)", _dynamic),
    "sequoia": ("sequoia:N@FILE, the best static tree of N nodes for the acceptance in a JSON file", _sequoia),
    "opt-tree": ("opt-tree:N, the same as deep as pays (OPT-Tree)", _opt_tree),
    "product": ("product:N, the N likeliest nodes of Gumiho or Medusa, full tree attention done exactly", _product),
    "list": ("list:FILE, the parent list in a JSON file", static.from_file),
}


def tree_policy(spec: str) -> TreePolicy:
    """The tree policy that `spec` describes, e.g. "chain:4", "kary:2x4", "list:shape.json"."""
    kind, colon, rest = spec.partition(":")
    if kind not in TREES or not colon:
        grammar = "; ".join(text for text, _ in TREES.values())
        raise ForetokenError(f"Unknown tree {spec}: choose {grammar}.")
    return TREES[kind][1](rest)


def _positive(text: str, form: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ForetokenError(f"In tree {form} the numbers must be positive integers, not {text!r}.")
    return int(text)


def _floor(spec: str, form: str) -> tuple[str, float]:
    """(what stands before the @, the number behind it), 0 where there is no @."""
    rest, at, text = spec.partition("@")
    if not at:
        return rest, 0.0
    try:
        floor = float(text)
    except ValueError:
        floor = math.nan
    if not 0 < floor <= 1:
        raise ForetokenError(f"In tree {form}@C the confidence C must be above 0 and at most 1, not {text!r}.")
    return rest, floor


def _ended(tree: StaticTree, floor: float) -> StaticTree:
    return ConfidentTree(tree.parents, floor=floor) if floor else tree


def policy_for(policy: TreePolicy, rule: Verifier) -> TreePolicy:
    """The policy, told what the rule takes."""
    if isinstance(policy, BudgetTree):
        return replace(policy, hub=rule.accepts(Hub(2)), joint=isinstance(rule, PathVerifier))
    return policy


def law(name: str, k: int = 1, counts: Sequence[float] | None = None) -> Law:
    """The draft law `name` with k draws; counts: P(0 draws), .., P(k draws) where their number is random (iid only)."""
    if k < 0:
        raise ForetokenError(f"A law cannot make {k} draws: give a number >= 0.")
    family = law_family(name)
    if counts is None:
        return family(k)
    if family is not IID:
        raise ForetokenError(f"Law {name} takes no counts: only iid may make a random number of draws.")
    return IID(k, tuple(counts))


def law_family(name: str) -> LawFamily:
    name = name.replace("-", "_")
    if name not in LAWS:
        raise ForetokenError(f"Unknown law {name}: choose one of {', '.join(LAWS)}.")
    return LAWS[name]


def verifier(name: str) -> Verifier:
    """The verification rule `name`: a pure function (p, siblings) -> row.

    p: [v], the target's distribution; siblings: the draws, the q they were drawn from, and the law.
    Raises ForetokenError for rows that are no distributions, draws that q or the law cannot make, and laws that the
    rule is not lossless for.
    """
    return checked(verifier_named(name))


def verifier_named(name: str) -> Verifier:
    """The rule without the checks, for rows and draws of our own making."""
    if name not in VERIFIERS:
        raise ForetokenError(f"Unknown verifier {name}: choose one of {', '.join(VERIFIERS)}.")
    rule = VERIFIERS[name]
    if isinstance(rule, Solver):
        rule.check_installed()
    return rule


def check_pair(drafter: Drafter, rule: Verifier) -> None:
    """Refuse a drafter whose laws the rule is not lossless for."""
    if isinstance(rule, Approximate):
        raise ForetokenError(
            f"Verifier {rule.name} is only approximately lossless, so no engine takes it: choose "
            f"{rule.name}-thinned, which is exactly lossless, or another rule."
        )
    for drafted in drafter.laws:
        if isinstance(rule, PathVerifier) and drafted.k > 1 and not rule.accepts(drafted):
            raise ForetokenError(
                f"Verifier {rule.name} decides over a whole path, and drafter {drafter.name} makes {drafted.k} draws "
                "at a node: choose a tree that does not branch, e.g. chain:5, or another verifier."
            )
        if not rule.accepts(drafted):
            able = [
                name
                for name, other in VERIFIERS.items()
                if other.accepts(drafted) and not isinstance(other, Approximate)
            ]
            advice = f"choose verifier {' or '.join(able)}, or" if able else "no verifier is, so choose"
            raise ForetokenError(
                f"Verifier {rule.name} is not lossless for law {drafted.name} with {drafted.k} draws at a node, which "
                f"drafter {drafter.name} makes: {advice} another tree or law."
            )
