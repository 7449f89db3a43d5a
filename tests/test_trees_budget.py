"""Budget trees: their cost is bounded, they decide before they draw, and pruning after the draw is caught."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from foretoken.audit import decoding
from foretoken.audit.enumerate import TOLERANCE
from foretoken.core import laws
from foretoken.core.budgeted import law_with, number
from foretoken.core.draws import draw_iid
from foretoken.core.laws import IID, Hub, Law, Opaque, WithoutReplacement, draw_each
from foretoken.core.sampling import Sampling
from foretoken.core.tree import Siblings, TreeBuilder
from foretoken.core.verifier import LawFamily
from foretoken.trees.budget import ADVANCE, CAP, OFF, Account, BudgetTree, Ledger, Limits, Node, law_for, spend
from foretoken.trees.gain import CHOICES, shares
from foretoken.verify import VERIFIERS
from tables import Hidden, off_target, table_decoding, trees

SAMPLED: tuple[LawFamily, ...] = (IID, WithoutReplacement, Hub)
EAGER = BudgetTree(3, depth=2, most_draws=2, mismatch=3.0)  # thinks so badly of the drafter that it branches
# The audit's own enumeration (tests/test_audit_exact.py) has a budget tree for every rule; these branch.
CASES: list[tuple[str, LawFamily]] = [
    ("transport", IID),
    ("block-transport", IID),
    ("rrsw", WithoutReplacement),
    ("traversal", WithoutReplacement),
    ("hub", Hub),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "family"), CASES)
def test_whole_decodings_have_the_targets_law(name: str, family: LawFamily) -> None:
    v = 3 if name == "transport" else 2
    case = table_decoding(VERIFIERS[name], family, EAGER, v, seed=v)
    assert any(len(set(s.draws)) > 1 for tree, *_ in trees(case) for s in tree.siblings if s is not None)
    worst, accepted = off_target(case)
    assert worst <= TOLERANCE
    assert accepted > 0.1


@pytest.mark.usefixtures("unchecked")
def test_hub_and_iid_nodes_side_by_side() -> None:
    """A sharp drafter: some nodes take hub draws, some i.i.d. ones; transport is exact for the mixture."""
    policy = replace(EAGER, hub=True, budget=5)
    case = table_decoding(VERIFIERS["transport"], IID, policy, 3, sampling=Sampling(temperature=0.35))
    assert {type(law) for law in laws_drawn(case)} == {IID, Hub}
    assert off_target(case)[0] <= TOLERANCE


def laws_drawn(case: decoding.Decoding) -> set[Law]:
    return {s.law for tree, *_ in trees(case) for s in tree.siblings if s is not None}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("family", SAMPLED)
@pytest.mark.parametrize("budget", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_account_bounds_the_expected_nodes_and_the_cap_every_tree(
    family: LawFamily, budget: int, temperature: float
) -> None:
    """Two trees one after the other, every outcome of both; what is booked is what nodes are expected."""
    policy = replace(EAGER, budget=budget, hub=True)
    case = table_decoding(VERIFIERS["transport"], family, policy, 2, sampling=Sampling(temperature=temperature))
    accounts, nodes = {None: 1.0}, 0.0
    for t in (1, 2):
        after: dict[Account | None, float] = defaultdict(float)
        for past, prob in accounts.items():
            found = trees(case, (0, t % 2), past)
            assert sum(p for *_, p in found) == pytest.approx(1)
            expected, saved = sum(p * tree.num_drafted for tree, _, p in found), past.saved if past else 0.0
            assert sum(p * left.saved for _, left, p in found) == pytest.approx(saved + budget - expected, abs=1e-9)
            assert max(len(tree) for tree, *_ in found) <= policy.max_nodes
            assert max(sum(len(s.draws) for s in tree.siblings if s) for tree, *_ in found) <= CAP * budget
            nodes += prob * expected
            for _, left, p in found:
                after[Account(round(left.saved, 9), round(left.spent, 9), round(left.foreseen, 9))] += prob * p
        accounts = after
        assert min(left.saved for left in accounts if left is not None) >= -ADVANCE * budget - 1e-9
        assert nodes <= (t + ADVANCE) * budget + 1e-9


def drawn(policy: BudgetTree, widths: torch.Tensor, past: Account | None, rng: torch.Generator) -> tuple[int, Account]:
    """(nodes of one tree, account after it); every node's q is one of 200 random logits over a width of `widths`."""
    states, level = [policy.root(past)], [0]
    while level := policy.select(states, level[0]):
        pick = torch.randint(len(widths), (len(level),), generator=rng)
        logits = torch.randn(len(level), 200, generator=rng, dtype=torch.float64) * widths[pick, None]
        q = torch.softmax(logits, 1)
        plans = policy.plan([states[i] for i in level], q, IID)
        level = [len(states)]
        for row, plan in zip(q, plans, strict=True):
            if plan is not None:
                u = torch.rand(1, plan.law.num_uniforms, generator=rng, dtype=torch.float64)
                draws = draw_each([plan.law], row[None], u)[0]
                (born,) = policy.grow([plan], row[None], [draws])
                states += [born[j] for j in TreeBuilder(0).add(0, Siblings(draws, row, plan.law))]
        if len(states) == level[0]:
            break
    return len(states) - 1, policy.past(states)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("joint", [False, True])
