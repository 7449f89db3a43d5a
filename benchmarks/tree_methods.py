"""The ways of drafting that `python -m benchmarks trees` compares: a shape, and the rule that verifies it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretoken.core.errors import ForetokenError
from foretoken.core.policy import TreePolicy
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.draft.lm import LMDrafter
from foretoken.names import check_pair, policy_for, verifier_named
from foretoken.trees.budget import BudgetTree
from foretoken.trees.dynamic import DynamicTree, OptTree
from foretoken.trees.paths import delayed
from foretoken.trees.sequoia import sequoia
from foretoken.trees.static import chain, kary
from foretoken.verify import VERIFIERS

MATCH = "exact-match"
SHAPES = ("chain", "kary", "paths", "sequoia", "budget", "dynamic", "opt-tree")
CHAIN, KARY, PATHS, SEQUOIA, BUDGET, DYNAMIC, OPT_TREE = SHAPES
RANKED = (DYNAMIC, OPT_TREE)
RULES = ("rrs", "rrsw", "hub", "kseq", "transport")
DEFAULT = (
    *(f"{shape}+{rule}" for shape in (KARY, SEQUOIA, BUDGET) for rule in RULES),
    *(f"{DYNAMIC}+{MATCH}", f"{CHAIN}+block", f"{SEQUOIA}+traversal", f"{BUDGET}+block-transport"),
)


@dataclass(frozen=True)
class TreeMethod:
    """shape+rule, e.g. sequoia+rrsw; `at` makes it a drafter of a number of nodes."""

    shape: str
    rule: str

    @property
    def name(self) -> str:
        return f"{self.shape}+{self.rule}"

    @property
    def verifier(self) -> Verifier:
        return verifier_named(self.rule)

    @property
    def family(self) -> LawFamily:
        return self.verifier.laws[0]

    def at(self, nodes: int, inner: LMDrafter, acceptance: Callable[[], Sequence[float]]) -> LMDrafter | None:
        """The drafter with a tree of at most `nodes` drafted nodes; None where this shape has no tree so small.

        acceptance: the measured vector of the rule, asked for by Sequoia trees alone.
        """
        policy = self._policy(nodes, acceptance)
        if policy is None:
            return None
        drafter = LMDrafter(inner.lm, policy_for(policy, self.verifier), self.family, inner.vocab_size)
        check_pair(drafter, self.verifier)
        return drafter

    def _policy(self, nodes: int, acceptance: Callable[[], Sequence[float]]) -> TreePolicy | None:
        if self.shape == CHAIN:
            return chain(nodes)
        if self.shape == KARY:
            depth = (nodes + 2).bit_length() - 2  # 2 + 4 + .. + 2^depth <= nodes
            return kary(2, depth) if depth else None
        if self.shape == PATHS:  # as many as the square root, to a power of two
            paths = 2 ** ((nodes.bit_length() - 1) // 2)
            return delayed(0, paths, nodes // paths)
        if self.shape == SEQUOIA:
            return sequoia(list(acceptance()), nodes)
        return {BUDGET: BudgetTree, DYNAMIC: DynamicTree, OPT_TREE: OptTree}[self.shape](nodes)


def method(name: str) -> TreeMethod:
    """The method of a name such as budget+transport."""
    shape, plus, rule = name.partition("+")
    if not plus or shape not in SHAPES or rule not in VERIFIERS:
        raise ForetokenError(
            f"Unknown method {name}: write SHAPE+RULE, e.g. sequoia+rrsw, with a shape of {', '.join(SHAPES)}."
        )
    if (shape in RANKED) != (rule == MATCH):
        raise ForetokenError(f"Method {name} cannot be: {', '.join(RANKED)} go with {MATCH}, the others do not.")
    return TreeMethod(shape, rule)


def at_zero(methods: Sequence[TreeMethod]) -> list[TreeMethod]:
    """At temperature 0 every rule is exact match: one method a shape."""
    return [TreeMethod(shape, MATCH) for shape in dict.fromkeys(m.shape for m in methods)]
