"""Exact enumeration of whole decodings: the law of the next tokens, through the real drafter, trees, walk and decoder.

Every outcome of every draw is tried (branching.py). The result is the exact law of the emitted ids, which is compared
with the target's own

    P(x_1 .. x_n) = product over i of p(x_i | prompt, x_1 .. x_{i-1}),    ended by the end-of-text token.

The enumeration goes step by step. After each step, runs that reached the same state (the emitted ids and the ids in
both caches) are joined into one.
"""

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from foretoken.audit.branching import outcomes
from foretoken.audit.enumerate import COINS, FAMILIES, Deviation, remembering
from foretoken.audit.report import largest
from foretoken.audit.table import TableLM, TableRows, random_table
from foretoken.core.interfaces import Drafter, DraftSession
from foretoken.core.laws import IID, Coins, Law, Opaque
from foretoken.core.policy import TreePolicy
from foretoken.core.random import Random
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import PricedSiblings, Siblings, TokenTree, chain
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.decode import Decoder, DraftFailedWarning
from foretoken.draft.lm import LMDrafter, LMDraftSession
from foretoken.draft.randomised import RandomisedDrafter
from foretoken.draft.wrapped import WrappedDrafter, WrappedSession
from foretoken.models.target import LMTarget, LMTargetSession
from foretoken.trees import static
from foretoken.trees.budget import BudgetTree
from foretoken.trees.paths import PathTree

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """A tree and a vocabulary small enough to enumerate together.

    name: the tree, for the report.
    policy: makes the tree.
    v: the number of tokens in the vocabulary.
    families: the kinds of laws by which children are drawn. Coins need a shape that does not depend on q.
    priced: whether a PricedDrafter drafts, for whose chains the law is opaque.
    """

    name: str
    policy: TreePolicy
    v: int
    families: tuple[LawFamily, ...] = FAMILIES
    priced: bool = False

    def laws(self, family: LawFamily) -> tuple[Law, ...]:
        """Return the laws for which a rule must be lossless; family: the kind of laws by which children are drawn."""
        return (Opaque(1),) if self.priced else self.policy.laws(family)


SHAPES = (
    Shape("chain:2", static.chain(2), 3),
    Shape("kary:2x1", static.kary(2, 1), 3),
    Shape("kary:2x2", static.kary(2, 2), 2),
    Shape("kary:3x1", static.kary(3, 1), 2),
    Shape("uneven", static.StaticTree((-1, 0, 0, 1)), 3),
    Shape("delayed:1+2x1", PathTree(1, 2, 1), 3),
    Shape("delayed:0+2x2", PathTree(0, 2, 2), 2),
    Shape("chain:2@0.5", static.chain(2, floor=0.5), 3),
    Shape("budget:3", BudgetTree(3, depth=2, most_draws=2), 2),
    Shape("chain:2 by coins", static.chain(2), 3, (COINS,)),
    Shape("kary:2x1 by coins", static.kary(2, 1), 3, (COINS,)),
    Shape("delayed:0+2x2 by coins", PathTree(0, 2, 2), 2, (COINS,)),
    Shape("chain:2 priced", static.chain(2), 3, (IID,), priced=True),
)


def cases(rule: Verifier) -> list[tuple[LawFamily, Shape]]:
    """Return the pairs of a kind of laws and a shape for which `rule` declares that it is lossless."""
    pairs = [(family, shape) for shape in SHAPES for family in shape.families]
    return [(family, shape) for family, shape in pairs if all(map(rule.accepts, shape.laws(family)))]


@dataclass(frozen=True)
class Decoding:
    """What is enumerated: the first `num_tokens` tokens after `prompt`.

    target, drafter: table models, see table.py.
    verifier: the rule.
    prompt: ids, at least two.
    num_tokens: the most new tokens of a text.
    sampling: how logits become probabilities.
    eos_ids: tokens that end a text early.
    """

    target: LMTarget
    drafter: Drafter
    verifier: Verifier
    prompt: Ids = (0, 1)
    num_tokens: int = 3
    sampling: Sampling = field(default_factory=Sampling)
    eos_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class WholeDeviation(Deviation):
    """The largest deviation of a text's probability from the target's own.

    tree: the name of the shape.
    num_outcomes: the number of texts of positive probability.
    accepted: the expected number of accepted draft tokens of one decoding.
    """

    tree: str
    num_outcomes: int
    accepted: float


def measure(
    verifier: Verifier,
    family: LawFamily,
    shape: Shape,
    seed: int,
    num_tokens: int = 3,
    around: Callable[[Drafter], Drafter] = lambda drafter: drafter,
) -> WholeDeviation:
    """Enumerate decoding over random tables, and compare its law with the target's own.

    verifier: the rule.
    family: the kind of law by which children are drawn.
    shape: the tree and the vocabulary.
    seed: of the tables.
    num_tokens: the number of new tokens of a text.
    around: gives the drafter to use instead of the usual one.
    """
    target, inner = table_pair(shape.policy, family, shape.v, seed)
    drafter = PricedDrafter(inner) if shape.priced else around(inner)
    decoding = Decoding(target, drafter, remembering(verifier), num_tokens=num_tokens)
    law, accepted = enumerate_law(decoding)
    worst = deviation(law, own_law(decoding))
    return WholeDeviation(worst, tree=shape.name, num_outcomes=len(law), accepted=accepted)


