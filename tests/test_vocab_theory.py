"""Theorems and acceptance formulas of Timor et al. 2025 (Table 3), against the acceptance of one step, enumerated."""

import pytest
import torch

import tiny_tables as tables
import tokenizers_zoo as zoo
from foretoken.audit.branching import outcomes
from foretoken.audit.table import TableLM, random_table
from foretoken.core.laws import IID
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.draft.lm import LMDrafter
from foretoken.models.target import LMTarget
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.vocab.segmentation import SingleTokens
from foretoken.vocab.slem import SLEMDrafter
from foretoken.vocab.slrs import SLRSDrafter
from foretoken.vocab.source import TranslatedSource
from foretoken.vocab.tli import tli
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import vocabulary
from rates import summed
from tables import decodings, each
from thinning import one_in

PROMPT = (1, 1, 1)  # which all of them split alike


def step(lm, drafter, rule):
    """(P(the first drafted token is accepted), {first drafted token or None: probability}) of one step."""
    whole = decodings(lambda: drafter, LMTarget(lm), VERIFIERS[rule], 2, PROMPT, eos_ids=frozenset({0}), most_steps=1)
    first = [(*steps[0], prob) for (_, steps), prob in whole.items()]
    accepted = sum(prob * (len(path) - 1) for _, path, prob in first)
    drafted = summed((tokens[1] if len(tokens) > 1 else None, prob) for tokens, _, prob in first)
    assert sum(drafted.values()) == pytest.approx(1, abs=1e-12)
    return accepted, drafted


def shares(lm, small, drafter):
    """p, and the drafter's q over the target's ids (0 for tokens it lacks), at the prompt."""
    p = lm.table[PROMPT[-2], PROMPT[-1]]
    translation = tables.translation(drafter, tables.TARGET)
    ids = translation.text(PROMPT)
    row = small.table[ids[-2], ids[-1]]
    q = torch.zeros_like(p)
    for t, d in translation.pairs.items():
        q[t] = row[d]
    return p, q


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("seed", one_in(4, range(4)))
def test_theorem_41_holds_with_a_special_token_that_both_have(seed):
    """Such as the marker of a turn, which is one token by its name."""
    both = {"additional_special_tokens": ["<|turn|>"]}
    target, other = zoo.letters([zoo.EOS, "a", "b", "ab"], [("a", "b")]), zoo.letters(["b", "ba", "a", zoo.EOS])
    for tokenizer in (target, other):
        tokenizer.add_special_tokens(both)
    translation = Translation(vocabulary(target), vocabulary(other))
    lm, small = TableLM("T", random_table(5, seed)), TableLM("D", random_table(5, seed + 1))
    chain = static.chain(1)
    drafter = SLRSDrafter(small, translation, chain, drafts=SingleTokens, vocab_size=5)
    union, drafted = step(lm, drafter, "string-rejection")
    turn = target.convert_tokens_to_ids("<|turn|>")
    assert drafted[turn] > 0
    token_level, drafted = step(lm, tli(TranslatedSource("tli", 5, small, translation), chain, IID), "standard")
    assert drafted[turn] > 0
    assert union <= token_level + 1e-12
    _, drafted = step(lm, SLEMDrafter(small, translation, chain, IID, 5), "exact-match")
    assert drafted[turn] > 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("drafter", "seed"), [(tables.DRAFTER, 0), (tables.CONTAINED, 0), (tables.WIDER_LETTERS, 3)])
def test_table_3_is_what_a_step_accepts_and_theorem_41_holds(drafter, seed):
    lm, small = tables.lms(drafter, tables.TARGET, seed)
    translation = tables.translation(drafter, tables.TARGET)
    chain = static.chain(1)
    p, q = shares(lm, small, drafter)

    settings = {"vocab_size": lm.vocab_size}
    union, _ = step(lm, SLRSDrafter(small, translation, chain, drafts=SingleTokens, **settings), "string-rejection")
    assert union == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-10)

    token_level, _ = step(lm, tli(TranslatedSource("tli", lm.vocab_size, small, translation), chain, IID), "standard")
    assert token_level == pytest.approx(float(torch.minimum(p, q / q.sum()).sum()), abs=1e-10)
    assert union <= token_level + 1e-12  # Theorem 4.1
    if float(q.sum()) < 0.99:
        assert union < token_level

    strings = SLRSDrafter(small, translation, chain, **settings)
    rejected, drafted = step(lm, strings, "string-rejection")
    psi = torch.tensor([drafted.get(t, 0.0) for t in range(lm.vocab_size)], dtype=torch.float64)
    assert rejected == pytest.approx(float(torch.minimum(p, psi).sum()), abs=1e-10)
    matched, same = step(lm, strings, "exact-match")
    assert same == pytest.approx(drafted, abs=1e-12)
    assert matched == pytest.approx(float((p * psi).sum()), abs=1e-10)
    assert matched < rejected  # what Theorem 3.1 says of q = p holds for any psi: p psi <= min(p, psi)

    slem, first = step(lm, SLEMDrafter(small, translation, static.chain(2), IID, lm.vocab_size), "exact-match")
    psi = torch.tensor([first.get(t, 0.0) for t in range(lm.vocab_size)], dtype=torch.float64)
    assert slem == pytest.approx(float((p * psi).sum()), abs=1e-10)


@pytest.mark.usefixtures("unchecked")
def test_theorem_31_a_target_drafting_for_itself():
    """With q = p rejection accepts everything, and exact match sum p^2, which is less where p is not one-hot."""
    lm, _ = tables.lms(tables.TARGET, tables.TARGET, 1)
    p = lm.table[PROMPT[-2], PROMPT[-1]]
    drafter = LMDrafter(lm, static.chain(1), IID, lm.vocab_size)
    assert step(lm, drafter, "standard")[0] == pytest.approx(1, abs=1e-12)
    matched, _ = step(lm, drafter, "exact-match")
    assert matched == pytest.approx(float((p * p).sum()), abs=1e-12)
    assert matched < 0.99


@pytest.mark.usefixtures("unchecked")
def test_a_rejection_asks_for_at_most_one_more_psi_on_average():
    """Section 3.3 needs the residual of psi; drawn by rejection from p it costs at most one psi a step on average."""
    lm, small = tables.lms(tables.DRAFTER, tables.TARGET, 0)
    drafter = SLRSDrafter(small, tables.translation(), static.chain(1), vocab_size=lm.vocab_size)

    def run(rng):
        session = drafter.open(1, 64)
        session.join()
        (tree,) = session.propose([Sequence(list(PROMPT), Sampling(), rng, 3)])
        record = tree.siblings[0]
        asked = []
        object.__setattr__(record, "psi", lambda t, psi=record.psi: asked.append(t) or psi(t))
        p = lm.table[PROMPT[-2], PROMPT[-1]]
        VERIFIERS["string-rejection"].walk(tree, each(lambda node: p), rng)
        assert len(asked) == len(set(asked))
        return len(asked) - len(record.draws)

    assert 0 < sum(prob * number for number, prob in outcomes(run)) <= 1
