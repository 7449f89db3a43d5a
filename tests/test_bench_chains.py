"""Chains on given texts: against block verification enumerated, against real trees, and against real decoding."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from benchmarks.chains import Course, measure
from benchmarks.given_text import GivenText, Path, decoded, decoded_by_chain, given_text, grown, kept, one_path
from benchmarks.tree_report import ratio, samples
from benchmarks.tree_runs import Cell
from benchmarks.tree_runs import Course as Decodings
from benchmarks.tree_runs import run as run_cell
from foretoken.audit.branching import outcomes
from foretoken.core.laws import IID
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.verifier import Verifier
from foretoken.draft.lm import LMDrafter
from foretoken.measure.teacher_forcing import logits_at
from foretoken.names import policy_for, tree_policy
from foretoken.trees.budget import Account, BudgetTree
from foretoken.verify import VERIFIERS
from tables import each, tiny_engine
from test_verify_block import drafted, tables

BLOCK = VERIFIERS["block"]
PROMPTS = [[3 + i, 1 + 3 * i] for i in range(30)]


def test_what_is_kept_of_a_text_is_what_block_verification_keeps() -> None:
    """P(text begins with y, and the step kept i drafts or more) of every y, over all drafts and decisions."""
    v, length = 3, 3
    p, q = tables(v, length, seed=0)
    joint: dict[tuple[tuple[int, ...], int], float] = {}
    for tokens in itertools.product(range(v), repeat=length):
        tree = drafted(q, tokens)
        chance = math.prod(float(q[tokens[:i]][x]) for i, x in enumerate(tokens))

        def walk(rng, tree=tree, tokens=tokens):
            return BLOCK.walk(tree, each(lambda node: p[tokens[:node]]), rng)

        for (path, _), prob in outcomes(walk):
            for i in range(len(path)):
                joint[tokens[:i], i] = joint.get((tokens[:i], i), 0.0) + chance * prob
    for y in itertools.product(range(v), repeat=length):
        ratios = torch.tensor([math.log(q[y[:i]][x] / p[y[:i]][x]) for i, x in enumerate(y)])
        (found,) = kept(torch.cat([ratios, torch.zeros(1)]).double(), length).tolist()[:1]
        for i in range(length + 1):
            of_text = math.prod(float(p[y[:j]][y[j]]) for j in range(i))
            assert joint[y[:i], i] == pytest.approx(of_text * found[i], abs=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_a_chain_is_decoded_as_its_markov_chain_says() -> None:
    rng = np.random.default_rng(0)
    ratios = torch.from_numpy(rng.normal(0.2, 0.7, 24))
    at_least = kept(ratios, 4)
    nothing = [Path([0] * 4, torch.full((4, 2), 0.5))] * len(at_least)
    for depth in (1, 3):
        policy = tree_policy(f"chain:{depth}")
        text = GivenText(at_least, nothing, nothing)
        counts = [decoded(policy, text, 1, np.random.default_rng(i)) for i in range(500)]
        exact = decoded_by_chain(at_least, depth)
        for name in ("tokens", "steps", "drafted"):
            values = np.array([getattr(count, name) for count in counts])
            assert abs(values.mean() - getattr(exact, name)) < 5 * values.std() / len(values) ** 0.5 + 1e-9


def test_nodes_are_those_of_the_drafters_path_and_tokens_those_of_the_text() -> None:
    """On the text q is sure, so that chains are long there and all is kept; the drafter's own paths end at once."""
    at_least = kept(torch.zeros(9, dtype=torch.float64), 3)
    q = torch.tensor([[0.9, 0.1]]).expand(3, 2)
    text = GivenText(at_least, [Path([0] * 3, q)] * 6, [Path([1] * 3, q)] * 6)
    count = decoded(tree_policy("chain:3@0.5"), text, 1, np.random.default_rng(0))
    assert (count.tokens, count.steps, count.drafted) == (8, 2, 2)


@pytest.mark.usefixtures("unchecked")
def test_a_texts_paths_hold_the_drafters_q() -> None:
    """Along the text, and along each drafted path, as the drafter scores the whole text by itself; and what is kept."""
    engine = tiny_engine(tree="chain:1", verifier="block")
    target, drafter, v = engine.target.lm, engine.drafter.lm, engine.target.vocab_size
    prompt, text, depth, sampling = [3, 1, 4], [1, 5, 9, 2, 6, 5, 3], 3, Sampling(temperature=0.8)
    found = given_text(target, drafter, prompt, text, depth, 0.8, torch.Generator().manual_seed(0))
    n = len(text) - depth
    assert len(found.ahead) == len(found.drafted) == n
    ratios = []
    for t in range(n):
        before = prompt + text[:t]
        for path, tokens in ((found.ahead[t], text[t:]), (found.drafted[t], found.drafted[t].tokens)):
            assert path.tokens == tokens
            places = [(0, len(before) - 1 + i) for i in range(len(tokens))]
            p, q = (sampling(logits_at(lm, [before + tokens], places, v)) for lm in (target, drafter))
            torch.testing.assert_close(path.q, q, rtol=1e-4, atol=1e-6)
            if path is found.ahead[t]:
                ratios = [q[i, x].log() - p[i, x].log() for i, x in enumerate(tokens[:depth])]
        assert len(found.drafted[t].tokens) == depth
        smallest = [min(0.0, *(float(sum(ratios[:j])) for j in range(1, i + 1))) for i in range(1, depth + 1)]
        assert found.kept[t].tolist() == pytest.approx([1.0, *(math.exp(x) for x in smallest)], rel=1e-3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["chain:3", "chain:6@0.02", "budget:4"])