def test_a_text_spends_its_budget_and_easy_stretches_more_of_it(joint: bool) -> None:
    """Sixty trees, the drafter nearly sure in every other stretch of six. The seeds are fixed."""
    policy, rng, past = BudgetTree(8, joint=joint), torch.Generator().manual_seed(1), None
    easy, hard = torch.tensor([6.0, 20.0], dtype=torch.float64), torch.tensor([2.0, 4.0], dtype=torch.float64)
    counts, booked = [], 0.0
    for t in range(60):
        before = past.saved if past else 0.0
        number, past = drawn(policy, hard if t // 6 % 2 else easy, past, rng)
        counts.append(number)
        booked += policy.budget + before - past.saved
        assert booked <= (t + 1 + ADVANCE) * policy.budget + 1e-9
    assert 0.8 * policy.budget <= np.mean(counts) <= 1.05 * policy.budget
    stretches = np.array(counts).reshape(5, 2, 6).mean((0, 2))
    assert stretches[0] > 1.2 * stretches[1]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("saved", [-40.0, 0.0, 40.0])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_nodes_get_as_many_distinct_children_as_were_chosen(saved: float, temperature: float) -> None:
    """Whatever the account holds: numbers between one and two are not cut to one while the cap leaves draws."""
    policy = BudgetTree(32, temperature=temperature, joint=True)
    root = policy.root(Account(saved, 64, 64))
    q = mixed_rows(20)
    chosen = []
    for row in q:
        (plan,) = policy.plan([root], row[None], IID)
        assert plan is not None
        booked = root.ledger.saved - plan.memo.first.ledger.saved
        assert np.isclose(CHOICES, booked, rtol=1e-6).any()
        numbers = torch.tensor(plan.law.counts or [0.0] * plan.law.k + [1.0]).double()
        fresh = 1 - (1 - row[:, None]) ** torch.arange(len(numbers))
        assert float(numbers @ fresh.sum(0)) == pytest.approx(booked, rel=1e-6)
        chosen.append(booked)
    assert any(1.1 < wanted < 2 for wanted in chosen)


def mixed_rows(n: int) -> torch.Tensor:
    """[n, 300]: wide ones and sharp ones in turn."""
    logits = torch.randn(n, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.softmax(logits * torch.tensor([1.0, 3.0, 6.0, 12.0]).repeat(n)[:n, None], 1)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("budget", [1, 2, 4, 8])
def test_the_cap_leaves_a_draw_to_every_chosen_node_and_no_more_than_there_are(budget: int) -> None:
    """One level of many nodes, whatever was drawn above it."""
    policy, full = BudgetTree(budget, mismatch=3.0), 0
    for drawn in range(CAP * budget):
        ledger = Ledger(Account(0, 2 * budget, 2 * budget), 0, float(budget), drawn, 1)
        left, below = min((1 + ADVANCE) * budget, CAP * budget - drawn), policy._forecast[policy.depth - 2]
        for m in range(1, 9):
            q, states, chosen = mixed_rows(m), [Node(0.9, 1.0, ledger)] * m, np.empty(m, np.int64)
            of = shares((q**2).sum(1).numpy(), np.ones(m), np.full(m, 0.9), policy._gain)
            spend(np.full(m, 0.9), of, below, float(left), 0, chosen)
            plans = policy.plan(states, q, IID)
            assert [plan is not None for plan in plans] == [choice >= 0 for choice in chosen]
            draws = [plan.law.k for plan in plans if plan is not None]
            assert all(k >= 1 for k in draws)
            assert drawn + sum(draws) <= CAP * budget
            full += drawn + sum(draws) == CAP * budget
    assert full > 1


@pytest.mark.usefixtures("unchecked")
def test_trees_do_not_stay_empty_where_the_forecast_jumps() -> None:
    """Where the drafter is thought to be nearly the target, sizes by price go from many nodes to none at once."""
    policy, rng, past = BudgetTree(2, depth=4, mismatch=0.05), torch.Generator().manual_seed(1), None
    counts = []
    for _ in range(120):
        number, past = drawn(policy, torch.tensor([10.0, 30.0], dtype=torch.float64), past, rng)
        counts.append(number)
    assert np.mean(counts[-40:]) > 1


@pytest.mark.usefixtures("unchecked")
def test_what_a_tree_may_cost_depends_on_the_past_alone() -> None:
    """Whatever is drawn, the root's law is the same; the fuller the account, the more nodes, and the more the text's
    trees have cost beside what was foreseen, the fewer."""
    case = table_decoding(VERIFIERS["transport"], IID, BudgetTree(2, depth=4, most_draws=2), 3)
    expected = []
    accounts = [Account(-4, 4, 4), Account(0, OFF * 4, 4), Account(0, 4, 4), Account(0, 4, OFF * 4), Account(4, 4, 4)]
    for past in accounts:
        found = trees(case, past=past)
        roots = [tree.siblings[0] for tree, *_ in found]
        assert len({None if root is None else root.law for root in roots}) == 1
        expected.append(sum(prob * tree.num_drafted for tree, _, prob in found))
    assert expected[0] < expected[2] < expected[4]
    assert expected[1] < expected[2] < expected[3]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "family"), [("block-transport", IID), ("traversal", WithoutReplacement)])