def table_pair(policy: TreePolicy, family: LawFamily, v: int, seed: int) -> tuple[LMTarget, LMDrafter]:
    """Return a target and a drafter of random tables. After the tokens 0, 1 the target may write at least two tokens.

    policy: makes the drafter's trees.
    family: the kind of law by which children are drawn.
    v: the number of tokens in the vocabulary.
    seed: of the tables.
    """
    tables = (random_table(v, number) for number in itertools.count(seed, 1000))
    target = TableLM("table target", next(table for table in tables if table[0, 1].max() < 1))
    kind = RandomisedDrafter if isinstance(family, Coins) else LMDrafter
    return LMTarget(target), kind(TableLM("table drafter", random_table(v, seed + 1)), policy, family, v)


@dataclass(frozen=True)
class PricedDrafter(WrappedDrafter[LMDrafter]):
    """A drafter of chains that gives the probability of its draw token by token, as that of `--vocab slrs` does.

    The inner drafter's token 0 counts as no token of the target's: where it is drawn there is no draft token.
    """

    @property
    def laws(self) -> tuple[Law, ...]:
        return (Opaque(1),)

    def open(self, batch: int, slots: int) -> "PricedSession":
        return PricedSession(self.inner.open(batch, slots))


class PricedSession(WrappedSession[DraftSession]):
    """A session of a PricedDrafter."""

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        return [_priced(tree) for tree in self.inner.propose(sequences)]


def _priced(tree: TokenTree) -> TokenTree:
    """Return a chain up to its first draft token 0, its draws priced."""
    end = next((node for node in range(1, len(tree)) if tree.tokens[node] == 0), len(tree))
    records = [
        record and PricedSiblings(tuple(filter(None, record.draws)), None, Opaque(1), partial(_psi, record))
        for record in tree.siblings[:end]
    ]
    return chain(tree.tokens[:end], records)


def _psi(record: Siblings, token: int) -> float:
    assert record.q is not None
    return float(record.q[token]) if token else 0.0


def deviation(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Return the largest difference of a probability between two laws.

    one, other: {outcome: probability}; an outcome that is missing has probability 0.
    """
    return largest(abs(one.get(ids, 0.0) - other.get(ids, 0.0)) for ids in one.keys() | other.keys())


def own_law(decoding: Decoding) -> dict[Ids, float]:
    """Return the target's own law of the next ids, {ids: probability}, one token at a time and without a tree.

    decoding: what is enumerated; its drafter and its rule are not used.
    """
    table = cast(TableLM, decoding.target.lm).table
    laws: dict[Ids, float] = {}
    open_ = [((), 1.0)]
    while open_:
        ids, prob = open_.pop()
        if len(ids) == decoding.num_tokens or (ids and ids[-1] in decoding.eos_ids):
            laws[ids] = prob
            continue
        prefix = [*decoding.prompt, *ids]
        p = decoding.sampling(table[prefix[-2], prefix[-1], None].log(), [prefix], len(decoding.prompt))[0]
        open_ += [((*ids, x), prob * float(p[x])) for x in range(len(p)) if p[x] > 0]
    return laws


def enumerate_law(decoding: Decoding) -> tuple[dict[Ids, float], float]:
    """Return ({ids: probability}, the expected number of accepted draft tokens) of `decoding` as it really runs."""
    law: dict[Ids, float] = defaultdict(float)
    accepted = 0.0
    running: dict[State, float] = {State(decoding.prompt, (), ()): 1.0}
    while running:
        after: dict[State, float] = defaultdict(float)
        for state, prob in running.items():
            for (next_state, num_accepted), p in outcomes(partial(_step, decoding, state)):
                accepted += prob * p * num_accepted
                if next_state.finished:
                    law[next_state.ids[len(decoding.prompt) :]] += prob * p
                else:
                    after[next_state] += prob * p
        running = after
    return dict(law), accepted


@dataclass(frozen=True)
class State:
    """All that a step leaves behind.

    ids: the prompt and the emitted ids.
    in_target, in_drafter: the ids in the caches; empty for a finished text.
    past: what the tree policy keeps about earlier trees.
    finished: whether the text has ended.
    """

    ids: Ids
    in_target: Ids
    in_drafter: Ids
    past: Hashable = None
    finished: bool = False


def _step(decoding: Decoding, state: State, rng: Random) -> tuple[State, int]:
    """Run one step of the real decoder from `state`; returns (the state after it, the accepted draft tokens)."""
    decoder = Decoder(decoding.target, decoding.drafter, decoding.verifier, 1, 1)
    sequence = Sequence(list(decoding.prompt), decoding.sampling, rng, decoding.num_tokens, decoding.eos_ids)
    sequence.ids = list(state.ids)
    decoder.join(sequence)
    drafting = decoder.drafter.inner if isinstance(decoder.drafter, WrappedSession) else decoder.drafter
    assert isinstance(decoder.target, LMTargetSession)
    assert isinstance(drafting, LMDraftSession)
    target, drafter = cast(TableRows, decoder.target.rows), cast(TableRows, drafting.rows)
    drafting.pasts[0] = state.past
    target.extend(0, state.in_target)
    drafter.extend(0, state.in_drafter)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DraftFailedWarning)  # else a broken drafter would pass as plain decoding
        ((_, step),) = decoder.step()
    if sequence.finished:
        return State(tuple(sequence.ids), (), (), finished=True), step.num_accepted
    in_caches = tuple(target.ids[0]), tuple(drafter.ids[0])
    return State(tuple(sequence.ids), *in_caches, drafting.pasts[0]), step.num_accepted
