"""Trees, laws and rules by name, and the refusal of those that do not go together. recipe.py has the names."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from foretoken.core.errors import ForetokenError
from foretoken.core.interfaces import Drafter
from foretoken.core.laws import IID, Coins, Hub, Law, Opaque
from foretoken.core.limits import check_choice, whole
from foretoken.core.policy import TreePolicy
from foretoken.core.verifier import Approximate, LawFamily, Verifier
from foretoken.core.walk import PathVerifier
from foretoken.recipe import (
    AUTO,
    KINDS,
    LAWS,
    NO_DRAFTER,
    ON_STATES,
    OWN,
    SAME,
    VOCABS,
    Recipe,
    check_law,
)
from foretoken.trees.budget import BudgetTree
from foretoken.trees.dynamic import DynamicTree, OptTree, ProductTree, RankedTree
from foretoken.trees.forms import read_tree
from foretoken.trees.paths import PathTree, delayed
from foretoken.trees.sequoia import sequoia
from foretoken.trees.static import StaticTree, chain, kary
from foretoken.verify import VERIFIERS
from foretoken.verify.block import TreeBlock
from foretoken.verify.checked import checked
from foretoken.verify.published.plan import Solver

# The function that makes a tree of each kind from the arguments that trees.forms.read_tree returns.
MADE_BY: dict[str, Callable[..., TreePolicy]] = {
    "chain": chain,
    "kary": kary,
    "delayed": delayed,
    "budget": BudgetTree,
    "dynamic": DynamicTree,
    "sequoia": sequoia,
    "opt-tree": OptTree,
    "product": ProductTree,
    "list": StaticTree,
}


def tree_policy(spec: str) -> TreePolicy:
    """Return the tree policy that `spec` describes, e.g. "chain:4", "kary:2x4", "list:shape.json".

    Raises ForetokenError for a text that describes none.
    """
    kind, arguments = read_tree(spec)
    return MADE_BY[kind](*arguments)


def policy_for(policy: TreePolicy, rule: Verifier) -> TreePolicy:
    """Return `policy`; a budget tree with what it may use by `rule`: hub draws if that takes them, and whole paths."""
    if isinstance(policy, BudgetTree):
        return replace(policy, hub=rule.accepts(Hub(2)), joint=isinstance(rule, PathVerifier))
    return policy


def law(name: str, k: int = 1, counts: Sequence[float] | None = None) -> Law:
    """Return a draft law, the way in which the children of one node are drawn.

    name: iid, without_replacement, hub or opaque.
    k: the number of draws, the largest one where it is random.
    counts: P(0 draws), .., P(k draws) where the number is random (iid only); None: it is always k.

    Raises ForetokenError for an unknown name, a negative k, and counts that are not k + 1 probabilities of sum 1.
    """
    if whole("k", k) < 0:
        raise ForetokenError(f"A law cannot make {k} draws: give a number >= 0.")
    family = law_family(name)
    if counts is None:
        return family(k)
    if family is not IID:
        raise ForetokenError(f"Law {name} takes no counts: only iid may make a random number of draws.")
    return IID(k, tuple(counts))


def law_family(name: str) -> LawFamily:
    """Return the kind of laws that `name` stands for, a function of the number of draws."""
    return LAWS[check_law(name)]


def verifier(name: str) -> Verifier:
    """Return the verification rule `name`, a pure function (p, siblings) -> row.

    p is the target's distribution at a node [v], `siblings` the draws there with their q and law, and row the
    distribution of the emitted token given these draws [v]. The rule raises ForetokenError for a p or q that is no
    distribution, draws that q or the law cannot make, and laws that it is not lossless for; `verifier` itself does so
    for an unknown name.
    """
    return checked(verifier_named(name))


def verifier_named(name: str) -> Verifier:
    """Return the rule `name` without the checks of `verifier`, for p and draws that the engine itself made."""
    check_choice("verifier", name, VERIFIERS, optional=False)
    rule = VERIFIERS[name]
    if isinstance(rule, Solver):
        rule.check_installed()
    return rule


def usual_rule(recipe: Recipe, kind: str = SAME) -> str:
    """Return the name of the verifier for a recipe that names none; kind: that of the drafter, of `recipe.KINDS`."""
    policy = tree_policy(recipe.tree)
    if recipe.draft_probability is not None:
        return "randomised" if policy.max_draws <= 1 else "transport"
    if isinstance(policy, RankedTree):
        return "exact-match"
    if KINDS[kind].rule is not None:
        return str(KINDS[kind].rule)
    if isinstance(policy, BudgetTree):
        return "block-transport"
    return "block" if policy.max_draws <= 1 else "traversal"


def settled(recipe: Recipe, kind: str) -> tuple[TreePolicy, Verifier, LawFamily]:
    """Return (tree policy, rule, law) of a recipe; raises ForetokenError for what does not go together.

    recipe: what a user named; its tree is not PLAIN.
    kind: that of the drafter, of `recipe.KINDS`.
    """
    tree, policy = recipe.tree, tree_policy(recipe.tree)
    if recipe.law is not None and KINDS[kind].own_draws:
        raise ForetokenError(
            f"vocab {kind} draws in a way of its own, to which law {recipe.law} means nothing: leave it out."
        )
    if isinstance(policy, ProductTree) and kind not in ON_STATES:
        raise ForetokenError(f"Tree {tree} is for draft heads: take chain or kary, or the folder of a head as drafter.")
    if isinstance(policy, ProductTree) and recipe.method == AUTO:
        raise ForetokenError(f"Method auto cuts a tree by its depth, and {tree} has no fixed one: take chain or kary.")
    if recipe.draft_probability is not None:
        _check_randomised(recipe.draft_probability, kind, policy, recipe.law)
    rule = verifier_named(recipe.verifier or usual_rule(recipe, kind))
    if recipe.draft_probability is not None and isinstance(rule, TreeBlock):
        raise ForetokenError(f"draft_probability does not go with verifier {rule.name}: leave the verifier out.")
    usual = KINDS[kind].rule
    if recipe.verifier is not None and kind in VOCABS and usual is not None and not rule.accepts(Opaque(1)):
        raise ForetokenError(
            f"Verifier {rule.name} needs probabilities that vocab {kind} does not give: choose {usual}, its usual one."
        )
    family = law_family(recipe.law) if recipe.law else rule.laws[0]
    policy = policy_for(policy, rule)
    if isinstance(policy, RankedTree) and family is not Opaque:
        raise ForetokenError(
            f"Tree {tree} has the likeliest tokens as children, which needs verifier exact-match with law opaque, not "
            f"{rule.name} with law {family.name}: leave both out, or choose tree budget:N."
        )
    return policy, rule, family


def _check_randomised(draft_probability: float, kind: str, policy: TreePolicy, law: str | None) -> None:
    """Refuse a draft probability where the drafter's kind, the tree or the law has no coins."""
    if kind in (OWN, *ON_STATES):
        reads = "drafter self works in its cache" if kind == OWN else "a head reads its hidden states"
        raise ForetokenError(
            f"draft_probability {draft_probability} needs a drafter that works beside the target, and {reads}: "
            "name a model."
        )
    if kind == NO_DRAFTER or KINDS[kind].rule is not None:
        raise ForetokenError(
            f"draft_probability {draft_probability} needs a drafter that gives each token a probability: a language "
            "model, not a lookup or strings as of vocab slem."
        )
    if not isinstance(policy, PathTree) and not (isinstance(policy, StaticTree) and policy.floor == 0):
        raise ForetokenError(
            "draft_probability needs a tree whose shape is fixed, such as chain:4 or kary:2x3, without a confidence @C."
        )
    if law not in (None, IID.name):
        raise ForetokenError(f"draft_probability makes i.i.d. draws: leave law {law} out.")