def test_whole_decodings_with_an_account_have_the_targets_law(name: str, family: LawFamily) -> None:
    """Four tokens, so that a third tree is drafted from what two left, rejected drafts among them."""
    pasts = set()

    class Recording(BudgetTree):
        def root(self, past):
            pasts.add(past)
            return super().root(past)

    case = table_decoding(
        VERIFIERS[name], family, Recording(1, depth=3, most_draws=2, mismatch=0.15), 2, seed=2, num_tokens=4
    )
    worst, accepted = off_target(case)
    assert worst <= TOLERANCE
    assert accepted > 0.1
    assert len(pasts) > 2
    assert min(past.saved for past in pasts if past is not None) < 0  # ahead of its account


class Pairs(BudgetTree):
    """Draws two i.i.d. children everywhere."""

    def plan(self, states, q, family):
        return [replace(plan, law=IID(2)) if plan else None for plan in super().plan(states, q, family)]


@pytest.mark.usefixtures("unchecked")
def test_pruning_sampled_children_after_the_draw_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafter, the same draws: exact if all of them are kept, off by far if the unlikely ones are not."""
    case = table_decoding(VERIFIERS["transport"], IID, Pairs(3, depth=1, most_draws=2), 3)
    assert off_target(case)[0] <= TOLERANCE

    def pruned(laws, q, u):
        return [
            tuple(sorted(draws, key=lambda x: -float(row[x]))[:1])
            for draws, row in zip(draw_each(laws, q, u), q, strict=True)
        ]

    monkeypatch.setattr("foretoken.draft.lm.draw_each", pruned)
    assert off_target(case)[0] > 0.01


@pytest.mark.usefixtures("unchecked")
def test_an_account_that_looks_at_the_draw_it_pays_for_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two draws that share a node cost one: what was saved pays for another draw in place of the second. Lossy."""
    case = table_decoding(VERIFIERS["transport"], IID, Pairs(3, depth=1, most_draws=2), 3)

    def peeking(laws, q, u):
        found = []
        for draws, row in zip(draw_each(laws, q, u), q, strict=True):
            again = draw_each([IID(1)], row[None], u[:1])[0] if len(set(draws)) == 1 else draws[1:]
            found.append((draws[0], *again))
        return found

    monkeypatch.setattr("foretoken.draft.lm.draw_each", peeking)
    assert off_target(case)[0] > 0.01