def test_paths_are_followed_as_far_as_trees_are_grown(name: str) -> None:
    """By the drafter's own session, steps on end, and what is remembered from one to the next."""
    engine = tiny_engine(tree="chain:1", verifier="block")
    v, sampling = engine.target.vocab_size, Sampling(temperature=0.6)
    policy = policy_for(one_path(tree_policy(name), name), BLOCK)
    session = LMDrafter(engine.drafter.lm, policy, IID, v).open(1, 400)
    session.join()
    sequence = Sequence([3, 1, 4], sampling, seeded(1), 200)
    past, told, lengths = None, policy.at(IID, 0.6), []
    for _ in range(12):
        (tree,) = session.propose([sequence])
        drafts = list(tree.tokens[1:])
        ahead = [*drafts, 7, 7, 7]
        places = [(0, len(sequence.ids) - 1 + i) for i in range(len(ahead))]
        q = sampling(logits_at(engine.drafter.lm, [[*sequence.ids, *ahead]], places, v))
        length, past = grown(told, past, Path(ahead, q))
        assert length == len(drafts)
        sequence.ids.append(11)
        session.observe([sequence], [tree], [(0,)])
        if isinstance(policy, BudgetTree):
            assert isinstance(past, Account)
            assert vars(session.pasts[0]) == pytest.approx(vars(past), rel=1e-4)
        lengths.append(length)
    assert len(set(lengths)) > (name != "chain:3")


@pytest.mark.usefixtures("unchecked")
def test_given_texts_count_what_decoding_counts() -> None:
    """Tokens per step beside those of 450 real decodings: within 4 standard errors (false alarm: 1e-4 each). Verified
    node by node a chain of the same drafts is out of them."""
    engine = tiny_engine(tree="chain:1", verifier="block")
    policies = {"chain:6": tree_policy("chain:6"), "budget:3": BudgetTree(3, depth=8, most_draws=1, joint=True)}
    found = measure(Course(engine, PROMPTS, 5, 12, 4, 0), policies, 1.0, lambda line: None)
    course = Decodings(engine.target, PROMPTS, num_tokens=12, batch=30, seed=1)

    def against(name: str, rule: Verifier) -> tuple[float, float, float]:
        drafter = LMDrafter(engine.drafter.lm, policies[name], IID, engine.target.vocab_size)
        (real,) = samples([run_cell(Cell(1.0, 3, name, drafter, rule), course, i) for i in range(15)]).values()
        given = found.sample(name)
        nodes = [each.drafted.sum() / each.steps.sum() for each in (given, real)]
        return *ratio(given, real), float(nodes[0] / nodes[1])

    for name in policies:
        value, error, nodes = against(name, BLOCK)
        assert abs(value - 1) < 4 * error < 0.1, name
        assert nodes == pytest.approx(1, abs=0.03), name
    value, error, _ = against("chain:6", VERIFIERS["rrs"])
    assert value > 1 + 4 * error


@pytest.mark.usefixtures("unchecked")
def test_the_command(run) -> None:
    """A chain is level with itself and, to rounding, with the chain of as many nodes."""
    small = ("--prompts", 2, "--texts", 1, "--max-new-tokens", 6, "--runs", 2, "--temperature", 1, "--json")
    trees = ("--tree", "chain:2", "--tree", "chain:3@0.1", "--tree", "budget:2")
    code, printed, err = run("benchmarks", "chains", *trees, *small)
    assert code == 0, err
    (table,) = json.loads(printed)["tables"]
    rows = {row["tree"]: row for row in table["rows"]}
    assert rows["chain:2"]["nodes a step"] == 2
    assert rows["chain:2"]["over chain:2"].startswith("1.000 ± 0.000")
    assert rows["chain:2"]["over a chain of as many nodes"].startswith("1.000 ± 0.000")
    assert 0 < rows["chain:3@0.1"]["nodes a step"] <= 3


@pytest.mark.usefixtures("unchecked")
def test_what_was_measured_is_shown_when_stopped() -> None:
    """The second text is stopped before it is counted; the first one is found. With none there is nothing to show."""
    engine = tiny_engine(tree="chain:1", verifier="block")
    policies = {"chain:2": tree_policy("chain:2")}
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:  # the target writes, prompt 1, prompt 2
            raise KeyboardInterrupt

    found = measure(Course(engine, PROMPTS[:2], 1, 4, 1, 0), policies, 1.0, stop)
    assert found.interrupted
    assert [len(found.kept), len(found.counts["chain:2"])] == [1, 1]
    lines[:] = ["asked for"] * 2
    with pytest.raises(KeyboardInterrupt):
        measure(Course(engine, PROMPTS[:2], 1, 4, 1, 0), policies, 1.0, stop)