def check_ahead(recipe: Recipe, kind: str, name: str) -> None:
    """Refuse what `settled` refuses and, where the kind of drafter makes it plain, what `check_pair` would refuse.

    recipe, kind: as in `settled`; there need be no models yet.
    name: names the drafter in the error.
    """
    policy, rule, family = settled(recipe, kind)
    if kind == NO_DRAFTER or KINDS[kind].own_draws:
        return
    if KINDS[kind].rule is not None:  # its draft tokens have no q
        family = Opaque
    elif recipe.draft_probability is not None:
        family = Coins(recipe.draft_probability)
    _check_laws(policy.laws(family), name, rule)


def first_taken(recipes: dict[str, Recipe]) -> str:
    """Return the first kind of drafter that can have its recipe, as far as `check_ahead` tells, for drafter auto.

    recipes: the recipe of each kind, the kind that is preferred first.

    Raises the ForetokenError of the preferred kind where none can.
    """
    errors: list[ForetokenError] = []
    for kind, recipe in recipes.items():
        try:
            check_ahead(recipe, kind, AUTO)
            return kind
        except ForetokenError as error:
            errors.append(error)
    raise errors[0]


def check_pair(drafter: Drafter, rule: Verifier) -> None:
    """Refuse a `drafter` that has a law for which the `rule` is not lossless; raises ForetokenError."""
    _check_laws(drafter.laws, drafter.name, rule)


def _check_laws(laws: Sequence[Law], name: str, rule: Verifier) -> None:
    """Refuse the laws of a drafter of this name for which a rule is not lossless."""
    if isinstance(rule, Approximate):
        raise ForetokenError(
            f"Verifier {rule.name} is only approximately lossless, so no engine takes it: choose "
            f"{rule.name}-thinned, which is exactly lossless, or another rule."
        )
    for drafted in laws:
        branches = any(rule.accepts(family(drafted.k)) for family in rule.laws)
        if isinstance(rule, PathVerifier) and drafted.k > 1 and not branches:
            raise ForetokenError(
                f"Verifier {rule.name} decides over a whole path, and drafter {name} makes {drafted.k} draws "
                "at a node: choose a tree that does not branch, e.g. chain:5, or another verifier."
            )
        if not rule.accepts(drafted):
            exact = [other for other in VERIFIERS.values() if not isinstance(other, Approximate)]
            able = [other.name for other in exact if other.accepts(drafted)]
            advice = f"choose verifier {' or '.join(able)}, or" if able else "no verifier is, so choose"
            raise ForetokenError(
                f"Verifier {rule.name} is not lossless for law {drafted.name} with {drafted.k} draws at a node, which "
                f"drafter {name} makes: {advice} another tree or law."
            )