def test_a_draw_that_decides_its_own_number_is_seen_by_the_enumeration() -> None:
    """The premise of random counts: a count that looks at its draws ("draw again if it was unlikely") is lossy."""
    p, q = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.9, 0.1], dtype=torch.float64)
    law = IID(2, counts=(0.0, 0.5, 0.5))
    total = torch.zeros(2, dtype=torch.float64)
    for first in range(2):
        for second in range(2):
            draws = (first,) if first == 0 else (first, second)
            total += q[first] * q[second] * VERIFIERS["transport"](p, Siblings(draws, q, law))
    assert float((total - p).abs().max()) > 0.01


def test_draws_of_laws_side_by_side_are_those_of_each_alone() -> None:
    rng = torch.Generator().manual_seed(0)
    q = torch.softmax(torch.randn(6, 8, generator=rng, dtype=torch.float64), 1)
    u = torch.rand(6, 4, generator=rng, dtype=torch.float64)
    laws = [IID(2), IID(3, (0.0, 0.2, 0.3, 0.5)), Hub(3), WithoutReplacement(4), Opaque(2), IID(0)]
    found = draw_each(laws, q, u)
    assert found[5] == ()
    for i, law in enumerate(laws[:5]):
        own = law.draw(q[i : i + 1], u[i : i + 1, : law.num_uniforms])[0].tolist()
        assert found[i] == tuple(own[: len(found[i])])
    assert [len(draws) for draws in (found[0], found[2], found[3], found[4])] == [2, 3, 4, 2]


def test_the_fast_number_of_draws_is_the_plain_one() -> None:
    """The plain one goes through `draw_iid`, so that the enumeration takes every way of it."""
    rng = torch.Generator().manual_seed(2)
    for counts in ((1.0,), (0.0, 1.0), (0.5, 0.5), (0.2, 0.0, 0.5, 0.3), (0.0, 0.7, 0.3, 0.0)):
        for x in [0.0, 0.5, 0.7, 1.0, *torch.rand(50, generator=rng, dtype=torch.float64).tolist()]:
            u = torch.tensor([[x]], dtype=torch.float64)
            assert laws._number(counts, u) == int(draw_iid(torch.tensor([counts], dtype=torch.float64), u))
            assert x == 1.0 or laws._number(counts, u) == laws._number(counts, Hidden(u))


NO_HUBS = Limits(8.0, 0, 24, 16, True, np.inf)


def test_up_to_a_second_draw_the_certainty_tells_the_law() -> None:
    """Without a look at q: the law that the loops over q give."""
    q = torch.softmax(3 * torch.randn(40, 30, generator=torch.Generator().manual_seed(3)), 1)
    quick = 0
    for row in q:
        certainty = float((row.double() ** 2).sum())
        for wanted in (1.0, *CHOICES.tolist()):
            for most in (1, 2, 5):
                n, one_more, on_hubs, expected = law_for(row.numpy(), certainty, wanted, most, NO_HUBS)
                plain_n, plain_more, plainly = number(row.numpy(), wanted, most)
                plain = law_with(plain_n, plain_more)
                assert not on_hubs
                assert (plain.k, plain.counts is None) == (n + (one_more > 0), one_more == 0)
                assert plain.counts is None or plain.counts[-1] == pytest.approx(one_more, abs=1e-6)
                assert expected == pytest.approx(plainly, abs=1e-6)
                quick += 1 < wanted < 2 - certainty and most > 1
    assert quick > 100
