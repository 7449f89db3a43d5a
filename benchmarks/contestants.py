"""Who meets in the arena: every rule with every law that it takes, on trees of one number of nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from foretoken.build import with_recipe
from foretoken.core.laws import IID
from foretoken.core.policy import ShapePolicy, TreePolicy
from foretoken.core.verifier import Approximate, Verifier
from foretoken.engine import Engine
from foretoken.names import policy_for, tree_policy, usual_rule, verifier_named
from foretoken.recipe import KINDS, Recipe
from foretoken.trees.budget import BudgetTree
from foretoken.trees.dynamic import RankedTree
from foretoken.verify import VERIFIERS
from foretoken.verify.published.plan import Solver

MATCH, OPAQUE = "exact-match", "opaque"
OWN_DRAWS = ("string-rejection", "randomised")  # for drafters that draw in a way of their own
BEHIND = ((0, 2), (0, 4), (4, 2))  # the length of a stem, and how many paths stand behind it


@dataclass(frozen=True)
class Contestant:
    """A tree of `nodes` draft tokens or, where equal draws meet, fewer; and the rule and the law, by name."""

    nodes: int
    tree: str
    rule: str
    law: str

    @property
    def player(self) -> str:
        """The rule with its law, whatever the tree: a row of the tables."""
        return self.rule if self.rule == MATCH else f"{self.rule}, {self.law}"

    @cached_property
    def verifier(self) -> Verifier:
        return verifier_named(self.rule)

    @property
    def drawn(self) -> tuple[TreePolicy, str]:
        """What its trees depend on: contestants for which this is equal meet on the same ones."""
        return policy_for(tree_policy(self.tree), self.verifier), self.law

    def engine(self, engine: Engine) -> Engine:
        """The engine, drafting and deciding so."""
        return with_recipe(engine, Recipe(self.tree, self.rule, engine.recipe.vocab, law=self.law))


def trees_of(nodes: int) -> list[str]:
    """Trees of so many draft tokens: a chain, a binary tree (of as many as fit), paths behind a stem, and two that go
    by the drafter's q, one of sampled children and one of the likeliest."""
    depth = (nodes + 2).bit_length() - 2  # 2 + 4 + .. + 2^depth <= nodes
    behind = [(stem, paths, (nodes - stem) // paths) for stem, paths in BEHIND]
    return [
        f"chain:{nodes}",
        *([f"kary:2x{depth}"] if depth > 1 else []),
        *(f"delayed:{stem}+{paths}x{length}" for stem, paths, length in behind if length > 1),
        *(f"budget:{nodes}", f"dynamic:{nodes}"),
    ]


def rules() -> list[str]:
    """Rules that can meet here: exact ones, for drafts from q, that need no solver (those take small vocabularies)."""
    return [
        name for name, rule in VERIFIERS.items() if not isinstance(rule, Approximate | Solver) and name not in OWN_DRAWS
    ]


def nodes_of(tree: str) -> int:
    """How many draft tokens a tree may have; of `budget:N` and the like N, which they keep on average."""
    policy = tree_policy(tree)
    return policy.budget if isinstance(policy, BudgetTree | RankedTree) else policy.max_nodes - 1


def contestants(
    engine: Engine, nodes: int, trees: Sequence[str], temperature: float, named: Sequence[str]
) -> list[Contestant]:
    """All that can meet on these trees with the engine's drafter. named: the rules that are asked for.

    At temperature 0, and where the drafter gives no q, every rule is exact match.
    """
    has_q = KINDS[engine.kind].rule is None
    weighed = has_q and temperature > 0
    asked = named if weighed else [MATCH]
    policies = {tree: tree_policy(tree) for tree in trees}
    return [
        Contestant(nodes, tree, rule, law)
        for tree, policy in policies.items()
        if has_q or isinstance(policy, ShapePolicy)
        for rule in asked
        for law in _laws(rule, policy, weighed)
    ]


def _laws(name: str, policy: TreePolicy, weighed: bool) -> list[str]:
    """The laws by which a rule may decide over trees of a policy. Where a node has one draw all laws are one.

    weighed: whether there is a q that other rules weigh; exact match then has the trees that are made of the likeliest
    tokens alone.
    """
    rule = verifier_named(name)
    if isinstance(policy, RankedTree) or name == MATCH:
        fits = isinstance(policy, RankedTree) or not (weighed or isinstance(policy, BudgetTree))
        return [OPAQUE] if name == MATCH and fits else []
    families = [family for family in rule.laws if policy.max_draws > 1 or family is IID]
    drawn = policy_for(policy, rule)
    return [family.name for family in families if all(rule.accepts(law) for law in drawn.laws(family))]


def usual(nodes: int, temperature: float, engine: Engine) -> Contestant:
    """A chain with what decides over it where no rule is named."""
    tree = f"chain:{nodes}"
    rule = MATCH if temperature == 0 else usual_rule(Recipe(tree), engine.kind)
    return Contestant(nodes, tree, rule, OPAQUE if rule == MATCH else IID.name)
